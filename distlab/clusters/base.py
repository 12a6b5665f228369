"""What `train` asks of a cluster: launch a job, hear what happens, ask it to stop, wait for what is left.

Real and simulated clusters answer the same way.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor

from distlab.checkpoint import Checkpoint
from distlab.errors import DistlabError
from distlab.fabric import Peer
from distlab.fabric.network import Change
from distlab.options import Options
from distlab.strategies.base import Job, Outcome, Strategy

ONLY_SIMULATED = "only a simulated run can begin paused and be looked into: use a SimulatedCluster"
NOT_HERE = "a run under torchrun cannot be paused and stepped: use a LocalCluster or a SimulatedCluster"
ONE_PACE = "real processes go at their own speed, which is 1, got speed={!r}: use a SimulatedCluster"


class Sink(Protocol):
    """Who listens to a run. Called from one thread at a time.

    Attributes:
        version, loss: the newest that it has heard of.
    """

    @property
    def version(self) -> int: ...

    @property
    def loss(self) -> float: ...

    def events(self, rows: np.ndarray) -> None:
        """A batch of trace rows (dtype `trace.EVENT`)."""

    def output(self, who: Peer, text: str) -> None:
        """What a process printed."""

    def part(self, who: Peer, data: Tensor) -> None:
        """A process's part of a checkpoint, as `Saver` packed it."""

    def go_back(self) -> Checkpoint | None:
        """The newest checkpoint, at which the run begins anew; None if there is none."""

    def progress(self, version: int, loss: float) -> None:
        """Another rank says how far the run is."""

    def began_at(self, begin: Checkpoint | None) -> None:
        """It says where it began, or began anew."""


@dataclass
class Ending:
    """How a run ended: what each process left, or the error that ended it.

    Attributes:
        clocks: by host, how many seconds the caller's clock was ahead of its, and by how many that may be wrong.
    """

    outcomes: dict[Peer, Outcome] = field(default_factory=dict)
    error: BaseException | None = None
    clocks: dict[str, tuple[float, float]] = field(default_factory=dict)


class Launched(ABC):
    """A run under way.

    Attributes:
        ahead_s: of this process's clock, the one of its events.
    """

    ahead_s: float = 0.0

    @abstractmethod
    def stop(self) -> None:
        """Ask for an early end after the update in progress; `wait` then returns an ordinary ending."""

    @abstractmethod
    def kill(self, why: str = "LiveRun.kill()") -> None:
        """End it now. All processes are gone when this returns. Harmless when it has ended."""

    @abstractmethod
    def change(self, change: Change) -> None:
        """Let a line of a scenario come true; its times count from now."""

    @abstractmethod
    def scale_lr(self, factor: float) -> None:
        """Let every process, and who comes later, know what to multiply the task's learning rate by."""

    def pause(self) -> None:
        """Let nothing more happen for now."""
        raise DistlabError(NOT_HERE)

    def resume(self, speed: float | None = None) -> None:
        """Go on after a pause, at so many seconds of the run for a real one."""
        if speed not in (None, 1):
            raise DistlabError(ONE_PACE.format(speed))

    def step(self, events: int = 1) -> float:
        """Let so many events (of a real run: updates) happen, then pause; returns the time."""
        raise DistlabError(NOT_HERE)

    @property
    def paused(self) -> bool:
        """Does it stand still until it is told to go on?"""
        return False

    @property
    def now_s(self) -> float:
        """The time of the run in seconds, without its pauses."""
        return 0.0

    def params(self) -> dict[str, Tensor]:
        """What each process holds as parameters at this moment, by name; copies."""
        raise DistlabError(ONLY_SIMULATED)

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> Ending | None:
        """The ending, or None if there is none yet after `timeout_s`."""


class Cluster(Options, ABC):
    """Workers to run on.

    Attributes:
        num_workers: every process that computes gradients, spares included.
        is_chief: does this script lead the runs? Always, but under torchrun, where others run it too.
    """

    num_workers: int
    is_chief: bool = True
    _closed = False

    @abstractmethod
    def launch(self, strategy: Strategy, job: Job, sink: Sink, *, paused: bool = False) -> Launched:
        """Start `strategy`'s processes on `job`; returns at once. A simulated run can begin paused."""

    def call_off(self, error: BaseException) -> None:
        """Let other ranks that wait for a run of this one know that there will be none, and why."""

    def close(self) -> None:
        """End what is running. A closed cluster refuses new runs."""
        self._closed = True

    def check_open(self) -> None:
        """Raise ClusterClosed if it has been closed."""
        if self._closed:
            raise ClusterClosed(f"this {type(self).__name__} was closed: make a new one")

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ClusterClosed(DistlabError):
    """A run was asked of a cluster that has been closed."""
