"""`train` and `start`: a task, a strategy and a cluster in, a `Run` out."""

import importlib.util
import math
import os
import queue
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
from torch import Tensor

from distlab import trace
from distlab.checkpoint import Checkpoint
from distlab.clusters.base import Cluster, Ending, Launched
from distlab.clusters.scenario import Scenario, check_scenario
from distlab.errors import DistlabError
from distlab.fabric import Peer
from distlab.options import check_count, options
from distlab.run import Run, run_from
from distlab.saving import check_saving, collector
from distlab.strategies.base import Job, Strategy
from distlab.task import Task

APPLY = trace.KINDS.index("apply")


class Listener:
    """Keeps what a run says. Filled by the watching thread, read by any."""

    def __init__(self, job: Job, strategy: Strategy, cluster: Cluster) -> None:
        self.parts: list[np.ndarray] = []
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.version = 0 if job.begin is None else job.begin.version
        self.loss = float("nan")
        self.begin: Checkpoint | None = job.begin
        self.collector = collector(job, strategy, cluster.num_workers, self.say) if cluster.is_chief else None

    def events(self, rows: np.ndarray) -> None:
        """Store a batch of events."""
        self.parts.append(rows)
        if self.collector is not None:
            self.collector.events(rows)
        applied = rows[rows["kind"] == APPLY]
        if len(applied):
            self.version = max(self.version, int(applied["version"].max()))
            self.loss = float(applied["loss"].mean())

    def output(self, who: Peer, text: str) -> None:
        """Store a line that a process printed."""
        self.say(f"[{who}] {text}")

    def say(self, line: str) -> None:
        """Store a line."""
        self.lines.put(line)

    def part(self, who: Peer, data: Tensor) -> None:
        """Hand on a process's part of a checkpoint."""
        if self.collector is not None:
            self.collector.part(who, data)

    def go_back(self) -> Checkpoint | None:
        """The newest checkpoint: from now on the run is one that began there."""
        kept = None if self.collector is None else self.collector.newest()
        self.begin = kept or self.begin
        return kept

    def progress(self, version: int, loss: float) -> None:
        """Store how far another says that the run is."""
        self.version, self.loss = max(self.version, version), loss

    def began_at(self, begin: Checkpoint | None) -> None:
        """Store where another says that it began."""
        self.begin = begin

    def close(self) -> None:
        """Nothing more will come."""
        if self.collector is not None:
            self.collector.close()


