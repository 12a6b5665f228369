"""Asynchronous parameter server: pull, compute, push; the server applies on arrival, and nobody waits.

Between-graph replication as in TensorFlow 1: every worker drives itself. The hard idea is what the server does
*not* do: it never broadcasts. A worker learns of the others' updates when it next asks.
"""

from dataclasses import dataclass
from typing import Literal

from distlab.fabric import Peer
from distlab.options import nearest
from distlab.roles.server import Server, ServerPort, WorkerPort
from distlab.roles.worker import Worker
from distlab.strategies.base import ParameterServerStrategy

LOCKING = ("none", "server")


@dataclass(frozen=True, kw_only=True, repr=False)
class AsyncPS(ParameterServerStrategy):
    """Each gradient is applied when it arrives, to whatever the parameters have become by then.

    Who applies: the server, one update per gradient. The version counts them.
    Assumes: that old gradients still help. N equal workers settle at staleness N - 1.
    If a worker dies: the others go on; its last gradient may be lost with it.
    If the chief dies: the same, once the first parameters are with the server.
    If the server dies: the run ends.

    Args:
        locking: "none" is hogwild (Niu et al. 2011): the server's threads apply at the same time, and single
            elements of an update can be lost to a race. "server" applies one gradient after the other: nothing
            is lost, and a pull sees whole updates only.
    """

    locking: Literal["none", "server"] = "none"

    def __post_init__(self) -> None:
        if self.locking not in LOCKING:
            raise ValueError(f"locking={self.locking!r}: {nearest(str(self.locking), LOCKING)}")

    def survives(self, peer: Peer) -> bool:
        return peer.role == "worker"

    def serve(self, server: Server, worker: WorkerPort) -> None:
        for gradient in worker.pushes():
            with server.guard():  # or the answer would queue behind the others' gradients
                server.apply(gradient)  # the server applies: here, and nowhere else
                worker.reply()

    def work(self, worker: Worker, server: ServerPort) -> None:
        params = server.pull()
        for batch in worker.batches():
            gradient = worker.gradient(params, batch)
            params = server.push(gradient)  # the answer is the next pull
