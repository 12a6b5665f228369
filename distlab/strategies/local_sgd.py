"""Local SGD: every worker trains alone for H steps, then all average their parameters. DiLoCo, with an outer optimizer.

Put it beside `all_reduce.py`: it sends H times less often. The hard idea is what is averaged: how far each worker has
come since the last round. Seen from outside, that mean is one big gradient, and an outer optimizer may take it as such.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distlab.collectives import ALGORITHMS
from distlab.fabric import Fabric
from distlab.fabric.base import Timed
from distlab.flat import Flat, Vector, local_state
from distlab.options import check_count, check_word
from distlab.roles.exchange import Exchange
from distlab.roles.rank import Rank
from distlab.roles.updater import Gradient, Lane, Params, Updater
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
    If a worker dies: the run ends with an error that names it.

    Args:
        every: H, the steps of a round.
        outer: a factory of the optimizer that applies the mean move, such as SGD with Nesterov momentum (DiLoCo);
            None: it is applied as it is. It multiplies the effective learning rate: compare at matched rates.
        algorithm: of the all-reduce, as for `AllReduce`.

    Source: Stich 2019; Douillard et al. 2023 (DiLoCo), algorithm 1.
    """

    every: int = 8
    outer: Callable[[list[Any]], torch.optim.Optimizer] | None = None
    algorithm: str = "auto"

    promises = ("fresh", "enough", "identical replicas")

    def __post_init__(self) -> None:
        check_count("every", self.every)
        check_word("algorithm", self.algorithm, ALGORITHMS)
        if self.outer is not None and not callable(self.outer):
            raise TypeError(f"outer must be a factory of an optimizer, got {self.outer!r}")

    def layout(self, num_workers: int) -> Layout:
        return Layout({"worker": num_workers}, [("worker", "worker")])

    def gradients_per_update(self, num_workers: int) -> int:
        return num_workers * self.every

    def exchange(self, flat: Flat) -> Exchange:
        """How a rank's moves become their sum."""
        return Exchange(flat, self.algorithm)

    def run(self, fabric: Fabric, job: Job) -> Outcome:
        worker = worker_of(fabric, job)
        flat, updater = worker.flat, Updater(fabric, job.task, worker.flat)
        rank, rounds = Rank(worker, self.exchange(flat)), Rounds(job.task, flat, self.outer)
        mine: list[Gradient] = []
        for batch in worker.rounds():
            if batch is not USED_UP:
                mine.append(worker.gradient(Params(flat.params, updater.version), batch))
                done = updater.step(mine[-1])
                fabric.record("local", done.start_s, done.end_s, version=updater.version, **mine[-1].facts)
            if len(mine) == self.every or batch is USED_UP:
                torch.sub(flat.params, rounds.start.params, out=flat.grads)
                somebody, enough = rank.mean(contributes=int(bool(mine)))
                if somebody:
                    rounds.end(flat.grads, flat.params)
                    updater.version += 1
                now = fabric.now()
                updater.record(Timed(None, now, now), updater.version, *mine)
                mine = []
                worker.ended = updater.version >= job.num_updates or enough or not somebody
        return Outcome(flat.params, updater.version, local_state(worker.model), worker.step)


class Rounds:
    """Where the round began, and what makes the next beginning of the mean move."""

    def __init__(self, task: Task, flat: Flat, outer: Callable[[list[Any]], torch.optim.Optimizer] | None) -> None:
        self.start = Vector(flat.shapes, flat.dtype)
        self.start.params.copy_(flat.params)
        self._lane = None if outer is None else Lane(task.but(optimizer=outer), self.start, None)

    def end(self, move: Tensor, params: Tensor) -> None:
        """Apply the mean `move` (size,) to where the round began, and let `params` be there too."""
        if self._lane is None:
            self.start.params.add_(move)
        else:
            self._lane.step(move.neg_())
        params.copy_(self.start.params)
