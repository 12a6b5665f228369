"""Closed forms that lessons draw beside measurements: what should come out, before anything runs.

Each is one function of plain numbers. They know nothing of the rest of the package, so that agreement between the
two means something. Three files by subject: what old gradients do (`stability`), who waits for whom
(`queues_and_order`), and what has to travel (`traffic`).

>>> round(largest_stable_lr(staleness=2), 3), mean_staleness(num_workers=8), bytes_per_nic(1000, num_workers=8)
(0.618, 7.0, 1750.0)
"""

from distlab.theory.queues_and_order import (
    async_speedup,
    batch_update_s,
    best_share_to_await,
    exponential_arrival_s,
    harmonic,
    mean_staleness,
    pareto_arrival_s,
    server_updates_per_s,
    staleness_probability,
    surviving_share,
)
from distlab.theory.stability import (
    best_lr,
    best_rate,
    implicit_momentum,
    largest_stable_lr,
    local_sgd_limit,
    stationary_variance,
)
from distlab.theory.traffic import (
    all_reduce_s,
    best_num_buckets,
    between_graph_replicas_per_s,
    bytes_per_nic,
    in_graph_knee,
    in_graph_replicas_per_s,
    overlapped_step_s,
)

__all__ = [
    "all_reduce_s",
    "async_speedup",
    "batch_update_s",
    "best_lr",
    "best_num_buckets",
    "best_rate",
    "best_share_to_await",
    "between_graph_replicas_per_s",
    "bytes_per_nic",
    "exponential_arrival_s",
    "harmonic",
    "implicit_momentum",
    "in_graph_knee",
    "in_graph_replicas_per_s",
    "largest_stable_lr",
    "local_sgd_limit",
    "mean_staleness",
    "overlapped_step_s",
    "pareto_arrival_s",
    "server_updates_per_s",
    "staleness_probability",
    "stationary_variance",
    "surviving_share",
]
