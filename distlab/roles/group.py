"""The group of the ranks that are there, and how it forms anew when one dies, leaves or comes.

When a rank dies in the middle of an exchange, some of the others may have come to its end and some not. So the first
thing that a new group's ranks tell each other is their version, and who is furthest gives its state to the rest. One
that comes has version -1, and is served the same way. Then the samples that nobody has used yet are dealt to those that
are there. The hard idea is who is in the group: nobody finds out by asking. All have been told the same changes in the
same order, and after the same number of them they mean the same group.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from distlab.collectives import Ranks, all_gather, broadcast
from distlab.data import Deal
from distlab.errors import BadMessage, PeerLost, ProcessLost, TooLate
from distlab.fabric import Link, Peer
from distlab.packing import packed, unpacked
from distlab.roles.updater import Gradient, Rate
from distlab.roles.worker import Worker

UNHEARD_S = (
    1.0  # a process that is killed takes what it has not handed over of its trace with it: 0.05 s, on a good day
)


class Holder(Protocol):
    """Who holds what all ranks hold alike, such as an `Updater`."""

    version: int
    rate: Rate

    def state(self) -> dict[str, Any]:
        """All of it."""

    def restore(self, state: dict[str, Any]) -> None:
        """Hold what another did when it said `state`."""


class Told(NamedTuple):
    """What one rank tells the others when a group forms.

    Attributes:
        version, step, ended: where it is; version -1: it has just come.
        waiting: how many gradients it has that are part of no version.
        place, apart: where in the stream the first of their batches is, and how far apart they are.
        dealt: the place from which on nobody has had anything, as far as it knows.
        numel, itemsize: of its parameters.
    """

    version: int
    step: int
    ended: bool
    waiting: int
    place: int
    apart: int
    dealt: int
    numel: int
    itemsize: int


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
        self._given: deque[tuple[float, Gradient, dict[Peer, tuple[int, int]]]] = deque()  # when, mine, theirs
        self._dropped: deque[tuple[float, Peer, dict[str, Any]]] = (
            deque()
        )  # when, whose, what, as an exchange broke off
        self._steps: dict[Peer, int | None] = {}  # of each rank, in a new group; None: it begins after the highest
        self._places: dict[Peer, tuple[int, int]] = {}  # ... of what it gives first: where, and how far apart
        self._highest = 0
        self._era, self._gone = -1, 0
        self._peers, self._links = list[Peer](), list[Link]()
        if self._fabric.me in self._fabric.members.returned:
            self.form_anew()
        else:
            self._form_first()

    def check(self) -> None:
        """PeerLost if one of this group is gone."""
        if self._fabric.members.gone != self._gone:
            raise PeerLost("another rank")

    @property
    def is_old(self) -> bool:
        """Has the membership changed since this group was formed?"""
        return self._fabric.members.era != self._era

    def renew(self) -> None:
        """Form a new group, once this rank has heard who has left or come."""
        self._await_news("the news of who has left or come")  # before: the others may still need these links
        self.form_anew()

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
            self._await_news("the news of who was lost")
            try:
                self._form()
                behind |= self._catch_up(before, waiting)
            except PeerLost:
                continue
            now, version = self._fabric.now(), self._holder.version
            for peer in self._peers:
                self._fabric.record("regroup", now, now, worker=peer.index, step=self._era, version=version)
            return behind

    def _await_news(self, what: str) -> None:
        self._fabric.until(lambda: self.is_old, what)

    def remember(self, mine: Sequence[Gradient]) -> None:
        """All ranks gave as many gradients as this one, of the same batches: one that dies may not have said so."""
        now, further = self._fabric.now(), self._further(len(mine)) if mine else {}
        for i, g in enumerate(mine):
            theirs = {peer: (g.step + ahead, self._place(peer, i, g)) for peer, ahead in further.items()}
            self._given.append((now, g, theirs))
        self._places = {}
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

    def _place(self, peer: Peer, number: int, mine: Gradient) -> int:
        """Of the batch that `peer` gave as number so much, when this rank gave `mine`."""
        if peer in self._places:
            first, apart = self._places[peer]
            return first + number * apart
        return mine.batch + self._peers.index(peer) - self.ranks.rank

    def _form_first(self) -> None:
        """On the links that are there: if somebody has died by now, those who have not heard of it wait at them."""
        fabric = self._fabric
        others = [peer for peer in fabric.others("worker") if fabric.has_link(peer)]  # not to one that has just come
        self._era, self._peers = 0, sorted([fabric.me, *others])
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
        self._gone = members.gone
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
        told = self._tell_each_other(mine, waiting)
        newest, last = max(t.version for t in told.values()), max(t.step for t in told.values())
        self._check_sizes(told)
        left = self._fabric.members.left  # they have said it all themselves
        lost = [peer for peer in before if (peer not in told or told[peer].version < 0) and peer not in left]
        self._speak_for(lost)  # all do: any may be the next to die
        furthest = [peer for peer, t in told.items() if t.version == newest]
        if newest < 0:
            self._check_anew()
            broadcast(self.ranks, worker.flat.params)  # the chief's, so that all begin alike
        elif mine < newest:
            self._take(furthest[0])
        elif self._fabric.me == furthest[0]:
            self._give([rank for rank, t in enumerate(told.values()) if t.version < newest], waiting)
        wait = {peer: told[peer] for peer in furthest if told[peer].waiting}
        keep = self._keeps and bool(wait)  # for the coming exchange
        if not keep:
            self._remember_drops(wait, newest)
        self.over = any(t.ended for t in told.values())
        worker.ended |= self.over and mine < 0
        self._begun, self._highest = True, last
        self._steps = {peer: t.step if t.version == newest else None for peer, t in told.items()} if keep else {}
        if not keep or mine < newest:
            worker.step = last + (mine < 0 <= newest)
        behind = 0 <= mine < newest
        since = worker.next if self._keeps or behind else worker.next - waiting
        self._deal(max(told[peer].dealt for peer in furthest), since, wait if keep else {})
        return behind

    def _tell_each_other(self, version: int, waiting: int) -> dict[Peer, "Told"]:
        worker, begin = self._worker, self._fabric.saver.begin
        first = worker.next - waiting  # of the batches that are part of no version
        if not self._begun and begin is not None:
            dealt = begin.dealt(worker.stream.batch_size)
        else:
            dealt = worker.stream.dealt(worker.next if self._keeps else first)
        place, apart = worker.stream.place(first), worker.stream.deal_of(first).among
        said = Told(version, worker.step, worker.ended, waiting, place, apart, dealt, *self._size)
        heard = all_gather(self.ranks, [torch.tensor(said)])
        return {peer: Told(*values.tolist()) for peer, (values,) in zip(self._peers, heard, strict=True)}

    def _deal(self, start: int, since: int, wait: Mapping[Peer, "Told"]) -> None:
        """Deal what comes from `start` on to the group. Those that `wait` with what they have do so for others that
        have nothing yet, which are dealt a round of their own before."""
        me, late = self._fabric.me, [peer for peer in self._peers if peer not in wait] if wait else []
        self._places = {peer: (t.place, t.apart) for peer, t in wait.items()}
        self._places |= {peer: (start + turn, len(late)) for turn, peer in enumerate(late)}
        deals, count = [], max((t.waiting for t in wait.values()), default=0)
        if me in late:
            deals, since = [Deal(since, start, late.index(me), len(late))], since + count
        self._worker.stream.deal(*deals, Deal(since, start + count * len(late), self.ranks.rank, self.ranks.size))

    @property
    def _size(self) -> tuple[int, int]:
        return self._worker.flat.size, self._worker.flat.dtype.itemsize

    def _check_sizes(self, told: Mapping[Peer, "Told"]) -> None:
        """BadMessage if the model's factory made another one elsewhere: gloo aborts where more is lent than awaited."""
        for peer, (*_, numel, itemsize) in told.items():
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
        if members.left - members.parted:
            raise TooLate(str(self._fabric.me))
        raise ProcessLost(
            "all ranks have been lost, or have left, before another that came had their state: the parameters are gone"
        )

    def _give(self, behind: Sequence[int], waiting: int) -> None:
        """Send what this rank holds to those that are behind."""
        if behind:
            state = packed({"holder": self._holder.state(), "next": self._worker.next - waiting})
            for rank in behind:
                self.ranks.post(rank, state)
            self.ranks.flush()

    def _take(self, giver: Peer) -> None:
        """Be where `giver` is. A rank that was in the group before goes on with its own batches."""
        state = unpacked(self.ranks.recv_all(self._peers.index(giver))[0])
        self._holder.restore(state["holder"])
        if not self._begun:
            self._worker.next = state["next"]

    def _remember_drops(self, wait: Mapping[Peer, "Told"], version: int) -> None:
        """The exchange was broken off: those that `wait` with what they have drop it."""
        now, samples = self._fabric.now(), self._worker.stream.batch_size
        for peer, t in wait.items():
            for i in range(t.waiting):
                facts = {"worker": peer.index, "step": t.step - t.waiting + 1 + i, "batch": t.place + i * t.apart}
                self._dropped.append((now, peer, {"read": version, "version": version, "samples": samples, **facts}))
        while self._dropped and self._dropped[0][0] < now - UNHEARD_S:
            self._dropped.popleft()

    def _speak_for(self, lost: Sequence[Peer]) -> None:
        """Say what those gave last, who may have died before they could; and let it be out of the house before anybody
        builds on it."""
        for at_s, g, given in self._given if lost else ():
            for peer in [peer for peer in lost if peer in given]:
                step, place = given[peer]
                theirs = {"worker": peer.index, "step": step, "batch": place, "loss": math.nan}
                self._fabric.record("apply", at_s, at_s, version=g.read + 1, **(g.facts | theirs))
        for at_s, peer, facts in self._dropped:
            if peer in lost:
                self._fabric.record("drop", at_s, at_s, **facts)
        if lost:
            self._fabric.hand_over()
