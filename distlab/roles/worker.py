"""The worker: a model, its own stream of samples, and `gradient`.

It is the same under every strategy; what differs is where its parameters come from and where its gradient goes.
"""

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from distlab.data import Stream
from distlab.errors import NonFiniteLoss
from distlab.fabric import Fabric
from distlab.flat import Flat
from distlab.roles.chief import Chief
from distlab.roles.updater import Gradient, Params
from distlab.task import Task


class Worker:
    """Computes gradients.

    Attributes:
        index: its number; 0 is the chief.
        model, flat: its copy of the model.
        ended: set when the run is over; `batches` then stops.
        chief: evaluates and logs, if this worker is to.
    """

    def __init__(self, fabric: Fabric, task: Task, *, index: int, num_workers: int, batch_size: int) -> None:
        self.fabric, self.task, self.index = fabric, task, index
        self.model = task.build()
        self.model.train()
        self.flat = fabric.flat = Flat(self.model)
        self.ended = False
        self.chief: Chief | None = None
        self.stream = Stream(task.train, batch_size=batch_size, index=index, num_workers=num_workers, seed=task.seed)
        fabric.seed(task.seed * 1_000_003 + index)

    @property
    def step(self) -> int:
        """How many batches it has finished: the number of the one it is at."""
        return max(self.fabric.step, 0)

    @step.setter
    def step(self, number: int) -> None:
        self.fabric.step = number

    @property
    def is_chief(self) -> bool:
        """Worker 0 initialises and logs."""
        return self.index == 0

    def initial(self) -> Params:
        """The parameters as the model factory made them."""
        return Params(self.flat.params.clone(), 0)

    def batches(self) -> Iterator[Any]:
        """This worker's batches, until the run is over."""
        while not self.ended:
            self.fabric.step = self.step
            yield self.fabric.timed("load", lambda: self.stream.batch(self.step)).value
            self.step += 1

    def look(self, params: Params) -> None:
        """Say that this worker holds `params`: if it is the chief, it may evaluate them."""
        if self.chief is not None:
            self.chief.look(params)

    def log(self, version: int, loss: float) -> None:
        """Say what the training loss is at `version`: if this is the chief, it may write it down."""
        if self.chief is not None:
            self.chief.log(version, loss)

    def gradient(self, params: Params, batch: Any) -> Gradient:
        """The gradient of the mean loss over `batch` at `params`.

        Its values are this worker's own buffer, good until the next call. Buffers of the model (BatchNorm) change
        here and nowhere else.

        Raises:
            NonFiniteLoss: the loss is infinite or not a number.
        """
        self.look(params)
        done = self.fabric.timed("compute", lambda: self._backward(params.values, batch), idle=0.0)
        gradient = Gradient(self.flat.grads, params.version, self.index, self.step, self.stream.batch_size, done.value)
        self.fabric.record("compute", done.start_s, done.end_s, version=params.version, **gradient.facts)
        self.log(params.version, done.value)
        if not math.isfinite(done.value):
            raise NonFiniteLoss(str(self.fabric.me), self.step, done.value)
        return gradient

    def _backward(self, params: Tensor, batch: Any) -> float:
        if params is not self.flat.params:
            self.flat.params.copy_(params)
        self.flat.grads.zero_()
        loss = self.task.loss_of(self.task.outputs(self.model, batch), batch)
        loss.backward()
        return loss.item()
