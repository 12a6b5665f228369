"""Blame: who was waited for, and what spare workers would have saved.

Under a synchronous strategy everybody looks equally slow: whoever came early waits inside the all-reduce. What tells
them apart is when each *arrived*, which is when its gradient was there.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from distlab.trace import Trace

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Blame:
    """Who was waited for in a synchronous run.

    Attributes:
        updates: how many were looked at.
        times_last: worker -> in how many of them it came last.
        waited_s: worker -> how long all others waited for it alone, in seconds.
    """

    updates: int
    times_last: dict[int, int]
    waited_s: dict[int, float]

    @property
    def worker(self) -> int:
        """The one that was waited for the longest."""
        return max(self.waited_s, key=lambda worker: self.waited_s[worker])

    def __str__(self) -> str:
        who, whole = self.worker, sum(self.waited_s.values())
        return (
            f"worker {who} came last in {self.times_last[who]} of {self.updates} updates, and was waited for alone "
            f"{self.waited_s[who]:.3g} s of the {whole:.3g} s that anybody was"
        )


def arrivals(trace: Trace) -> np.ndarray:
    """When each worker's gradient was there: (updates, workers) seconds, one row per update that has one of each.

    Raises:
        ValueError: there is no such update: blame is for synchronous strategies.
    """
    rows = trace.select("compute")
    ends: dict[tuple[int, int], float] = {}
    for worker, step, end_s in rows[["worker", "step", "end_s"]].tolist():
        ends[worker, step] = max(end_s, ends.get((worker, step), end_s))
    reduces = trace.select("reduce")[["worker", "step", "start_s"]].tolist()
    for key, start_s in {(worker, step): start_s for worker, step, start_s in reduces}.items():  # the last of each
        if key in ends:  # DDP waits for the others inside backward
            ends[key] = min(ends[key], start_s)
    workers = sorted({worker for worker, _ in ends})
    applied = trace.select("apply")[["version", "worker", "step"]].tolist()
    steps: dict[int, dict[int, int]] = {}
    for version, worker, step in sorted(applied):
        steps.setdefault(version, {})[worker] = step  # of several, the last
    whole = [held for _, held in sorted(steps.items()) if len(held) == len(workers)]
    if len(workers) < 2 or not whole:
        raise ValueError("no update holds a gradient of every worker: blame is for synchronous runs of several workers")
    return np.array([[ends[worker, held[worker]] for worker in workers] for held in whole])


def blame(trace: Trace) -> Blame:
    """Name who was waited for, by the arrivals of the gradients; ValueError as `arrivals`."""
    times = arrivals(trace)
    last, alone_s = times.argmax(1), np.diff(np.sort(times, 1)[:, -2:], axis=1)[:, 0]
    workers = range(times.shape[1])
    counts = {worker: int((last == worker).sum()) for worker in workers}
    return Blame(len(times), counts, {worker: float(alone_s[last == worker].sum()) for worker in workers})


def how_many_backups(trace: Trace) -> "pd.DataFrame":
    """What b spare workers would have saved in this run, and wasted: a row per b.

    Columns: b, seconds (per update, until enough gradients were there), saved (share of the time without spares),
    wasted (share of the gradients). It takes the arrivals as they were: with spares, a late worker would have begun
    its next gradient later than here; and an update of fewer gradients does not go as far.

    Raises:
        ValueError: as `arrivals`.
    """
    import pandas as pd

    if len(trace.select("dispatch")) or len(trace.select("send", who="client 0")):
        raise ValueError("in-graph one client drives every device: none of them could be spared")
    times = arrivals(trace)
    begins = np.r_[trace.rows["start_s"].min(), times.max(1)[:-1]]
    waits = np.sort(times - begins[:, None], 1).mean(0)[::-1]
    b = np.arange(len(waits))
    return pd.DataFrame({"b": b, "seconds": waits, "saved": 1 - waits / waits[0], "wasted": b / len(waits)})
