"""Replay: a run, done again from its tape, one gradient after the other, in one process.

If "asynchronous training is SGD with old gradients" is true, then the order in which gradients were applied and the
versions they were read at are *all* there is to know: computing the same gradients at the same old parameters and
applying them in the same order must give the same parameters, to the last bit. Replay does that. And because it is
only a tape, it can be edited: another learning rate, a worker left out, the same arrivals.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from distlab.collectives import serial_all_reduce
from distlab.data import Stream, pieces
from distlab.flat import Flat, local_state
from distlab.randomness import Randomness, undisturbed
from distlab.roles.updater import Lane
from distlab.strategies.base import model_of
from distlab.task import Task, pair
from distlab.trace import ROLES, Trace


@dataclass(frozen=True, eq=False)
class Replay:
    """What a replay came to.

    Attributes:
        params: (size,) the final parameters.
        losses: version -> mean loss of the gradients in it.
        local: the chief's buffers and frozen parameters.
    """

    task: Task
    params: Tensor
    losses: dict[int, float]
    local: dict[str, Tensor]

    def __repr__(self) -> str:
        return f"Replay({len(self.losses)} updates of {self.task!r})"

    @property
    def model(self) -> nn.Module:
        """A module with these parameters and buffers, in eval mode."""
        return model_of(self.task, self.params, self.local).eval()

    def evaluate(self, samples: Any = None) -> dict[str, float]:
        """Mean loss and metrics on the validation data, or on `samples`."""
        return self.task.evaluate(self.model, samples)


@dataclass(frozen=True)
class Line:
    """One line of the tape: a version, and the gradients that made it, as (worker, step, read)."""

    version: int
    gradients: tuple[tuple[int, int, int], ...]


def tape(trace: Trace) -> list[Line]:
    """The updates of a trace, in order."""
    lines: dict[int, dict[tuple[int, int], int]] = defaultdict(dict)
    for version, worker, step, read in trace.select("apply")[["version", "worker", "step", "read"]].tolist():
        lines[version].setdefault((worker, step), read)
    return [Line(v, tuple((w, s, r) for (w, s), r in sorted(lines[v].items()))) for v in sorted(lines)]


def replay(
    trace: Trace, task: Task, *, num_workers: int, lr: float | None = None, without_worker: int | None = None
) -> Replay:
    """Do a run again from its trace, serially.

    Unedited, it ends at the run's parameters bit for bit, if every read was of whole versions: any simulated run,
    and real ones but `AsyncPS(locking="none")` and `Hogwild`, whose races no tape records.

    Args:
        num_workers: how many the stream of samples was dealt to.
        lr: another learning rate, for the same arrivals.
        without_worker: leave this worker's gradients out; the others arrive as they did.

    Raises:
        ValueError: the trace holds no update, `without_worker` is not on it, or a gradient was read at a version
            that is not.
    """
    lines = tape(trace)
    if not lines:
        raise ValueError("this trace holds no update: there is nothing to replay")
    if lr is not None and not 0 < lr < float("inf"):
        raise ValueError(f"lr must be positive and finite, got {lr}")
    authors = {worker for line in lines for worker, _, _ in line.gradients}
    if without_worker is not None and without_worker not in authors:
        raise ValueError(f"without_worker={without_worker!r}: this tape has gradients of workers {sorted(authors)}")
    with undisturbed():
        player = Player(trace, task, num_workers, lr)
        losses = {}
        for line in lines:
            kept = [g for g in line.gradients if g[0] != without_worker]
            losses[line.version] = player.play(line.version, kept)
        player.finish()
    return Replay(task, player.latest.clone(), losses, player.local)


class Player:
    """Plays a tape: the versions that are still read, and every worker's model, buffers and random numbers."""

    def __init__(self, trace: Trace, task: Task, num_workers: int, lr: float | None) -> None:
        self.task, self.num_workers, self.lr = task, num_workers, lr
        self.flat = Flat(task.build())
        self.lane = self._lane(self.flat)
        self.applied = 0
        self.latest = self.flat.params
        self.versions = {0: self.flat.params.clone()}
        self.workers: dict[int, Computer] = {}
        self.own_lanes: dict[int, Lane] = {}
        self.computes = reads(trace)
        self.last_use = last_uses(tape(trace), self.computes)
        has = {kind: len(trace.select(kind)) > 0 for kind in ("dispatch", "store", "reduce")}
        self.sums_in_a_ring = has["reduce"]
        self.rule = self._client if has["dispatch"] else self._worker if has["store"] else self._mean
        if not any(has.values()) and applies_its_own(trace):
            self.rule = self._own

    def play(self, version: int, gradients: list[tuple[int, int, int]]) -> float:
        """Make `version` from `gradients` (worker, step, read); returns their mean loss, nan if there are none."""
        loss = float("nan")
        if gradients:
            loss = self.rule(gradients)
            self.applied += 1
        self.versions[version] = self.latest.clone()
        for old in [v for v in self.versions if self.last_use.get(v, -1) <= version and v != version]:
            del self.versions[old]
        return loss

    def finish(self) -> None:
        """What the chief computed and nobody used still moved its buffers."""
        chief = min(self.computes)
        last = max(self.computes[chief], default=-1)
        if self.rule != self._client and self._computer(chief).step <= last:
            self._gradient(chief, last, self.computes[chief][last])

    @property
    def local(self) -> dict[str, Tensor]:
        """What is local to the chief: the first worker on the tape."""
        chief = self.workers[min(self.workers)].model if self.workers else self.task.build()
        return {name: tensor.clone() for name, tensor in local_state(chief).items()}

    def _mean(self, gradients: list[tuple[int, int, int]]) -> float:
        done = [self._gradient(*g) for g in gradients]
        values = [values for values, _ in done]
        if len(values) == 1:
            mean = values[0]
        elif self.sums_in_a_ring:
            mean = serial_all_reduce(values).div_(len(values))
        else:
            mean = torch.stack([v[: self.flat.size] for v in values]).mean(0)
        self._step(self.lane, mean[: self.flat.size], self.applied)
        return float(np.mean([loss for _, loss in done]))

    def _worker(self, gradients: list[tuple[int, int, int]]) -> float:
        """A worker applied it to what it had read, and wrote that back."""
        (worker, step, read), *_ = gradients
        values, loss = self._gradient(worker, step, read)
        flat = self._computer(worker).flat
        self._step(self._own_lane(worker, flat), values[: flat.size], read)
        self.latest = flat.params.clone()
        return loss

    def _own(self, gradients: list[tuple[int, int, int]]) -> float:
        """A worker applied it to what all share, with an optimizer of its own."""
        (worker, step, read), *_ = gradients
        values, loss = self._gradient(worker, step, read)
        self._step(self._own_lane(worker, self.flat), values[: self.flat.size], self.applied)
        return loss

    def _client(self, gradients: list[tuple[int, int, int]]) -> float:
        """The client cut one batch, and backward at the gather."""
        step, read = gradients[0][1:]
        whole = Stream(self.task.train, batch_size=self.task.batch_size * self.num_workers, seed=self.task.seed)
        batch = whole.batch(step)
        parts = pieces(pair(batch)[0], self.num_workers)
        computers = [self._computer(i) for i in range(len(parts))]
        outputs = [c.forward(self.versions[read], part) for c, part in zip(computers, parts, strict=True)]
        gathered = torch.cat([o.detach() for o in outputs]).requires_grad_()
        loss = self.task.loss_of(gathered, batch)
        grads = torch.autograd.grad(loss, gathered)[0].split([len(o) for o in outputs])
        values = [c.backward(o, g) for c, o, g in zip(computers, outputs, grads, strict=True)]
        self._step(self.lane, torch.stack(values).sum(0), self.applied)
        return loss.item()

    def _gradient(self, worker: int, step: int, read: int) -> tuple[Tensor, float]:
        """A worker's gradient of `step`, after all of its earlier ones: each draws random numbers, moves buffers."""
        computer, done = self._computer(worker), None
        while computer.step <= step:
            at = self.computes[worker][computer.step]
            if at not in self.versions:
                raise ValueError(f"worker {worker} read version {at} at step {computer.step}: not on this tape")
            done = computer.gradient(self.versions[at])
        assert done is not None, f"worker {worker}'s gradient of step {step} is on the tape twice"
        return done

    def _step(self, lane: Lane, mean: Tensor, version: int) -> None:
        lane.step(mean, self.task.lr_schedule(version) if self.task.lr_schedule else 1.0)

    def _own_lane(self, worker: int, flat: Flat) -> Lane:
        if worker not in self.own_lanes:
            self.own_lanes[worker] = self._lane(flat)
        return self.own_lanes[worker]

    def _lane(self, flat: Flat) -> Lane:
        lane = Lane(self.task, flat, None)
        if self.lr is not None:
            lane.rates = [self.lr] * len(lane.rates)
        return lane

    def _computer(self, worker: int) -> "Computer":
        if worker not in self.workers:
            self.workers[worker] = Computer(self.task, worker, self.num_workers)
        return self.workers[worker]


