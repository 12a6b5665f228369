"""Asynchronous parameter server: pull, compute, push; the server applies on arrival, and nobody waits.

Between-graph replication as in TensorFlow 1: every worker drives itself. The hard idea is what the server does
*not* do: it never broadcasts. A worker learns of the others' updates when it next asks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from distlab.fabric import Fabric, Peer
from distlab.options import check_count, check_word
from distlab.roles.server import Server, ServerPort, WorkerPort
from distlab.roles.updater import Gradient
from distlab.roles.worker import Worker
from distlab.rules import Rule, by_staleness
from distlab.shards import PLACEMENTS
from distlab.strategies.base import Job, ParameterServerStrategy


@dataclass(frozen=True, kw_only=True, repr=False)
class AsyncPS(ParameterServerStrategy):
    """Each gradient is applied when it arrives, to whatever the parameters have become by then.

    Who applies: the server, one update per gradient (or per `apply_every` of them). The version counts them.
    What is dropped: nothing; what arrives after the last update is unused.
    Assumes: that old gradients still help. N equal workers settle at staleness N - 1.
    If a worker dies: the others go on; its last gradient may be lost with it.
    If the chief dies: the same, once the first parameters are with the server.
    If a server dies: the run goes back to the last checkpoint; where there is none, it ends, naming the server.

    Args:
        locking: "none" is hogwild (Niu et al. 2011): the server's threads apply at the same time, and single
            elements of an update can be lost to a race. "tensor" lets one of them at a time update a tensor: no
            update is lost, but a pull can see some tensors before it and others after. "server" applies one gradient
            after the other: nothing is lost, and a pull sees whole updates only.
        max_clock_gap: no worker starts a step more than so many ahead of the slowest live one (SSP, Ho et al. 2013).
            It bounds clocks, not staleness, and hides passing stragglers, never a lasting one.
        apply_every: apply the mean of so many gradients; nobody waits for it (K-batch-async, Dutta et al. 2018).
        distinct: they must come from distinct workers, each of which waits for the update it is part of (K-async).
        lr_by_staleness: the learning rate's factor for a gradient of staleness s: "1/s" (Zhang et al. 2016),
            "1/(1+s)" or a function.
        compensation: correct old gradients: `DelayCompensation`, or a function (gradient, moved) -> gradient.
        num_servers: cut the parameters into so many shards. A pull can then mix versions.
        placement: "ranges" of equal length, whole tensors "round-robin", or "greedy".
    """

    locking: Literal["none", "tensor", "server"] = "none"
    max_clock_gap: int | None = None
    apply_every: int = 1
    distinct: bool = False
    lr_by_staleness: str | Callable[[int], float] | None = None
    compensation: Callable[[Tensor, Tensor], Tensor] | None = None
    num_servers: int = 1
    placement: Literal["ranges", "round-robin", "greedy"] = "ranges"

    def __post_init__(self) -> None:
        check_word("locking", self.locking, ("none", "tensor", "server"))
        check_word("placement", self.placement, PLACEMENTS)
        check_count("apply_every", self.apply_every)
        check_count("num_servers", self.num_servers)
        if self.max_clock_gap is not None:
            check_count("max_clock_gap", self.max_clock_gap, least=0)
        if self.lr_by_staleness is not None:
            by_staleness(self.lr_by_staleness)
        if self.compensation is not None and not callable(self.compensation):
            raise TypeError(f"compensation must be a function (gradient, moved) -> gradient, got {self.compensation!r}")

    @property
    def rule(self) -> Rule:  # type: ignore[override]
        factor = None if self.lr_by_staleness is None else by_staleness(self.lr_by_staleness)
        return Rule(factor, self.compensation)

    @property
    def promises(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("distinct",) if self.distinct or self.apply_every == 1 else ()

    def check(self, num_workers: int) -> None:
        if self.distinct and self.max_clock_gap is not None:
            raise ValueError("distinct=True and max_clock_gap= would wait for each other: take one of them")
        if self.distinct and self.apply_every > num_workers:
            raise ValueError(f"{num_workers} workers cannot give {self.apply_every} gradients of distinct workers")

    def gradients_per_update(self, num_workers: int) -> int:
        return self.apply_every

    def make_server(self, fabric: Fabric, job: Job) -> Server:
        server = super().make_server(fabric, job)
        server.distinct = self.distinct
        return server

    def needed(self, server: Server) -> int:
        return min(self.apply_every, len(server.live)) if self.distinct else self.apply_every

    def survives(self, peer: Peer) -> bool:
        return peer.role == "worker"

    def serve(self, server: Server, worker: WorkerPort) -> None:
        waits = self.distinct or self.max_clock_gap is not None
        for gradient in worker.pushes():
            with server.guard():  # or the answer would queue behind the others' gradients
                made = self.take(server, gradient)
                if not waits:
                    worker.reply()
            if self.distinct:
                server.wait_for(made)
            if self.max_clock_gap is not None:
                server.keep_pace(worker.index, self.max_clock_gap)
            if waits:
                worker.reply()

    def take(self, server: Server, gradient: Gradient) -> int:
        """Apply `gradient`, alone or with those that it completes; returns the version that it is part of."""
        if self.apply_every > 1:
            return server.collect(gradient, keep=True) or 0
        server.apply(gradient)  # the server applies: here, and nowhere else
        return server.version

    def work(self, worker: Worker, server: ServerPort) -> None:
        params = server.pull()
        for batch in worker.batches():
            gradient = worker.gradient(params, batch)
            params = server.push(gradient)  # the answer is the next pull
