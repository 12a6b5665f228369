"""What a strategy is: which processes there are, who talks to whom, and what each of them does.

To write one, subclass `Strategy` (or `ParameterServerStrategy`) and write plain blocking code. It runs in one
process per role and number; the same lines run on real processes and on a virtual clock.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from distlab.checkpoint import Checkpoint
from distlab.errors import PeerLost, TooLate
from distlab.fabric import Fabric, Kind, Peer
from distlab.fabric.saver import Saver
from distlab.flat import Flat, Vector, local_state, padded
from distlab.options import Options, warn
from distlab.roles.chief import Chief
from distlab.roles.server import Server, ServerPort, WorkerPort
from distlab.roles.updater import Params, treats_elements_alike
from distlab.roles.worker import Worker
from distlab.rules import MEAN, Rule
from distlab.shards import Shard, cut
from distlab.task import Task

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Layout:
    """The processes of a run (role -> how many) and which roles are linked, each process with each."""

    counts: dict[str, int]
    links: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Job:
    """What a process is told: the task, how many workers compute gradients, and how long.

    Attributes:
        num_updates: the version at which the run is over, if the workers' data lasts so long.
        num_batches: how many batches each worker has.
        evaluate_every, log_dir: what the chief looks at, and where it writes.
        checkpoint_dir, checkpoint_every: where checkpoints are written, and at which multiples of a version (None: at
            the end only).
        begin: the checkpoint that the run goes on from.
    """

    task: Task
    num_updates: int
    num_workers: int
    num_batches: tuple[int, ...] | None = None
    evaluate_every: int | None = None
    log_dir: str | None = None
    checkpoint_dir: str | None = None
    checkpoint_every: int | None = None
    begin: Checkpoint | None = None

    def batches_of(self, worker: int) -> int | None:
        """How many batches this worker has; None: as many as it takes."""
        return None if self.num_batches is None or worker >= len(self.num_batches) else self.num_batches[worker]


@dataclass
class Outcome:
    """What a process leaves behind.

    Attributes:
        params: (size,) its parameters at the end, or None if it has none.
        version: how many updates are in them.
        local: buffers and frozen parameters, by name.
        steps: batches finished.
        ranges: where `params` belong in the whole vector, (start, stop) each; empty: they are all of it.
        judged: the chief's evaluations: version, loss and each metric by name.
        parted: did it leave before the end, as it was asked to?
    """

    params: Tensor | None = None
    version: int = 0
    local: dict[str, Tensor] | None = None
    steps: int = 0
    ranges: tuple[tuple[int, int], ...] = ()
    judged: list[dict[str, float]] = field(default_factory=list)
    parted: bool = False


class Strategy(Options, ABC):
    """How N workers train one model.

    Attributes:
        final: the role that holds the model at the end; of several such processes, the one with the most updates.
        promises: what `check_strategy` may hold it to, beyond what is true of all: "fresh" (version v holds only
            gradients read at v - 1), "distinct" (of no worker two), "enough" (as many as `gradients_per_update` says),
            "identical replicas".
        shrinks: does an update hold fewer gradients once workers have died?
        simulated_only, real_only: why it cannot run on real processes, or on a virtual clock, if it cannot.
        unsaved: why there are no checkpoints of it, if there are none.
        one_host: why it cannot run on several hosts, if it cannot.
        fixed: why no worker can join or leave a run, if none can.
    """

    final: ClassVar[str] = "worker"
    promises: tuple[str, ...] = ("distinct",)
    shrinks: bool = False
    simulated_only: str = ""
    real_only: str = ""
    unsaved: ClassVar[str] = ""
    one_host: ClassVar[str] = ""
    fixed: str = "its workers are those that it began with"

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

    def check_task(self, task: Task) -> None:
        """Raise ValueError if this strategy cannot train this task; warn if it does so in another way."""

    def num_updates(self, task: Task, num_workers: int, num_samples: int) -> int:
        """How many updates it takes to use at least `num_samples` samples."""
        return -(-num_samples // (task.batch_size * self.gradients_per_update(num_workers)))

    def optimizer(self, task: Task) -> Callable[..., Any] | None:
        """The factory of the optimizer that makes the versions, if there is one."""
        return task.optimizer

    def most_updates(self, num_batches: Sequence[int]) -> int:
        """How many updates the workers' batches allow, at most: here, each of them on its own."""
        return sum(num_batches)

    def __repr__(self) -> str:
        options: tuple[Field[Any], ...] = fields(self) if is_dataclass(self) else ()
        values = [(f.name, getattr(self, f.name)) for f in options if getattr(self, f.name) != f.default]
        said = [f"{name}={getattr(value, '__name__', None) or repr(value)}" for name, value in values]
        return f"{type(self).__name__}({', '.join(said)})"

    def survives(self, peer: Peer) -> bool:
        """Does the run go on without this process?"""
        return self.shrinks

    def comes_back(self, peer: Peer) -> bool:
        """If this process is lost, and there is a checkpoint, does the run go back to that?"""
        return peer.role in ("server", "client") and not self.unsaved

    @property
    def name(self) -> str:
        """``async-ps`` for `AsyncPS`: the word of the command line."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", type(self).__name__).lower()


class ParameterServerStrategy(Strategy):
    """A strategy with servers: write `serve` (one task per worker on each server) and `work` (each worker)."""

    final = "server"
    locking: str = "server"
    num_servers: int = 1
    placement: str = "ranges"
    rule: Rule = MEAN
    fixed: str = ""

    @abstractmethod
    def serve(self, server: Server, worker: WorkerPort) -> None:
        """What a server does for one worker, until the run is over."""

    @abstractmethod
    def work(self, worker: Worker, server: ServerPort) -> None:
        """What a worker does, until the run is over."""

    def needed(self, server: Server) -> int:
        """How many gradients make an update, for `Server.collect`."""
        return 1

    def goes_on(self, server: Server) -> bool:
        """Can the run go on without `server.dead`?"""
        return True

    def make_server(self, fabric: Fabric, job: Job) -> Server:
        """A server's state; a strategy that keeps more there changes it."""
        shard, said = self.cut(job.task, Flat(job.task.build()))[fabric.me.index], {"locking": self.locking}
        return Server(fabric, job.task, shard, num_updates=job.num_updates, rule=self.rule, needed=self.needed, **said)

    def cut(self, task: Task, flat: Vector) -> list[Shard]:
        """Each server's part of the parameters in `flat`. Only an optimizer that treats elements alike can work on
        half a tensor; for others whole tensors are placed."""
        whole = self.num_servers > 1 and not treats_elements_alike(task, flat)
        return cut(flat, self.num_servers, self.placement, whole=whole)

    def shards(self, task: Task) -> "pd.DataFrame":
        """Who holds what: a row per server and tensor, with the elements (from, to) and their bytes."""
        import pandas as pd

        flat = Flat(task.build())
        return pd.DataFrame(held(flat, self.cut(task, flat)))

    def check_task(self, task: Task) -> None:
        flat = Flat(task.build())
        self.cut(task, flat)
        if self.num_servers > 1 and self.placement == "ranges" and not treats_elements_alike(task, flat):
            told = "this optimizer may need whole tensors, so the servers get these and not equal ranges"
            warn(f"{told}: see {type(self).__name__}.shards(task)")

    def layout(self, num_workers: int) -> Layout:
        return Layout({"server": self.num_servers, "worker": num_workers}, [("server", "worker")])

    def gradients_per_update(self, num_workers: int) -> int:
        return 1

    def run(self, fabric: Fabric, job: Job) -> Outcome:
        return self._serve(fabric, job) if fabric.me.role == "server" else self._work(fabric, job)

    def _serve(self, fabric: Fabric, job: Job) -> Outcome:
        server = self.make_server(fabric, job)
        server.ports = [WorkerPort(server, link) for link in fabric.links("worker")]
        for port in server.ports:
            fabric.spawn(self._serve_one, server, port)
        arrivals = fabric.members.arrivals
        while not self._is_done(server):
            fabric.until(lambda: bool(arrivals or server.unnoticed) or self._is_done(server), "its workers")
            for worker in server.unnoticed:  # a link over gloo may never say that its peer died while it was made
                self._lose(server, worker)
            if arrivals:
                self._greet(server, *arrivals.popleft())
        server.close()
        parted = {peer.index for peer in fabric.members.parted}
        if not server.over and not server.left - parted:
            raise PeerLost("the last worker")
        ranges = server.shard.ranges if self.num_servers > 1 else ()
        return Outcome(server.flat.params, server.version, ranges=ranges)

    def _is_done(self, server: Server) -> bool:
        return server.deserted and not server.fabric.members.arrivals

    def _greet(self, server: Server, peer: Peer, era: int) -> None:
        """A worker has come back."""
        fabric = server.fabric
        with suppress(PeerLost):  # and is gone again
            fabric.relink([peer], tag=era, unless=lambda: peer in fabric.members.lost)
            server.welcome(peer.index)
            port = WorkerPort(server, fabric.link(*peer))
            server.ports = [other for other in server.ports if other.index != peer.index] + [port]
            fabric.spawn(self._serve_one, server, port)

    def _serve_one(self, server: Server, port: WorkerPort) -> None:
        try:
            self.serve(server, port)
            if port in server.ports:  # and not one whose place another has taken
                server.leave(port.index)
        except PeerLost:
            if port in server.ports:
                self._lose(server, port.index)

    def _lose(self, server: Server, worker: int) -> None:
        """A worker has died; PeerLost if the run cannot go on without it."""
        server.leave(worker, died=True)
        begun = server.ready or worker > 0  # without the chief's first parameters nothing can go on
        goes_on = self.survives(Peer("worker", worker)) and begun and self.goes_on(server)
        if not (goes_on or server.over):
            raise PeerLost(f"worker {worker}")

    def _work(self, fabric: Fabric, job: Job) -> Outcome:
        worker = worker_of(fabric, job)
        port = ServerPort(worker, fabric.links("server"), self.cut(job.task, worker.flat))
        if len(port.links) == self.num_servers:  # else this worker has come back when all was over
            self.work(worker, port)
        for link in port.links:
            link.send(Kind.STOP)
        return Outcome(None, 0, local_state(worker.model), worker.step)


