"""Applying updates: a torch optimizer on flat parameters, and the version that counts them.

Whoever applies (a server, the client, every worker of a collective) has one. The hard idea is the *lane*:
threads that apply at the same time must not share ``.grad``, or one would apply another's gradient; yet they
must share the parameters and the optimizer's state. So each thread has its own Parameter objects over the same
memory, with its own ``.grad``, and an optimizer of its own whose state dicts are the shared ones.
"""

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from distlab.fabric.base import Fabric, Timed
from distlab.flat import Vector
from distlab.rules import MEAN, Rule
from distlab.task import Task

ELEMENTWISE = {
    getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adadelta", "ASGD")
}


@dataclass(frozen=True)
class Params:
    """All parameters as one vector (size,), and how many updates are in them.

    Attributes:
        version: server 0's; `versions` has every server's: a read across several can mix them.
        dropped: the gradient that this answers was not used.
    """

    values: Tensor
    version: int
    versions: tuple[int, ...] = ()
    dropped: bool = False


@dataclass(frozen=True)
class Gradient:
    """One worker's gradient (size,) at the parameters of version `read` (of server 0; `reads` has every server's).

    Attributes:
        batch: the place of its batch in the stream of samples.
        at: those parameters (size,), where the rule needs them: by the time that it is applied, its worker may have
            been sent others.
    """

    values: Tensor
    read: int
    worker: int
    step: int
    samples: int
    loss: float
    reads: tuple[int, ...] = ()
    at: Tensor | None = None
    batch: int = -1

    @property
    def facts(self) -> dict[str, Any]:
        """What the trace records of it."""
        known = ("read", "worker", "step", "samples", "loss", "batch")
        return {name: getattr(self, name) for name in known}

    @property
    def header(self) -> dict[str, Any]:
        """What travels with the values: a message's version is the one that its gradient was read at."""
        known = ("step", "samples", "loss", "batch")
        return {"version": self.read} | {name: getattr(self, name) for name in known}


class Lane:
    """One thread's way to the shared parameters.

    An optimizer that treats every element alike is given one flat parameter instead of many: the same bits, sooner.
    """

    def __init__(self, task: Task, flat: Vector, first: "Lane | None", *, by_tensor: bool = False) -> None:
        self.params = [nn.Parameter(view) for view in flat.views(flat.params)]
        self.optimizer = optimizer_of(task, self.params, flat)
        self._flat = flat
        groups = self.optimizer.param_groups
        alike = len(groups) == 1 and len(groups[0]["params"]) == len(self.params)
        self.merged = alike and not by_tensor and is_elementwise(self.optimizer)
        if self.merged:
            groups[0]["params"] = self.params = [nn.Parameter(flat.params)]
        self.rates, self._first = [group["lr"] for group in groups], self._settings
        if first is not None:
            for mine, shared in zip(self.params, first.params, strict=True):
                self.optimizer.state[mine] = first.optimizer.state[shared]
        self.parts = [self.optimizer] if not by_tensor else one_each(self.optimizer)

    def step(self, mean: Tensor, factor: float = 1.0) -> None:
        """Apply `mean` (size,), which is read and not changed, at `factor` times the learning rate."""
        self.take(mean, factor)
        for part in self.parts:
            part.step()

    def state(self) -> dict[str, Any]:
        """What the optimizer has come to know: vectors, laid out as the parameters are; others, by tensor (-1: of all);
        and the settings that it has changed itself."""
        vectors: dict[str, Tensor] = {}
        others: dict[int, dict[str, Any]] = {}
        for i, param in enumerate(self.params):
            for name, value in self.optimizer.state.get(param, {}).items():
                if is_like(value, param):
                    whole = vectors.setdefault(name, torch.zeros(self._flat.size, dtype=value.dtype))
                    self._pieces(whole)[i].copy_(value)
                elif value is not None:
                    others.setdefault(self._number(i), {})[name] = value
        both = zip(self._settings, self._first, strict=True)
        changed = [{name: value for name, value in now.items() if value != first[name]} for now, first in both]
        return {"vectors": vectors, "others": others, "settings": changed}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from another's `state`; it may have had them as one tensor, or as many."""
        alike: dict[str, Any] = next(iter(state["others"].values()), {})
        for i, param in enumerate(self.params):
            kept = {name: self._pieces(vector)[i].clone() for name, vector in state["vectors"].items()}
            kept |= copy.deepcopy(state["others"].get(self._number(i), alike))
            mine = self.optimizer.state[param]  # which the other lanes share
            mine.clear()
            mine.update(kept)
        for group, changed in zip(self.optimizer.param_groups, state["settings"], strict=False):
            group.update(changed)

    def _pieces(self, vector: Tensor) -> list[Tensor]:
        return [vector] if self.merged else self._flat.views(vector)

    def _number(self, i: int) -> int:
        return -1 if self.merged else i if self._flat.among is None else self._flat.among[1][i]

    @property
    def _settings(self) -> list[dict[str, Any]]:
        plain = (bool, int, float, str)
        return [{k: v for k, v in g.items() if isinstance(v, plain) and k != "lr"} for g in self.optimizer.param_groups]

    def take(self, mean: Tensor, factor: float) -> None:
        """Let the next step of every one of `parts` apply this."""
        for part in self.parts:
            for group, rate in zip(part.param_groups, self.rates, strict=True):
                group["lr"] = rate * factor
        for param, piece in zip(self.params, self._pieces(mean), strict=True):
            param.grad = piece


