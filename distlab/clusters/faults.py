"""Faults: a scenario, as it comes true for real processes. Here is decided what is due; `local.py` does it."""

import heapq
import math
from itertools import count

from distlab.clusters.scenario import peer_of
from distlab.fabric import Peer
from distlab.fabric.network import Change
from distlab.fabric.weather import Weather
from distlab.strategies.base import Layout

INSIDE = ("slow", "throttle", "delay", "partition")  # what a process does to itself


class Faults:
    """The lines of a scenario, and where in it a run is.

    Args:
        changes: times count from the beginning of the run.
    """

    def __init__(self, changes: tuple[Change, ...], layout: Layout) -> None:
        self._layout, self._numbers = layout, count()
        self._edges: list[tuple[float, int, Change, bool]] = []
        self._active: list[Change] = []
        for change in changes:
            if change.from_s == 0.0 and change.kind in INSIDE:  # so from its first gradient on
                self._active.append(change)
                self._push(change.to_s, change, False)
            else:
                self.add(change)

    def add(self, change: Change) -> None:
        """One more line."""
        if change.at_step < 0:
            self._push(change.from_s, change, True)
            self._push(change.to_s, change, False)

    def _push(self, at_s: float, change: Change, begins: bool) -> None:
        if at_s < math.inf:
            heapq.heappush(self._edges, (at_s, next(self._numbers), change, begins))

    @property
    def next_s(self) -> float:
        """When the next one begins or ends."""
        return self._edges[0][0] if self._edges else math.inf

    def due(self, now_s: float) -> list[tuple[Peer, Change, bool]]:
        """Whose change begins (True) or ends by now."""
        found = []
        while self._edges and self._edges[0][0] <= now_s:
            _, _, change, begins = heapq.heappop(self._edges)
            if begins:
                self._active.append(change)
            else:
                self._active.remove(change)
            found.append((peer_of(change, self._layout), change, begins))
        return found

    def weather(self, peer: Peer) -> Weather:
        """How things stand for a process."""
        mine = [change for change in self._active if peer_of(change, self._layout) == peer]
        slow, share = (math.prod(c.factor for c in mine if c.kind == kind) for kind in ("slow", "throttle"))
        delay_s = sum(c.by_s for c in mine if c.kind == "delay")
        return Weather(slow, share, delay_s, any(c.kind == "partition" for c in mine))
