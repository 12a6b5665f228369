"""The parameter server: it holds the parameters and the optimizer, and it is *the server* that applies.

`Server` is one process; `WorkerPort` is how it sees one worker, `ServerPort` how a worker sees it.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from distlab.errors import BadMessage
from distlab.fabric import Fabric, Kind, Link, Message
from distlab.flat import Flat
from distlab.roles.updater import Gradient, Params, Updater
from distlab.roles.worker import Worker
from distlab.task import Task


class Server:
    """Parameters, optimizer state and version of one run.

    Args:
        num_updates: the version at which the run is over; never one more is applied.
        locking: "none" lets the tasks of several workers apply and read at the same time; "server" makes every
            apply and every read whole.
    """

    def __init__(self, fabric: Fabric, task: Task, *, num_updates: int, locking: str = "server") -> None:
        self.fabric, self.task, self.num_updates, self.locking = fabric, task, num_updates, locking
        self.flat = fabric.flat = Flat(task.build())
        self.updater = Updater(fabric, task, self.flat)
        self.waiting: dict[int, Gradient] = {}
        self.ready = False
        self._begun = 0

    @property
    def version(self) -> int:
        """Updates applied."""
        return self.updater.version

    @property
    def over(self) -> bool:
        """No further update will be applied."""
        return self.version >= self.num_updates or self.fabric.stopping

    def wait_for(self, version: int) -> None:
        """Wait until that version is there, or no further one will be."""
        self.fabric.until(lambda: self.version >= version or self.over, f"version {version}")

    def guard(self) -> AbstractContextManager[Any]:
        """What has to be held while the parameters are read or written."""
        return self.fabric.lock("server") if self.locking == "server" else nullcontext()

    def apply(self, *gradients: Gradient) -> None:
        """Apply the mean of `gradients` as one update, or record them as unused if the last one has begun."""
        with self.fabric.lock("version"):
            begins = self._begun < self.num_updates
            self._begun += begins
        if not begins:
            self.record("unused", *gradients)
            return
        with self.guard():
            self.updater.apply(*gradients, lane=gradients[-1].worker)

    def store(self, values: Tensor) -> int:
        """Replace the parameters by what a worker wrote back; returns the new version."""
        with self.guard(), self.fabric.lock("version"):
            self.flat.params.copy_(values)
            self.updater.version += 1
            return self.version

    def initialise(self, values: Tensor) -> None:
        """Take the chief's first parameters."""
        with self.fabric.lock():
            self.flat.params.copy_(values)
            self.ready = True

    def record(self, outcome: str, *gradients: Gradient) -> None:
        """Say in the trace what became of gradients that were not applied: "drop" or "unused"."""
        now = self.fabric.now()
        for g in gradients:
            self.fabric.record(outcome, now, now, version=self.version, **g.facts)

    def close(self) -> None:
        """Account for the gradients that still wait for others."""
        self.record("unused", *self.waiting.values())


class WorkerPort:
    """One worker, seen from the server: its pushes in, parameters out."""

    def __init__(self, server: Server, link: Link) -> None:
        self.server, self.link, self.index = server, link, link.peer.index

    def pushes(self) -> Iterator[Gradient]:
        """The worker's gradients as they arrive, until the run is over.

        A gradient that arrives after the last update is recorded as unused, and its worker is told to stop.
        """
        for message in self.messages(Kind.PUSH):
            gradient = gradient_from(message, self.index)
            if self.server.over:
                self.refuse(gradient)
            else:
                yield gradient

    def messages(self, kind: Kind) -> Iterator[Message]:
        """What arrives of `kind`; the first parameters and pulls are answered here."""
        while True:
            message = self.link.recv()
            if message.kind is Kind.STOP:
                return
            if message.kind is Kind.INIT:
                self.server.initialise(self._checked(message))
            elif message.kind is Kind.PULL:
                self.server.fabric.until(lambda: self.server.ready, "the chief's first parameters")
                self.reply()
            elif message.kind is kind:
                self._checked(message)
                yield message
            else:
                raise BadMessage(f"{self.link.peer} sent {message.kind.name} where {kind.name} was expected")

    def reply(self, *, params: bool = True, version: int | None = None) -> None:
        """Answer a pull or a push: with the parameters as they are now, and with the word if the run is over."""
        server = self.server
        with server.guard():
            kind = Kind.STOP if server.over else Kind.PARAMS
            said = server.version if version is None else version
            self.link.post(kind, [server.flat.params] if params else [], version=said)

    def refuse(self, gradient: Gradient) -> None:
        """Account for a gradient that came after the last update, and answer with the version it was read at."""
        self.server.record("unused", gradient)
        self.reply(version=gradient.read)

    def _checked(self, message: Message) -> Tensor:
        want, values = self.server.flat.params, message.values
        if values.shape != want.shape or values.dtype != want.dtype:
            raise BadMessage(
                f"{self.link.peer} sent {message.kind.name} of {tuple(values.shape)} {values.dtype}, "
                f"this run's are {tuple(want.shape)} {want.dtype}"
            )
        return values


class ServerPort:
    """The server, seen from a worker: pull parameters, push gradients."""

    def __init__(self, worker: Worker, link: Link) -> None:
        self.worker, self.link = worker, link

    def pull(self) -> Params:
        """Ask for the parameters and wait for them. The chief sends the first ones before."""
        if self.worker.is_chief and self.worker.step == 0:
            self.link.send(Kind.INIT, [self.worker.flat.params])
        self.link.send(Kind.PULL)
        return self.answer()

    def push(self, gradient: Gradient) -> Params:
        """Send `gradient` and wait for the answer: the next parameters."""
        self.send(Kind.PUSH, gradient.values, gradient)
        return self.answer()

    def send(self, kind: Kind, values: Tensor, gradient: Gradient) -> None:
        """Send `values` under the header of `gradient`."""
        fabric = self.worker.fabric
        start = fabric.now()
        sent = self.link.send(kind, [values], **gradient.header)
        fabric.record("push", start, fabric.now(), peer=self.link.peer, num_bytes=sent, **gradient.facts)

    def answer(self) -> Params:
        """Wait for parameters."""
        message = self.receive()
        params = Params(message.values, message.version)
        if self.worker.ended:
            self.worker.look(params)  # the last ones: no gradient will be computed at them
        return params

    def receive(self) -> Message:
        """The server's next message. The trace keeps the wait and the transfer (a pull) apart."""
        fabric, worker, asked = self.worker.fabric, self.worker, self.worker.fabric.now()
        message = self.link.recv()
        worker.ended = message.kind is Kind.STOP
        end = fabric.now()
        began = min(max(message.sent_s, asked), end)
        said: dict[str, Any] = {"worker": worker.index, "step": worker.step, "version": message.version}
        said["peer"] = self.link.peer
        fabric.record("wait", asked, began, **said)
        fabric.record("pull", began, end, num_bytes=message.num_bytes, **said)
        return message


def gradient_from(message: Message, worker: int) -> Gradient:
    """A push as the gradient that it carries; its values are the link's buffer, good until the next message."""
    return Gradient(message.values, message.version, worker, message.step, message.samples, message.loss)
