"""`train` and `start`: a task, a strategy and a cluster in, a `Run` out."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import cloudpickle

from distlab.clusters.base import Cluster
from distlab.live import LiveRun
from distlab.options import check_count, options
from distlab.roles.event_file import check_folder
from distlab.run import Run
from distlab.saving import check_saving
from distlab.strategies.base import Job, Strategy
from distlab.task import Task


@options
def start(
    task: Task,
    strategy: Strategy,
    cluster: Cluster,
    *,
    num_updates: int | None = None,
    num_samples: int | None = None,
    num_batches: Sequence[int] | None = None,
    evaluate_every: int | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    resume: str | os.PathLike[str] | None = None,
    paused: bool = False,
) -> LiveRun:
    """Start a run and return at once.

    Args:
        task, strategy, cluster: what, how, where. Change one and nothing else.
        num_updates: how many versions to make (collectives: common steps).
        num_samples: the other way to say how long: as many updates as it takes to use so many samples. Use
            it to compare strategies.
        num_batches: or how many batches each worker has; one that has used up its own leaves, the others go on, and
            the run ends with the last one. A chief that has left evaluates no more. `SingleWorker` has the first
            worker's. `InGraph` has them all in one stream, of which each update takes one for every replica; what is
            left of it in the end is not used.
        evaluate_every: let the chief (worker 0; in-graph the client) judge the parameters that it holds on the
            validation data: at version 0, then whenever it has come to the next multiple. See `Run.evaluations`.
            Costs the chief's time, none on a simulated cluster; its training is as without, bit for bit. BatchNorm
            is judged with the chief's statistics: the client of `InGraph` has none, no batch goes through its model.
        log_dir: a folder, made if it is not there, for the chief's TensorBoard files: its training loss
            (train/loss), the schedule's factor (train/lr_factor) and each evaluation (validation/...), by version.
            Needs tensorboard. Take a new folder for every run.
        checkpoint_dir: a folder, made if it is not there, for checkpoints (the newest five): of the run's end, and
        checkpoint_every: of every multiple of so many versions. Training does not wait for the disk.
        resume: go on from the checkpoint at this path, or from the newest in this folder of them; None: from the
            beginning. See `latest_checkpoint`. `num_updates` counts the updates that are in it too. With the same
            strategy, servers and workers a deterministic run ends at the bits that it would have without the break.
        paused: let nothing happen before `LiveRun.step` or `LiveRun.resume` (simulated clusters only).

    Raises:
        TypeError, ValueError: bad input, before any process starts, with what was asked and what was got.
        ModuleNotFoundError, OSError: log_dir or checkpoint_dir cannot be written, in the same way.
        FileNotFoundError, BadCheckpoint: there is no checkpoint at `resume`, or it is damaged, or of another task.
    """
    job = checked(task, strategy, cluster, num_updates, num_samples, num_batches)
    job = replace(job, evaluate_every=check_evaluation(task, evaluate_every))
    if cluster.is_chief:
        try:
            kept = check_saving(task, strategy, job.num_updates, checkpoint_dir, checkpoint_every, resume)
            job = replace(job, log_dir=None if log_dir is None else check_folder(log_dir, "log_dir"), **kept)
        except Exception as error:
            cluster.call_off(error)
            raise
    else:  # it looks after the files
        folders = [None if path is None else os.path.abspath(path) for path in (log_dir, checkpoint_dir)]
        job = replace(job, log_dir=folders[0], checkpoint_dir=folders[1], checkpoint_every=checkpoint_every)
    return LiveRun(task, strategy, cluster, job, paused)


@options
def train(
    task: Task,
    strategy: Strategy,
    cluster: Cluster,
    *,
    num_updates: int | None = None,
    num_samples: int | None = None,
    num_batches: Sequence[int] | None = None,
    evaluate_every: int | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    resume: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Run:
    """Run to the end, with a progress bar. Arguments and errors as `start`, then those of `LiveRun.wait`."""
    how_long: dict[str, Any] = {"num_updates": num_updates, "num_samples": num_samples, "num_batches": num_batches}
    kept: dict[str, Any] = {"checkpoint_dir": checkpoint_dir, "checkpoint_every": checkpoint_every, "resume": resume}
    live = start(task, strategy, cluster, **how_long, evaluate_every=evaluate_every, log_dir=log_dir, **kept)
    return live.wait(progress=progress)


def checked(
    task: Task, strategy: Strategy, cluster: Cluster, num_updates: int | None, num_samples: int | None,
    num_batches: Sequence[int] | None,
) -> Job:  # fmt: skip
    """The job, if everything about it can be run."""
    for name, value, kind in (
        ("task", task, Task),
        ("strategy", strategy, Strategy),
        ("cluster", cluster, Cluster),
    ):
        if not isinstance(value, kind):
            hint = f": write {value.__name__}()" if isinstance(value, type) and issubclass(value, kind) else ""
            raise TypeError(f"{name} must be a {kind.__name__}, got {value!r}{hint}")
    if [num_updates, num_samples, num_batches].count(None) != 2:
        raise ValueError("say how long: num_updates=..., num_samples=... or num_batches=..., one of them")
    strategy.check(cluster.num_workers)
    task.check()
    strategy.check_task(task)
    if num_samples is not None:
        num_updates = strategy.num_updates(task, cluster.num_workers, check_count("num_samples", num_samples))
    if num_batches is not None:
        num_batches = checked_batches(num_batches, cluster.num_workers)
        num_updates = strategy.most_updates(num_batches)
    job = Job(task, check_count("num_updates", num_updates), cluster.num_workers, num_batches)
    check_picklable("the strategy", strategy, "")
    check_picklable("the task", task, "task")
    return job


def checked_batches(num_batches: Sequence[int], num_workers: int) -> tuple[int, ...]:
    """How many batches each worker has, if that can be."""
    if not isinstance(num_batches, Iterable):
        raise TypeError(f"num_batches must have a number for each of the {num_workers} workers, got {num_batches!r}")
    counts = tuple(check_count("num_batches", count) for count in num_batches)
    if len(counts) != num_workers:
        raise ValueError(f"num_batches has {len(counts)} numbers for {num_workers} workers")
    return counts


def check_evaluation(task: Task, every: int | None) -> int | None:
    """`every`, if this task can be evaluated."""
    if every is None:
        return None
    check_count("evaluate_every", every)
    if task.validation is None:
        raise ValueError(f"evaluate_every={every!r}, but this task has no validation data: pass Task(validation=...)")
    if taken := {"version", "time_s"} & set(task.metrics):
        raise ValueError(f"a metric cannot be called {taken.pop()!r} here: run.evaluations has a column of that name")
    return every


def check_picklable(what: str, value: Any, path: str, depth: int = 0) -> None:
    """Raise TypeError that names the innermost part of `value` that cannot be sent to another process."""
    try:
        cloudpickle.dumps(value)
        return
    except Exception as error:
        reason = str(error)
    for name, part in parts_of(value):
        if depth < 6:
            check_picklable(what, part, f"{path}{name}", depth + 1)
    raise TypeError(f"{what} cannot be sent to a worker process: {path} ({type(value).__name__}): {reason}")


def parts_of(value: Any) -> list[tuple[str, Any]]:
    """What `value` is made of, by the path that a reader would write."""
    if isinstance(value, dict):
        return [(f"[{k!r}]", v) for k, v in value.items()]
    if isinstance(value, (list, tuple, set)):
        return [(f"[{i}]", v) for i, v in enumerate(value)]
    parts = [(f".{k}", v) for k, v in getattr(value, "__dict__", {}).items()]
    if getattr(value, "__closure__", None):
        names = value.__code__.co_freevars
        parts += [(f" (its variable {n!r})", c.cell_contents) for n, c in zip(names, value.__closure__, strict=True)]
    if hasattr(value, "__code__"):
        used = {n: value.__globals__[n] for n in value.__code__.co_names if n in value.__globals__}
        parts += [(f" (its global {n!r})", v) for n, v in used.items()]
    return parts
