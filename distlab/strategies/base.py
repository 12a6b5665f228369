"""What a strategy is: which processes there are, who talks to whom, and what each of them does.

To write one, subclass `Strategy` (or `ParameterServerStrategy`) and write plain blocking code. It runs in one
process per role and number; the same lines run on real processes and on a virtual clock.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from distlab.errors import PeerLost
from distlab.fabric import Fabric, Kind, Peer
from distlab.flat import Flat, local_state
from distlab.options import Options
from distlab.roles.chief import Chief
from distlab.roles.server import Server, ServerPort, WorkerPort
from distlab.roles.updater import Params
from distlab.roles.worker import Worker
from distlab.task import Task


@dataclass(frozen=True)
class Layout:
    """The processes of a run (role -> how many) and which roles are linked, each process with each."""

    counts: dict[str, int]
    links: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Job:
    """What a process is told: the task, how long, how many workers compute gradients, and what the chief looks at."""

    task: Task
    num_updates: int
    num_workers: int
    evaluate_every: int | None = None
    log_dir: str | None = None


@dataclass
class Outcome:
    """What a process leaves behind.

    Attributes:
        params: (size,) its parameters at the end, or None if it has none.
        version: how many updates are in them.
        local: buffers and frozen parameters, by name.
        steps: batches finished.
        judged: the chief's evaluations: version, loss and each metric by name.
    """

    params: Tensor | None = None
    version: int = 0
    local: dict[str, Tensor] | None = None
    steps: int = 0
    judged: list[dict[str, float]] = field(default_factory=list)


class Strategy(Options, ABC):
    """How N workers train one model.

    Attributes:
        final: the role whose number 0 holds the model at the end.
        promises: what `check_strategy` may hold it to, beyond what is true of all: "fresh" (version v holds only
            gradients read at v - 1), "one from each" (of every worker), "identical replicas".
    """

    final: ClassVar[str] = "worker"
    promises: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def layout(self, num_workers: int) -> Layout:
        """The processes that a cluster of `num_workers` runs, and their links."""

    @abstractmethod
    def run(self, fabric: Fabric, job: Job) -> Outcome:
        """The whole life of one process: `fabric.me` says which."""

    def gradients_per_update(self, num_workers: int) -> int:
        """How many workers' batches one update holds."""
        return num_workers

    def check(self, num_workers: int) -> None:
        """Raise ValueError if this strategy cannot run on so many workers."""

    def num_updates(self, task: Task, num_workers: int, num_samples: int) -> int:
        """How many updates it takes to use at least `num_samples` samples."""
        return -(-num_samples // (task.batch_size * self.gradients_per_update(num_workers)))

    def __repr__(self) -> str:
        options: tuple[Field[Any], ...] = fields(self) if is_dataclass(self) else ()
        said = [f"{f.name}={getattr(self, f.name)!r}" for f in options if getattr(self, f.name) != f.default]
        return f"{type(self).__name__}({', '.join(said)})"

    def survives(self, peer: Peer) -> bool:
        """Does the run go on without this process?"""
        return False

    @property
    def name(self) -> str:
        """``async-ps`` for `AsyncPS`: the word of the command line."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", type(self).__name__).lower()


class ParameterServerStrategy(Strategy):
    """A strategy with a server: write `serve` (one task per worker on the server) and `work` (each worker)."""

    final = "server"
    locking: str = "server"

    @abstractmethod
    def serve(self, server: Server, worker: WorkerPort) -> None:
        """What the server does for one worker, until the run is over."""

    @abstractmethod
    def work(self, worker: Worker, server: ServerPort) -> None:
        """What a worker does, until the run is over."""

    def make_server(self, fabric: Fabric, job: Job) -> Server:
        """The server's state; a strategy that keeps more there returns a subclass."""
        return Server(fabric, job.task, num_updates=job.num_updates, locking=self.locking)

    def layout(self, num_workers: int) -> Layout:
        return Layout({"server": 1, "worker": num_workers}, [("server", "worker")])

    def gradients_per_update(self, num_workers: int) -> int:
        return 1

    def run(self, fabric: Fabric, job: Job) -> Outcome:
        return self._serve(fabric, job) if fabric.me.role == "server" else self._work(fabric, job)

    def _serve(self, fabric: Fabric, job: Job) -> Outcome:
        server = self.make_server(fabric, job)
        ports = [WorkerPort(server, link) for link in fabric.links("worker")]
        for task in [fabric.spawn(self._serve_one, server, port) for port in ports]:
            task.join()
        server.close()
        if not server.over:
            raise PeerLost("the last worker")
        return Outcome(server.flat.params, server.version)

    def _serve_one(self, server: Server, port: WorkerPort) -> None:
        try:
            self.serve(server, port)
        except PeerLost:
            goes_on = self.survives(port.link.peer) and server.ready  # without the chief's parameters nothing can
            if not (goes_on or server.over):
                raise

    def _work(self, fabric: Fabric, job: Job) -> Outcome:
        worker = worker_of(fabric, job)
        port = ServerPort(worker, fabric.link("server", 0))
        self.work(worker, port)
        port.link.send(Kind.STOP)
        return Outcome(None, 0, local_state(worker.model), worker.step)


def worker_of(fabric: Fabric, job: Job, **changes: Any) -> Worker:
    """This process's worker; number 0 is the chief, and in-graph the client is, not a replica."""
    usual = {"index": fabric.me.index, "num_workers": job.num_workers, "batch_size": job.task.batch_size}
    worker = Worker(fabric, job.task, **(usual | changes))
    asked: dict[str, Any] = {"every": job.evaluate_every, "log_dir": job.log_dir}
    if worker.is_chief and fabric.me.role != "replica" and any(asked.values()):
        worker.chief = fabric.chief = Chief(fabric, job.task, worker.model, **asked)
    return worker


def outcome_of(strategy: Strategy, fabric: Fabric, job: Job) -> Outcome:
    """What a process leaves: what the strategy says, and what the chief saw, if this was the chief's."""
    try:
        outcome = strategy.run(fabric, job)
        if (chief := fabric.chief) is not None:
            if outcome.params is not None:  # the final ones, where the chief holds them itself
                chief.look(Params(outcome.params, outcome.version))
            outcome.judged = chief.judged
        return outcome
    finally:
        if fabric.chief is not None:
            fabric.chief.close()


def model_of(task: Task, params: Tensor, local: dict[str, Tensor]) -> nn.Module:
    """A model of `task` with these parameters and buffers, on memory of its own."""
    model = task.build()
    flat = Flat(model)
    if flat.params.shape != params.shape:
        raise ValueError(f"these are parameters of another model: {len(params)} numbers, this task has {flat.size}")
    flat.params.copy_(params)
    model.load_state_dict(local, strict=False)
    return model
