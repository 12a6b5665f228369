"""The group of the ranks that are there, and how it forms anew when one dies or comes back.

When a rank dies in the middle of an exchange, some of the others may have come to its end and some not. So the first
thing that a new group's ranks tell each other is their version, and who is furthest gives its state to the rest. One
that comes back has version -1, and is served the same way. The hard idea is who is in the group: nobody finds out by
asking. All have been told the same changes in the same order, and after the same number of them they mean the same
group.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from distlab.collectives import Ranks, all_gather, broadcast
from distlab.errors import BadMessage, PeerLost, ProcessLost, TooLate
from distlab.fabric import Link, Peer
from distlab.packing import packed, unpacked
from distlab.roles.updater import Gradient
from distlab.roles.worker import Worker

UNHEARD_S = (
    1.0  # a process that is killed takes what it has not handed over of its trace with it: 0.05 s, on a good day
)


class Holder(Protocol):
    """Who holds what all ranks hold alike, such as an `Updater`."""

    version: int

    def state(self) -> dict[str, Any]:
        """All of it."""

    def restore(self, state: dict[str, Any]) -> None:
        """Hold what another did when it said `state`."""


class Group:
    """One rank's view of the group.

    Args:
        holder: of what is equal on all ranks.
        keeps: does a rank give what it has again to a new group, or does it drop it and compute anew?
        stop: called once the links of the old group are gone: whatever still uses them must come to its end.

    Attributes:
        ranks: for collectives.
        over: has one of the ranks come to the end of the run? Then there is no further exchange.
    """

    ranks: Ranks
    over = False

    def __init__(self, worker: Worker, holder: Holder, stop: Callable[[], None], *, keeps: bool = False) -> None:
        self._worker, self._fabric, self._holder, self._stop = worker, worker.fabric, holder, stop
        self._keeps = keeps
        self._begun = False  # is there a version?
        self._given: deque[tuple[float, Gradient, int, dict[Peer, int]]] = deque()  # when, what, its batch, its steps
        self._dropped: deque[tuple[float, Peer, dict[str, Any]]] = (
            deque()
        )  # when, whose, what, as an exchange broke off
        self._steps: dict[Peer, int | None] = {}  # of each rank, in a new group; None: it begins after the highest
        self._highest = 0
        self._era, self._peers, self._links = -1, list[Peer](), list[Link]()
        if self._fabric.me in self._fabric.members.returned:
            self.form_anew()
        else:
            self._form_first()

    def check(self) -> None:
        """PeerLost if the membership has changed since this group was formed."""
        if self._fabric.members.era != self._era:
            raise PeerLost("another rank")

    def form_anew(self, waiting: int = 0) -> bool:
        """Form a new group of those that are there, and let all hold the same.

        Args:
            waiting: how many gradients this rank has that are part of no version.

        Returns: was this rank a version behind? Then what it gave is in the state that it has been given.
        """
        before, behind = self._peers, False
        while True:
            for link in self._links:
                link.hang_up(self._worker.flat.message.nbytes)
            self._stop()
            self._fabric.until(lambda: self._fabric.members.era != self._era, "the news of who was lost")
            try:
                self._form()
                behind |= self._catch_up(before, waiting)
            except PeerLost:
                continue
            now, version = self._fabric.now(), self._holder.version
            for peer in self._peers:
                self._fabric.record("regroup", now, now, worker=peer.index, step=self._era, version=version)
            return behind

    def remember(self, mine: Sequence[Gradient]) -> None:
        """All ranks gave as many gradients as this one, of the same batches: one that dies may not have said so."""
        now, further = self._fabric.now(), self._further(len(mine))
        for batch, g in enumerate(mine, self._worker.batch + 1 - len(mine)):
            self._given.append((now, g, batch, further))
        while self._given and self._given[0][0] < now - UNHEARD_S:
            self._given.popleft()

    def _further(self, count: int) -> dict[Peer, int]:
        """By how much each rank's steps are ahead of this one's, in the last `count`. From then on all count alike."""
        if not self._steps:
            return self._alike
        mine, last = self._worker.step, self._highest + count
        found = {peer: (last if step is None else step) - mine for peer, step in self._steps.items()}
        self._worker.step, self._steps = mine + max(found.values()), {}
        return found

    def _form_first(self) -> None:
        """On the links that are there: if somebody has died by now, those who have not heard of it wait at them."""
        self._era, self._peers = 0, [Peer("worker", i) for i in range(self._fabric.counts["worker"])]
        self._take_places()
        try:
            self.check()
            self._catch_up([], 0)
        except PeerLost:
            self.form_anew()

    def _form(self) -> None:
        """On new links, between all that are there after the same changes of the membership."""
        members, me = self._fabric.members, self._fabric.me
        self._era, self._links = members.era, []
        others = members.present(self._fabric.others("worker"))
        self._peers = sorted([me, *others])
        self._fabric.relink(others, tag=self._era, unless=lambda: members.era != self._era)
        self._take_places()

    def _take_places(self) -> None:
        me = self._fabric.me
        links = [None if peer == me else self._fabric.link(*peer) for peer in self._peers]
        self._links = [link for link in links if link is not None]
        self.ranks, self._alike = Ranks(self._peers.index(me), links), dict.fromkeys(self._peers, 0)

    def _catch_up(self, before: Sequence[Peer], waiting: int) -> bool:
        """Let all hold the state of who is furthest; was this rank not as far? `before`: who was in the group."""
        worker, mine = self._worker, self._holder.version if self._begun else -1
        told = all_gather(self.ranks, [torch.tensor([mine, worker.step, worker.ended, waiting, *self._size])])
        versions, steps, ended, waits, *sizes = zip(*(values.tolist() for (values,) in told), strict=True)
        self._check_sizes(list(zip(*sizes, strict=True)))
        newest, now = max(versions), dict(zip(self._peers, versions, strict=True))
        self._speak_for([peer for peer in before if now.get(peer, -1) < 0])  # all do: any may be the next to die
        if newest < 0:
            self._check_anew()
            broadcast(self.ranks, worker.flat.params)  # the chief's, so that all begin alike
        elif mine < newest:
            self._take(versions.index(newest))
        elif versions.index(newest) == self.ranks.rank:
            self._give([rank for rank, version in enumerate(versions) if version < newest], waiting)
        if not self._keeps:
            here = zip(self._peers, versions, steps, waits, strict=True)
            held = [(peer, step, count) for peer, version, step, count in here if version == newest]
            self._remember_drops(held, newest, worker.next - waiting * (mine == newest))
        self.over = any(ended)
        worker.ended |= self.over and mine < 0
        self._begun, self._highest = True, max(steps)
        if self._keeps and newest >= 0:
            self._steps = {peer: s if now[peer] == newest else None for peer, s in zip(self._peers, steps, strict=True)}
        if not self._keeps or mine < newest:
            worker.step = max(steps) + (mine < 0 <= newest)
        return 0 <= mine < newest

    @property
    def _size(self) -> tuple[int, int]:
        return self._worker.flat.size, self._worker.flat.dtype.itemsize

    def _check_sizes(self, sizes: Sequence[tuple[int, ...]]) -> None:
        """BadMessage if the model's factory made another one elsewhere: gloo aborts where more is lent than awaited."""
        for peer, (numel, itemsize) in zip(self._peers, sizes, strict=True):
            if (numel, itemsize) != self._size:
                raise BadMessage(
                    f"{peer} has a model of {numel} numbers of {itemsize} bytes, {self._fabric.me} one of "
                    f"{self._size[0]}: the factory must make the same one everywhere"
                )

    def _check_anew(self) -> None:
        """Nobody here holds a version. Those who have all come back must not begin once more what others have done.

        Raises:
            TooLate: the others have come to the end.
            ProcessLost: they have died.
        """
        members = self._fabric.members
        if any(peer not in members.returned for peer in self._peers):
            return
        if members.left:
            raise TooLate(str(self._fabric.me))
        raise ProcessLost(
            "all ranks have been lost, each before another that came back had its state: the parameters are gone"
        )

    def _give(self, behind: Sequence[int], waiting: int) -> None:
        """Send what this rank holds to those that are behind."""
        if behind:
            state = packed({"holder": self._holder.state(), "next": self._worker.next - waiting})
            for rank in behind:
                self.ranks.post(rank, state)
            self.ranks.flush()

    def _take(self, giver: int) -> None:
        """Be where `giver` is. A rank that was in the group before goes on with its own batches."""
        state = unpacked(self.ranks.recv_all(giver)[0])
        self._holder.restore(state["holder"])
        if not self._begun:
            self._worker.next = state["next"]

    def _remember_drops(self, held: Sequence[tuple[Peer, int, int]], version: int, batch: int) -> None:
        """The exchange was broken off: those of `held` (who, at which step, how many gradients) drop what they have.
        `batch`: the first of those that come again."""
        now, samples = self._fabric.now(), self._worker.stream.batch_size
        for peer, step, count in held:
            for i in range(count):
                facts = {"worker": peer.index, "step": step - count + 1 + i, "batch": batch + i, "samples": samples}
                self._dropped.append((now, peer, {"read": version, "version": version, **facts}))
        while self._dropped and self._dropped[0][0] < now - UNHEARD_S:
            self._dropped.popleft()

    def _speak_for(self, lost: Sequence[Peer]) -> None:
        """Say what those gave last, who may have died before they could; and let it be out of the house before anybody
        builds on it."""
        for at_s, g, batch, further in self._given if lost else ():
            for peer in [peer for peer in lost if peer in further]:
                theirs = {"worker": peer.index, "step": g.step + further[peer], "loss": math.nan}
                self._fabric.record("apply", at_s, at_s, version=g.read + 1, batch=batch, **(g.facts | theirs))
        for at_s, peer, facts in self._dropped:
            if peer in lost:
                self._fabric.record("drop", at_s, at_s, **facts)
        if lost:
            self._fabric.hand_over()
