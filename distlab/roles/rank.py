"""A worker as a rank: its gradient, summed with those of all others, and with it what they have to agree on."""

import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.collectives import Ranks, broadcast
from distlab.errors import BadMessage, PeerLost
from distlab.fabric import Parts
from distlab.roles.exchange import Exchange
from distlab.roles.worker import FORWARD, Worker

P = ParamSpec("P")
R = TypeVar("R")


class Rank:
    """A worker of a collective strategy: it has links to all others.

    Args:
        exchange: how the sum is made.
    """

    def __init__(self, worker: Worker, exchange: Exchange) -> None:
        self.worker, self._exchange = worker, exchange
        fabric, me = worker.fabric, worker.index
        links = [None if i == me else fabric.link("worker", i) for i in range(fabric.counts["worker"])]
        self._ranks = Ranks(me, links)
        self._agree_on_size()
        broadcast(self._ranks, worker.flat.params)  # the chief's, so that all begin alike
        shares = exchange.shares[:-1]  # the last bucket waits for `mean`: until then nobody can apply a gradient of nan
        self._parts = Parts([FORWARD + (1 - FORWARD) * share for share in shares], self._is_there)
        self._there, self._summing = 0, None  # type: int, Any
        self._missing: list[set[int]] = []  # of each bucket, the parameters whose gradient is not there yet
        if len(exchange.buckets) > 1:
            self._watch()

    def begin(self, *, contributes: int) -> Parts | None:
        """Sum each bucket as soon as the coming backward pass is done with it; None if there is only one.

        Args:
            contributes: how many gradients this worker's buffer will then hold.
        """
        if len(self._exchange.buckets) == 1:
            return None
        self._fill_tail(contributes)
        self._there, self._missing = 0, [set(held) for held in self._exchange.parameters]
        self._summing = self.worker.fabric.spawn(self._sum_what_is_there)
        return self._parts

    def mean(self, *, contributes: int) -> tuple[bool, bool]:
        """Replace `worker.flat.grads` by the mean of all workers' gradients.

        One message holds the values, a count and the votes to stop. A worker that has nothing to give sends zeros, and
        takes part until nobody has.

        Args:
            contributes: how many gradients this worker's buffer holds.

        Returns: did anybody contribute, and does anybody want to stop?
        """
        flat = self.worker.flat
        if self._summing is not None:
            self._is_there(len(self._exchange.buckets) - 1)  # and those with parameters that were not used
            self._summing.join()
            self._summing = None
        else:
            if not contributes:
                flat.grads.zero_()
            self._fill_tail(contributes)
            for number in range(len(self._exchange.buckets)):
                self._sum(number)
        total, votes = flat.tail[:2].tolist()
        if total:
            flat.grads.div_(total)
        return total > 0, votes > 0

    def _agree_on_size(self) -> None:
        """BadMessage if the model's factory made another one here: gloo aborts where more is lent than awaited."""
        mine = torch.tensor([self.worker.flat.size, self.worker.flat.dtype.itemsize])
        size, itemsize = broadcast(self._ranks, mine.clone()).tolist()
        if [size, itemsize] != mine.tolist():
            raise BadMessage(
                f"worker 0 has a model of {size} numbers of {itemsize} bytes, {self.worker.fabric.me} one of "
                f"{mine[0]} of {mine[1]}: the factory must make the same one everywhere"
            )

    def _fill_tail(self, contributes: int) -> None:
        tail = self.worker.flat.tail.zero_()
        tail[0], tail[1] = float(contributes), float(self.worker.fabric.stopping)

    def _sum(self, number: int) -> None:
        fabric, step = self.worker.fabric, self.worker.step
        start, before = fabric.now(), self._ranks.sent_bytes
        self._exchange.sum_bucket(self._ranks, self.worker.flat.message, number)
        sent = self._ranks.sent_bytes - before
        fabric.record("reduce", start, fabric.now(), worker=self.worker.index, step=step, num_bytes=sent)

    def _sum_what_is_there(self) -> None:
        for number in range(len(self._exchange.buckets)):
            self.worker.fabric.until(lambda number=number: number < self._there, f"bucket {number}")  # type: ignore[misc]
            self._sum(number)

    def _is_there(self, number: int) -> None:
        with self.worker.fabric.lock("buckets"):
            self._there = max(self._there, number + 1)

    def _watch(self) -> None:
        """Let every parameter say when its gradient is there. A bucket is, once those before it are too."""
        bucket_of = {i: number for number, held in enumerate(self._exchange.parameters) for i in held}
        for i, parameter in enumerate(self.worker.flat.parameters):
            parameter.register_post_accumulate_grad_hook(lambda _, i=i: self._has_gradient(i, bucket_of[i]))

    def _has_gradient(self, i: int, number: int) -> None:
        if self._summing is None:
            return
        if i not in self._missing[number]:
            name = self.worker.flat.names[i]
            raise RuntimeError(f"{name} got a gradient twice in one backward pass: use AllReduce(overlap=False)")
        self._missing[number].remove(i)
        whole = next((n for n, missing in enumerate(self._missing[:-1]) if missing), len(self._missing) - 1)
        if not self._missing[number]:
            self._parts.say(whole - 1)


class TorchRank:
    """The same, with torch's DistributedDataParallel at work: `AllReduce(engine="ddp")`.

    It sums in its own hooks while backward runs; its order of additions is not recorded.
    """

    def __init__(self, worker: Worker, bucket_bytes: int) -> None:
        worker.fabric.default_group()
        self.worker, self._last = worker, False
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

    def mean(self, *, contributes: int) -> tuple[bool, bool]:
        """As `Rank.mean`; all contribute alike."""
        worker, self._last = self.worker, False
        self.worker.flat.grads.div_(contributes)
        votes = self.worker.flat.tail[:1].fill_(float(self.worker.fabric.stopping))
        peers_lost(dist.all_reduce)(votes)
        worker.fabric.record("reduce", self._there_s, worker.fabric.now(), worker=worker.index, step=worker.step)
        return True, votes.item() > 0

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
