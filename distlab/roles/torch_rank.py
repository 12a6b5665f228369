"""A worker as a rank of torch's own engine, DistributedDataParallel: `AllReduce(engine="ddp")`, for comparison."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from distlab.errors import PeerLost
from distlab.roles.updater import Gradient, Rate
from distlab.roles.worker import Worker

P = ParamSpec("P")
R = TypeVar("R")


class TorchRank:
    """What `Rank` is, with torch's DistributedDataParallel at work.

    It sums in its own hooks while backward runs; its order of additions is not recorded.
    """

    def __init__(self, worker: Worker, rate: Rate, bucket_bytes: int) -> None:
        worker.fabric.default_group()
        self.worker, self._rate, self._last = worker, rate, False
        whole, cap = Whole(worker.model, worker.outputs), bucket_bytes / (1 << 20)
        with warnings.catch_warnings():  # newer torch has another name for "buffers are local"
            warnings.simplefilter("ignore", FutureWarning)
            self._ddp = nn.parallel.DistributedDataParallel(whole, broadcast_buffers=False, bucket_cap_mb=cap)
        worker.outputs = self._outputs  # type: ignore[method-assign]
        worker.backward = peers_lost(worker.backward)  # type: ignore[method-assign]
        self._there_s = 0.0  # when the last of this rank's own gradients was there: the rest of backward is waiting
        for parameter in worker.flat.parameters:
            parameter.register_post_accumulate_grad_hook(self._has_gradient)

    def begin(self, *, contributes: int) -> None:
        """Let the coming backward pass sum; those before it only add up on this rank (`no_sync`)."""
        self._last = True

    def mean(self, mine: Sequence[Gradient], *, contributes: int) -> tuple[bool, bool]:
        """As `Rank.mean`; all contribute alike, and a group that has lost one cannot go on."""
        worker, self._last = self.worker, False
        self.worker.flat.grads.div_(contributes)
        votes = self.worker.flat.tail[:2]
        votes[0] = float(worker.fabric.stopping)
        votes[1] = 0.0 if worker.index else worker.fabric.rate
        peers_lost(dist.all_reduce)(votes)
        stop, self._rate.agreed = votes.tolist()
        worker.fabric.record("reduce", self._there_s, worker.fabric.now(), worker=worker.index, step=worker.step)
        return True, stop > 0

    def part(self) -> bool:
        """Nobody leaves before the end."""
        return False

    def leave(self) -> None:
        """All come to the end together."""

    def _has_gradient(self, _: Tensor) -> None:
        self._there_s = self.worker.fabric.now()

    def _outputs(self, batch: Any) -> Any:
        if self._last:
            return self._ddp(batch)
        with self._ddp.no_sync():
            return self._ddp(batch)


def peers_lost(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, in which gloo's own error, which names a port, says what it is: PeerLost, a consequence."""

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            if "gloo" in str(error):
                raise PeerLost("another rank") from error
            raise

    return call


class Whole(nn.Module):
    """A model behind one call, as DistributedDataParallel asks."""

    def __init__(self, model: nn.Module, outputs: Any) -> None:
        super().__init__()
        self.model, self._say = model, outputs

    def forward(self, batch: Any) -> Tensor:
        """What the model says to `batch`."""
        return self._say(batch)
