"""One worker, no network: plain PyTorch training. Every other strategy is held against this one."""

from collections.abc import Sequence
from dataclasses import dataclass

from distlab.fabric import Fabric
from distlab.flat import local_state
from distlab.roles.updater import Params, Updater
from distlab.strategies.base import Job, Layout, Outcome, Strategy, worker_of


@dataclass(frozen=True, kw_only=True, repr=False)
class SingleWorker(Strategy):
    """Worker 0 alone; the cluster's other workers are not started.

    Who applies: the worker itself, to its own model.
    What is dropped: nothing.
    Assumes: nothing. The same bits as a plain PyTorch loop over the same batches.
    If the worker dies: the run is over.
    """

    promises = ("fresh", "enough", "distinct")

    def layout(self, num_workers: int) -> Layout:
        return Layout({"worker": 1})

    def gradients_per_update(self, num_workers: int) -> int:
        return 1

    def most_updates(self, num_batches: Sequence[int]) -> int:
        return num_batches[0]

    def run(self, fabric: Fabric, job: Job) -> Outcome:
        worker = worker_of(fabric, job, num_workers=1)
        updater = Updater(fabric, job.task, worker.flat)
        for batch in worker.batches():
            gradient = worker.gradient(Params(worker.flat.params, updater.version), batch)
            version = updater.apply(gradient)
            worker.ended = version >= job.num_updates or fabric.stopping
        return Outcome(worker.flat.params, updater.version, local_state(worker.model), worker.step)
