"""A misreading, to be measured: the server sends the workers *gradients*, and each worker applies them all.

The server is then a post office. It works, in that every replica applies the same updates in the same order;
but every gradient goes to every worker, so the bytes down grow with the square of the workers, and each of
them keeps an optimizer and does all the applying. Put it beside `async_ps.py`.
"""

from dataclasses import dataclass, replace

import torch

from distlab.fabric import Kind
from distlab.roles.server import Server, ServerPort, WorkerPort, gradient_from
from distlab.roles.updater import Gradient, Params, Updater
from distlab.roles.worker import Worker
from distlab.strategies.base import ParameterServerStrategy


@dataclass(frozen=True, kw_only=True, repr=False)
class BroadcastGradients(ParameterServerStrategy):
    """A push is answered with every gradient since the worker's version, its own included, in one order.

    Who applies: every worker, all gradients; the server too, so that somebody has the last one.
    What is dropped: nothing.
    Assumes: that the workers can afford P times the bytes and P optimizers. One worker is plain training.
    If a worker or the server dies: the run ends with an error that names it.
    """

    fixed = "who comes later would not have the others' optimizer state"
    unsaved = "it is a misreading, to be measured and not to be continued"

    def serve(self, server: Server, worker: WorkerPort) -> None:
        log: list[tuple[Gradient, float]] = server.memory.setdefault("log", [])  # in the order of the versions
        for gradient in worker.pushes():
            with server.guard():
                server.apply(gradient)
                log.append((replace(gradient, values=gradient.values.clone()), server.updater.rate.used))
                news = log[gradient.read : server.version]
            for old, rate in news:
                facts = torch.tensor([old.worker, rate], dtype=torch.float64)
                worker.link.send(Kind.GRADIENT, [old.values, facts], **old.header)
            worker.reply(params=False)

    def work(self, worker: Worker, server: ServerPort) -> None:
        server.pull()  # the server is ready; but a late worker has to catch up from version 0, or its optimizer's
        updater = Updater(worker.fabric, worker.task, worker.flat)  # state would not be that of the others
        for batch in worker.batches():
            gradient = worker.gradient(Params(worker.flat.params, updater.version), batch)
            server.send(Kind.PUSH, gradient.values, gradient)
            while (message := server.receive()).kind is Kind.GRADIENT:
                values, facts = message.tensors
                author, updater.rate.agreed = facts.tolist()
                updater.apply(gradient_from(message._replace(tensors=[values]), int(author)))
