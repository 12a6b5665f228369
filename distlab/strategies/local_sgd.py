"""Local SGD: every worker trains alone for H steps, then all average their parameters. DiLoCo, with an outer optimizer.

Put it beside `all_reduce.py`: it sends H times less often. The hard idea is what is averaged: how far each worker has
come since the last round. Seen from outside, that mean is one big gradient, and an outer optimizer may take it as such.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from distlab.collectives import ALGORITHMS
from distlab.fabric import Fabric
from distlab.fabric.base import Timed
from distlab.flat import Flat, Vector, local_state, trainable
from distlab.options import check_count, check_word
from distlab.roles.exchange import Exchange
from distlab.roles.rank import Rank
from distlab.roles.updater import Gradient, Lane, Params, Rate, Updater, held, known
from distlab.roles.worker import USED_UP
from distlab.strategies.base import Job, Layout, Outcome, Strategy, worker_of
from distlab.task import Task


@dataclass(frozen=True, kw_only=True, repr=False)
class LocalSGD(Strategy):
    """A round: `every` steps of each worker's own optimizer, then the mean of what they came to. Versions count rounds.

    Who applies: every worker, to its own copy; after a round all hold the same bits.
    What is dropped: nothing. A worker whose data is used up no longer counts in the mean.
    Assumes: that workers which go apart for a while still agree: on a quadratic that all share, the mean path is that
        of synchronous SGD; where their data differs, many local steps end elsewhere. `every=1` with plain SGD equals
        `AllReduce`. The inner optimizer's state stays with its worker.
    If a worker dies: the others go on as a new group, with the mean of their own moves; see `on_too_few`.

    Args:
        every: H, the steps of a round.
        outer: a factory of the optimizer that applies the mean move, such as SGD with Nesterov momentum (DiLoCo);
            None: it is applied as it is. It multiplies the effective learning rate: compare at matched rates.
        algorithm, on_too_few: as for `AllReduce`.

    Source: Stich 2019; Douillard et al. 2023 (DiLoCo), algorithm 1.
    """

    every: int = 8
    outer: Callable[[list[Any]], torch.optim.Optimizer] | None = None
    algorithm: str = "auto"
    on_too_few: Literal["shrink", "stop"] = "shrink"

    fixed = ""
    promises = ("fresh", "enough", "identical replicas")

    def __post_init__(self) -> None:
        check_count("every", self.every)
        check_word("algorithm", self.algorithm, ALGORITHMS)
        check_word("on_too_few", self.on_too_few, ("shrink", "stop"))
        if self.outer is not None and not callable(self.outer):
            raise TypeError(f"outer must be a factory of an optimizer, got {self.outer!r}")

    def check_task(self, task: Task) -> None:
        if self.outer is not None:
            try:
                task.but(optimizer=self.outer).check_optimizer([p for _, p in trainable(task.build())])
            except (TypeError, ValueError) as error:
                raise type(error)(f"outer: {error}") from error

    @property
    def shrinks(self) -> bool:  # type: ignore[override]
        return self.on_too_few == "shrink"

    def optimizer(self, task: Task) -> Callable[..., Any] | None:
        return self.outer

    def layout(self, num_workers: int) -> Layout:
        return Layout({"worker": num_workers}, [("worker", "worker")])

    def gradients_per_update(self, num_workers: int) -> int:
        return num_workers * self.every

    def exchange(self, flat: Flat) -> Exchange:
        """How a rank's moves become their sum."""
        return Exchange(flat, self.algorithm)

    def run(self, fabric: Fabric, job: Job) -> Outcome:
        worker = worker_of(fabric, job)
        flat, updater = worker.flat, Updater(fabric, job.task, worker.flat, common=False)
        rounds = Rounds(job.task, flat, self.outer)
        rounds.rate = updater.rate
        fabric.saver.common(flat.ranges, rounds.state, rounds.restore)
        fabric.saver.own("inner", updater.lane(-1).state, updater.lane(-1).restore)
        rank = Rank(worker, self.exchange(flat), rounds, keeps=True)
        rounds.begin(flat.params)
        mine: list[Gradient] = []
        for batch in worker.rounds():
            updater.version = rounds.version  # a schedule counts rounds
            if batch is not USED_UP:
                mine.append(worker.gradient(Params(flat.params, rounds.version), batch))
                done = updater.step(mine[-1])
                fabric.record("local", done.start_s, done.end_s, version=rounds.version, **mine[-1].facts)
            if len(mine) == self.every or batch is USED_UP:
                somebody, over = rank.mean(mine, contributes=int(bool(mine)), fill=rounds.move)
                if somebody:
                    rounds.end(flat.grads)
                    now = fabric.now()
                    updater.record(Timed(None, now, now), rounds.version, *mine)
                    fabric.saver.reached(rounds.version)
                worker.ended = over or rounds.version >= job.num_updates or rank.part()
                mine = []
        rank.leave()
        return Outcome(flat.params, rounds.version, local_state(worker.model), worker.step)


class Rounds:
    """Where the round began, and what makes the next beginning of the mean move.

    Attributes:
        version: how many rounds have ended.
        start: where all workers were when this one began.
        rate: the factor of the inner learning rate.
    """

    rate: Rate

    def __init__(self, task: Task, flat: Flat, outer: Callable[[list[Any]], torch.optim.Optimizer] | None) -> None:
        self.version, self.start, self._flat = 0, Vector(flat.shapes, flat.dtype), flat
        self._lane = None if outer is None else Lane(task.but(optimizer=outer), self.start, None)

    def begin(self, params: Tensor) -> None:
        """The first round begins at `params` (size,), unless others have begun already."""
        if not self.version:
            self.start.params.copy_(params)

    def move(self) -> None:
        """Write how far this worker has come into its gradients' buffer."""
        torch.sub(self._flat.params, self.start.params, out=self._flat.grads)

    def end(self, move: Tensor) -> None:
        """Apply the mean `move` (size,) to where the round began, and let the worker's parameters be there too."""
        if self._lane is None:
            self.start.params.add_(move)
        else:
            self._lane.step(move.neg_())
        self._flat.params.copy_(self.start.params)
        self.version += 1

    def state(self) -> dict[str, Any]:
        """Where the round began, and the outer optimizer's state."""
        return held(self.version, self.start.params, self._lane, {})

    def restore(self, state: dict[str, Any]) -> None:
        """Begin the round of another worker's `state`."""
        for params in (self.start.params, self._flat.params):
            params.copy_(state["vectors"]["params"])
        self.version = state["version"]
        if self._lane is not None:
            self._lane.restore(known(state, "optimizer"))
