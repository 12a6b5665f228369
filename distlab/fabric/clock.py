"""This process's clock. All processes of a run count the same seconds: those of whoever leads it.

Hosts count from different beginnings. A process is told once how far ahead the leader's clock is of its host's; what
two such clocks drift apart afterwards is some microseconds in a second.
"""

import time

_ahead_ns = 0


def set_ahead(seconds: float) -> None:
    """The leader's clock is so far ahead of this host's."""
    global _ahead_ns  # a process has one clock
    _ahead_ns = round(seconds * 1e9)


def now_ns() -> int:
    """Nanoseconds on the leader's clock."""
    return time.monotonic_ns() + _ahead_ns


def now() -> float:
    """Seconds on the leader's clock."""
    return now_ns() * 1e-9
