"""`LocalCluster`: real processes on this machine.

New processes come from a fork server that has torch loaded, so that one costs milliseconds; they are made anew
for every run, so that nothing is left over from the last one. The caller's own process computes nothing: it
watches, in one thread, and can always be interrupted.
"""

import atexit
import weakref
from typing import Literal

from distlab.clusters.base import ONLY_SIMULATED, Cluster, Sink
from distlab.clusters.home import Here
from distlab.clusters.member import warm
from distlab.clusters.processes import Processes
from distlab.clusters.scenario import Scenario, check_scenario, sentence
from distlab.fabric.network import Change
from distlab.options import check_count, check_positive, check_seconds, check_word
from distlab.strategies.base import Job, Strategy

LONGEST_S = 1e6  # no operating system sleeps for much longer


class LocalCluster(Scenario, Cluster):
    """`num_workers` real worker processes on this machine (and the servers or client that a strategy adds).

    Reusable for many runs, one at a time: a new run ends the one before it, so that a notebook cell can be run again.
    A context manager; closed at exit. Everything listens on loopback only.

    Args:
        num_workers: at least 1.
        compute_time_s: every gradient takes at least so long; the rest is slept. With it sixteen workers act
            on two cores as if each had a device of its own.
        links: messages travel through "memory" that both ends have mapped, or over torch.distributed's "gloo", as
            they would between hosts.
        failure_timeout_s: a process that gives no sign of life for so long is taken for dead, and ended; so is one that
            has not come to its end so long after the run's last update, or after `LiveRun.stop`. Longer than a step!

    >>> LocalCluster(num_workers=4)
    LocalCluster(num_workers=4)
    """

    def __init__(
        self,
        num_workers: int,
        *,
        compute_time_s: float = 0.0,
        links: Literal["memory", "gloo"] = "memory",
        failure_timeout_s: float = 30.0,
    ) -> None:
        self.num_workers = check_count("num_workers", num_workers)
        self.compute_time_s = check_seconds("compute_time_s", compute_time_s)
        if compute_time_s > LONGEST_S:
            raise ValueError(f"compute_time_s must be at most {LONGEST_S:g} s, got {compute_time_s:g}")
        self.links = check_word("links", links, ("memory", "gloo"))
        self.failure_timeout_s = check_positive("failure_timeout_s", failure_timeout_s)
        self._runs: weakref.WeakSet[Processes] = weakref.WeakSet()
        warm()
        atexit.register(_close, weakref.ref(self))

    def __repr__(self) -> str:
        padded = f", compute_time_s={self.compute_time_s:g}" if self.compute_time_s else ""
        links = f", links={self.links!r}" if self.links != "memory" else ""
        made = f"LocalCluster(num_workers={self.num_workers}{padded}{links})" + "".join(map(sentence, self.changes))
        return made + (" (closed)" if self._closed else "")

    def _with(self, changes: tuple[Change, ...]) -> "LocalCluster":
        names = ("compute_time_s", "links", "failure_timeout_s")
        other = LocalCluster(self.num_workers, **{name: getattr(self, name) for name in names})
        other.changes = changes
        return other

    def launch(self, strategy: Strategy, job: Job, sink: Sink, *, paused: bool = False) -> Processes:
        if paused:
            raise ValueError(ONLY_SIMULATED)
        if strategy.simulated_only:
            raise ValueError(f"on real processes this cannot be had: {strategy.simulated_only}")
        self.check_open()
        check_scenario(self.changes, strategy, self.num_workers)
        for older in list(self._runs):
            older.kill("a newer run on the same cluster")
        run = Processes(job, strategy, self, sink, Here(self.links))
        self._runs.add(run)
        return run

    def close(self) -> None:
        super().close()
        for run in list(self._runs):
            run.kill()


def _close(cluster: "weakref.ref[LocalCluster]") -> None:
    if (alive := cluster()) is not None:
        alive.close()
