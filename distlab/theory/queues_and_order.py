"""Who waits for whom: staleness, the k-th of P arrivals, and the queue in front of one server.

The hard idea is in `mean_staleness`: how the work is scheduled decides how old the *average* gradient is, whatever
the workers' speeds and however they vary. What varies is who has the old ones.
"""

import math
from typing import Literal

from distlab.options import check_count, check_positive, check_seconds, nearest

RULES = ("k-async", "k-batch-async", "one-by-one")


def harmonic(n: int) -> float:
    """1 + 1/2 + ... + 1/n; 0 for n = 0.

    Args:
        n: a whole number, at least 0.

    Raises:
        ValueError: a negative number.

    >>> round(harmonic(8), 6)
    2.717857

    Source: a definition.
    """
    return math.fsum(1 / i for i in range(1, check_count("n", n, least=0) + 1))


def mean_staleness(
    num_workers: int, num_awaited: int = 1, *, rule: Literal["k-async", "k-batch-async", "one-by-one"] = "k-async"
) -> float:
    """How many updates old a gradient is on average when it is applied, whatever the law of computing times.

    Waiting for more gradients per update makes them fresher, in proportion.

    Args:
        num_workers: workers that never stop.
        num_awaited: gradients in an update; 1 is plain asynchronous training.
        rule: "k-async" awaits `num_awaited` different workers, who wait for the update; "k-batch-async" so many
            gradients, from whomever, and nobody waits; "one-by-one" is a round with a barrier, all of whose
            gradients are read at one version and then applied one after the other (`num_awaited` has no say).

    Returns: updates; 0 is fresh.

    Raises:
        ValueError: fewer than one worker, more awaited than there are, or an unknown rule.

    >>> mean_staleness(8), mean_staleness(8, 2), mean_staleness(8, 2, rule="k-batch-async")
    (7.0, 3.0, 3.5)

    Source: derived, and checked numerically.
    """
    check_awaited(num_awaited, num_workers)
    if rule not in RULES:
        raise ValueError(f"rule={rule!r}: {nearest(str(rule), RULES)}")
    if rule == "one-by-one":
        return (num_workers - 1) / 2
    return (num_workers - (num_awaited if rule == "k-async" else 1)) / num_awaited


def staleness_probability(staleness: int, num_workers: int) -> float:
    """How likely a gradient is exactly so old, if computing times are exponential and nobody waits.

    The most likely staleness is 0, though the mean is num_workers − 1: a few gradients are very old.

    Args:
        staleness: updates between read and apply.
        num_workers: asynchronous workers, equally fast.

    Returns: a probability; over all stalenesses they sum to 1.

    Raises:
        ValueError: a negative staleness, or fewer than one worker.

    >>> [round(staleness_probability(staleness, num_workers=8), 4) for staleness in range(4)]
    [0.125, 0.1094, 0.0957, 0.0837]

    Source: Mitliagkas et al. 2016.
    """
    check_count("staleness", staleness, least=0)
    return (1 - 1 / check_count("num_workers", num_workers)) ** staleness / num_workers


def exponential_arrival_s(num_awaited: int, num_workers: int, *, tail_s: float, shift_s: float = 0.0) -> float:
    """When the k-th of P gradients arrives, on average, if all start together and times are (shifted) exponential.

    It is the time of an update that awaits k of P workers, if the late ones are *cancelled* and start anew. If they
    finish and are dropped at arrival, an update takes longer, because the next one begins without them.

    Args:
        num_awaited, num_workers: k and P.
        tail_s: mean of the exponential part; all of it for a plain exponential law.
        shift_s: the part that every gradient takes.

    Returns: seconds.

    Raises:
        ValueError: k is not from 1 to P, or a time is not positive.

    >>> round(exponential_arrival_s(4, 8, tail_s=1), 6), round(exponential_arrival_s(96, 100, tail_s=1, shift_s=1), 3)
    (0.634524, 4.104)

    Source: Dutta et al. 2018.
    """
    check_awaited(num_awaited, num_workers)
    waits = harmonic(num_workers) - harmonic(num_workers - num_awaited)
    return check_seconds("shift_s", shift_s) + check_positive("tail_s", tail_s) * waits


def pareto_arrival_s(num_awaited: int, num_workers: int, *, alpha: float, least_s: float) -> float:
    """When the k-th of P gradients arrives, on average, if all start together and times have a Pareto law.

    The last of them is what hurts: with alpha = 2 and 100 workers, awaiting 96 instead of all saves almost three
    quarters of the time. Late workers are cancelled, as in `exponential_arrival_s`.

    Args:
        num_awaited, num_workers: k and P.
        alpha: the smaller, the heavier the tail.
        least_s: no gradient takes less.

    Returns: seconds.

    Raises:
        ValueError: k is not from 1 to P, `alpha` or `least_s` is not positive, or the mean is infinite.

    >>> [round(pareto_arrival_s(k, 100, alpha=2, least_s=1), 3) for k in (96, 98, 100)]
    [4.853, 6.655, 17.747]

    Source: derived, and checked numerically.
    """
    check_awaited(num_awaited, num_workers)
    late, power = num_workers - num_awaited + 1, 1 / check_positive("alpha", alpha)
    if late <= power:
        raise ValueError(f"arrival {num_awaited} of {num_workers} has an infinite mean with alpha={alpha}")
    logs = math.lgamma(num_workers + 1) - math.lgamma(num_workers + 1 - power)
    return check_positive("least_s", least_s) * math.exp(logs + math.lgamma(late - power) - math.lgamma(late))


