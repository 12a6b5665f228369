"""The worker: a model, its own stream of samples, and `gradient`.

It is the same under every strategy; what differs is where its parameters come from and where its gradient goes.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from distlab.data import Stream
from distlab.errors import NonFiniteLoss
from distlab.fabric import Fabric, Link, Parts, Peer
from distlab.flat import Flat, local_state
from distlab.roles.chief import Chief
from distlab.roles.updater import Gradient, Params
from distlab.task import Task

FORWARD = 1 / 3  # of a gradient's compute time; the rest is backward
USED_UP = object()  # instead of a batch: there is no more data


class Computer:
    """A model, its part of the samples, and its gradient: what a worker has, and a replay of it too.

    Attributes:
        model, flat: its copy of the model.
        seed: of the random numbers that its user code draws.
    """

    def __init__(self, task: Task, *, index: int, num_workers: int, batch_size: int) -> None:
        self.task, self.index, self.seed = task, index, task.seed * 1_000_003 + index
        self.model = task.build()
        self.model.train()
        self.flat = Flat(self.model)
        self.stream = Stream(task.train, batch_size=batch_size, index=index, num_workers=num_workers, seed=task.seed)

    def outputs(self, batch: Any) -> Any:
        """What the model says to `batch`."""
        return self.task.outputs(self.model, batch)

    def backward(self, params: Tensor, batch: Any, *, add: bool = False) -> float:
        """Fill `flat.grads` with the gradient of the mean loss over `batch` at `params` (size,), or `add` it to what is
        there; returns the loss."""
        if params is not self.flat.params:
            self.flat.params.copy_(params)
        if not add:
            self.flat.grads.zero_()
        loss = self.task.loss_of(self.outputs(batch), batch)
        loss.backward()
        self.flat.check_grads()
        return loss.item()


class Worker(Computer):
    """Computes gradients, batch after batch, until the run is over.

    Attributes:
        index: its number; 0 is the chief.
        ended: set when the run is over; `batches` then stops.
        batch: which batch of its stream it is at.
        next: which one comes then.
        held: the version of the parameters that it has, as far as it knows.
        local: its buffers and frozen parameters.
        chief: evaluates and logs, if this worker is to.
        make_chief: makes that, should this worker become the chief; None: it has.
    """

    def __init__(self, fabric: Fabric, task: Task, *, num_batches: int | None = None, **part: int) -> None:
        super().__init__(task, **part)
        self.fabric, fabric.flat = fabric, self.flat
        self.ended = False
        first = max(fabric.step, 0)  # of a process that takes another's place: it goes on there, unless it is told more
        self.batch, self.next, self._num_batches = first, first, num_batches
        self.chief: Chief | None = None
        self.make_chief: Callable[[], Chief | None] | None = None
        self.held, self.local = 0, lambda: local_state(self.model)  # type: int, Callable[[], dict[str, Tensor]]
        fabric.seed(self.seed)
        if (begin := fabric.saver.begin) is not None:
            dealt = self.stream.num_workers, self.stream.batch_size
            self.step = self.next = begin.position(self.index, *dealt)
        if fabric.me.role == "worker":
            fabric.saver.speaks = lambda: self.is_chief and not fabric.parted
        if fabric.me.role != "replica":
            fabric.saver.own("place", self.place, lambda _: None)
        fabric.saver.own("worker", self.state, self.restore)

    def place(self) -> dict[str, int]:
        """Where it is in its data, and how that was dealt; see `Checkpoint.position`."""
        whose = {"index": self.index, "num_workers": self.stream.num_workers, "batch_size": self.stream.batch_size}
        dealt = self.stream.dealt(self.next) * self.stream.batch_size
        return {**whose, "position": self.next, "dealt": dealt, "step": self.step, "batch": self.batch}

    def state(self) -> dict[str, Any]:
        """What this worker alone has."""
        return {"random": self.fabric.random_states(), "local": self.local()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self.fabric.set_random_states(state["random"])
        self.model.load_state_dict(state["local"], strict=False)

    @property
    def step(self) -> int:
        """How many batches it has finished: the number of the one it is at."""
        return max(self.fabric.step, 0)

    @step.setter
    def step(self, number: int) -> None:
        self.fabric.step = number

    @property
    def is_chief(self) -> bool:
        """Worker 0 initialises and logs; if it is lost, the first of those that are left."""
        workers = [Peer("worker", i) for i in range(self.fabric.counts.get("worker", 1))]
        return self.fabric.members.first(workers) == Peer("worker", self.index)

    def initial(self) -> Params:
        """The parameters as the model factory made them."""
        return Params(self.flat.params.clone(), 0)

    def batches(self, *, to_the_end: bool = False) -> Iterator[Any]:
        """This worker's batches, until the run is over or its data is used up; or until it is asked to leave, unless it
        must take part `to_the_end`."""
        while not self.ended and (self._num_batches is None or self.next < self._num_batches):
            if self.fabric.leaving and not to_the_end:
                return self.part()
            self.fabric.saver.reached(self.held)
            self.fabric.step = self.step
            self.batch, self.next = self.next, self.next + 1
            yield self.fabric.timed("load", lambda: self.stream.batch(self.batch)).value
            self.step += 1

    def part(self) -> None:
        """Leave the run, as asked."""
        now, self.fabric.parted = self.fabric.now(), True
        self.fabric.record("leave", now, now, worker=self.index, version=self.held)

    def redo(self, batches: int) -> None:
        """Let the next batches be the last ones once more."""
        self.next -= batches

    def rounds(self) -> Iterator[Any]:
        """The same, then USED_UP until the run is over: for who must take part to the end."""
        yield from self.batches(to_the_end=True)
        while not self.ended:
            yield USED_UP

    def look(self, params: Params) -> None:
        """Say that this worker holds `params`: if it is the chief, it may evaluate them."""
        self.held = params.version
        members = self.fabric.members
        if self.make_chief is not None and (members.lost or members.parted) and self.is_chief:
            self.become_chief(params.version)
        if self.chief is not None:
            self.chief.look(params)

    def become_chief(self, version: int = 0) -> None:
        """From now on this worker evaluates and logs."""
        assert self.make_chief is not None
        self.chief, self.make_chief = self.make_chief(), None
        self.fabric.chief = self.chief
        if self.index:
            now = self.fabric.now()
            self.fabric.record("chief", now, now, worker=self.index, version=version)

    def log(self, version: int, loss: float) -> None:
        """Say what the training loss is at `version`: if this is the chief, it may write it down."""
        if self.chief is not None:
            self.chief.log(version, loss)

    def gradient(self, params: Params, batch: Any, *, add: bool = False, parts: Parts | None = None) -> Gradient:
        """The gradient of the mean loss over `batch` at `params`; `add` sums it with those before in the same buffer.

        Its values are this worker's own buffer, good until the next call. Buffers of the model (BatchNorm) change
        here and nowhere else.

        Raises:
            NonFiniteLoss: the loss is infinite or not a number.
        """
        gradient = self.gradient_unless(None, params, batch, add=add, parts=parts)
        assert gradient is not None
        return gradient

    def gradient_unless(
        self, news: Link | None, params: Params, batch: Any, *, add: bool = False, parts: Parts | None = None
    ) -> Gradient | None:
        """The same, but stop at once, with None, when a message comes on the link `news` (a simulated run only)."""
        self.look(params)
        backward = lambda: self.backward(params.values, batch, add=add)  # noqa: E731
        done = self.fabric.timed("compute", backward, unless=news, parts=parts)
        loss, samples = math.nan if done.value is None else done.value, self.stream.batch_size
        grads, reads = self.flat.grads, params.versions
        place = self.stream.place(self.batch)
        gradient = Gradient(grads, params.version, self.index, self.step, samples, loss, reads, batch=place)
        kind, facts = "cancel" if done.cancelled else "compute", gradient.facts
        self.fabric.record(kind, done.start_s, done.end_s, version=params.version, **facts)
        self.fabric.computed = self.step
        if done.cancelled:
            return None
        self.log(params.version, loss)
        self.checked(done.value)
        return gradient

    def checked(self, loss: float | None) -> float:
        """`loss`; NonFiniteLoss if it is none, nan if nothing was computed."""
        if loss is not None and not math.isfinite(loss):
            raise NonFiniteLoss(str(self.fabric.me), self.step, loss)
        return math.nan if loss is None else loss
