"""Hogwild: no server, no message, no lock. Each worker applies its own gradients to parameters that all share.

Put it beside `async_ps.py`: what the server's threads do there, the workers' processes do here. The hard idea is
that nothing keeps them apart. A step writes one element after the other; where two workers meet at an element, one
of the two changes is lost, and everything else of both is kept.
"""

from copy import copy
from dataclasses import dataclass
from typing import Any

from distlab.fabric import Fabric, Peer
from distlab.fabric.base import ALWAYS
from distlab.flat import Flat, local_state
from distlab.roles.updater import Gradient, Lane, Params, Rate, held
from distlab.strategies.base import Job, Layout, Outcome, Strategy, worker_of

READY, BEGUN, DONE = range(3)  # the shared counts: are there parameters; updates that began; those that are complete


@dataclass(frozen=True, kw_only=True, repr=False)
class Hogwild(Strategy):
    """Each worker computes on a copy of the shared parameters and steps on the parameters themselves.

    It costs no message: a round is a copy of the parameters, a gradient and a step. In return all workers must be on
    one host, and a real run is never the same twice.

    Who applies: each worker, its own gradients, with an optimizer of its own: momentum and Adam's averages know that
        worker's gradients alone, as in PyTorch's "hogwild" example. Parameters and version are shared.
    What is dropped: nothing on purpose; single elements of updates that meet another's are lost.
    Assumes: that old gradients still help (N equal workers settle at staleness N - 1), and that workers seldom write
        the same element at the same moment, or single elements of updates are lost. The paper's rates need sparse
        gradients; dense ones share every element.
    If a worker dies: the others go on, whoever it was. An update that it was in the middle of stays in the parameters
        as far as it came and is never counted: the run then ends one version short. Its last 50 ms may be missing
        from a real trace.

    Source: Niu, Recht, Ré and Wright, "Hogwild!", 2011, section 3.
    """

    def layout(self, num_workers: int) -> Layout:
        return Layout({"worker": num_workers})

    def gradients_per_update(self, num_workers: int) -> int:
        return 1

    fixed = ""
    one_host = "its workers share memory"

    def survives(self, peer: Peer) -> bool:
        return True

    def run(self, fabric: Fabric, job: Job) -> Outcome:
        worker = worker_of(fabric, job)
        memory = Memory(fabric, job, worker.flat)
        for batch in worker.batches():
            gradient = worker.gradient(memory.read(), batch)
            memory.apply(gradient)  # the worker applies: no server, and no lock around it
            worker.ended = memory.over or fabric.stopping
        last = memory.read()  # who ends last sees every update
        return Outcome(last.values, last.version, local_state(worker.model), worker.step)


class Memory:
    """The shared parameters, as one worker sees them.

    Never do more than `num_updates` updates begin. The version counts those that are complete.
    """

    def __init__(self, fabric: Fabric, job: Job, flat: Flat) -> None:
        self.fabric, self.job, self.flat = fabric, job, flat
        self.shared = fabric.shared("params", flat.size, flat.dtype)
        self.counts, whole = self.shared.counts, copy(flat)
        whole.params = self.shared.values  # so that the optimizer's steps write there
        self.lane, self.rate = Lane(job.task, whole, None), Rate(fabric, job.task)
        fabric.saver.own("lane", self.lane.state, self.lane.restore)
        fabric.saver.common(flat.ranges, self.state, self.restore)
        with self.shared.lock:
            if not self.counts[READY]:  # only the first to come: a late one would undo what was learnt
                self.shared.values.copy_(flat.params)
                self.counts[READY] = 1

    @property
    def over(self) -> bool:
        """No further update will begin."""
        return int(self.counts[BEGUN]) >= self.job.num_updates

    def state(self) -> dict[str, Any]:
        """The parameters and how many updates are complete: at least those are in them."""
        version = int(self.counts[DONE])
        return held(version, self.shared.values, None, {})

    def restore(self, state: dict[str, Any]) -> None:
        """Begin from there, unless others have begun."""
        with self.shared.lock:
            if not self.counts[READY]:
                self.shared.values.copy_(state["vectors"]["params"])
                self.counts[READY], self.counts[BEGUN], self.counts[DONE] = 1, state["version"], state["version"]

    def read(self) -> Params:
        """The worker's copy. Its version is counted first: the copy may hold parts of newer updates, but lacks none."""
        version = int(self.counts[DONE])
        return Params(self.flat.params.copy_(self.shared.values), version)

    def apply(self, gradient: Gradient) -> None:
        """Apply `gradient` as one update, or record it as unused if the last one has begun."""
        done = self.fabric.timed("apply", lambda: self._step(gradient), idle=ALWAYS)
        kind, version = ("apply", done.value) if done.value else ("unused", int(self.counts[DONE]))
        self.fabric.record(kind, done.start_s, done.end_s, version=version, **gradient.facts)
        self.fabric.saver.reached(version)

    def _step(self, gradient: Gradient) -> int:
        with self.shared.lock:  # held to count, and never while parameters are written
            if self.over:
                return 0
            self.counts[BEGUN] += 1
            version = int(self.counts[DONE])
        self.lane.step(gradient.values, self.rate(version, gradient.step))
        with self.shared.lock:
            self.counts[DONE] += 1
            return int(self.counts[DONE])
