"""Where a run lives."""

from distlab.clusters.base import Cluster, Launched, Sink
from distlab.clusters.local import LocalCluster
from distlab.clusters.simulated import SimulatedCluster
from distlab.clusters.torchrun import TorchrunCluster

__all__ = ["Cluster", "Launched", "LocalCluster", "SimulatedCluster", "Sink", "TorchrunCluster"]
