"""Applying updates: a torch optimizer on flat parameters, and the version that counts them.

Whoever applies (a server, the client, every worker of a collective) has one. The hard idea is the *lane*:
threads that apply at the same time must not share ``.grad``, or one would apply another's gradient; yet they
must share the parameters and the optimizer's state. So each thread has its own Parameter objects over the same
memory, with its own ``.grad``, and an optimizer of its own whose state dicts are the shared ones.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from distlab.fabric.base import Fabric, Timed
from distlab.flat import Flat
from distlab.task import Task

ELEMENTWISE = {
    getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adadelta", "ASGD")
}


@dataclass(frozen=True)
class Params:
    """All parameters as one vector (size,), and how many updates are in them."""

    values: Tensor
    version: int


@dataclass(frozen=True)
class Gradient:
    """One worker's gradient (size,) at the parameters of version `read`."""

    values: Tensor
    read: int
    worker: int
    step: int
    samples: int
    loss: float

    @property
    def facts(self) -> dict[str, Any]:
        """All but the values, as the trace records them."""
        return {name: value for name, value in vars(self).items() if name != "values"}

    @property
    def header(self) -> dict[str, Any]:
        """What travels with the values: a message's version is the one that its gradient was read at."""
        return {"version": self.read, "step": self.step, "samples": self.samples, "loss": self.loss}


class Lane:
    """One thread's way to the shared parameters.

    An optimizer that treats every element alike is given one flat parameter instead of many: the same bits, sooner.
    """

    def __init__(self, task: Task, flat: Flat, first: "Lane | None") -> None:
        self.params = [nn.Parameter(view) for view in flat.views(flat.params)]
        self.optimizer = task.optimizer(self.params)
        self._flat = flat
        groups = self.optimizer.param_groups
        if is_elementwise(self.optimizer) and len(groups) == 1 and len(groups[0]["params"]) == len(self.params):
            groups[0]["params"] = self.params = [nn.Parameter(flat.params)]
        self.rates = [group["lr"] for group in groups]
        if first is not None:
            for mine, shared in zip(self.params, first.params, strict=True):
                self.optimizer.state[mine] = first.optimizer.state[shared]

    def step(self, mean: Tensor, factor: float = 1.0) -> None:
        """Apply `mean` (size,), which is read and not changed, at `factor` times the learning rate."""
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        parts = [mean] if len(self.params) == 1 else self._flat.views(mean)
        for param, part in zip(self.params, parts, strict=True):
            param.grad = part.view_as(param)
        self.optimizer.step()


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Does it treat every element of a parameter alike, whatever the shape? Known of most of torch's, not of others."""
    return type(optimizer) in ELEMENTWISE and not optimizer.state


class Updater:
    """Parameters, optimizer and version in one place.

    Args:
        flat: its `params` are changed in place by `apply`.

    Attributes:
        version: how many updates have been applied.
    """

    def __init__(self, fabric: Fabric, task: Task, flat: Flat) -> None:
        self.flat, self.version = flat, 0
        self._fabric, self._task = fabric, task
        self._first = Lane(task, flat, None)
        self._lanes, self._begun = {-1: self._first}, False

    def lane(self, number: int) -> Lane:
        """The lane of one thread; made on first use. Where threads take turns, one is enough."""
        if not self._fabric.parallel:
            return self._first
        if number not in self._lanes:
            self._lanes[number] = Lane(self._task, self.flat, self._first)
        return self._lanes[number]

    def apply(self, *gradients: Gradient, lane: int = -1, mean: Tensor | None = None) -> int:
        """Apply the mean of `gradients` as one update; returns the version that it made.

        `mean` is for who has it already (after an all-reduce); then `gradients` only says what was in it.
        """
        done = self.step(*gradients, lane=lane, mean=mean)
        with self._fabric.lock("version"):
            self.version += 1
            version = self.version
        self.record(done, version, *gradients)
        return version

    def step(self, *gradients: Gradient, lane: int = -1, mean: Tensor | None = None) -> Timed:
        """The optimizer's part of `apply`: no new version, nothing recorded."""
        # An optimizer makes its state in its first step: a second one beside it would find it half made.
        with nullcontext() if self._begun else self._fabric.lock("first step"):
            way = self.lane(lane)
            done = self._fabric.timed("apply", lambda: self._step(way, gradients, mean))
            self._begun = True
        return done

    def record(self, done: Timed, version: int, *gradients: Gradient) -> None:
        """Say in the trace that `gradients` became part of `version`."""
        for g in gradients:
            self._fabric.record("apply", done.start_s, done.end_s, version=version, **g.facts)

    def _step(self, way: Lane, gradients: tuple[Gradient, ...], mean: Tensor | None) -> None:
        if mean is None:
            mean = gradients[0].values
            if len(gradients) > 1:
                mean = torch.stack([g.values for g in gradients]).mean(0)
        way.step(mean, self._task.lr_schedule(self.version) if self._task.lr_schedule else 1.0)
