"""See how distributed training works; then import it in your own experiments.

A run is a task, a strategy and a cluster:

    import distlab as dl

    run = dl.train(dl.tasks.digits(), dl.AsyncPS(), dl.LocalCluster(num_workers=4), num_updates=400)
    run.history, run.trace, run.model, run.evaluate()
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from distlab import tasks, theory
from distlab.check import PromiseBroken, check_strategy
from distlab.checkpoint import BadCheckpoint, Checkpoint, latest_checkpoint, load_checkpoint
from distlab.clusters import Cluster, LocalCluster, SimulatedCluster, TorchrunCluster
from distlab.compression import TopK
from distlab.devices import Device, on
from distlab.errors import (
    BadMessage,
    Deadlock,
    DistlabError,
    DivergenceWarning,
    NonFiniteLoss,
    PeerLost,
    ProcessLost,
    RemoteError,
)
from distlab.fabric import laws
from distlab.fabric.network import Network
from distlab.live import LiveRun
from distlab.reports import compare
from distlab.rules import DelayCompensation
from distlab.run import Run, load_run
from distlab.strategies import (
    AllReduce,
    AsyncPS,
    BroadcastGradients,
    Hogwild,
    InGraph,
    LocalSGD,
    ParameterServerStrategy,
    SingleWorker,
    Strategy,
    SyncPS,
    WorkerApplies,
)
from distlab.task import Task, accuracy
from distlab.trace import Event, Trace
from distlab.train import start, train

if TYPE_CHECKING:
    from distlab.dashboard import Explorer as Explorer

__version__ = "0.1.0"

#: What needs ipywidgets and matplotlib: imported when it is first asked for, and by no star.
LATE = {"Explorer": "distlab.dashboard"}

__all__ = [  # noqa: RUF022  # in the order in which the lessons meet them
    "tasks",
    "Task",
    "accuracy",
    "LocalCluster",
    "AsyncPS",
    "DelayCompensation",
    "SyncPS",
    "AllReduce",
    "TopK",
    "LocalSGD",
    "InGraph",
    "on",
    "Device",
    "SingleWorker",
    "Hogwild",
    "WorkerApplies",
    "BroadcastGradients",
    "train",
    "start",
    "Run",
    "LiveRun",
    "load_run",
    "Checkpoint",
    "load_checkpoint",
    "latest_checkpoint",
    "compare",
    "Trace",
    "Event",
    "SimulatedCluster",
    "TorchrunCluster",
    "Network",
    "laws",
    "theory",
    "Strategy",
    "ParameterServerStrategy",
    "check_strategy",
    "Cluster",
    "DistlabError",
    "NonFiniteLoss",
    "DivergenceWarning",
    "ProcessLost",
    "PeerLost",
    "BadMessage",
    "BadCheckpoint",
    "Deadlock",
    "PromiseBroken",
    "RemoteError",
]


def __getattr__(name: str) -> Any:
    if name not in LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(LATE[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *LATE])
