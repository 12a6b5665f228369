"""`TorchrunCluster`: the ranks of torchrun, on one host or many. Every rank runs the same script.

The script's own processes train nothing: rank 0's leads the run, as a notebook does on one host, and those of the other
ranks follow it, which is to start the processes that live on their hosts and to carry their words. In the end all ranks
return the same run. The hard idea is that a task never travels: every rank has made its own, by the same lines, and
only what they say of it is compared. So no rank has to trust what another could pickle.
"""

import os
from contextlib import suppress

from distlab.clusters.base import ONLY_SIMULATED, Cluster, Launched, Sink
from distlab.clusters.crew import Crew, call_of
from distlab.clusters.follower import Follower
from distlab.clusters.leader import Everywhere, Reports
from distlab.clusters.member import warm
from distlab.clusters.processes import Processes
from distlab.clusters.scenario import Scenario, check_scenario, sentence
from distlab.errors import DistlabError, ProcessLost
from distlab.fabric.network import Change
from distlab.options import check_positive, check_seconds
from distlab.strategies.base import Job, Strategy

ASKED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class TorchrunCluster(Scenario, Cluster):
    """One worker on every rank that torchrun has started; servers go round the ranks, the in-graph client is on rank 0.

    Make it, and call `train`, on every rank alike: ``torchrun --nproc-per-node 4 script.py``. All ranks get the same
    run. What workers print, checkpoints and event files are rank 0's affair (`is_chief`), and so are `LiveRun.stop` and
    scenarios. A run waits until every rank has called for it.

    Args:
        compute_time_s: as for `LocalCluster`.
        failure_timeout_s: also how long a host may be silent before its processes are taken for dead.

    Raises:
        DistlabError: torchrun has not started this script.
        ProcessLost: a rank has not come.
    """

    def __init__(self, *, compute_time_s: float = 0.0, failure_timeout_s: float = 30.0) -> None:
        self.compute_time_s = check_seconds("compute_time_s", compute_time_s)
        self.failure_timeout_s = check_positive("failure_timeout_s", failure_timeout_s)
        if missing := [name for name in ASKED if name not in os.environ]:
            raise DistlabError(
                f"TorchrunCluster needs torchrun, as in `torchrun --nproc-per-node 4 script.py` ({missing[0]} is not "
                f"set): on one host, LocalCluster needs nothing"
            )
        self._crew = Crew(failure_timeout_s)
        self.num_workers = self._crew.size
        warm()

    def __repr__(self) -> str:
        padded = f"compute_time_s={self.compute_time_s:g}" if self.compute_time_s else ""
        return f"TorchrunCluster({padded}) of {self.num_workers}" + "".join(map(sentence, self.changes))

    @property
    def is_chief(self) -> bool:  # type: ignore[override]
        return self._crew.rank == 0

    def _with(self, changes: tuple[Change, ...]) -> "TorchrunCluster":
        other = object.__new__(type(self))
        vars(other).update(vars(self), changes=changes)
        return other

    def launch(self, strategy: Strategy, job: Job, sink: Sink, *, paused: bool = False) -> Launched:
        if paused:
            raise ValueError(ONLY_SIMULATED)
        if strategy.simulated_only:
            raise ValueError(f"on real processes this cannot be had: {strategy.simulated_only}")
        if strategy.one_host and not self._crew.on_one_host:
            raise ValueError(f"{strategy!r} cannot run on several hosts: {strategy.one_host}")
        self.check_open()
        check_scenario(self.changes, strategy, self.num_workers)
        said = call_of(strategy, job, repr(self))
        if not self.is_chief:
            return Follower(self._crew, strategy, job, sink, said)
        self._crew.gather(said)
        reports = Reports(sink, self._crew, job.begin)
        return Processes(job, strategy, self, reports, Everywhere(self._crew, reports))

    def call_off(self, error: BaseException) -> None:
        with suppress(ProcessLost):
            self._crew.calls()
            self._crew.refuse(error)

    def close(self) -> None:
        super().close()
        self._crew.close()
