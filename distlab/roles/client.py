"""The in-graph client.

The client runs one program for each replica side by side, in greenlets: each goes on until it asks a device, so that
all replicas have their work before any answer is awaited.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor

from distlab.data import pieces, size_of
from distlab.fabric import Kind, Link, Message
from distlab.fabric.base import ALWAYS, Timed
from distlab.flat import Flat, local_state, padded
from distlab.roles.placed import Ask, Crossing, Piece, Placed, pieces_of
from distlab.roles.updater import Gradient, Params, Updater
from distlab.roles.worker import Worker
from distlab.task import pair


class Client:
    """The one program: its data, its parameters, its links to the devices.

    Args:
        worker: has the data, and a model; its links go to the devices.
        place: module name -> device of a replica; None: all modules.
        width: how many devices a replica has.

    Attributes:
        flat: all parameters; those that stay with their devices are here as last fetched.
        stays: do parameters stay where they are placed?
    """

    def __init__(self, worker: Worker, place: Mapping[str, int] | None, width: int) -> None:
        self.worker, self.fabric, self.task, self.version = worker, worker.fabric, worker.task, 0
        self.flat, self.model = self.worker.flat, self.worker.model
        links = self.fabric.links("replica")
        self.replicas = [links[i : i + width] for i in range(0, len(links), width)]
        self.pieces = pieces_of(self.model, place)
        self.stays = place is not None and len(self.replicas) == 1
        self.sizes: list[int] = []  # of the parts of this step's batch
        self.asked: list[set[int]] = []  # which devices of each replica have been asked something in this step
        self.crossings: list[list[Crossing]] = []  # of each replica's program in this step
        self.going_back = False  # is backward under way?
        self._at = 0  # which replica's program is running
        self._place(place is None)
        worker.local = lambda: self.local
        begin = self.fabric.saver.begin
        self.version = 0 if begin is None else begin.version

    def _place(self, whole: bool) -> None:
        """Put stand-ins where the placed modules were, and an optimizer over what the client holds."""
        for number, piece in enumerate(self.pieces):
            mine, held = indices(self.flat, piece), ()  # type: list[int], tuple[Tensor, ...]
            if mine and not self.stays:
                where = extent(self.flat, mine)
                held = self.flat.params[where], self.flat.grads[where]
            placed = Placed(piece, number, self.ask, self._cross, *held)
            if not whole:
                placed.install(self.model)
        self._all = placed if whole else None
        self.own = among_all(self.flat, self.model, self.pieces) if self.stays else self.flat
        self.updater = None if self.own is None else Updater(self.fabric, self.task, self.own)

    @property
    def local(self) -> dict[str, Tensor]:
        """The buffers of what is placed nowhere."""
        return {} if self._all is not None else local_state(self.model)

    def outputs(self, part: Any) -> Any:
        """What the model says to a part of a batch."""
        return self.task.outputs(self.model, (part, None)) if self._all is None else self._all(*flatten(part))

    def ask(self, question: Ask) -> Message:
        """Let the other programs go on until there is an answer. Gradient mode is the thread's: bring it back."""
        grad_mode = torch.is_grad_enabled()
        answer = getcurrent().parent.switch(question)
        torch.set_grad_enabled(grad_mode)
        return answer

    def next_batch(self) -> Any:
        """The whole batch of this step; the client's parameters are looked at, if it is time to."""
        self.look()
        return self.fabric.timed("load", lambda: self.worker.stream.batch(self.worker.step), idle=ALWAYS).value

    def look(self) -> None:
        """Let the chief evaluate."""
        chief = self.worker.chief
        if chief is not None and chief.is_due(self.version):
            self.fetch()
            chief.look(Params(self.flat.params, self.version))

    def cut(self, batch: Any) -> list[Any]:
        """The replicas' parts of the batch's inputs."""
        done = self.fabric.timed("dispatch", lambda: pieces(pair(batch)[0], len(self.replicas)), idle=ALWAYS)
        parts, start = done.value, done.start_s
        for _ in parts[1:]:  # each replica's part takes its time
            done = self.fabric.timed("dispatch", lambda: None)
        self.fabric.record("dispatch", start, done.end_s, step=self.worker.step, samples=size_of(batch))
        if self.own is not None:
            self.own.grads.zero_()
        self.sizes, self.crossings = [size_of(part) for part in parts], [[] for _ in parts]
        self.asked = [set() for _ in parts]
        return parts

    def together(self, programs: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run one program for each replica side by side, each as far as it can without an answer; their results."""
        tasks, results = [greenlet(program) for program in programs], [None] * len(programs)
        asked: deque[tuple[int, int]] = deque()

        def go_on(number: int, *answer: Message) -> None:
            self._at = number
            with torch.enable_grad():  # which the program before may have left switched off
                said = self._own_work(partial(tasks[number].switch, *answer))
            if tasks[number].dead:
                results[number] = said
            else:
                self._post(self.replicas[number][said.device], said.kind, said.tensors)
                asked.append((number, said.device))
                self.asked[number].add(said.device)

        for number in range(len(tasks)):
            go_on(number)
        while asked:
            number, device = asked.popleft()
            go_on(number, self._recv(self.replicas[number][device]))
        return results

    def _own_work(self, function: Callable[[], Any]) -> Any:
        done = self.fabric.timed("unplaced", function, idle=ALWAYS)
        if self.pieces[0].names != ("",):
            self.fabric.record("unplaced", done.start_s, done.end_s, step=self.worker.step)
        return done.value

    def _post(self, link: Link, kind: Kind, tensors: Sequence[Tensor] = (), loss: float = math.nan) -> None:
        start, step = self.fabric.now(), self.worker.step
        sent = link.post(kind, tensors, version=self.version, step=step, loss=loss)
        if kind is not Kind.STOP:
            self.fabric.record("send", start, self.fabric.now(), peer=link.peer, step=step, num_bytes=sent)

    def _recv(self, link: Link) -> Message:
        start = self.fabric.now()
        message = link.recv()
        self.fabric.record("wait", start, self.fabric.now(), peer=link.peer, step=self.worker.step)
        return message

    def _cross(self, crossing: Crossing) -> None:
        """Remember that backward has to come back to `crossing`; RuntimeError if it is under way already."""
        if self.going_back:
            raise RuntimeError(
                f"{crossing.placed.said} was called again in backward, as torch.utils.checkpoint does: a placed module "
                f"cannot be inside a checkpoint, but a checkpoint may be inside it"
            )
        self.crossings[self._at].append(crossing)

    def send_all(self, kind: Kind, rate: float = math.nan) -> None:
        """Send every device a word, with what the learning rate is multiplied by where a loss would be."""
        links = [link for replica in self.replicas for link in replica]
        for link in links:
            self._post(link, kind, loss=rate)
        for link in links:
            link.flush()

    def loss(self, outputs: list[Tensor], batch: Any) -> tuple[float, list[Tensor]]:
        """The loss of the gathered outputs, and its gradient by each replica's."""
        if odd := [type(output).__name__ for output in outputs if not isinstance(output, Tensor)]:
            raise TypeError(f"InGraph gathers outputs along dim 0: they must be one tensor, got {odd[0]}")
        for output, size in zip(outputs, self.sizes, strict=True):
            if output.ndim == 0 or len(output) % size:
                raise ValueError(
                    f"InGraph gathers outputs along dim 0, but the model made {tuple(output.shape)} of {size} samples: "
                    f"it must not take a mean over its batch, of which it sees a part"
                )
        gathered = torch.cat([output.detach() for output in outputs]).requires_grad_()

        def loss_and_gradient() -> tuple[float, Tensor]:
            loss = self.task.loss_of(gathered, batch)
            return loss.item(), torch.autograd.grad(loss, gathered)[0]

        done = self.fabric.timed("loss", loss_and_gradient, idle=(None, torch.zeros_like(gathered)))
        value, gradient = done.value
        value = self.worker.checked(value)
        self.fabric.record("loss", done.start_s, done.end_s, step=self.worker.step, loss=value)
        self.worker.log(self.version, value)
        return value, list(gradient.split([len(part) for part in outputs]))

    def apply(self, loss: float) -> None:
        """Make an update of the replicas' gradients. The loss is a mean over the whole batch, so they add up."""
        width, now = len(self.replicas[0]), self.fabric.now()
        whose = []
        for number, (size, asked) in enumerate(zip(self.sizes, self.asked, strict=True)):
            devices = sorted(asked) or [0]  # a module may not be called in every step
            if not asked:
                place = self._share(number * width)
                facts: dict[str, Any] = {"worker": number * width, "step": self.worker.step, "batch": place}
                self.fabric.record("compute", now, now, read=self.version, version=self.version, **facts)
            for i, device in enumerate(devices):
                samples = size // len(devices) + (i < size % len(devices))
                who = number * width + device
                facts = {"step": self.worker.step, "samples": samples, "loss": loss, "batch": self._share(who)}
                whose.append(Gradient(self.flat.grads, self.version, who, **facts))
        done, rate = Timed(None, now, now), self.fabric.rate
        if self.updater is not None and self.own is not None:
            self.updater.rate.agreed = rate
            done = self.updater.step(*whose, mean=self.own.grads)
            self.updater.version += 1
        if self.stays:
            self.send_all(Kind.APPLY, rate)
        self.version += 1
        for gradient in whose:
            self.fabric.record("apply", done.start_s, done.end_s, version=self.version, **gradient.facts)
        self.worker.step += 1
        self.worker.next = self.worker.step
        self.fabric.saver.reached(self.version)

    def _share(self, device: int) -> int:
        """The place of a device's share of this batch, in the stream of the task's own batches."""
        return self.worker.step * len(self.replicas) * len(self.replicas[0]) + device

    def fetch(self, kind: Kind = Kind.PULL) -> None:
        """Bring what stays elsewhere into `flat`; with STOP, for the last time."""
        if self.stays or kind is Kind.STOP:
            self.send_all(kind)
        if not self.stays:
            return
        for device, link in enumerate(self.replicas[0]):
            answer = iter(self._recv(link).tensors)
            for mine in (indices(self.flat, piece) for piece in self.pieces if piece.device == device):
                if mine:
                    self.flat.params[extent(self.flat, mine)] = next(answer)
        if self.own is not None:
            for i, values in zip(own_indices(self.flat, self.pieces), self.own.parameters, strict=True):
                self.flat.views(self.flat.params)[i].copy_(values.data)


def indices(flat: Flat, piece: Piece) -> list[int]:
    """Which of the model's trainable tensors are in a piece."""
    return [i for i, name in enumerate(flat.names) if piece.holds(name)]


def own_indices(flat: Flat, pieces: Sequence[Piece]) -> list[int]:
    """Which are in none."""
    return [i for i, name in enumerate(flat.names) if not any(piece.holds(name) for piece in pieces)]


def extent(flat: Flat, mine: Sequence[int]) -> slice:
    """Where tensors that follow each other lie in the flat vector."""
    assert list(mine) == list(range(mine[0], mine[-1] + 1)), "a module's parameters lie together"
    sizes = [padded(shape.numel()) for shape in flat.shapes]
    return slice(sum(sizes[: mine[0]]), sum(sizes[: mine[-1] + 1]))


def among_all(flat: Flat, model: Any, pieces: Sequence[Piece]) -> Flat | None:
    """What `model` holds itself, once all pieces are taken out of it; None if that is nothing to train."""
    mine = own_indices(flat, pieces)
    if not mine:
        return None
    own = Flat(model)
    own.among = flat.shapes, mine
    return own


def flatten(inputs: Any) -> list[Tensor]:
    """The tensors of a piece of inputs, in a fixed order."""
    if isinstance(inputs, Tensor):
        return [inputs]
    return [inputs[name] for name in sorted(inputs)] if isinstance(inputs, Mapping) else list(inputs)


def unflatten(like: Any, tensors: Sequence[Tensor]) -> Any:
    """`flatten` undone: inputs built as `like` is."""
    if isinstance(like, Tensor):
        return tensors[0]
    return dict(zip(sorted(like), tensors, strict=True)) if isinstance(like, Mapping) else type(like)(tensors)
