"""In-graph replication: one client drives all devices.

The client holds the parameters. Each step it cuts the batch, ships parameters and a piece to every replica,
gathers their outputs, computes the loss, sends every replica the gradient of the loss by its outputs, gathers the
parameters' gradients and applies. The hard idea is the order: *all* replicas get their work before any answer is
awaited, and backward is cut at the gather, so that equal replicas compute at the same time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distlab.data import Stream, pieces, size_of
from distlab.fabric import Fabric, Kind, Link, Message
from distlab.fabric.base import ALWAYS
from distlab.flat import local_state
from distlab.roles.updater import Gradient, Params, Updater
from distlab.strategies.base import Job, Layout, Outcome, Strategy, worker_of
from distlab.task import pair

FORWARD, BACKWARD = 1 / 3, 2 / 3  # shares of a gradient's compute time


@dataclass(frozen=True, kw_only=True, repr=False)
class InGraph(Strategy):
    """Synchronous by construction; the batch of the client is `num_workers` times the task's.

    Who applies: the client, after it gathered every replica's gradient.
    What is dropped: nothing.
    Assumes: a loss that is a mean over rows of the gathered outputs; then the update equals that of the whole
        batch on one worker. Only the model is replicated: cutting, gathering and the loss run on the client.
        Buffers (BatchNorm) move on the replicas alone; what the client evaluates on the way knows nothing of them.
    If a replica dies: the run ends with an error that names it.
    If the client dies: the run is over; it was the only one that knew the parameters.
    """

    promises = ("fresh", "enough", "distinct")

    final = "client"

    def layout(self, num_workers: int) -> Layout:
        return Layout({"client": 1, "replica": num_workers}, [("client", "replica")])

    def most_updates(self, num_batches: Sequence[int]) -> int:
        return sum(num_batches) // len(num_batches)  # they are one stream, of which an update takes one for each

    def run(self, fabric: Fabric, job: Job) -> Outcome:
        return self.drive(fabric, job) if fabric.me.role == "client" else self.replicate(fabric, job)

    def drive(self, fabric: Fabric, job: Job) -> Outcome:
        """The client's program."""
        client = Client(fabric, job)
        while client.updater.version < job.num_updates and not fabric.stopping:
            batch = client.next_batch()
            sizes = client.dispatch(batch)
            outputs = client.gather(len(sizes))
            loss, grads = client.loss(outputs, batch)
            client.send_all(Kind.BACKWARD, [[grad] for grad in grads])
            client.apply(client.gather(len(sizes)), sizes, loss)
        client.stop()
        return Outcome(client.flat.params, client.updater.version)

    def replicate(self, fabric: Fabric, job: Job) -> Outcome:
        """A replica's program: forward when data comes, backward when the gradient of its outputs comes."""
        replica = Replica(fabric, job)
        while (message := replica.link.recv()).kind is not Kind.STOP:
            if message.kind is Kind.DATA:
                replica.send(Kind.OUTPUTS, replica.forward(message), message)
            else:
                replica.send(Kind.GRADIENT, replica.backward(message), message)
        return Outcome(None, 0, local_state(replica.worker.model), replica.worker.step)


