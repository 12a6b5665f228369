"""The network of a simulated cluster: latency, bandwidth, and what happens to both over time.

Every process has one NIC, which sends one message at a time and receives one at a time. That is enough for incast
to appear: eight workers that push at once queue at the server's NIC. The hard idea is that no queue is needed for
it, only the moment from which each NIC is free again.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from distlab.fabric.base import Peer
from distlab.fabric.laws import positive_number
from distlab.options import Options


@dataclass(frozen=True, kw_only=True)
class Network(Options):
    """Every NIC's latency and bandwidth, in each direction.

    Args:
        latency_s: from the first byte's leaving to its arrival.
        bandwidth_bytes_per_s: of each NIC, out and in; 1.25e9 is 10 Gbit/s.
    """

    latency_s: float = 1e-4
    bandwidth_bytes_per_s: float = 1.25e9

    def __post_init__(self) -> None:
        if not 0 <= positive_number("latency_s", self.latency_s) < math.inf:
            raise ValueError(f"latency_s must be 0 or more, and finite, got {self.latency_s}")
        if not positive_number("bandwidth_bytes_per_s", self.bandwidth_bytes_per_s) > 0:
            raise ValueError(f"bandwidth_bytes_per_s must be positive, got {self.bandwidth_bytes_per_s}")


IDEAL = Network(latency_s=0.0, bandwidth_bytes_per_s=math.inf)


@dataclass(frozen=True)
class Change:
    """A stretch of time in which something about one worker is different: one line of a scenario.

    `kind` is "slow" (computing takes `factor` times as long), "throttle" (its NIC has `factor` of its bandwidth),
    "delay" (its messages take `by_s` longer), "partition" (it is cut off), "pause" (it stands still), "kill" (at
    `from_s`, or when it begins its step `at_step`), "revive", "add_worker" or "remove_worker" (at `from_s`; worker -1:
    any). `role` may be another one than "worker" for a "kill".
    """

    kind: str
    worker: int
    from_s: float
    to_s: float = math.inf
    factor: float = 1.0
    by_s: float = 0.0
    role: str = "worker"
    at_step: int = -1

    def holds(self, now: float) -> bool:
        """Is it so now?"""
        return self.from_s <= now < self.to_s


@dataclass
class Nic:
    """When a process's NIC is free again, in each direction, and what happens to it."""

    network: Network
    changes: list[Change] = field(default_factory=list)
    out_free_s: float = 0.0
    in_free_s: float = 0.0

    def rate(self, now: float) -> float:
        """Bytes per second at this moment."""
        if not self.changes:
            return self.network.bandwidth_bytes_per_s
        slower = [c.factor for c in self.changes if c.kind == "throttle" and c.holds(now)]
        return self.network.bandwidth_bytes_per_s * math.prod(slower)

    def connected_from(self, now: float) -> float:
        """The first moment from `now` on at which it is not cut off."""
        for change in sorted(self.changes, key=lambda c: c.from_s):
            if change.kind in ("partition", "pause") and change.holds(now):
                now = change.to_s
        return now

    def delay_s(self, now: float) -> float:
        """What a message takes longer at this moment."""
        return sum(c.by_s for c in self.changes if c.kind == "delay" and c.holds(now)) if self.changes else 0.0


def standing_still(changes: list[Change], start_s: float, end_s: float) -> float:
    """When work that would take from `start_s` to `end_s` is done, if the process stands still meanwhile."""
    for pause in sorted((c for c in changes if c.kind == "pause"), key=lambda c: c.from_s):
        if pause.from_s < end_s and pause.to_s > start_s:
            end_s += pause.to_s - max(pause.from_s, start_s)
    return end_s


class Traffic:
    """All NICs, and the arithmetic of a message from one to another.

    Args:
        at: (time, function): call the function, with one argument to be ignored, at that time.
        now: the clock.
    """

    def __init__(
        self, nics: dict[Peer, Nic], at: Callable[[float, Callable[[Any], None]], None], now: Callable[[], float]
    ):
        self._nics, self._at, self._now = nics, at, now
        self._newest: dict[tuple[Peer, Peer], float] = {}  # when the last message of a link arrives, where that varies

    def send(self, source: Peer, target: Peer, num_bytes: int, deliver: Callable[[Any], None]) -> float:
        """Send so many bytes; `deliver` is called when the last one is there. Returns when the last one has left."""
        out, into = self._nics[source], self._nics[target]
        start = max(self._now(), out.out_free_s)
        if out.changes or into.changes:
            start = into.connected_from(out.connected_from(start))
        if start == math.inf:
            return math.inf  # cut off for good: it never leaves
        gone = start + num_bytes / out.rate(start)
        out.out_free_s = gone
        latency = out.network.latency_s
        if out.changes or into.changes:  # a message does not overtake the one before, whose delay may have been longer
            arrives = max(
                start + latency + out.delay_s(start) + into.delay_s(start), self._newest.get((source, target), 0)
            )
            self._newest[source, target], latency = arrives, arrives - start
        if out.network.bandwidth_bytes_per_s == math.inf:
            self._at(start + latency, deliver)
        else:
            self._at(start + latency, lambda _: self._receive(into, num_bytes, gone + latency, deliver))
        return gone

    def _receive(self, into: Nic, num_bytes: int, last_byte_s: float, deliver: Callable[[Any], None]) -> None:
        begin = max(self._now(), into.in_free_s)
        done = max(begin + num_bytes / into.rate(begin), last_byte_s)
        into.in_free_s = done
        self._at(done, deliver)
