"""A worker as a rank: its gradient, summed with those of all others, and with it what they have to agree on."""

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from distlab.collectives import all_reduce
from distlab.errors import PeerLost
from distlab.fabric import Parts
from distlab.fabric.base import Running
from distlab.roles.exchange import Exchange
from distlab.roles.group import Group, Holder
from distlab.roles.updater import Gradient
from distlab.roles.worker import FORWARD, Worker


class Rank:
    """A worker of a collective strategy: its gradient becomes the mean of the group's.

    Args:
        exchange: how the sum is made.
        holder: of what is equal on all ranks.
        keeps: can `fill` write what this rank gives again, once an exchange was broken off?
    """

    def __init__(self, worker: Worker, exchange: Exchange, holder: Holder, *, keeps: bool = False) -> None:
        self.worker, self._exchange, self._holder = worker, exchange, holder
        shares = exchange.shares[:-1]  # the last bucket waits for `mean`: until then nobody can apply a gradient of nan
        self._parts = Parts([FORWARD + (1 - FORWARD) * share for share in shares], self._is_there)
        self._there, self._broken = 0, None  # type: int, PeerLost | None
        self._leaves = False  # is this rank to leave?
        self._leavers = self._news = 0  # how many are, and how many know of somebody who has come
        holder.rate.agreed = worker.fabric.rate
        self._summing: Running | None = None
        self._missing: list[set[int]] = []  # of each bucket, the parameters whose gradient is not there yet
        if len(exchange.buckets) > 1:
            self._watch()
        worker.fabric.saver.own("exchange", exchange.state, exchange.restore)
        self._group = Group(worker, holder, self._stop_summing, keeps=keeps)

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

        One message holds the values, a count, the votes to stop and to change, and what the learning rate is multiplied
        by. A worker that has nothing to give sends zeros, and takes part until nobody has. If the group changes
        meanwhile, all have to give again: their next gradient, of the same batches, or what `fill` writes into the
        buffer once more.

        Args:
            mine: what is in this worker's buffer, for the trace.
            contributes: how many gradients it counts as.

        Returns: is there a mean, and is the run over?
        """
        while True:
            try:
                return self._mean(mine, contributes, fill)
            except PeerLost:
                behind = self._group.form_anew(len(mine))
                if behind or fill is None or self._group.over:
                    self._account_for(mine, behind)
                    return False, self._group.over

    def part(self) -> bool:
        """After an update: let those go who have said that they leave, and those in who have come. Is this rank gone?

        All wait for each other once more, since who leaves must not be the only one to have made the update. If that
        fails, somebody has died, and whoever was to leave says so again with the next gradient.
        """
        leavers, news, self._leavers, self._news = self._leavers, self._news, 0, 0
        if leavers == self._group.ranks.size:  # somebody must be there to give what all hold to those who have come
            leavers, self._leaves = 0, False
        if not (leavers or news):
            return False
        try:
            all_reduce(self._group.ranks, torch.zeros(1))
        except PeerLost:
            self._group.form_anew()
            return False
        if self._leaves:
            self.worker.part()
        else:
            self._group.renew()
        return self._leaves

    def leave(self) -> None:
        """Wait until all have come to the end: whoever is a version behind still needs one to take it from. If this
        rank dies after that, nobody is there who could speak for it, so its own trace is out of the house before."""
        self.worker.fabric.hand_over()
        while not self.worker.fabric.parted:
            try:
                all_reduce(self._group.ranks, torch.zeros(1))
                return
            except PeerLost:
                self._group.form_anew()

    def _mean(self, mine: Sequence[Gradient], contributes: int, fill: Callable[[], object] | None) -> tuple[bool, bool]:
        flat = self.worker.flat
        self._group.check()
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
        total, votes, self._leavers, self._news, rate = flat.tail[:5].tolist()
        if total:
            flat.grads.div_(total)
            self._holder.rate.agreed = rate
        self._group.remember(mine if total == contributes * self._group.ranks.size else ())
        return total > 0, votes > 0 or not total

    def _stop_summing(self) -> None:
        """The links are gone: come to the end of an exchange that is under way."""
        if self._summing is not None:
            with suppress(PeerLost):
                self._finish_summing()

    def _finish_summing(self) -> None:
        assert self._summing is not None
        self._is_there(len(self._exchange.buckets) - 1)  # and those with parameters that were not used
        self._summing.join()
        self._summing, broken, self._broken = None, self._broken, None
        if broken is not None:
            raise broken

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

    def _fill_tail(self, contributes: int) -> None:
        tail, fabric = self.worker.flat.tail.zero_(), self.worker.fabric
        self._leaves = fabric.leaving
        rate = 0.0 if self._group.ranks.rank else fabric.rate  # all do what the first was told
        for i, number in enumerate((contributes, fabric.stopping, self._leaves, self._group.is_old, rate)):
            tail[i] = float(number)

    def _sum(self, number: int) -> None:
        fabric, step = self.worker.fabric, self.worker.step
        start, before = fabric.now(), self._group.ranks.sent_bytes
        self._exchange.sum_bucket(self._group.ranks, self.worker.flat.message, number)
        sent = self._group.ranks.sent_bytes - before
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
