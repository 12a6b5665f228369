"""Synchronous parameter server: it collects gradients of one version, applies their mean, then answers all.

Put it beside `async_ps.py`: the worker's side is the same; the server's side waits. The hard idea is the spare worker:
whoever waits for the first N of N + b gradients never waits for the b slowest, whoever they are this time.
"""

from dataclasses import dataclass
from typing import Literal

from distlab.fabric import Fabric, Peer
from distlab.options import check_count, check_word
from distlab.roles.server import Server, ServerPort, WorkerPort
from distlab.roles.tokens import Tokens
from distlab.roles.worker import Worker
from distlab.shards import PLACEMENTS
from distlab.strategies.base import Job, ParameterServerStrategy


@dataclass(frozen=True, kw_only=True, repr=False)
class SyncPS(ParameterServerStrategy):
    """Version v + 1 is the mean of the first N gradients that were read at v, by N distinct workers.

    Who applies: the server, in the task of the worker that came last, in the order of the workers' numbers.
    What is dropped: with b spare workers, on arrival, what was read at an older version; its worker is told.
    Assumes: mean loss, equal batches, no dropout or BatchNorm, for the update to equal the one of a batch N
        times as large. Otherwise it is the mean of N different gradients all the same.
    If a worker dies: with a spare left, the others go on; else `on_too_few` says what happens.
    If the chief dies: the same, once the first parameters are with the server.
    If a server dies: the run goes back to the last checkpoint; where there is none, it ends, naming the server.

    Args:
        num_backup_workers: b: the server waits for `num_workers` - b of them (Chen et al. 2016).
        late: "drop" late gradients on arrival, or "cancel" their computation the moment that it is in vain, as
            the closed forms of the papers assume (simulated clusters only).
        requeue: compute a dropped batch again, so that every sample is used.
        distinct: False lets a worker that waits compute another batch of the same version (K-batch-sync).
        semantics: "tf1" is TensorFlow 1's SyncReplicasOptimizer: accumulators that accept by a label, and a queue of
            tokens that any worker may draw. A slow or dead spare leaves old tokens in it, and whoever draws one
            computes in vain.
        on_too_few: what to do when fewer than N workers are left: "stop" with an error that names who died, "shrink" N
            to those that are left, or "wait" until one comes back.
        num_servers: cut the parameters into so many shards; with spares each chooses its own N.
        placement: "ranges" of equal length, whole tensors "round-robin", or "greedy".
    """

    num_backup_workers: int = 0
    late: Literal["drop", "cancel"] = "drop"
    requeue: bool = False
    distinct: bool = True
    semantics: Literal["exact", "tf1"] = "exact"
    on_too_few: Literal["stop", "shrink", "wait"] = "stop"
    num_servers: int = 1
    placement: Literal["ranges", "round-robin", "greedy"] = "ranges"

    def __post_init__(self) -> None:
        check_count("num_backup_workers", self.num_backup_workers, least=0)
        check_count("num_servers", self.num_servers)
        check_word("late", self.late, ("drop", "cancel"))
        check_word("semantics", self.semantics, ("exact", "tf1"))
        check_word("placement", self.placement, PLACEMENTS)
        check_word("on_too_few", self.on_too_few, ("stop", "shrink", "wait"))
        own = self.late == "drop" and not self.requeue and self.distinct and self.num_servers == 1
        own = own and self.on_too_few == "stop"
        if self.semantics == "tf1" and not own:
            raise ValueError(
                'semantics="tf1" has one server, drops what is late and tells nobody: no late=, requeue=, ...'
            )
        if self.late == "cancel" and self.num_servers > 1:
            raise ValueError('late="cancel" needs one server, which alone knows what is in vain')

    @property
    def simulated_only(self) -> str:  # type: ignore[override]
        return 'late="cancel": a gradient that is being computed cannot be called off' if self.late == "cancel" else ""

    @property
    def fixed(self) -> str:  # type: ignore[override]
        return 'semantics="tf1" counts its replicas once' if self.semantics == "tf1" else ""

    @property
    def promises(self) -> tuple[str, ...]:  # type: ignore[override]
        if self.semantics == "tf1":
            return ()
        return ("fresh", "enough", "distinct") if self.distinct else ("fresh", "enough")

    @property
    def shrinks(self) -> bool:  # type: ignore[override]
        return self.on_too_few == "shrink"

    def check(self, num_workers: int) -> None:
        if self.num_backup_workers >= num_workers:
            spares = self.num_backup_workers
            raise ValueError(f"num_backup_workers={spares}: of {num_workers} workers nobody would be left to wait for")

    def gradients_per_update(self, num_workers: int) -> int:
        return num_workers - self.num_backup_workers

    def needed(self, server: Server) -> int:
        wanted = self.gradients_per_update(server.num_workers) - len(server.left)
        return max(1, min(wanted, len(server.live)) if self.on_too_few == "shrink" else wanted)

    def survives(self, peer: Peer) -> bool:
        return peer.role == "worker" and (self.num_backup_workers > 0 or self.on_too_few != "stop")

    def goes_on(self, server: Server) -> bool:
        return len(server.dead) <= self.num_backup_workers or self.on_too_few != "stop"

    def make_server(self, fabric: Fabric, job: Job) -> Server:
        server = super().make_server(fabric, job)
        server.distinct = self.distinct and self.semantics == "exact"
        server.broadcasts = self.late == "cancel"
        server.memory["tokens"] = Tokens(server, self.gradients_per_update(server.num_workers))
        return server

    def serve(self, server: Server, worker: WorkerPort) -> None:
        if self.semantics == "tf1":
            return server.memory["tokens"].serve(worker)
        for gradient in worker.pushes():
            made = server.collect(gradient, fresh=True, keep=not self.distinct)
            if made is not None and self.distinct:
                server.wait_for(made)
            if not server.broadcasts or server.version == gradient.read:
                worker.reply(dropped=made is None)

    def work(self, worker: Worker, server: ServerPort) -> None:
        params, news = server.pull(), server.link if self.late == "cancel" else None
        for batch in worker.batches():
            gradient = worker.gradient_unless(news, params, batch)
            params = server.push(gradient) if gradient is not None else server.answer()
            if self.requeue and (gradient is None or params.dropped):
                worker.redo(1)
