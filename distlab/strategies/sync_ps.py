"""Synchronous parameter server: it collects one gradient from each worker, applies their mean, then answers all.

Put it beside `async_ps.py`: the worker's side is the same; the server's side waits.
"""

from dataclasses import dataclass

from distlab.roles.server import Server, ServerPort, WorkerPort
from distlab.roles.worker import Worker
from distlab.strategies.base import ParameterServerStrategy


@dataclass(frozen=True, kw_only=True, repr=False)
class SyncPS(ParameterServerStrategy):
    """Version v + 1 is the mean of N gradients, all read at v, one from each worker.

    Who applies: the server, in the task of the worker that came last, in the order of the workers' numbers.
    Assumes: mean loss, equal batches, no dropout or BatchNorm, for the update to equal the one of a batch N
        times as large. Otherwise it is the mean of N different gradients all the same.
    If a worker dies: the run ends with an error that names it.
    If the server dies: the run ends.
    """

    promises = ("fresh", "one from each")

    def gradients_per_update(self, num_workers: int) -> int:
        return num_workers

    def serve(self, server: Server, worker: WorkerPort) -> None:
        for gradient in worker.pushes():
            with server.fabric.lock():
                server.waiting[gradient.worker] = gradient
                if len(server.waiting) == server.fabric.counts["worker"]:
                    server.apply(*(server.waiting.pop(w) for w in sorted(server.waiting)))
            server.wait_for(gradient.read + 1)
            worker.reply()

    def work(self, worker: Worker, server: ServerPort) -> None:
        params = server.pull()
        for batch in worker.batches():
            gradient = worker.gradient(params, batch)
            params = server.push(gradient)
