"""A misreading, to be measured: the *worker* applies the update and writes the parameters back.

It sounds harmless, and with one worker it is. With more, a worker that writes back overwrites whatever the
others wrote since it read: of P workers' updates about one in P survives. Put it beside `async_ps.py`.
"""

from dataclasses import dataclass

from distlab.fabric import Kind
from distlab.roles.server import Server, ServerPort, WorkerPort, gradient_from
from distlab.roles.updater import Gradient, Updater
from distlab.roles.worker import Worker
from distlab.strategies.base import ParameterServerStrategy


@dataclass(frozen=True, kw_only=True, repr=False)
class WorkerApplies(ParameterServerStrategy):
    """Pull, compute, apply locally, write back. The version counts the writes, not the updates that survive.

    Who applies: the worker, to its own copy; the server only stores.
    What is dropped: no gradient, but with P workers all but one in P updates are overwritten.
    Assumes: that nobody else wrote in between, which is false as soon as there are two workers. The optimizer's
        state stays with the worker; shipping it too would cost its size in bytes and lose it the same way.
    If a worker or the server dies: the run ends with an error that names it.
    """

    unsaved = "it is a misreading, to be measured and not to be continued"

    def serve(self, server: Server, worker: WorkerPort) -> None:
        for message in worker.messages(Kind.STORE):
            written = gradient_from(message, worker.index)
            with server.guard():  # the answer says which version the write became
                if server.over:
                    worker.refuse(written)
                else:
                    self.store(server, written)
                    worker.reply()

    def store(self, server: Server, written: Gradient) -> None:
        """Let the server's parameters be what the worker wrote, whatever they were."""
        start = server.fabric.now()
        version = server.store(written.values)
        server.fabric.record("store", start, server.fabric.now(), version=version, **written.facts)

    def work(self, worker: Worker, server: ServerPort) -> None:
        params = server.pull()
        updater = Updater(worker.fabric, worker.task, worker.flat)
        for batch in worker.batches():
            gradient = worker.gradient(params, batch)
            updater.version = gradient.read  # the learning-rate schedule counts versions
            done = updater.step(gradient)  # the worker applies: to a copy that may be old by now
            server.send(Kind.STORE, worker.flat.params, gradient)
            params = server.answer()
            if params.version > gradient.read:  # it was stored
                updater.record(done, params.version, gradient)