class LiveRun:
    """A run under way, in other processes; this one stays free.

    If the last reference to it goes, so do its processes.
    """

    def __init__(self, task: Task, strategy: Strategy, cluster: Cluster, job: Job, paused: bool = False) -> None:
        self._task, self._strategy, self._cluster, self._job = task, strategy, cluster, job
        self._scenario: Any = cluster  # with what was done to the run
        self._listener, self._began = Listener(job, strategy, cluster), time.monotonic()
        self.launched: Launched = cluster.launch(strategy, job, self._listener, paused=paused)
        self._lock, self._run = threading.Lock(), None  # type: tuple[Any, Run | None]
        self._ender = weakref.finalize(self, end, self.launched, self._listener)

    def __repr__(self) -> str:
        state = "running" if self.launched.wait(0) is None else "ended"
        return f"LiveRun({self._strategy} on {self._cluster}: {state}, {self.version} of {self.num_updates} updates)"

    @property
    def num_updates(self) -> int:
        """The version at which the run will be over."""
        return self._job.num_updates

    @property
    def version(self) -> int:
        """Updates applied so far, as far as this process has heard (about 0.1 s behind)."""
        return self._listener.version

    @property
    def loss(self) -> float:
        """The mean training loss of the newest updates heard of."""
        return self._listener.loss

    @property
    def trace(self) -> trace.Trace:
        """What has happened so far."""
        return trace.gather(list(self._listener.parts))

    def stop(self) -> None:
        """Ask for an early end; `wait` then returns the run as far as it came.

        It ends with the update in progress. Where there is none (your code never comes back, a strategy never
        answers), it does not: use `kill`.
        """
        self.launched.stop()

    @options
    def kill(self, *, worker: int | None = None, server: int | None = None, client: int | None = None) -> None:
        """End one process, as SIGKILL does; without a word of which, the whole run, with what was measured lost but for
        the trace. All its processes are gone then."""
        if worker is server is client is None:
            self.launched.kill()
        else:
            self._change(Scenario.kill, worker=worker, server=server, client=client, at_s=0.0)

    @options
    def revive(self, *, worker: int) -> None:
        """Let a new process take the place of a worker that has died, or of one that lives, as soon as it dies."""
        self._change(Scenario.revive, worker=worker, at_s=0.0)

    def add_worker(self) -> None:
        """Let one more worker join: with the lowest number that is free (of one that has left or died), or a new one.

        A rank takes its parameters from another, and shares what is left of the samples with all others. A worker of a
        parameter server goes on with the part of the one whose number it has; a new number has its part of a deal to
        one more, so some samples come twice."""
        self._change(Scenario.add_worker, at_s=0.0)

    @options
    def remove_worker(self, *, worker: int | None = None) -> None:
        """Let a worker leave, by itself the one with the highest number, once its gradient is used. The last stays."""
        self._change(Scenario.remove_worker, worker=worker, at_s=0.0)

    @options
    def slow(self, *, worker: int, factor: float, for_s: float = math.inf) -> None:
        """Let a worker's gradients take `factor` times as long from now on, or for a while."""
        self._change(Scenario.slow, worker=worker, factor=factor, to_s=for_s)

    @options
    def throttle(self, *, worker: int, factor: float, for_s: float = math.inf) -> None:
        """Leave a worker's NIC `factor` (below 1) of its bandwidth; see `Scenario.throttle`."""
        self._change(Scenario.throttle, worker=worker, factor=factor, to_s=for_s)

    @options
    def delay(self, *, worker: int, by_s: float, for_s: float = math.inf) -> None:
        """Let every message to and from a worker take so much longer."""
        self._change(Scenario.delay, worker=worker, by_s=by_s, to_s=for_s)

    @options
    def partition(self, *, worker: int, for_s: float = math.inf) -> None:
        """Cut a worker off; messages wait."""
        self._change(Scenario.partition, worker=worker, to_s=for_s)

    @options
    def pause(self, *, worker: int | None = None, for_s: float = math.inf) -> None:
        """Let a worker stand still for a while; without a word of which, let nothing more happen for now (a simulated
        run only, as are `resume`, `step` and `params`)."""
        if worker is None:
            self.launched.pause()
        elif for_s == math.inf:
            raise ValueError("a pause ends: say for_s=..., or kill the worker")
        else:
            self._change(Scenario.pause, worker=worker, from_s=0.0, to_s=for_s)

    def _change(self, line: Callable[..., Scenario], **words: Any) -> None:
        """One more line of the cluster's scenario, from now on: checked by the same method."""
        if not isinstance(self._scenario, Scenario):
            raise DistlabError(f"nothing can be done to the processes of {self._cluster!r}")
        said = line(self._scenario, **words)
        check_scenario(said.changes[-1:], self._strategy, self._cluster.num_workers)
        if self.launched.wait(0) is not None:
            raise DistlabError("the run has ended: nothing can be done to its processes any more")
        self._scenario = said
        self.launched.change(said.changes[-1])

    def resume(self) -> None:
        """Go on after `pause` or `step`."""
        self.launched.resume()

    def step(self, events: int = 1) -> float:
        """Let so many events of the virtual clock happen, then pause; returns the virtual time in seconds."""
        return self.launched.step(events)

    def params(self) -> dict[str, Tensor]:
        """What each process holds as parameters, by name, each (size,): a worker's own beside the server's."""
        return self.launched.params()

    def wait(self, *, progress: bool = False) -> Run:
        """Wait for the end, printing what the processes print. A paused run goes on.

        Raises: what ended the run early: an exception of your own code on a worker as itself, with a note that
            names the worker; its attribute ``run`` holds what was measured.
            KeyboardInterrupt ends the run's processes first.
        """
        self.launched.resume()
        with bar(self, progress and self._cluster.is_chief) as advance:
            try:
                while (ending := self.launched.wait(0.05)) is None:
                    self._print()
                    advance()
            except BaseException:
                self.launched.kill()
                raise
            self._listener.close()
            self._print()
            advance()
        return self._finish(ending)

    def _print(self) -> None:
        while not self._listener.lines.empty():
            print(self._listener.lines.get(), flush=True)

    def _finish(self, ending: Ending) -> Run:
        self._ender.detach()  # or it would hold the error, whose traceback holds this run
        with self._lock:
            if self._run is None:
                self._run = self._result(ending)
                if self._cluster.is_chief:
                    self._run._warn_if_diverging(ending.error)
        if ending.error is not None:
            ending.error.run = self._run  # type: ignore[attr-defined]
            raise ending.error
        return self._run

    def _result(self, ending: Ending) -> Run:
        events = self._listener.parts
        first = min((float(part["start_s"].min()) for part in events), default=self._began)
        error = "" if ending.error is None else one_line(ending.error)
        counts = self._strategy.layout(self._cluster.num_workers).counts
        said: dict[str, Any] = {"num_workers": counts.get("worker") or counts.get("replica", 1)}
        said |= {"trace": trace.gather(events), "error": error}
        said["startup_s"] = first - (self._began + self.launched.ahead_s)
        said |= {"begin": self._listener.begin, "clocks": ending.clocks}
        said["num_holders"] = counts.get(self._strategy.final, 0)
        return run_from(self._strategy, repr(self._cluster), self._task, ending.outcomes, **said)


def end(launched: Launched, listener: Listener) -> None:
    """End a run that nobody waits for."""
    launched.kill()
    listener.close()


def one_line(error: BaseException) -> str:
    """Type and text of an exception, even if its own text cannot be had."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


class bar:
    """A progress bar over a live run's updates, or nothing."""

    def __init__(self, live: LiveRun, shown: bool) -> None:
        from tqdm.auto import tqdm

        self._live = live
        self._bar = tqdm(total=live.num_updates, unit="update", disable=not shown, leave=False)

    def __enter__(self) -> Any:
        return self._advance

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def _advance(self) -> None:
        self._bar.update(self._live.version - self._bar.n)
        if self._live.loss == self._live.loss:
            self._bar.set_postfix(loss=f"{self._live.loss:.3f}", refresh=False)


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
            job = replace(job, log_dir=check_log_dir(log_dir), **kept)
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


def check_log_dir(log_dir: str | os.PathLike[str] | None) -> str | None:
    """The absolute path of `log_dir`, made if it is not there, if event files can be written there."""
    if log_dir is None:
        return None
    if not isinstance(log_dir, (str, os.PathLike)):
        raise TypeError(f"log_dir must be the path of a folder, got {log_dir!r} ({type(log_dir).__name__})")
    if importlib.util.find_spec("tensorboard") is None:
        raise ModuleNotFoundError(f"log_dir={str(log_dir)!r} needs tensorboard: pip install 'distlab[tensorboard]'")
    folder = Path(log_dir).resolve()  # a worker may stand elsewhere
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return str(folder)
    except OSError as error:
        raise OSError(f"log_dir={str(log_dir)!r} cannot be written to: {error}") from error


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
