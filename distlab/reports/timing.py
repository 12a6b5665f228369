"""Timing: what a simulated cluster must know to act like the one that a run was measured on.

Compute times are read off the trace as they are. What the trace cannot show directly is how long one message takes
on its way, threads and system calls included; it is what remains of a round once everything else is taken away.
"""

from dataclasses import dataclass

import numpy as np

from distlab.trace import Trace


@dataclass(frozen=True)
class Timing:
    """Seconds, read off a trace.

    Attributes:
        compute_s: for each worker, its gradients' times.
        apply_s: of each update.
        load_s: what a worker does before each gradient that no event covers.
        dispatch_s: of the in-graph client, the mean for each replica; 0 for others.
        message_s: of one message on its way, the mean.
        busy_s: how much of that its sender is busy with it, so that the next one waits.
    """

    compute_s: tuple[tuple[float, ...], ...]
    apply_s: tuple[float, ...]
    load_s: tuple[float, ...]
    dispatch_s: float
    message_s: float
    busy_s: float


def timing(trace: Trace, num_workers: int) -> Timing:
    """Read the times off a real run's trace.

    Raises:
        ValueError: a worker computed nothing, or nothing was applied.
    """
    compute = tuple(gradients(trace, worker) for worker in range(num_workers))
    if not all(compute) or not len(trace.select("apply")):
        raise ValueError("this trace does not show every worker computing and some update applied: run it for longer")
    rows = trace.select("apply")
    _, first = np.unique(rows["version"], return_index=True)
    apply_s, dispatch_s = durations(rows[first]), mean_or_0(durations(trace.select("dispatch"))) / num_workers
    load_s = (0.0,) if dispatch_s else gaps(trace, num_workers)
    busy_s = busy_time(trace)
    message_s = max(busy_s, message_time(trace, compute, float(apply_s.mean())))
    return Timing(compute, tuple(apply_s.tolist()), load_s, dispatch_s, message_s, busy_s)


def mean_or_0(values: np.ndarray) -> float:
    """Their mean, 0 if there are none."""
    return float(values.mean()) if len(values) else 0.0


def durations(rows: np.ndarray) -> np.ndarray:
    """How long each event took."""
    return rows["end_s"] - rows["start_s"]


def gradients(trace: Trace, worker: int) -> tuple[float, ...]:
    """A worker's compute times, one per gradient; those computed in parts are added up."""
    rows = trace.select("compute", worker=worker)
    steps, place = np.unique(rows["step"], return_inverse=True)
    return tuple(np.bincount(place, weights=durations(rows), minlength=len(steps)).tolist())


def gaps(trace: Trace, num_workers: int) -> tuple[float, ...]:
    """The times from a worker's last event to its next gradient."""
    found: list[float] = [0.0]
    for worker in range(num_workers):
        starts = trace.select("compute", who=f"worker {worker}")["start_s"]
        ends = np.sort(trace.select(who=f"worker {worker}")["end_s"])
        before = np.searchsorted(ends, starts, side="right") - 1
        found += (starts - ends[before])[before >= 0].tolist()
    return tuple(found[1:] or found)


def message_time(trace: Trace, compute: tuple[tuple[float, ...], ...], apply_s: float) -> float:
    """What remains of a round, over the messages that it has one after the other."""
    if len(reduces := trace.select("reduce")):
        quickest = by_group(reduces["step"], durations(reduces), np.minimum)
        ranks = len(compute)
        return float(quickest.mean()) / (1 if ranks == 2 else max(1, 2 * (ranks - 1)))
    if len(trace.select("dispatch")):
        return client_message_time(trace, compute, apply_s)
    pushes, pulls, waits = (trace.select(kind) for kind in ("push", "pull", "wait"))
    if not len(pushes):
        return 0.0
    answered = by_group(pulls["version"], durations(pulls) + durations(waits), np.minimum)
    return (float(answered.mean()) + float(durations(pushes).mean()) - apply_s) / 2


def client_message_time(trace: Trace, compute: tuple[tuple[float, ...], ...], apply_s: float) -> float:
    """In-graph: four messages a step, and the slowest replica's gradient."""
    applies = np.unique(trace.select("apply")["end_s"])
    own = [mean_or_0(durations(trace.select(kind))) for kind in ("dispatch", "loss")]
    slowest = np.max([times[: min(map(len, compute))] for times in compute], axis=0)
    return (float(np.diff(applies).mean()) - apply_s - sum(own) - float(slowest.mean())) / 4


def busy_time(trace: Trace) -> float:
    """From the answers to one version, or the pieces of one answer: how far apart they arrive.

    Answers to several workers may be on their way at once; but no server is busy for longer than the run.
    """
    pulls = np.sort(trace.select("pull"), order=["worker", "step", "end_s"])
    if not len(pulls):
        return 0.0
    follows = (np.diff(pulls["worker"]) == 0) & (np.diff(pulls["step"]) == 0)
    at_most = float(np.ptp(pulls["end_s"])) / len(pulls)
    if follows.mean() > 0.5:  # an answer has several pieces
        return min(at_most, float(durations(pulls[1:][follows]).mean()))
    _, answers = np.unique(pulls["version"], return_counts=True)
    shared = answers > 1
    if shared.mean() <= 0.5:
        return 0.0
    spread = by_group(pulls["version"], pulls["end_s"], np.maximum) - by_group(
        pulls["version"], pulls["end_s"], np.minimum
    )
    return min(at_most, float((spread[shared] / (answers[shared] - 1)).mean()))


def by_group(keys: np.ndarray, values: np.ndarray, reduce: np.ufunc) -> np.ndarray:
    """One value per distinct key."""
    order = np.argsort(keys, kind="stable")
    _, first = np.unique(keys[order], return_index=True)
    return reduce.reduceat(values[order], first)
