"""A device of the in-graph client: it computes what is placed on it, and does what it is asked."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distlab.data import Stream
from distlab.fabric import Kind, Message
from distlab.fabric.base import ALWAYS
from distlab.flat import local_state
from distlab.roles.client import indices, unflatten
from distlab.roles.placed import Piece, Served, pieces_of
from distlab.roles.updater import Updater
from distlab.roles.worker import FORWARD, Worker
from distlab.task import Task, pair


class Device:
    """What a client places modules on: it computes, and knows neither data nor loss."""

    def __init__(self, worker: Worker, place: Mapping[str, int] | None, width: int) -> None:
        self.worker, self.fabric, self.place = worker, worker.fabric, place
        fabric, task, pieces = worker.fabric, worker.task, pieces_of(worker.model, place)
        self.link = fabric.link("client", 0)
        mine = {i: piece for i, piece in enumerate(pieces) if piece.device == fabric.me.index % width}
        self.stays = place is not None and fabric.counts["replica"] == width
        self.pieces = mine
        self.served = {number: self._serve(task, piece) for number, piece in mine.items()}
        self.updaters = [self._updater(task, pieces[i], served) for i, served in self.served.items()]
        worker.local = lambda: self.local
        fabric.flat = next((served.flat for served in self.served.values() if served.flat is not None), None)

    @property
    def local(self) -> dict[str, Tensor]:
        """The buffers and frozen parameters of its pieces."""
        state = local_state(self.worker.model)
        return {name: t for name, t in state.items() if any(piece.holds(name) for piece in self.pieces.values())}

    def _serve(self, task: Task, piece: Piece) -> Served:
        if self.place is not None:
            return Served(piece.module(self.worker.model), " + ".join(piece.names))
        like = pair(Stream(task.train, batch_size=1, seed=task.seed).batch(0))[0]
        whole = lambda *inputs: self.worker.outputs((unflatten(like, inputs), None))  # noqa: E731
        return Served(self.worker.model, "the model", whole)

    def _updater(self, task: Task, piece: Piece, served: Served) -> Updater | None:
        if not self.stays or served.flat is None:
            return None
        served.flat.among = self.worker.flat.shapes, indices(self.worker.flat, piece)
        return Updater(self.fabric, task, served.flat)

    def obey(self, message: Message) -> None:
        """Do what the client asks, and answer."""
        self.fabric.saver.reached(message.version)
        if message.kind is Kind.APPLY:
            self.apply(message.loss)
        elif message.kind is Kind.PULL:
            self.hand_over(message)
        else:
            self.compute(message)

    def hand_over(self, message: Message) -> None:
        """Answer with the parameters that are here."""
        held = [served.flat.params for served in self.served.values() if served.flat is not None]
        self.send(Kind.PARAMS, held, message)

    def compute(self, message: Message) -> None:
        """Forward or backward through the piece that the message names."""
        served = self.served[int(message.tensors[-1][0])]
        if message.kind is Kind.BACKWARD:
            if not self.stays and served.flat is not None:
                served.flat.grads.zero_()
            grads = self._timed(message, partial(served.backward, message), 1 - FORWARD, [])
            held = [] if self.stays or served.flat is None else [served.flat.grads]
            self.send(Kind.GRADIENT, [*grads, *held], message)
            self.worker.step = message.step + 1
        else:
            idle = [] if self.place is not None else [torch.zeros(len(message.tensors[-2]), 1)]
            outputs = self._timed(message, partial(served.forward, message), FORWARD, idle)
            self.send(Kind.OUTPUTS, outputs, message, samples=served.num_outputs)

    def apply(self, rate: float) -> None:
        """Make an update of what this device holds, at `rate` times the task's learning rate."""
        for served, updater in zip(self.served.values(), self.updaters, strict=True):
            if updater is not None and served.flat is not None:
                updater.rate.agreed = rate
                updater.step(mean=served.flat.grads)
                updater.version += 1
                served.flat.grads.zero_()

    def send(self, kind: Kind, tensors: Sequence[Tensor], asked: Message, **header: Any) -> None:
        """Answer the client."""
        start = self.fabric.now()
        sent = self.link.send(kind, tensors, version=asked.version, step=asked.step, **header)
        if asked.kind is not Kind.STOP:
            self.fabric.record("send", start, self.fabric.now(), peer=self.link.peer, step=asked.step, num_bytes=sent)

    def _timed(self, message: Message, function: Any, share: float, idle: Any) -> Any:
        idle = idle if self.place is None else ALWAYS  # what comes out of a piece goes into the next
        done = self.fabric.timed("compute", function, share / len(self.served), idle)
        whose: dict[str, Any] = {
            "worker": self.worker.index,
            "step": message.step,
            "read": message.version,
            "batch": self.worker.stream.place(message.step),
        }
        self.fabric.record("compute", done.start_s, done.end_s, version=message.version, **whose)
        return done.value
