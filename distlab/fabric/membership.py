"""Who takes part in a run, as one process has been told.

Processes die, end and come back. Whoever watches them tells all others, each the same and in the same order; so "after
the third change" names one group for everybody, and no vote is needed. A process only acts on what it has been told: a
link that breaks is a reason to ask, not yet a death.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


class Peer(NamedTuple):
    """A process of a run: its role and its number in that role."""

    role: str
    index: int  # type: ignore[assignment]  # a tuple has a method of that name, which nobody needs here

    def __str__(self) -> str:
        return f"{self.role} {self.index}"


@dataclass
class Membership:
    """All processes are members at first.

    Attributes:
        era: how often it has changed; the last thing to change with it.
        gone: how often somebody died or left.
        lost: those that have died and not come back.
        left: those that have come to their end.
        parted: those of them that were asked to leave before that of the run.
        returned: those that have come since the beginning.
        arrivals: the same, with the era that this began, until somebody greets them.
    """

    era: int = 0
    gone: int = 0
    lost: set[Peer] = field(default_factory=set)
    left: set[Peer] = field(default_factory=set)
    parted: set[Peer] = field(default_factory=set)
    returned: set[Peer] = field(default_factory=set)
    arrivals: deque[tuple[Peer, int]] = field(default_factory=deque)

    def tell(self, what: str, peer: Peer) -> None:
        """`peer` is "lost", has "left", has "parted", or "came", as another of its number or as the first."""
        for group in (self.lost, self.left, self.parted):
            group.discard(peer)
        {"lost": self.lost, "left": self.left, "parted": self.left, "came": self.returned}[what].add(peer)
        if what == "parted":
            self.parted.add(peer)
        elif what == "came":
            self.arrivals.append((peer, self.era + 1))
        self.gone += what != "came"
        self.era += 1

    def present(self, peers: Iterable[Peer]) -> list[Peer]:
        """Those of `peers` that are there."""
        return [peer for peer in peers if peer not in self.lost and peer not in self.left]

    def first(self, peers: Iterable[Peer]) -> Peer | None:
        """The lowest of `peers` that has always been there, or at least has come: the chief of workers."""
        alive = [peer for peer in peers if peer not in self.lost and peer not in self.parted]
        return min(alive, key=lambda peer: (peer in self.returned, peer), default=None)
