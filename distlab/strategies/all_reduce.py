"""Synchronous all-reduce: no server. Every worker holds the model, all sum their gradients, all apply the sum.

The replicas never exchange parameters after the start: they stay equal because they apply the same update.
"""

from dataclasses import dataclass

from distlab.collectives import ALGORITHMS
from distlab.fabric import Fabric
from distlab.flat import local_state
from distlab.options import check_word
from distlab.roles.rank import Rank
from distlab.roles.updater import Params, Updater
from distlab.roles.worker import USED_UP
from distlab.strategies.base import Job, Layout, Outcome, Strategy, worker_of


@dataclass(frozen=True, kw_only=True, repr=False)
class AllReduce(Strategy):
    """Each step: compute, all-reduce, apply. One message holds the gradient, a count and the votes to stop.

    Who applies: every worker, the same update; the replicas hold the same bits after every step.
    What is dropped: nothing. A worker whose data is used up no longer counts; the mean is over those that have some.
    Assumes: mean loss, equal batches, no dropout or BatchNorm, to equal a batch N times as large.
    If a worker dies: the run ends with an error that names it.

    Args:
        algorithm: how the sum is made, see `collectives`: "ring", "tree", "halving-doubling", "recursive doubling",
            "rank 0"; "auto" takes few messages for small models and few bytes for large ones.
    """

    algorithm: str = "auto"

    def __post_init__(self) -> None:
        check_word("algorithm", self.algorithm, ALGORITHMS)

    promises = ("fresh", "enough", "distinct", "identical replicas")

    def layout(self, num_workers: int) -> Layout:
        return Layout({"worker": num_workers}, [("worker", "worker")])

    def run(self, fabric: Fabric, job: Job) -> Outcome:
        worker = worker_of(fabric, job)
        updater, rank = Updater(fabric, job.task, worker.flat), Rank(worker, self.algorithm)
        for batch in worker.rounds():
            params = Params(worker.flat.params, updater.version)
            mine = [] if batch is USED_UP else [worker.gradient(params, batch)]
            somebody, enough = rank.mean(contributes=bool(mine))
            if somebody:
                updater.apply(*mine, mean=worker.flat.grads)
            worker.ended = updater.version >= job.num_updates or enough or not somebody
        return Outcome(worker.flat.params, updater.version, local_state(worker.model), worker.step)
