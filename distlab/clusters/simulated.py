"""`SimulatedCluster`: any number of workers on a virtual clock, on one core.

The strategies are the ones that run on real processes, to the letter; gradients are real too. What is made up is
time: how long a gradient takes, how fast the network is, who is slow and who dies, all of it drawn from a seed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from distlab.clusters.base import Cluster, Sink
from distlab.clusters.scenario import Scenario, changes_of, check_scenario, sentence
from distlab.clusters.simulated_run import SimulatedRun
from distlab.fabric import Peer
from distlab.fabric.laws import Empirical, Gamma, Law, law
from distlab.fabric.network import Change, Network, Nic
from distlab.fabric.simulated import SimulatedFabric, World
from distlab.options import check_count, nearest
from distlab.strategies.base import Job, Layout, Strategy
from distlab.trace import Buffer, Recorder, Trace


class Measured(Protocol):
    """What a simulated cluster is made like: a run."""

    trace: Trace
    num_workers: int


GRADIENTS = ("real", "none")
COMPUTES = ("worker", "replica")


@dataclass(frozen=True, kw_only=True, repr=False)
class _Settings:
    """Everything about a simulated cluster but its number of workers."""

    compute: tuple[Law, ...]
    network: Network
    apply: Law | None
    dispatch: Law | None
    load: Law | None
    seed: int
    gradients: str
    changes: tuple[Change, ...] = ()


class SimulatedCluster(Scenario, Cluster):
    """`num_workers` workers on a virtual clock. The same seed gives the same run, bit for bit.

    Args:
        num_workers: at least 1.
        compute: how long a gradient takes: a law (see `distlab.laws`), a number of seconds, or one of these per
            worker.
        network: latency and bandwidth of every NIC.
        apply_time: how long one apply takes its server, client or worker; None: no time.
        dispatch_time: how long the in-graph client takes to hand one replica its part; None: no time.
        seed: of all times that are drawn. The task's own seed is another one.
        gradients: "real" computes them; "none" computes nothing, for pure timing: the parameters stay as they are.

    Scenarios read as sentences and make a new cluster each:

    >>> SimulatedCluster(8, compute=0.1).slow(worker=3, factor=5).kill(worker=0, at_s=12)
    SimulatedCluster(num_workers=8).slow(worker=3, factor=5).kill(worker=0, at_s=12)
    """

    def __init__(
        self,
        num_workers: int,
        *,
        compute: Law | float | Sequence[Law | float] = Gamma(mean_s=0.1, variation=0.1),  # noqa: B008
        network: Network = Network(),  # noqa: B008
        apply_time: Law | float | None = None,
        dispatch_time: Law | float | None = None,
        seed: int = 0,
        gradients: Literal["real", "none"] = "real",
    ) -> None:
        self.num_workers = check_count("num_workers", num_workers)
        if gradients not in GRADIENTS:
            raise ValueError(f"gradients={gradients!r}: {nearest(str(gradients), GRADIENTS)}")
        if not isinstance(network, Network):
            raise TypeError(f"network must be a Network, got {network!r}")
        self._settings = _Settings(
            compute=_laws(compute, num_workers),
            network=network,
            apply=None if apply_time is None else law(apply_time),
            dispatch=None if dispatch_time is None else law(dispatch_time),
            load=None,
            seed=check_count("seed", seed, least=0),
            gradients=gradients,
        )

    def __repr__(self) -> str:
        return f"SimulatedCluster(num_workers={self.num_workers})" + "".join(map(sentence, self._settings.changes))

    @classmethod
    def like(cls, run: Measured, *, seed: int = 0, gradients: Literal["real", "none"] = "real") -> "SimulatedCluster":
        """A cluster with the compute times, the apply and load times and the message time of a real run.

        Every worker draws from its own measured times. The message time holds all that a message of this run's size
        costs (threads, system calls, copies): the part that keeps its sender busy as bandwidth, the rest as latency.

        Raises:
            ValueError: the run is too short to read its times from.
        """
        from distlab.reports import timing

        if not isinstance(getattr(run, "trace", None), Trace):
            raise TypeError(f"like takes a run, got {run!r}")
        times = timing(run.trace, run.num_workers)
        sizes = run.trace.rows["bytes"][run.trace.rows["bytes"] > 0]
        rate = float(sizes.mean()) / times.busy_s if times.busy_s else math.inf
        other = cls(
            run.num_workers,
            compute=[Empirical(worker) for worker in times.compute_s],
            network=Network(latency_s=times.message_s - times.busy_s, bandwidth_bytes_per_s=rate),
            apply_time=Empirical(times.apply_s),
            dispatch_time=Empirical([times.dispatch_s]),
            seed=seed,
            gradients=gradients,
        )
        other._settings = replace(other._settings, load=Empirical(times.load_s))
        return other

    @property
    def changes(self) -> tuple[Change, ...]:  # type: ignore[override]
        return self._settings.changes

    def _with(self, changes: tuple[Change, ...]) -> "SimulatedCluster":
        other = SimulatedCluster(self.num_workers)
        other._settings = replace(self._settings, changes=changes)
        return other

    def launch(self, strategy: Strategy, job: Job, sink: Sink, *, paused: bool = False) -> "SimulatedRun":
        self.check_open()
        if strategy.real_only:
            raise ValueError(f"on a simulated cluster this cannot be had: {strategy.real_only}")
        check_scenario(self.changes, strategy, self.num_workers)
        return SimulatedRun(self, strategy, job, sink, paused)

    def laws(self, me: Peer) -> dict[str, Law]:
        """How long each kind of work takes on a process."""
        laws = {kind: getattr(self._settings, kind) for kind in ("apply", "dispatch", "load")}
        if me.role in COMPUTES:
            laws["compute"] = self._settings.compute[me.index % self.num_workers]  # who joins is like one of the others
        return {kind: law for kind, law in laws.items() if law is not None}

    def build(self, strategy: Strategy, job: Job, sink: Sink, began_s: float = 0.0) -> World:
        """The world of one run, with every process at its first line."""
        world = World(Buffer(sink.events), hollow=self._settings.gradients == "none", began_s=began_s)
        layout = strategy.layout(self.num_workers)
        peers = [Peer(role, i) for role, count in layout.counts.items() for i in range(count)]
        for number, me in enumerate(peers):
            changes = changes_of(me, self.changes, layout)
            world.nodes[me] = self.node(world, me, layout, changes, seed=[self._settings.seed, number])
        for a, b in layout.links:
            ends = [(p, q) for p in peers if p.role == a for q in peers if q.role == b]
            for p, q in ends:
                if a != b or p.index < q.index:
                    world.nodes[p].connect(q)
        return world

    def node(
        self, world: World, me: Peer, layout: Layout, changes: list[Change], seed: list[int]
    ) -> SimulatedFabric:  # fmt: skip
        """One process of a world."""
        world.nics.setdefault(me, Nic(self._settings.network, changes)).changes = changes
        record, laws = Recorder(*me, world.events), self.laws(me)
        return SimulatedFabric(world, me, layout.counts, record, laws=laws, changes=changes, seed=seed)


def _laws(compute: Any, num_workers: int) -> tuple[Law, ...]:
    if isinstance(compute, (str, Law)) or not hasattr(compute, "__len__"):
        return (law(compute),) * num_workers
    compute = list(compute)
    if len(compute) != num_workers:
        raise ValueError(f"compute has {len(compute)} laws for {num_workers} workers")
    return tuple(law(one) for one in compute)
