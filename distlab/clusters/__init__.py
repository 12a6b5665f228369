"""Where a run lives."""

from distlab.clusters.base import Cluster, Launched, Sink
from distlab.clusters.local import LocalCluster

__all__ = ["Cluster", "Launched", "LocalCluster", "Sink"]
