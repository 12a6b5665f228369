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
        era: how often it has changed.
        lost: those that have died and not come back.
        left: those that have come to their end.
        returned: those that have come back.
        arrivals: the same, with the era that this began, until somebody greets them.
    """

    era: int = 0
    lost: set[Peer] = field(default_factory=set)
    left: set[Peer] = field(default_factory=set)
    returned: set[Peer] = field(default_factory=set)
    arrivals: deque[tuple[Peer, int]] = field(default_factory=deque)

    def tell(self, what: str, peer: Peer) -> None:
        """`peer` is "lost", has "left", or "came" back."""
        self.era += 1
        self.lost.discard(peer)
        self.left.discard(peer)
        {"lost": self.lost, "left": self.left, "came": self.returned}[what].add(peer)
        if what == "came":
            self.arrivals.append((peer, self.era))

    def present(self, peers: Iterable[Peer]) -> list[Peer]:
        """Those of `peers` that are there."""
        return [peer for peer in peers if peer not in self.lost and peer not in self.left]

    def first(self, peers: Iterable[Peer]) -> Peer | None:
        """The lowest of `peers` that has never been lost, or at least has come back: the chief of workers."""
        alive = [peer for peer in peers if peer not in self.lost]
        return min(alive, key=lambda peer: (peer in self.returned, peer), default=None)
