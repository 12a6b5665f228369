"""In-graph replication: one client drives all devices.

The client's program reads as if there were one device: load a batch, call the model, compute the loss, go backward,
apply. The hard idea is the order: *all* replicas get their work before any answer is awaited, and backward is cut at
the gather, so that equal replicas compute at the same time. So the client runs one program per replica side by side,
each as far as it comes without an answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from distlab.fabric import Fabric, Kind
from distlab.flat import trainable
from distlab.options import check_count, warn
from distlab.roles.client import Client
from distlab.roles.device import Device
from distlab.roles.placed import go_back, pieces_of
from distlab.roles.worker import Worker
from distlab.strategies.base import Job, Layout, Outcome, Strategy, worker_of
from distlab.task import Task


@dataclass(frozen=True, kw_only=True, repr=False)
class InGraph(Strategy):
    """Synchronous by construction; the batch of the client is `num_workers` times the task's.

    Who applies: the client, after it gathered every replica's gradient. Of a model that is cut (`place`) and not
        copied, the parameters stay with their modules: the client gives the word, and each device applies its own.
    What is dropped: nothing.
    Assumes: a loss that is a mean over rows of the gathered outputs; then the update equals that of the whole
        batch on one worker, and of the uncut model. Only what is placed runs on the devices: loading, cutting the
        batch, modules that are placed nowhere, gathering and the loss are the client's. Buffers (BatchNorm) move where
        their modules run; what the client evaluates on the way knows nothing of those on devices.
    If a replica dies: the run ends with an error that names it.
    If the client dies: the run goes back to the last checkpoint; where there is none, it is over, since the client was
        the only one that knew what to do next.

    Args:
        place: module name -> device, from 0: cut the model over so many of the workers, such as
            ``place={"features": 0, "classifier": 1}``. Twice as many workers are two copies of the cut model, each on
            devices of its own and with its own half of the batch. Placed modules take and return tensors. A device's
            compute time is that of its own modules. None: the whole model on every device.
    """

    place: Mapping[str, int] | None = field(default=None, hash=False)

    fixed = "the client's graph, with a replica on each device, is made once"
    promises = ("fresh", "enough", "distinct")

    final = "client"

    def __post_init__(self) -> None:
        if self.place is None:
            return
        if not isinstance(self.place, Mapping) or not self.place or not all(isinstance(n, str) for n in self.place):
            raise TypeError(f"place must say which module is on which device, such as {{'0': 0}}, got {self.place!r}")
        used = {check_count(f"place[{name!r}]", device, least=0) for name, device in self.place.items()}
        if unused := set(range(max(used))) - used:
            raise ValueError(f"place uses device {max(used)}, but nothing is on device {min(unused)}")

    @property
    def num_devices(self) -> int:
        """Of one replica."""
        return 1 if self.place is None else 1 + max(self.place.values())

    def check(self, num_workers: int) -> None:
        if num_workers % self.num_devices:
            raise ValueError(f"place needs {self.num_devices} workers for each replica, got {num_workers} in all")

    def check_task(self, task: Task) -> None:
        model = task.build()
        pieces_of(model, self.place)
        if self.num_devices == 1:
            return
        optimizer = type(task.optimizer([p for _, p in trainable(model)]))
        if not optimizer.__module__.startswith("torch.optim."):
            warn(f"{optimizer.__name__} may look at all parameters at once: on devices each has its own part alone")

    def layout(self, num_workers: int) -> Layout:
        return Layout({"client": 1, "replica": num_workers}, [("client", "replica")])

    def most_updates(self, num_batches: Sequence[int]) -> int:
        return sum(num_batches) // len(num_batches)  # they are one stream, of which an update takes one for each

    def run(self, fabric: Fabric, job: Job) -> Outcome:
        return self.drive(fabric, job) if fabric.me.role == "client" else self.serve(fabric, job)

    def worker(self, fabric: Fabric, job: Job) -> Worker:
        """The client's: it has the whole batch."""
        return worker_of(fabric, job, index=0, num_workers=1, batch_size=job.task.batch_size * job.num_workers)

    def drive(self, fabric: Fabric, job: Job) -> Outcome:
        """The client's program."""
        client = Client(self.worker(fabric, job), self.place, self.num_devices)
        while client.version < job.num_updates and not fabric.stopping:
            batch = client.next_batch()
            outputs = client.together([partial(client.outputs, part) for part in client.cut(batch)])
            loss, grads = client.loss(outputs, batch)
            ways = zip(outputs, grads, client.crossings, strict=True)
            client.going_back = True
            client.together([partial(go_back, *way) for way in ways])
            client.going_back = False
            client.apply(loss)
        client.fetch(Kind.STOP)
        return Outcome(client.flat.params, client.version, client.local)

    def serve(self, fabric: Fabric, job: Job) -> Outcome:
        """A device's program: it does what it is asked."""
        device = Device(worker_of(fabric, job), self.place, self.num_devices)
        while (message := device.link.recv()).kind is not Kind.STOP:
            device.obey(message)
        if device.stays:
            device.hand_over(message)
        return Outcome(None, 0, device.local, device.worker.step)
