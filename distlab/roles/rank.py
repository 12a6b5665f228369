"""A worker as a rank: its gradient, summed with those of all others, and with it what they have to agree on."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from distlab.collectives import Ranks, all_gather, all_reduce, broadcast
from distlab.errors import BadMessage, PeerLost
from distlab.fabric import Link, Parts, Peer
from distlab.fabric.base import Running
from distlab.packing import packed, unpacked
from distlab.roles.exchange import Exchange
from distlab.roles.updater import Gradient
from distlab.roles.worker import FORWARD, Worker

UNHEARD_S = (
    1.0  # a process that is killed takes what it has not handed over of its trace with it: 0.05 s, on a good day
)


class Holder(Protocol):
    """Who holds what all ranks hold alike, such as an `Updater`."""

    version: int

    def state(self) -> Tensor:
        """All of it, as bytes."""

    def restore(self, data: Tensor) -> None:
        """Hold what another did when it said `state`."""


class Rank:
    """A worker of a collective strategy: it has links to all others.

    If one of them dies, those that are left form a new group. Some may have come to the end of the exchange that this
    broke off, others not; so the first thing they tell each other is their version, and who is furthest gives its state
    to the rest. One that comes back has version -1, and is served the same way.

    Args:
        exchange: how the sum is made.
        holder: of what is equal on all ranks.
    """

    def __init__(self, worker: Worker, exchange: Exchange, holder: Holder) -> None:
        self.worker, self._exchange, self._holder = worker, exchange, holder
        shares = exchange.shares[:-1]  # the last bucket waits for `mean`: until then nobody can apply a gradient of nan
        self._parts = Parts([FORWARD + (1 - FORWARD) * share for share in shares], self._is_there)
        self._there, self._broken = 0, None  # type: int, PeerLost | None
        self._summing: Running | None = None
        self._missing: list[set[int]] = []  # of each bucket, the parameters whose gradient is not there yet
        if len(exchange.buckets) > 1:
            self._watch()
        self._begun, self._mine = False, list[Gradient]()  # is there a version? what is not yet part of one
        self._given: deque[tuple[float, Gradient, int]] = deque()  # when, a gradient that all gave alike, its batch
        self._era, self._group, self._links = -1, list[Peer](), list[Link]()
        if worker.fabric.members.era:
            self._regroup()
        else:
            self._start()

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

    def mean(
        self, mine: Sequence[Gradient], *, contributes: int, fill: Callable[[], object] | None = None
    ) -> tuple[bool, bool]:
        """Replace `worker.flat.grads` by the mean of all workers' gradients.

        One message holds the values, a count and the votes to stop. A worker that has nothing to give sends zeros, and
        takes part until nobody has. If the group changes meanwhile, all have to give again: their next gradient, of the
        same batches, or what `fill` writes into the buffer once more.

        Args:
            mine: what is in this worker's buffer, for the trace.
            contributes: how many gradients it counts as.

        Returns: is there a mean, and is the run over?
        """
        while True:
            self._mine = list(mine) if fill is None else []
            try:
                return self._mean(mine, contributes, fill)
            except PeerLost:
                if (behind := self._regroup()) or fill is None:
                    self._account_for(mine, behind)
                    return False, False

    def leave(self) -> None:
        """Wait until all have come to the end: whoever is a version behind still needs one to take it from."""
        while True:
            try:
                all_reduce(self._ranks, torch.zeros(1))
                return
            except PeerLost:
                self._regroup()

    def _mean(self, mine: Sequence[Gradient], contributes: int, fill: Callable[[], object] | None) -> tuple[bool, bool]:
        flat, fabric = self.worker.flat, self.worker.fabric
        if fabric.members.era != self._era:
            raise PeerLost("another rank")
        if self._summing is not None:
            self._finish_summing()
        else:
            if fill is not None:
                fill()
            if not contributes:
                flat.grads.zero_()
            self._fill_tail(contributes)
            for number in range(len(self._exchange.buckets)):
                self._sum(number)
        total, votes = flat.tail[:2].tolist()
        if total:
            flat.grads.div_(total)
        self._mine = []
        if total == contributes * self._ranks.size:
            self._remember(mine)
        return total > 0, votes > 0 or not total

    def _finish_summing(self) -> None:
        assert self._summing is not None
        self._is_there(len(self._exchange.buckets) - 1)  # and those with parameters that were not used
        self._summing.join()
        self._summing, broken, self._broken = None, self._broken, None
        if broken is not None:
            raise broken

    def _remember(self, mine: Sequence[Gradient]) -> None:
        """What all ranks gave, as long as one that dies may not have said so."""
        now, last = self.worker.fabric.now(), self.worker.batch + 1
        self._given.extend((now, g, last - len(mine) + i) for i, g in enumerate(mine))
        while self._given and self._given[0][0] < now - UNHEARD_S:
            self._given.popleft()

    def _account_for(self, mine: Sequence[Gradient], behind: bool) -> None:
        """Of an exchange that was broken off: was this rank behind, its gradients are in the version that it was given;
        else they are dropped, and their batches come again."""
        fabric, now = self.worker.fabric, self.worker.fabric.now()
        if not behind:
            self._exchange.undo()
        for g in mine:
            kind = "apply" if behind else "drop"
            fabric.record(kind, now, now, version=self._holder.version, **g.facts)
        self.worker.redo(0 if behind else len(mine))

    def _speak_for(self, lost: Sequence[Peer]) -> None:
        """The last that those gave, who may have died before they said so."""
        for at_s, g, batch in self._given if lost else ():
            facts = g.facts | {"loss": math.nan, "version": g.read + 1, "batch": batch}
            for peer in lost:
                self.worker.fabric.record("apply", at_s, at_s, **(facts | {"worker": peer.index}))

    def _present(self) -> list[Peer]:
        fabric = self.worker.fabric
        me = Peer("worker", self.worker.index)
        return sorted([me, *fabric.members.present(fabric.others("worker"))])

    def _start(self) -> None:
        """The first group, on the links that are there."""
        self._era, self._group = 0, [Peer("worker", i) for i in range(self.worker.fabric.counts["worker"])]
        self._take_places()
        try:
            self._catch_up()
        except PeerLost:
            self._regroup()

    def _regroup(self) -> bool:
        """Form a new group. Was this rank behind, so that the state of another holds what it gave?"""
        fabric, before, behind = self.worker.fabric, self._group, False
        while True:
            for link in self._links:
                link.hang_up(self.worker.flat.message.nbytes)
            if self._summing is not None:
                with suppress(PeerLost):
                    self._finish_summing()
            fabric.until(lambda: fabric.members.era != self._era, "the news of who was lost")
            try:
                self._form()
                behind |= self._catch_up(before)
            except PeerLost:
                continue
            now, version = fabric.now(), self._holder.version
            for peer in self._group:
                fabric.record("regroup", now, now, worker=peer.index, step=self._era, version=version)
            return behind

    def _form(self) -> None:
        """New links, between all that are there after the same changes of the membership."""
        fabric, members = self.worker.fabric, self.worker.fabric.members
        self._era, self._links = members.era, []
        self._group = self._present()
        others = [peer for peer in self._group if peer.index != self.worker.index]
        fabric.relink(others, tag=self._era, unless=lambda: members.era != self._era)
        self._take_places()

    def _take_places(self) -> None:
        fabric, me = self.worker.fabric, Peer("worker", self.worker.index)
        links = [None if peer == me else fabric.link(*peer) for peer in self._group]
        self._links = [link for link in links if link is not None]
        self._ranks = Ranks(self._group.index(me), links)

    def _catch_up(self, before: Sequence[Peer] = ()) -> bool:
        """Let all hold the state of who is furthest; was this rank not as far? `before`: who was in the group.

        Raises:
            BadMessage: the model's factory made another one here. gloo aborts where more is lent than awaited.
        """
        worker, ranks, mine = self.worker, self._ranks, self._holder.version if self._begun else -1
        size = [worker.flat.size, worker.flat.dtype.itemsize]
        told = all_gather(ranks, [torch.tensor([mine, worker.step, *size])])
        versions, steps, *sizes = zip(*(values.tolist() for (values,) in told), strict=True)
        for peer, theirs in zip(self._group, zip(*sizes, strict=True), strict=True):
            if list(theirs) != size:
                raise BadMessage(
                    f"{peer} has a model of {theirs[0]} numbers of {theirs[1]} bytes, {worker.fabric.me} one of "
                    f"{size[0]}: the factory must make the same one everywhere"
                )
        newest = max(versions)
        if newest < 0:
            broadcast(ranks, worker.flat.params)  # the chief's, so that all begin alike
        elif mine < newest:
            state = unpacked(ranks.recv_all(versions.index(newest))[0])
            self._holder.restore(state["holder"])
            worker.next = state["next"] if mine < 0 else worker.next
        elif versions.index(newest) == ranks.rank:
            behind = [rank for rank, version in enumerate(versions) if version < newest]
            if behind:
                self._give(behind)
        now = dict(zip(self._group, versions, strict=True))
        self._speak_for(
            [peer for peer in before if now.get(peer, -1) < 0]
        )  # all do: any of them may be the next to die
        worker.step, self._begun = max(steps) + (mine < 0 <= newest), True
        return 0 <= mine < newest

    def _give(self, behind: Sequence[int]) -> None:
        """Send what this rank holds to those that are behind."""
        state = packed({"holder": self._holder.state(), "next": self.worker.next - len(self._mine)})
        for rank in behind:
            self._ranks.post(rank, state)
        self._ranks.flush()

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
        try:
            for number in range(len(self._exchange.buckets)):
                self.worker.fabric.until(lambda number=number: number < self._there, f"bucket {number}")  # type: ignore[misc]
                self._sum(number)
        except PeerLost as error:  # `mean` deals with it
            self._broken = error

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
