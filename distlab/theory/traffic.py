"""What has to travel, and how long that takes: all-reduces, buckets, and one client or many servers.

The hard idea is to count at one network card: its bytes divided by its bandwidth are a floor under the time of a
step, whatever the rest of the cluster does.
"""

import math

from distlab.options import check_count, check_positive, check_seconds, nearest

ALGORITHMS = ("ring", "recursive doubling", "rabenseifner", "tree")


def bytes_per_nic(num_bytes: float, num_workers: int) -> float:
    """What every network card sends in a step, and receives, if the load is spread evenly: under twice the model.

    It holds for a ring, for Rabenseifner's algorithm, and for parameters sharded over as many servers as workers,
    on the same machines. A single server moves num_workers times num_bytes in each direction instead.

    Args:
        num_bytes: the gradient's size in bytes.
        num_workers: ranks, or workers with a server each beside them.

    Returns: bytes, without headers.

    Raises:
        ValueError: a size that is not positive, or fewer than one worker.

    >>> bytes_per_nic(100, num_workers=8)
    175.0

    Source: derived, and checked numerically.
    """
    check_count("num_workers", num_workers)
    return 2 * (num_workers - 1) / num_workers * check_positive("num_bytes", num_bytes)


def all_reduce_s(
    algorithm: str,
    num_bytes: float,
    num_workers: int,
    *,
    latency_s: float,
    bandwidth_bytes_per_s: float,
    reduce_bytes_per_s: float | None = None,
) -> float:
    """How long an all-reduce takes.

    A ring pays latency for every worker, the others for every doubling; a tree and recursive doubling send the
    whole gradient each time. So small gradients and large ones want different algorithms.

    Args:
        algorithm: "ring", "recursive doubling", "rabenseifner" or "tree" (reduce to a root, then broadcast).
        num_bytes: the gradient's size in bytes.
        num_workers: ranks; a power of two, except for the ring.
        latency_s: of one message.
        bandwidth_bytes_per_s: of each network card, in each direction.
        reduce_bytes_per_s: how fast a rank adds what it receives to what it has; None: in no time.

    Returns: seconds.

    Raises:
        ValueError: an unknown algorithm, a number of workers that is not a power of two, or nonsense numbers.

    >>> links = {"latency_s": 50e-6, "bandwidth_bytes_per_s": 1.25e9, "reduce_bytes_per_s": 8e9}
    >>> [round(1000 * all_reduce_s(name, 10e6, 16, **links), 3) for name in ALGORITHMS]
    [17.672, 37.2, 16.572, 69.4]

    Source: derived, and checked numerically.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm={algorithm!r}: {nearest(str(algorithm), ALGORITHMS)}")
    if algorithm != "ring" and check_count("num_workers", num_workers) & (num_workers - 1):
        raise ValueError(f"{algorithm} is written for a power of two, got {num_workers} workers: take a ring")
    whole_s = check_positive("num_bytes", num_bytes) / check_positive("bandwidth_bytes_per_s", bandwidth_bytes_per_s)
    add_s = 0.0
    if reduce_bytes_per_s is not None:
        add_s = num_bytes / check_positive("reduce_bytes_per_s", reduce_bytes_per_s)
    rounds, share = math.log2(check_count("num_workers", num_workers)), (num_workers - 1) / num_workers
    scattered_s = share * (2 * whole_s + add_s)
    check_seconds("latency_s", latency_s)
    times = {
        "ring": 2 * (num_workers - 1) * latency_s + scattered_s,
        "recursive doubling": rounds * (latency_s + whole_s + add_s),
        "rabenseifner": 2 * rounds * latency_s + scattered_s,
        "tree": rounds * (2 * latency_s + 2 * whole_s + add_s),
    }
    return times[algorithm]


def overlapped_step_s(
    num_buckets: int, *, forward_s: float, backward_s: float, transfer_s: float, overhead_s: float
) -> float:
    """How long a step takes if the gradient is reduced in equal buckets while backward still computes the rest.

    Few buckets leave the last one to be sent when all else is over; many pay the overhead many times.

    Args:
        num_buckets: equal parts, each ready at its share of backward; 1 is no overlap.
        forward_s, backward_s: computing.
        transfer_s: the whole gradient's time on the wire, without overheads.
        overhead_s: of starting one bucket.

    Returns: seconds.

    Raises:
        ValueError: fewer than one bucket, or a negative time.

    >>> [round(overlapped_step_s(k, forward_s=1, backward_s=2, transfer_s=1, overhead_s=0.1), 3) for k in (1, 4, 20)]
    [4.1, 3.35, 4.1]

    Source: derived, and checked numerically.
    """
    check_count("num_buckets", num_buckets)
    check_seconds("forward_s", forward_s)
    ready_s = check_seconds("backward_s", backward_s) / num_buckets
    bucket_s = check_seconds("overhead_s", overhead_s) + check_seconds("transfer_s", transfer_s) / num_buckets
    if bucket_s <= ready_s:
        return forward_s + backward_s + bucket_s
    return forward_s + ready_s + num_buckets * bucket_s


def best_num_buckets(*, backward_s: float, overhead_s: float) -> float:
    """How many buckets make `overlapped_step_s` shortest where the network is the bottleneck; not a whole number.

    It does not depend on the gradient's size: more buckets start earlier, and each costs its overhead.

    Args:
        backward_s: computing.
        overhead_s: of starting one bucket.

    Returns: √(backward_s / overhead_s); take a neighbouring whole number.

    Raises:
        ValueError: a time that is not positive.

    >>> best_num_buckets(backward_s=4.0, overhead_s=0.25)
    4.0

    Source: derived, and checked numerically.
    """
    return math.sqrt(check_positive("backward_s", backward_s) / check_positive("overhead_s", overhead_s))


def in_graph_replicas_per_s(num_workers: int, *, compute_s: float, client_s: float) -> float:
    """How many replicas' gradients a second in-graph training computes, at most: one client feeds them all.

    Args:
        num_workers: replicas.
        compute_s: a replica's gradient.
        client_s: what the client does for one replica, one after the other: dispatch, and the fed bytes through
            its network card.

    Returns: gradients per second: a ceiling, which the first of two bottlenecks sets.

    Raises:
        ValueError: fewer than one worker, or a time that is not positive.

    >>> [round(in_graph_replicas_per_s(p, compute_s=0.1, client_s=0.02), 2) for p in (1, 4, 16)]
    [8.33, 33.33, 50.0]

    Source: derived, and checked numerically.
    """
    check_count("num_workers", num_workers)
    whole_s = check_positive("compute_s", compute_s) + check_positive("client_s", client_s)
    return min(num_workers / whole_s, 1 / client_s)


def in_graph_knee(*, compute_s: float, client_s: float) -> float:
    """From how many replicas on another one adds nothing to in-graph training: the client is busy all the time.

    Args:
        compute_s: a replica's gradient.
        client_s: what the client does for one replica.

    Returns: replicas; not a whole number.

    Raises:
        ValueError: a time that is not positive.

    >>> in_graph_knee(compute_s=0.75, client_s=0.25)
    4.0

    Source: derived, and checked numerically.
    """
    return (check_positive("compute_s", compute_s) + check_positive("client_s", client_s)) / client_s


def between_graph_replicas_per_s(
    num_workers: int,
    *,
    compute_s: float,
    dispatch_s: float,
    num_bytes: float,
    bandwidth_bytes_per_s: float,
    num_servers: int = 1,
) -> float:
    """How many gradients a second between-graph training applies, at most: every worker feeds itself.

    What all share is the servers' network cards, and there can be more of those.

    Args:
        num_workers: workers, each its own client.
        compute_s: a worker's gradient.
        dispatch_s: a worker's own client work for one gradient.
        num_bytes: the gradient's size in bytes; the parameters come back in as many.
        bandwidth_bytes_per_s: of a server's network card, in both directions together: twice the usual
            figure of a full-duplex card.
        num_servers: how many the parameters are spread over.

    Returns: gradients per second: a ceiling, which the first of two bottlenecks sets.

    Raises:
        ValueError: a count below one, or nonsense numbers.

    >>> net = {"num_bytes": 5e6, "bandwidth_bytes_per_s": 1e9}
    >>> [between_graph_replicas_per_s(p, compute_s=0.09, dispatch_s=0.01, **net) for p in (1, 4, 16)]
    [10.0, 40.0, 100.0]

    Source: derived, and checked numerically.
    """
    whole_s = check_positive("compute_s", compute_s) + check_seconds("dispatch_s", dispatch_s)
    servers_bytes_per_s = check_count("num_servers", num_servers) * check_positive(
        "bandwidth_bytes_per_s", bandwidth_bytes_per_s
    )
    ceiling = servers_bytes_per_s / (2 * check_positive("num_bytes", num_bytes))
    return min(check_count("num_workers", num_workers) / whole_s, ceiling)
