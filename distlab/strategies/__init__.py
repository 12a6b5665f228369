"""One algorithm a file. Put two files side by side: their difference is the difference between the algorithms."""

from distlab.strategies.all_reduce import AllReduce
from distlab.strategies.async_ps import AsyncPS
from distlab.strategies.base import ParameterServerStrategy, Strategy
from distlab.strategies.broadcast_gradients import BroadcastGradients
from distlab.strategies.hogwild import Hogwild
from distlab.strategies.in_graph import InGraph
from distlab.strategies.local_sgd import LocalSGD
from distlab.strategies.single_worker import SingleWorker
from distlab.strategies.sync_ps import SyncPS
from distlab.strategies.worker_applies import WorkerApplies

__all__ = [
    "AllReduce",
    "AsyncPS",
    "BroadcastGradients",
    "Hogwild",
    "InGraph",
    "LocalSGD",
    "ParameterServerStrategy",
    "SingleWorker",
    "Strategy",
    "SyncPS",
    "WorkerApplies",
]