def held(flat: Flat, shards: Sequence[Shard]) -> list[dict[str, Any]]:
    """The rows of `ParameterServerStrategy.shards`."""
    rows, start = [], 0
    for name, shape in zip(flat.names, flat.shapes, strict=True):
        for server, (a, b) in [(i, r) for i, shard in enumerate(shards) for r in shard.ranges]:
            low, high = max(a - start, 0), min(b - start, shape.numel())
            if low < high:
                size = (high - low) * flat.dtype.itemsize
                rows.append({"server": server, "tensor": name, "from": low, "to": high, "bytes": size})
        start += padded(shape.numel())
    return sorted(rows, key=lambda row: row["server"])


def worker_of(fabric: Fabric, job: Job, **changes: Any) -> Worker:
    """This process's worker; number 0 is the chief, and in-graph the client is, not a replica."""
    index = fabric.me.index
    dealt_to = max(job.num_workers, index + 1)  # one that joins beside all others takes its part of a deal to one more
    usual = {"index": index, "num_workers": dealt_to, "batch_size": job.task.batch_size}
    worker = Worker(fabric, job.task, **({"num_batches": job.batches_of(index)} | usual | changes))
    asked: dict[str, Any] = {"every": job.evaluate_every, "log_dir": job.log_dir}
    if fabric.me.role != "replica":
        worker.make_chief = lambda: Chief(fabric, job.task, worker.model, **asked) if any(asked.values()) else None
        if index == 0 and not fabric.members.era:
            worker.become_chief()
    return worker


def outcome_of(strategy: Strategy, fabric: Fabric, job: Job, hand_over: Callable[[Tensor], None]) -> Outcome:
    """What a process leaves: what the strategy says, and what the chief saw, if this was the chief's.

    Args:
        hand_over: called with this process's part of each checkpoint.
    """
    begin = None if fabric.members.era else job.begin  # who comes later is told by others how things are
    asked = hand_over if job.checkpoint_dir is not None else None
    fabric.saver = Saver(str(fabric.me), job.checkpoint_every, begin, asked, fabric.members.era)
    try:
        outcome = strategy.run(fabric, job)
        fabric.saver.finish()
        if fabric.parted:
            outcome = Outcome(steps=outcome.steps, parted=True)
        if (chief := fabric.chief) is not None:
            if outcome.params is not None:  # the final ones, where the chief holds them itself
                chief.look(Params(outcome.params, outcome.version))
            outcome.judged = chief.judged
        return outcome
    except TooLate:
        return Outcome(steps=max(fabric.step, 0))
    finally:
        if fabric.chief is not None:
            fabric.chief.close()
