"""A run under way: what it has said so far, what can be done to it, and the `Run` that it leaves."""

import asyncio
import math
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor

from distlab import trace
from distlab.checkpoint import Checkpoint
from distlab.clusters.base import Cluster, Ending, Launched
from distlab.clusters.scenario import Scenario, check_scenario
from distlab.clusters.simulated_run import SimulatedRun
from distlab.errors import DistlabError
from distlab.fabric import Peer
from distlab.options import check_positive, options, warn
from distlab.run import Run, run_from
from distlab.saving import collector
from distlab.strategies.base import Job, Strategy
from distlab.task import Task

APPLY = trace.KINDS.index("apply")
OVER = "the run has ended: nothing can be done to its processes any more"
LOOK_S = 0.05  # how often who waits for the end looks for what is new


class Listener:
    """Keeps what a run says. Filled by the watching thread, read by any.

    Attributes:
        lines: what was printed, only ever longer: each reader remembers how far it has read.
    """

    def __init__(self, job: Job, strategy: Strategy, cluster: Cluster) -> None:
        self.parts: list[np.ndarray] = []
        self.lines: list[str] = []
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
        self.lines.append(line)

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

    If the last reference to it goes, so do its processes. A notebook can ``await`` it, and stays free meanwhile.
    """

    def __init__(self, task: Task, strategy: Strategy, cluster: Cluster, job: Job, paused: bool = False) -> None:
        self._task, self._strategy, self._cluster, self._job = task, strategy, cluster, job
        self._scenario: Any = cluster  # with what was done to the run
        self._listener, self._began = Listener(job, strategy, cluster), time.monotonic()
        self.launched: Launched = cluster.launch(strategy, job, self._listener, paused=paused)
        self._lock, self._run = threading.Lock(), None  # type: tuple[Any, Run | None]
        self._printed, self._dashboards = 0, []  # type: tuple[int, list[Any]]
        self._has_buttons = False  # that can let it go on
        self.awaited = False  # by a cell, whose kernel serves widgets meanwhile
        self._ender = weakref.finalize(self, end, self.launched, self._listener)

    def __repr__(self) -> str:
        return f"LiveRun({self.strategy} on {self.cluster}: {self.state}, {self.version} of {self.num_updates} updates)"

    @property
    def task(self) -> Task:
        """What is trained."""
        return self._task

    @property
    def strategy(self) -> Strategy:
        """The algorithm."""
        return self._strategy

    @property
    def cluster(self) -> Cluster:
        """Where it runs."""
        return self._cluster

    @property
    def num_workers(self) -> int:
        """Workers that the run began with, spares included."""
        return self._cluster.num_workers

    @property
    def is_simulated(self) -> bool:
        """Has it a virtual clock, which can go at another speed?"""
        return isinstance(self.launched, SimulatedRun)

    @property
    def state(self) -> str:
        """ "running", "paused" or "ended"."""
        if self.launched.wait(0) is not None:
            return "ended"
        return "paused" if self.paused else "running"

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

    def heard(self, since: int) -> tuple[list[np.ndarray], list[str]]:
        """The batches of events from that one on, and all lines that the processes printed."""
        return self._listener.parts[since:], list(self._listener.lines)

    def dashboard(self) -> None:
        """Show the run below this cell of a notebook, with buttons for what can be done to it.

        The kernel stays free: ``await live`` in the next cell returns the run, and leaves one that is paused to the
        buttons. When it ends, an ordinary picture stays. While it is shown it holds the run; to run its cell again lets
        go of it. Needs ipywidgets and matplotlib, and a notebook: elsewhere there is a warning and no picture."""
        from distlab.dashboard import Dashboard, can_show, headless

        if not can_show():
            warn("live.dashboard() needs a notebook; plots.plot_overview(run) draws a run that has ended anywhere")
            return
        self._dashboards.append(made := Dashboard(self))
        self._has_buttons |= not headless()
        made.show()

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

    def scale_lr(self, factor: float) -> None:
        """Let updates be made at `factor` times the task's learning rate (and schedule) from now on; 1 is its own.

        Whoever applies does so as soon as it has heard of it: each server by itself, the replicas of a collective all
        at the same version, `LocalSGD`'s inner optimizers from the next round on. The trace says from where. A run that
        goes on from a checkpoint begins at 1 again."""
        check_positive("factor", factor)
        if self.launched.wait(0) is not None:
            raise DistlabError(OVER)
        self.launched.scale_lr(float(factor))

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
        """Let a worker stand still for a while; without a word of which, let nothing more happen for now.

        What is done to a paused run comes true when it goes on, but for `stop` and the end of all. Real processes are
        stopped as soon as all have found each other, and the times in their trace go on; a run under torchrun cannot be
        paused."""
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
            raise DistlabError(OVER)
        self._scenario = said
        self.launched.change(said.changes[-1])

    def resume(self, speed: float | None = None) -> None:
        """Go on after `pause` or `step`.

        Args:
            speed: virtual seconds for a real one, from now on; None is as fast as can be. Real processes go at 1.
        """
        self.launched.resume(speed)

    def step(self, events: int = 1) -> float:
        """Let so many events of the virtual clock happen, then pause; returns the virtual time in seconds.

        Of a real run, at least so many updates happen, and the time is `now_s`."""
        return self.launched.step(events)

    @property
    def paused(self) -> bool:
        """Does it stand still, after `pause` or `step`, until `resume`?"""
        return self.launched.paused

    @property
    def now_s(self) -> float:
        """The virtual time in seconds; of a real run, seconds since all processes found each other, without pauses."""
        return self.launched.now_s

    def params(self) -> dict[str, Tensor]:
        """What each process holds as parameters, by name, each (size,): a worker's own beside the server's."""
        return self.launched.params()

    def wait(self, *, progress: bool = False) -> Run:
        """Wait for the end, printing what the processes print. A paused run goes on.

        Raises: what ended the run early: an exception of your own code on a worker as itself, with a note that
            names the worker; its attribute ``run`` holds what was measured.
            KeyboardInterrupt ends the run's processes first.
        """
        self._go_on()
        with self._watching(progress) as look:
            while (ending := look(LOOK_S)) is None:
                pass
        return self._finish(ending)

    def __await__(self) -> Generator[Any, None, Run]:
        """The same as `wait`, but the event loop goes on meanwhile; to cancel it ends the run's processes."""
        return self._awaited().__await__()

    async def _awaited(self) -> Run:
        if not self._has_buttons:
            self._go_on()
        self.awaited = True
        try:
            with self._watching(progress=False) as look:
                while (ending := look(0)) is None:
                    await asyncio.sleep(LOOK_S)
        finally:
            self.awaited = False
        return self._finish(ending)

    def _go_on(self) -> None:
        if self.paused:  # or its speed would change
            self.launched.resume()

    @contextmanager
    def _watching(self, progress: bool) -> Iterator[Callable[[float], Ending | None]]:
        """A way to look for the end, for so many seconds, and to print what is new; an interrupt ends the run."""

        def look(within_s: float) -> Ending | None:
            ending = self.launched.wait(within_s)
            if ending is not None:
                self._listener.close()
            self._print()
            advance()
            return ending

        with bar(self, progress and self._cluster.is_chief) as advance:
            try:
                yield look
            except BaseException:
                self.launched.kill()
                raise

    def _print(self) -> None:
        """Print what the processes printed since, unless a dashboard does."""
        lines = self._listener.lines[self._printed :]
        self._printed += len(lines)
        for line in () if self._dashboards else lines:
            print(line, flush=True)

    def _finish(self, ending: Ending) -> Run:
        self._ender.detach()  # or it would hold the error, whose traceback holds this run
        for shown in self._dashboards:
            shown.finish()
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
