"""Which samples a worker sees, and in which order.

There is one endless stream of samples: each epoch's own permutation of the data set, one after the other.
Round k hands the next ``num_workers * batch_size`` of them out, a slice to each worker in turn, so that N
workers with batches of b see together exactly what one worker with batches of N * b sees alone. That is why a
synchronous strategy can be compared with plain training to the last digit.

No sample is left out and no batch is short: a batch may reach over the end of an epoch. A batch is named by its place:
how many of its size lie before it in the stream. Where workers come and go in step, what nobody has had yet is dealt
anew to those that are there, and so each place still comes once.
"""

from bisect import bisect
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Deal(NamedTuple):
    """From batch `since` on, a worker has every `among`-th place from `start` on, the first at `start` + `turn`."""

    since: int
    start: int
    turn: int
    among: int


class Stream:
    """One worker's part of the stream.

    Args:
        data: tensors of equal length (a tuple or a dict of them), or a map-style dataset.
        batch_size: samples a batch of this worker.
        index, num_workers: which slice of each round, until it is dealt anew.
        seed: of the permutations; equal on all workers.

    >>> stream = Stream((torch.arange(6),), batch_size=2, index=1, num_workers=3, seed=0)
    >>> whole = Stream((torch.arange(6),), batch_size=6, index=0, num_workers=1, seed=0)
    >>> stream.batch(0)[0].equal(whole.batch(0)[0][2:4])
    True
    """

    def __init__(self, data: Any, *, batch_size: int, index: int = 0, num_workers: int = 1, seed: int = 0) -> None:
        self.data, self.batch_size, self.index, self.num_workers, self.seed = (
            data,
            batch_size,
            index,
            num_workers,
            seed,
        )
        self.length, self._deals = length_of(data), [Deal(0, 0, index, num_workers)]

    def deal(self, *deals: Deal) -> None:
        """From now on this worker's part is another one. The last of `deals` holds to the end."""
        self._deals = list(deals)

    def deal_of(self, step: int) -> Deal:
        """Which deal batch number `step` is part of."""
        return self._deals[max(bisect(self._deals, step, key=lambda deal: deal.since) - 1, 0)]

    def place(self, step: int) -> int:
        """Of batch number `step`."""
        since, start, turn, among = self.deal_of(step)
        return start + (step - since) * among + turn

    def dealt(self, step: int) -> int:
        """Where the round begins in which this worker has batch number `step`."""
        return self.place(step) - self.deal_of(step).turn

    def indices(self, step: int) -> Tensor:
        """The indices (batch_size,) into the data set of batch number `step`."""
        return self.at(self.place(step))

    def at(self, place: int) -> Tensor:
        """The indices (batch_size,) of the batch at a place, whosever it is."""
        place, parts, missing = place * self.batch_size, [], self.batch_size
        while missing:
            epoch, start = divmod(place, self.length)
            parts.append(permutation(self.length, self.seed, epoch)[start : start + missing])
            place, missing = place + len(parts[-1]), missing - len(parts[-1])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def batch(self, step: int) -> Any:
        """Batch number `step`: (tensor, ...), a dict, or what the dataset's items collate to."""
        return collate(self.data, self.indices(step))


@lru_cache(maxsize=16)
def permutation(length: int, seed: int, epoch: int) -> Tensor:
    """The order of the samples in one epoch; all workers of a simulated run share it."""
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


def length_of(data: Any) -> int:
    """How many samples `data` holds; TypeError or ValueError that says what is wrong with it."""
    parts = tensors_of(data)
    if isinstance(data, (tuple, str)) and parts is None:
        kinds = ", ".join(type(part).__name__ for part in data) if isinstance(data, tuple) else "a string"
        raise TypeError(f"data must be a tuple of tensors, got {kinds}: torch.as_tensor makes tensors of arrays")
    if parts is None:
        if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
            raise TypeError(
                f"data must be tensors or a map-style dataset (len(data) and data[i]), got {type(data).__name__}"
            )
        return len(data)
    lengths = {len(part) for part in parts}
    if len(lengths) != 1:
        raise ValueError(f"data tensors must be of one length, got {sorted(lengths)}")
    return lengths.pop()


def tensors_of(data: Any) -> list[Tensor] | None:
    """The tensors of a tuple, list or dict of tensors; None for anything else."""
    parts = list(data.values()) if isinstance(data, Mapping) else data
    if isinstance(parts, Sequence) and parts and all(isinstance(p, Tensor) for p in parts):
        return list(parts)
    return None


def collate(data: Any, indices: Tensor) -> Any:
    """The samples at `indices` as one batch."""
    if tensors_of(data) is None:
        return torch.utils.data.default_collate([data[i] for i in indices.tolist()])
    if isinstance(data, Mapping):
        return {name: part[indices] for name, part in data.items()}
    return tuple(part[indices] for part in data)


def pieces(batch: Any, parts: int) -> list[Any]:
    """`batch` cut along the first dimension into `parts` pieces, as even as can be; empty ones left out."""
    if isinstance(batch, Tensor):
        return [p for p in torch.tensor_split(batch, parts) if len(p)]
    if isinstance(batch, Mapping):
        columns = {name: pieces(value, parts) for name, value in batch.items()}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return [type(batch)(row) for row in zip(*(pieces(value, parts) for value in batch), strict=True)]


def size_of(batch: Any) -> int:
    """How many samples a batch holds."""
    while not isinstance(batch, Tensor):
        batch = next(iter(batch.values() if isinstance(batch, Mapping) else batch))
    return len(batch)
