"""Compression: send less of a gradient, and remember what was not sent.

The hard idea is the error feedback: what compression left out is kept and added to the next gradient, so nothing is
lost, only late. Without it, the elements that are never among the largest would never be sent at all.

A compression of your own is any object with `compress` and `restore`, such as this one, which sends signs:

>>> class Sign:
...     def compress(self, values):
...         return [values.sign().to(torch.int8), values.abs().mean()]
...
...     def restore(self, sent, like):
...         return sent[0].to(like.dtype) * sent[1]
>>> values = torch.tensor([3.0, -1.0])
>>> Sign().restore(Sign().compress(values), like=values)
tensor([ 2., -2.])
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from distlab.options import Options, check_positive


class Compression(Protocol):
    """What `AllReduce(compression=...)` takes."""

    def compress(self, values: Tensor) -> list[Tensor]:
        """What to send instead of `values` (size,): tensors, of which none may need more than one message holds."""

    def restore(self, sent: Sequence[Tensor], like: Tensor) -> Tensor:
        """What the receiver makes of it: (size,), of the dtype of `like`."""


@dataclass(frozen=True, kw_only=True)
class TopK(Options):
    """Send the elements that are largest in magnitude, with their places: 8 bytes each in float32.

    All ranks gather what all others send: that costs p - 1 times as much as one sends, so a `share` below 1 / p saves.

    Args:
        share: of the elements, above 0 and at most 1.

    Source: Stich, Cordonnier and Jaggi 2018, Sparsified SGD with Memory.

    >>> TopK(share=0.5).compress(torch.tensor([1.0, -3.0, 0.0, 2.0]))
    [tensor([-3.,  2.]), tensor([1, 3], dtype=torch.int32)]
    """

    share: float

    def __post_init__(self) -> None:
        if check_positive("share", self.share) > 1:
            raise ValueError(f"share must be at most 1, all elements, got {self.share}")

    def compress(self, values: Tensor) -> list[Tensor]:
        """The largest elements, and where they were."""
        at = values.abs().topk(max(1, round(self.share * len(values)))).indices
        return [values[at], at.int()]

    def restore(self, sent: Sequence[Tensor], like: Tensor) -> Tensor:
        """Those elements where they were, zeros elsewhere."""
        values, at = sent
        return torch.zeros_like(like).index_put_((at.long(),), values)


def check_compression(value: Any) -> None:
    """Raise TypeError if `value` cannot compress and restore."""
    missing = [name for name in ("compress", "restore") if not callable(getattr(value, name, None))]
    if missing or isinstance(value, type):
        hint = f": write {value.__name__}(...)" if isinstance(value, type) else ""
        raise TypeError(f"compression must have methods compress and restore, such as TopK(share=0.01){hint}")


class Feedback:
    """A compression with its memory, on one rank.

    Attributes:
        error: (size,) all that was left out so far.
    """

    def __init__(self, compression: Compression, like: Tensor) -> None:
        self._compression, self.error = compression, torch.zeros_like(like)

    def compress(self, values: Tensor) -> list[Tensor]:
        """What to send instead of `values` and the error, of which the new one is what this leaves out."""
        whole = values + self.error
        sent = self._compression.compress(whole)
        self.error = whole - self.restore(sent)
        return sent

    def restore(self, sent: Sequence[Tensor]) -> Tensor:
        """What `sent`, from any rank, stands for.

        Raises:
            ValueError: it has another shape or dtype than what was compressed.
        """
        values = self._compression.restore(sent, self.error)
        if values.shape != self.error.shape or values.dtype != self.error.dtype:
            got, asked = [f"{tuple(t.shape)} {t.dtype}" for t in (values, self.error)]
            raise ValueError(f"compression restored {got} from a gradient of {asked}")
        return values