class Computer:
    """A worker of the tape: its model, its samples, its random numbers."""

    def __init__(self, task: Task, index: int, num_workers: int) -> None:
        self.task, self.step = task, 0
        self.model = task.build()
        self.model.train()
        self.flat = Flat(self.model)
        self.stream = Stream(
            task.train, batch_size=task.batch_size, index=index, num_workers=num_workers, seed=task.seed
        )
        self.randomness = Randomness(task.seed * 1_000_003 + index)

    def gradient(self, params: Tensor) -> tuple[Tensor, float]:
        """The next gradient (size + tail,) at `params`, and its loss."""
        self.flat.params.copy_(params)
        loss = self.randomness.around("compute", self._backward)
        self.step += 1
        return self.flat.message.clone(), loss

    def _backward(self) -> float:
        batch = self.stream.batch(self.step)
        self.flat.grads.zero_()
        loss = self.task.loss_of(self.task.outputs(self.model, batch), batch)
        loss.backward()
        return loss.item()

    def forward(self, params: Tensor, inputs: Any) -> Tensor:
        """A replica's outputs."""
        self.flat.params.copy_(params)
        return self.randomness.around("compute", lambda: self.task.outputs(self.model, (inputs, None)))

    def backward(self, outputs: Tensor, gradient: Tensor) -> Tensor:
        """A replica's gradient (size,)."""
        self.flat.grads.zero_()
        self.randomness.around("compute", lambda: outputs.backward(gradient))
        return self.flat.grads.clone()


def applies_its_own(trace: Trace) -> bool:
    """Did each worker apply its own gradients, and nobody another's?"""
    rows = trace.select("apply")
    return bool(((rows["role"] == ROLES.index("worker")) & (rows["index"] == rows["worker"])).all())


def reads(trace: Trace) -> dict[int, dict[int, int]]:
    """worker -> step -> the version that this gradient was computed at."""
    found: dict[int, dict[int, int]] = defaultdict(dict)
    for worker, step, read in trace.select("compute")[["worker", "step", "read"]].tolist():
        found[worker][step] = read
    return found


def last_uses(lines: list[Line], computes: dict[int, dict[int, int]]) -> dict[int, int]:
    """version -> the last version whose making needs it: a gradient is computed when its worker's next one is."""
    uses: dict[int, int] = defaultdict(int)
    done: dict[int, int] = defaultdict(int)
    for line in lines:
        for worker, step, _ in line.gradients:
            for earlier in range(done[worker], step + 1):
                read = computes[worker].get(earlier, -1)
                uses[read] = max(uses[read], line.version)
            done[worker] = step + 1
    chief = min(computes, default=0)
    for step in set(computes[chief]) - set(range(done[chief])):
        uses[computes[chief][step]] = lines[-1].version + 1
    return uses