def is_like(value: Any, param: Tensor) -> bool:
    """Is it of the parameter's shape, so an element belongs to each of the parameter's?"""
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape == param.shape


def optimizer_of(task: Task, params: list[nn.Parameter], flat: Vector) -> torch.optim.Optimizer:
    """The task's optimizer of `params`. Its factory sees the whole model, whose groups it may make by position; of
    tensors that others hold, it keeps nothing."""
    if flat.among is None:
        return task.optimizer(params)
    shapes, mine = flat.among
    held = dict(zip(mine, params, strict=True))
    every = [held.get(i, nn.Parameter(torch.empty(shape, dtype=flat.dtype))) for i, shape in enumerate(shapes)]
    optimizer, ours = task.optimizer(every), {id(param) for param in params}
    for group in optimizer.param_groups:
        group["params"] = [param for param in group["params"] if id(param) in ours]
    optimizer.param_groups = [group for group in optimizer.param_groups if group["params"]]
    for param in [param for param in optimizer.state if id(param) not in ours]:
        del optimizer.state[param]
    return optimizer


def one_each(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """For each parameter an optimizer of its own, with the same settings and the same state."""
    parts = []
    for mine in [param for group in optimizer.param_groups for param in group["params"]]:
        part = copy.copy(optimizer)
        own = [[p for p in group["params"] if p is mine] for group in optimizer.param_groups]
        part.param_groups = [{**g, "params": ps} for g, ps in zip(optimizer.param_groups, own, strict=True)]
        parts.append(part)
    return parts


def treats_elements_alike(task: Task, flat: Vector) -> bool:
    """Would the task's optimizer do the same to parameters of these shapes if they were one flat vector?"""
    return Lane(task, flat, None).merged


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Does it treat every element of a parameter alike, whatever the shape? Known of most of torch's, not of others."""
    return type(optimizer) in ELEMENTWISE and not optimizer.state


def held(version: int, params: Tensor, lane: Lane | None, rule: Mapping[str, Tensor]) -> dict[str, Any]:
    """What there is once in a run, or a shard of it, as checkpoints have it: all that is laid out as the parameters are
    beside these."""
    known = {"vectors": {}, "others": {}, "settings": []} if lane is None else lane.state()
    vectors = {"params": params} | {f"optimizer.{name}": v for name, v in known["vectors"].items()}
    return {**known, "version": version, "vectors": vectors | {f"rule.{name}": v for name, v in rule.items()}}


def known(state: Mapping[str, Any], whose: str) -> dict[str, Any]:
    """Of what `held` put together, what one had come to know."""
    prefix = f"{whose}."
    vectors = {name.removeprefix(prefix): v for name, v in state["vectors"].items() if name.startswith(prefix)}
    return {**state, "vectors": vectors}


class Rate:
    """What the task's learning rate is multiplied by: its schedule's factor, and that of `LiveRun.scale_lr`.

    Attributes:
        agreed: the latter, where several have to apply alike; None: it is what this process was told.
        used: the latter, in the last update.
    """

    def __init__(self, fabric: Fabric, task: Task) -> None:
        self.agreed: float | None = None
        self.used = 1.0
        self._fabric, self._task = fabric, task

    def __call__(self, version: int, step: int = -1) -> float:
        """The factor for the update after `version`, with this process's own gradient of `step`."""
        rate = self._fabric.rate if self.agreed is None else self.agreed
        if rate != self.used:
            now, self.used = self._fabric.now(), rate
            self._fabric.record("rate", now, now, version=version + 1, step=step, loss=rate)
        return rate * (self._task.lr_schedule(version) if self._task.lr_schedule else 1.0)


class Updater:
    """Parameters, optimizer and version in one place.

    Args:
        flat: its `params` are changed in place by `apply`.
        rule: what becomes of several gradients, or of old ones.
        by_tensor: hold a lock of each tensor's own while it is updated.
        common: is what it holds part of a checkpoint?

    Attributes:
        version: how many updates have been applied.
        rate: what the learning rate is multiplied by.
        settle: called with the gradients of each, together with the count.
    """

    def __init__(
        self, fabric: Fabric, task: Task, flat: Vector, *, rule: Rule = MEAN, by_tensor: bool = False,
        common: bool = True,
    ) -> None:  # fmt: skip
        self.flat, self.version, self.rule = flat, 0, copy.deepcopy(rule)
        self.rate = Rate(fabric, task)
        self._fabric, self._task, self._by_tensor = fabric, task, by_tensor
        self._first = Lane(task, flat, None, by_tensor=by_tensor)
        self._lanes, self._begun = {-1: self._first}, False
        self.settle: Callable[..., None] = lambda *gradients: None
        if common:
            fabric.saver.common(flat.ranges, self.state, self.restore)

    def lane(self, number: int) -> Lane:
        """The lane of one thread; made on first use. Where threads take turns, one is enough."""
        if not self._fabric.parallel:
            return self._first
        if number not in self._lanes:
            self._lanes[number] = Lane(self._task, self.flat, self._first, by_tensor=self._by_tensor)
        return self._lanes[number]

    def apply(self, *gradients: Gradient, lane: int = -1, mean: Tensor | None = None) -> int:
        """Apply the mean of `gradients` as one update; returns the version that it made.

        `mean` is for who has it already (after an all-reduce); then `gradients` only says what was in it.
        """
        done = self.step(*gradients, lane=lane, mean=mean)
        with self._fabric.lock("version"):  # a checkpoint knows of all that is in its version, and of nothing else
            self.version += 1
            version = self.version
            self.settle(*gradients)
            self.record(done, version, *gradients)
            self._fabric.saver.reached(version)
        return version

    def state(self) -> dict[str, Any]:
        """Parameters, version, and what the optimizer and the rule have come to know."""
        return held(self.version, self.flat.params, self._first, self.rule.state())

    def restore(self, state: dict[str, Any]) -> None:
        """Be where the updater was whose `state` this is."""
        self.flat.params.copy_(state["vectors"]["params"])
        self.version = state["version"]
        self._first.restore(known(state, "optimizer"))
        self.rule.restore(known(state, "rule")["vectors"])

    def step(self, *gradients: Gradient, lane: int = -1, mean: Tensor | None = None) -> Timed:
        """The optimizer's part of `apply`: no new version, nothing recorded."""
        # An optimizer makes its state in its first step: a second one beside it would find it half made.
        with nullcontext() if self._begun else self._fabric.lock("first step"):
            way = self.lane(lane)
            if self._by_tensor:
                done = self._step_by_tensor(way, gradients)
            else:
                done = self._fabric.timed("apply", lambda: self._step(way, gradients, mean))
            self._begun = True
        return done

    def _step_by_tensor(self, way: Lane, gradients: tuple[Gradient, ...]) -> Timed:
        """Tensor by tensor, each under its lock. Where tasks take turns it becomes visible in one moment, the last."""
        at_once, last, done = not self._fabric.parallel, len(way.parts) - 1, []
        sizes = [shape.numel() for shape in self.flat.shapes]
        if not at_once:
            self._take(way, gradients)
        for i, part in enumerate(way.parts):
            whole = (lambda: self._step(way, gradients, None)) if i == last else lambda: None
            with self._fabric.lock(f"tensor {i}"):
                done.append(self._fabric.timed("apply", whole if at_once else part.step, sizes[i] / sum(sizes)))
        return Timed(None, done[0].start_s, done[-1].end_s)

    def record(self, done: Timed, version: int, *gradients: Gradient) -> None:
        """Say in the trace that `gradients` became part of `version`."""
        for g in gradients:
            self._fabric.record("apply", done.start_s, done.end_s, version=version, **g.facts)

    def _step(self, way: Lane, gradients: tuple[Gradient, ...], mean: Tensor | None) -> None:
        if mean is None:
            self._take(way, gradients)
        else:
            way.take(mean, self._factor(gradients))
        for part in way.parts:
            part.step()

    def _take(self, way: Lane, gradients: tuple[Gradient, ...]) -> None:
        ages = [self.version - g.read for g in gradients]
        read = [self.flat.params if g.at is None else g.at for g in gradients]
        mean, factor = self.rule.combine([g.values for g in gradients], ages, read, self.flat.params)
        way.take(mean, factor * self._factor(gradients))

    def _factor(self, gradients: tuple[Gradient, ...]) -> float:
        return self.rate(self.version, gradients[-1].step if gradients else -1)