def batch_update_s(num_awaited: int, num_workers: int, *, mean_s: float) -> float:
    """How long an update takes that awaits `num_awaited` gradients from whomever, while nobody waits.

    There is no straggler to wait for: a fast worker hands in several.

    Args:
        num_awaited: gradients in an update; may exceed the number of workers.
        num_workers: workers that never stop.
        mean_s: of computing a gradient, whatever its law ("k-batch-async"). With an exponential law it also holds
            if all start anew from each version ("k-batch-sync", late ones cancelled).

    Returns: seconds.

    Raises:
        ValueError: a count below one, or a mean that is not positive.

    >>> [batch_update_s(awaited, 8, mean_s=1) for awaited in (1, 2, 4, 8)]
    [0.125, 0.25, 0.5, 1.0]

    Source: Dutta et al. 2018.
    """
    share = check_count("num_awaited", num_awaited) / check_count("num_workers", num_workers)
    return share * check_positive("mean_s", mean_s)


def async_speedup(num_workers: int) -> float:
    """How much longer a synchronous update takes than an asynchronous one, if computing times are exponential.

    Not a reason to be asynchronous: the synchronous update holds `num_workers` gradients, all fresh.

    Args:
        num_workers: workers, equally fast.

    Returns: P · H_P, exact.

    Raises:
        ValueError: fewer than one worker.

    >>> round(async_speedup(8), 2), round(async_speedup(16), 2)
    (21.74, 54.09)

    Source: Dutta et al. 2018, which prints P log P: that is 23.5 % low at P = 8.
    """
    return num_workers * harmonic(check_count("num_workers", num_workers))


def best_share_to_await(*, shift_s: float, tail_s: float) -> float:
    """Which share of many workers to await, if times are shifted exponential and every gradient helps as much.

    It is the most gradients per second: below it the update is too small for the time that nobody escapes, above
    it the stragglers cost more than their gradients are worth.

    Args:
        shift_s: the part that every gradient takes; 0 gives 0, the fewest possible.
        tail_s: mean of the exponential part.

    Returns: k / P, 1 + 1 / W(−exp(−shift/tail − 1)), with W the lower branch of Lambert's function.

    Raises:
        ValueError: a negative shift, or a tail that is not positive.

    >>> [round(best_share_to_await(shift_s=shift, tail_s=1), 4) for shift in (1, 5, 10)]
    [0.6822, 0.8764, 0.9265]

    Source: derived, and checked numerically.
    """
    ratio = check_seconds("shift_s", shift_s) / check_positive("tail_s", tail_s)
    w = math.sqrt(2 * ratio) + ratio  # w = −W − 1 solves w − ln(1 + w) = ratio; Newton comes down to it from here
    for _ in range(8 if w else 0):
        w -= (w - math.log1p(w) - ratio) * (1 + w) / w
    return w / (1 + w)


def server_updates_per_s(num_workers: int, *, compute_s: float, apply_s: float) -> float:
    """How many updates a second one server applies, one after the other, for so many asynchronous workers.

    With few workers it is what they compute; with many it is 1 / apply_s, and more workers only make a longer queue.

    Args:
        num_workers: workers that compute, push, and wait for the answer.
        compute_s: mean time of a gradient, exponential.
        apply_s: mean time of an apply, exponential.

    Returns: updates per second: (1 − p0) / apply_s, where p0 is the share of time in which the server is idle and
        1/p0 = Σ_k P! / (P − k)! · (apply_s / compute_s)^k.

    Raises:
        ValueError: fewer than one worker, or a time that is not positive.

    >>> [round(server_updates_per_s(workers, compute_s=1, apply_s=0.1), 4) for workers in (1, 4, 8, 16)]
    [0.9091, 3.5334, 6.6168, 9.777]

    Source: derived, and checked numerically.
    """
    ratio = check_positive("apply_s", apply_s) / check_positive("compute_s", compute_s)
    idle = 1.0  # p0 with no worker; each further one follows from 1/p0(P) = 1 + P · ratio / p0(P − 1)
    for workers in range(1, check_count("num_workers", num_workers) + 1):
        idle = idle / (idle + workers * ratio)
    return (1 - idle) / apply_s


def surviving_share(num_workers: int) -> float:
    """Which share of the updates is still there at the end, if workers write whole parameters back.

    Every write undoes what others wrote since its worker read: in the end one worker's chain is left.

    Args:
        num_workers: workers, equally fast.

    Returns: 1 / num_workers.

    Raises:
        ValueError: fewer than one worker.

    >>> [surviving_share(workers) for workers in (1, 2, 4, 8)]
    [1.0, 0.5, 0.25, 0.125]

    Source: derived, and checked numerically.
    """
    return 1 / check_count("num_workers", num_workers)


def check_awaited(num_awaited: int, num_workers: int) -> None:
    """ValueError unless 1 ≤ num_awaited ≤ num_workers."""
    if check_count("num_awaited", num_awaited) > check_count("num_workers", num_workers):
        raise ValueError(f"num_awaited={num_awaited}, but there are only {num_workers} workers")
