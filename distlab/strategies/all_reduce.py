"""Synchronous all-reduce: no server. Every worker holds the model, all sum their gradients, all apply the sum.

The replicas never exchange parameters after the start: they stay equal because they apply the same update.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from distlab.collectives import ALGORITHMS
from distlab.compression import Compression, check_compression
from distlab.fabric import Fabric
from distlab.flat import Flat, local_state
from distlab.options import check_bool, check_count, check_word
from distlab.roles.exchange import CompressedExchange, Exchange
from distlab.roles.rank import Rank
from distlab.roles.torch_rank import TorchRank
from distlab.roles.updater import Gradient, Params, Updater
from distlab.roles.worker import USED_UP
from distlab.strategies.base import Job, Layout, Outcome, Strategy, worker_of


@dataclass(frozen=True, kw_only=True, repr=False)
class AllReduce(Strategy):
    """Each step: compute, all-reduce, apply. One message holds the gradient, a count and the votes to stop.

    Who applies: every worker, the same update; the replicas hold the same bits after every step.
    What is dropped: nothing. A worker whose data is used up no longer counts; the mean is over the real gradients.
    Assumes: mean loss, equal batches, no dropout or BatchNorm, to equal a batch N times as large (`accumulate` times
        that). With `compression` each update is another one, and only their sum comes to the same.
    If a worker dies: the others go on as a new group, from the last common step; see `on_too_few`. Whatever the group,
        the samples that come next are dealt to those that are there.

    Args:
        algorithm: how the sum is made, see `collectives`: "ring", "tree", "halving-doubling", "recursive doubling",
            "rank 0"; "auto" takes few messages for small models and few bytes for large ones.
        overlap: sum the gradients of the last layers while backward still computes those of the first.
        bucket_bytes: ... in buckets of so many bytes, the first at most 1 MiB; a parameter is never split.
        accumulate: an update holds so many gradients of each worker, which are summed there before all are (DDP's
            `no_sync`).
        compression: send less, such as `TopK(share=0.01)`. What is left out is added to the next gradient.
        on_too_few: what to do when one has died: "shrink" the group to those that are left, or "stop" with an error
            that names it. One that comes back is given the state of another.
        engine: "ddp" lets torch's DistributedDataParallel do it, for comparison: on real processes, with the data of
            the worker that has the least; its sums have their own order, so a replay ends close by, not at the bits.

    Source: Li et al. 2020, PyTorch Distributed, section 3.2.
    """

    algorithm: str = "auto"
    overlap: bool = True
    bucket_bytes: int = 25 << 20
    accumulate: int = 1
    compression: Compression | None = None
    on_too_few: Literal["shrink", "stop"] = "shrink"
    engine: Literal["distlab", "ddp"] = "distlab"

    def __post_init__(self) -> None:
        check_word("algorithm", self.algorithm, ALGORITHMS)
        check_bool("overlap", self.overlap)
        check_count("bucket_bytes", self.bucket_bytes)
        check_count("accumulate", self.accumulate)
        check_word("on_too_few", self.on_too_few, ("shrink", "stop"))
        if self.compression is not None:
            check_compression(self.compression)
        if check_word("engine", self.engine, ("distlab", "ddp")) == "ddp":
            own = {"algorithm": "auto", "overlap": True, "compression": None}
            for name, usual in own.items():
                if getattr(self, name) != usual:
                    raise ValueError(
                        f'{name}={getattr(self, name)!r} says how distlab sums; engine="ddp" does it alone'
                    )

    @property
    def promises(self) -> tuple[str, ...]:  # type: ignore[override]
        distinct = ("distinct",) if self.accumulate == 1 else ()
        return ("fresh", "enough", "identical replicas", *distinct)

    @property
    def shrinks(self) -> bool:  # type: ignore[override]
        return self.on_too_few == "shrink" and self.engine != "ddp"

    @property
    def fixed(self) -> str:  # type: ignore[override]
        return 'engine="ddp" makes its group once' if self.engine == "ddp" else ""

    @property
    def real_only(self) -> str:  # type: ignore[override]
        return 'engine="ddp": torch\'s own engine knows no virtual clock' if self.engine == "ddp" else ""

    def layout(self, num_workers: int) -> Layout:
        return Layout({"worker": num_workers}, [("worker", "worker")])

    def gradients_per_update(self, num_workers: int) -> int:
        return num_workers * self.accumulate

    def most_updates(self, num_batches: Sequence[int]) -> int:
        if self.engine != "ddp":
            return sum(num_batches)
        if min(num_batches) < self.accumulate:
            raise ValueError(f"num_batches={num_batches}: with accumulate={self.accumulate} no update is ever complete")
        return min(num_batches) // self.accumulate

    def exchange(self, flat: Flat) -> Exchange:
        """How a rank's gradients become their sum."""
        if self.compression is not None:
            return CompressedExchange(flat, self.compression)
        return Exchange(flat, self.algorithm, self.bucket_bytes if self.overlap else None)

    def run(self, fabric: Fabric, job: Job) -> Outcome:
        worker = worker_of(fabric, job)
        updater = Updater(fabric, job.task, worker.flat)
        rank: Any = None
        if self.engine == "ddp":
            rank = TorchRank(worker, updater.rate, self.bucket_bytes)
        else:
            rank = Rank(worker, self.exchange(worker.flat), updater)
        mine: list[Gradient] = []
        for batch in worker.rounds():
            params = Params(worker.flat.params, updater.version)
            if batch is not USED_UP:
                is_last = len(mine) + 1 == self.accumulate
                parts = rank.begin(contributes=self.accumulate) if is_last else None
                mine.append(worker.gradient(params, batch, add=bool(mine), parts=parts))
            if len(mine) == self.accumulate or batch is USED_UP:
                somebody, over = rank.mean(mine, contributes=len(mine))
                if somebody:
                    updater.apply(*mine, mean=worker.flat.grads)
                worker.ended = over or updater.version >= job.num_updates or rank.part()
                mine = []
        rank.leave()
        return Outcome(worker.flat.params, updater.version, local_state(worker.model), worker.step)