class Client:
    """The one program: its parameters, its data, its links to the replicas."""

    def __init__(self, fabric: Fabric, job: Job) -> None:
        self.fabric, self.task = fabric, job.task
        self.replicas: list[Link] = fabric.links("replica")
        batch_size = job.task.batch_size * job.num_workers
        self.worker = worker_of(fabric, job, index=0, num_workers=1, batch_size=batch_size)
        self.flat = self.worker.flat
        self.updater = Updater(fabric, job.task, self.flat)

    def next_batch(self) -> Any:
        """The whole batch of this step."""
        return self.fabric.timed("load", lambda: self.worker.stream.batch(self.worker.step), idle=ALWAYS).value

    def dispatch(self, batch: Any) -> list[int]:
        """Cut `batch`, send every replica parameters and its piece; returns the sizes of the pieces."""
        self.worker.look(Params(self.flat.params, self.updater.version))
        done = self.fabric.timed("dispatch", lambda: pieces(pair(batch)[0], len(self.replicas)), idle=ALWAYS)
        parts, start = done.value, done.start_s
        for _ in parts[1:]:  # each replica's part takes its time
            done = self.fabric.timed("dispatch", lambda: None)
        self.fabric.record("dispatch", start, done.end_s, step=self.worker.step, samples=size_of(batch))
        self.send_all(Kind.DATA, [[self.flat.params, *flatten(part)] for part in parts])
        return [size_of(part) for part in parts]

    def send_all(self, kind: Kind, tensors: Sequence[Sequence[Tensor]]) -> None:
        """Send each of the first replicas its tensors: all are on their way before the first is waited for."""
        links, version, step = self.replicas[: len(tensors)], self.updater.version, self.worker.step
        for link, parts in zip(links, tensors, strict=True):
            start = self.fabric.now()
            sent = link.post(kind, parts, version=version, step=step)
            self.fabric.record("send", start, self.fabric.now(), peer=link.peer, step=step, num_bytes=sent)
        for link in links:
            link.flush()

    def gather(self, count: int) -> list[Tensor]:
        """The next tensor from each of the first `count` replicas."""
        gathered = []
        for link in self.replicas[:count]:
            start = self.fabric.now()
            gathered.append(link.recv().values)
            self.fabric.record("wait", start, self.fabric.now(), peer=link.peer, step=self.worker.step)
        return gathered

    def loss(self, outputs: list[Tensor], batch: Any) -> tuple[float, list[Tensor]]:
        """The loss of the gathered outputs, and its gradient by each replica's."""
        gathered = torch.cat(outputs).requires_grad_()

        def loss_and_gradient() -> tuple[float, Tensor]:
            loss = self.task.loss_of(gathered, batch)
            return loss.item(), torch.autograd.grad(loss, gathered)[0]

        done = self.fabric.timed("loss", loss_and_gradient, idle=(None, torch.zeros_like(gathered)))
        value, gradient = done.value
        value = self.worker.checked(value)
        self.fabric.record("loss", done.start_s, done.end_s, step=self.worker.step, loss=value)
        self.worker.log(self.updater.version, value)
        return value, list(gradient.split([len(part) for part in outputs]))

    def apply(self, grads: list[Tensor], sizes: list[int], loss: float) -> None:
        """Apply the replicas' gradients as one update. The loss is a mean over the whole batch, so they add up."""
        read, step = self.updater.version, self.worker.step
        gradients = [Gradient(g, read, i, step, n, loss) for i, (g, n) in enumerate(zip(grads, sizes, strict=True))]
        self.updater.apply(*gradients, mean=torch.stack(grads).sum(0))
        self.worker.step += 1

    def stop(self) -> None:
        """Tell the replicas that the run is over."""
        for link in self.replicas:
            link.send(Kind.STOP)


class Replica:
    """A copy of the model on one device: it computes, and knows neither data nor loss."""

    def __init__(self, fabric: Fabric, job: Job) -> None:
        self.fabric, self.link = fabric, fabric.link("client", 0)
        self.worker = worker_of(fabric, job)
        self.like = pair(Stream(job.task.train, batch_size=1, seed=job.task.seed).batch(0))[0]
        self.outputs = torch.empty(0)

    def forward(self, message: Message) -> Tensor:
        """The model's outputs at the client's parameters, on this replica's piece."""
        params, *inputs = message.tensors
        self.worker.flat.params.copy_(params)
        batch = (unflatten(self.like, inputs), None)
        idle = torch.zeros(len(inputs[0]), 1)
        outputs = self._timed(message, lambda: self.worker.task.outputs(self.worker.model, batch), FORWARD, idle)
        if not isinstance(outputs, Tensor):
            kind = type(outputs).__name__
            raise TypeError(f"InGraph gathers outputs along dim 0: they must be one tensor, got {kind}")
        self.outputs = outputs
        return outputs.detach()

    def backward(self, message: Message) -> Tensor:
        """The gradient of the client's loss by the parameters, through this replica's outputs."""
        self.worker.flat.grads.zero_()
        self._timed(message, lambda: self.outputs.backward(message.values), BACKWARD)
        self.worker.step += 1
        return self.worker.flat.grads

    def send(self, kind: Kind, values: Tensor, asked: Message) -> None:
        """Answer the client."""
        start = self.fabric.now()
        sent = self.link.send(kind, [values], version=asked.version, step=asked.step)
        self.fabric.record("send", start, self.fabric.now(), peer=self.link.peer, step=asked.step, num_bytes=sent)

    def _timed(self, message: Message, function: Any, share: float, idle: Any = None) -> Any:
        done, version = self.fabric.timed("compute", function, share, idle), message.version
        whose: dict[str, Any] = {
            "worker": self.worker.index,
            "step": message.step,
            "read": version,
            "batch": message.step,
        }
        self.fabric.record("compute", done.start_s, done.end_s, version=version, **whose)
        return done.value


def flatten(inputs: Any) -> list[Tensor]:
    """The tensors of a piece of inputs, in a fixed order."""
    if isinstance(inputs, Tensor):
        return [inputs]
    return [inputs[name] for name in sorted(inputs)] if isinstance(inputs, Mapping) else list(inputs)


def unflatten(like: Any, tensors: list[Tensor]) -> Any:
    """`flatten` undone: inputs built as `like` is."""
    if isinstance(like, Tensor):
        return tensors[0]
    return dict(zip(sorted(like), tensors, strict=True)) if isinstance(like, Mapping) else type(like)(tensors)
