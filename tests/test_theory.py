"""The closed forms: their golden values, and the small thing that each is about, computed the long way."""

import heapq
import math

import numpy as np
import pytest

from distlab import theory

DRAWS = 200_000  # of Monte Carlo oracles: their standard errors are below a third of the tolerance


def near(value: float, digits: int = 6):
    """Equal to a golden value that is printed with so many digits after the point."""
    return pytest.approx(value, abs=0.5 * 10.0**-digits)


def spectral_radius(lr: float, staleness: int, momentum: float = 0.0) -> float:
    """The factor by which x ← x − lr · x[t − staleness] + momentum · (x − x[t − 1]) grows in the long run."""
    recursion = np.eye(staleness + 2, k=-1)
    recursion[0, 0] += 1 + momentum
    recursion[0, 1] -= momentum
    recursion[0, staleness] -= lr
    return np.abs(np.linalg.eigvals(recursion)).max()


# What old gradients do.


@pytest.mark.parametrize(
    ("staleness", "golden"), [(0, 2), (1, 1), (2, 0.618034), (4, 0.347296), (8, 0.184537), (16, 0.095164)]
)
def test_largest_stable_lr_is_the_golden_value(staleness, golden):
    assert theory.largest_stable_lr(staleness) == near(golden)
    assert theory.largest_stable_lr(staleness, curvature=4.0) == near(golden / 4)


@pytest.mark.parametrize("staleness", [0, 1, 2, 4, 8, 16])
@pytest.mark.parametrize(("factor", "grows"), [(0.97, False), (1.03, True)])
def test_delayed_descent_diverges_just_above_the_limit_and_not_below(staleness, factor, grows):
    lr, x = factor * theory.largest_stable_lr(staleness), [1.0] * (staleness + 1)
    for _ in range(3000):
        x.append(x[-1] - lr * x[-1 - staleness])
    assert (max(map(abs, x[-100:])) > 1) == grows


@pytest.mark.parametrize(("staleness", "golden"), [(0, 3.8), (1, 0.1)])
def test_largest_stable_lr_with_momentum_is_the_golden_value_and_the_limit(staleness, golden):
    limit = theory.largest_stable_lr(staleness, momentum=0.9)
    assert limit == near(golden)
    assert theory.largest_stable_lr(staleness, momentum=0.9, curvature=4.0) == near(golden / 4)
    assert spectral_radius(0.999 * limit, staleness, 0.9) < 1 < spectral_radius(1.001 * limit, staleness, 0.9)


@pytest.mark.parametrize(
    ("staleness", "lr", "rate"), [(0, 1, 0), (1, 0.25, 0.5), (4, 0.08192, 0.8), (16, 0.02230, 0.9412)]
)
def test_best_lr_and_rate_are_the_golden_values(staleness, lr, rate):
    assert theory.best_lr(staleness) == near(lr, 5)
    assert theory.best_lr(staleness, curvature=4.0) == near(lr / 4, 5)
    assert theory.best_rate(staleness) == near(rate, 4)


@pytest.mark.parametrize("staleness", [1, 4, 16])
def test_no_other_lr_is_faster_than_the_best(staleness):
    best = theory.best_lr(staleness)
    reached = spectral_radius(best, staleness)
    assert reached == pytest.approx(theory.best_rate(staleness), abs=1e-5)
    assert all(spectral_radius(f * best, staleness) > reached + 1e-4 for f in (0.5, 0.9, 0.99, 1.01, 1.1, 2))


@pytest.mark.parametrize(("staleness", "golden"), [(0, 5.263158), (1, 5.820106)])
def test_stationary_variance_is_the_golden_value(staleness, golden):
    assert theory.stationary_variance(0.1, staleness=staleness) / 0.1**2 == near(golden)


@pytest.mark.parametrize("staleness", [0, 1])
def test_stationary_variance_is_the_sum_over_the_echoes_of_every_kick(staleness):
    lr, curvature, noise = 0.2, 3.0, 0.5
    x = [0.0] * staleness + [lr * noise]
    while len(x) < 500:
        x.append(x[-1] - lr * curvature * x[-1 - staleness])
    variance = theory.stationary_variance(lr, staleness=staleness, curvature=curvature, noise_std=noise)
    assert variance == pytest.approx(sum(v * v for v in x))


def test_implicit_momentum_is_the_golden_value():
    assert [theory.implicit_momentum(m) for m in (1, 2, 4, 8, 16)] == [0, 0.5, 0.75, 0.875, 0.9375]


@pytest.mark.parametrize(("every", "golden"), [(1, 0.2), (5, 0.307498), (20, 0.467648)])
def test_local_sgd_limit_is_the_golden_value(every, golden):
    assert theory.local_sgd_limit([1, 4], [1, 0], lr=0.1, every=every).item() == near(golden)


def test_local_sgd_limit_is_where_averaging_comes_to_rest():
    hessians = np.array([[[2.0, 0.5], [0.5, 1.0]], [[1.0, 0.0], [0.0, 4.0]], [[3.0, -1.0], [-1.0, 2.0]]])
    minima = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 2.0]])
    w = np.zeros(2)
    for _ in range(300):
        ends = [w] * 3
        for _ in range(7):
            ends = [x - 0.1 * h @ (x - b) for x, h, b in zip(ends, hessians, minima, strict=True)]
        w = np.mean(ends, 0)
    assert theory.local_sgd_limit(hessians, minima, lr=0.1, every=7) == pytest.approx(w)


# Who waits for whom.


@pytest.mark.parametrize(
    ("awaited", "rule", "golden"),
    [
        (1, "k-async", 7),
        (2, "k-async", 3),
        (4, "k-async", 1),
        (1, "k-batch-async", 7),
        (2, "k-batch-async", 3.5),
        (4, "k-batch-async", 1.75),
        (1, "one-by-one", 3.5),
    ],
)
def test_mean_staleness_is_the_golden_value(awaited, rule, golden):
    assert theory.mean_staleness(8, awaited, rule=rule) == golden


def played_staleness(num_workers: int, awaited: int, rule: str, draw) -> float:
    """Workers that compute and a server that awaits: the mean age of what it applied, the long way."""
    version, waiting, ages = 0, [], []
    arrivals = [(draw(), worker, 0) for worker in range(num_workers)]
    heapq.heapify(arrivals)
    while version < 4000:
        now, worker, read = heapq.heappop(arrivals)
        waiting.append((worker, read))
        full = len(waiting) == awaited
        if full:
            ages += [version - r for _, r in waiting]
            version += 1
        for w in [v for v, _ in waiting] if full and rule == "k-async" else [worker] * (full or rule != "k-async"):
            heapq.heappush(arrivals, (now + draw(), w, version))
        waiting = [] if full else waiting
    return float(np.mean(ages))


@pytest.mark.parametrize("rule", ["k-async", "k-batch-async"])
@pytest.mark.parametrize("awaited", [1, 2, 4])
@pytest.mark.parametrize("law", ["exponential", "uniform", "pareto"])
def test_mean_staleness_is_what_is_played_under_any_law(rule, awaited, law):
    rng = np.random.default_rng(0)
    draw = {
        "exponential": rng.standard_exponential,
        "uniform": lambda: rng.uniform(0.9, 1.1),
        "pareto": lambda: 1 + rng.pareto(2.5),
    }
    expected = theory.mean_staleness(8, awaited, rule=rule)
    assert played_staleness(8, awaited, rule, draw[law]) == pytest.approx(expected, rel=0.01)


def test_mean_staleness_of_a_round_applied_one_by_one_is_that_of_its_places():
    assert theory.mean_staleness(9, rule="one-by-one") == np.mean(range(9))


def test_staleness_probability_is_the_golden_value():
    golden = [0.125, 0.1094, 0.0957, 0.0837]
    assert [theory.staleness_probability(s, 8) for s in range(4)] == [near(g, 4) for g in golden]


def test_staleness_probabilities_sum_to_1_with_mean_p_minus_1():
    every = np.array([theory.staleness_probability(s, 8) for s in range(500)])
    assert every.sum() == pytest.approx(1)
    assert every @ np.arange(500) == pytest.approx(theory.mean_staleness(8))


@pytest.mark.parametrize(("awaited", "golden"), [(1, 0.125), (2, 0.267857), (4, 0.634524), (8, 2.717857)])
def test_exponential_arrival_is_the_golden_value(awaited, golden):
    assert theory.exponential_arrival_s(awaited, 8, tail_s=1.0) == near(golden)


@pytest.mark.parametrize(
    ("awaited", "shifted", "pareto"), [(96, 4.104, 4.853), (98, 4.687, 6.655), (100, 6.187, 17.747)]
)
def test_arrivals_of_a_hundred_are_the_golden_values(awaited, shifted, pareto):
    assert theory.exponential_arrival_s(awaited, 100, tail_s=1.0, shift_s=1.0) == near(shifted, 3)
    assert theory.pareto_arrival_s(awaited, 100, alpha=2.0, least_s=1.0) == near(pareto, 3)


@pytest.mark.parametrize("awaited", [1, 3, 7, 8])
def test_arrivals_are_the_means_of_sorted_draws(awaited):
    rng = np.random.default_rng(1)
    shifted = np.sort(0.5 + 2.0 * rng.standard_exponential((DRAWS // 4, 8)))[:, awaited - 1].mean()
    heavy = np.sort(0.5 * (1 + rng.pareto(4.0, (DRAWS // 4, 8))))[:, awaited - 1].mean()
    assert theory.exponential_arrival_s(awaited, 8, tail_s=2.0, shift_s=0.5) == pytest.approx(shifted, rel=0.01)
    assert theory.pareto_arrival_s(awaited, 8, alpha=4.0, least_s=0.5) == pytest.approx(heavy, rel=0.01)


def test_batch_update_is_the_golden_value():
    assert [theory.batch_update_s(k, 8, mean_s=1.0) for k in (1, 2, 4, 8)] == [0.125, 0.25, 0.5, 1.0]


def test_batch_update_is_when_the_kth_of_all_gradients_arrives():
    rng = np.random.default_rng(2)
    times = 3.0 * rng.standard_exponential((DRAWS // 16, 4, 12)).cumsum(2)  # a worker's first, second, ... gradient
    sixth = np.sort(times.reshape(len(times), -1))[:, 5].mean()
    assert theory.batch_update_s(6, 4, mean_s=3.0) == pytest.approx(sixth, rel=0.02)


@pytest.mark.parametrize(("workers", "golden"), [(8, 21.74), (16, 54.09)])
def test_async_speedup_is_the_golden_value(workers, golden):
    assert theory.async_speedup(workers) == near(golden, 2)


def test_the_published_speedup_is_a_quarter_low():
    assert 1 - 8 * math.log(8) / theory.async_speedup(8) == near(0.235, 3)


@pytest.mark.parametrize(("ratio", "golden"), [(1, 0.6822), (5, 0.8764), (10, 0.9265)])
def test_best_share_to_await_is_the_golden_value(ratio, golden):
    assert theory.best_share_to_await(shift_s=2.0 * ratio, tail_s=2.0) == near(golden, 4)


@pytest.mark.parametrize("ratio", [0.1, 1, 5, 50])
def test_best_share_to_await_has_the_most_gradients_per_second(ratio):
    workers = 2000
    waits = np.cumsum(1 / np.arange(workers, 0, -1.0))  # H_P − H_{P−k}
    best = 1 + np.argmax(np.arange(1, workers + 1) / (ratio + waits))
    assert theory.best_share_to_await(shift_s=ratio, tail_s=1.0) == pytest.approx(best / workers, abs=1e-3)


@pytest.mark.parametrize("ratio", [1e-12, 1e-3, 1.0, 1e3, 1e9])
def test_best_share_to_await_solves_its_equation_at_any_scale(ratio):
    w = 1 / (1 / theory.best_share_to_await(shift_s=ratio, tail_s=1.0) - 1)
    assert w - math.log1p(w) == pytest.approx(ratio, rel=1e-4)


def test_without_a_part_that_nobody_escapes_the_first_gradient_is_enough():
    assert theory.best_share_to_await(shift_s=0.0, tail_s=1.0) == 0


@pytest.mark.parametrize(("workers", "golden"), [(1, 0.9091), (4, 3.5334), (8, 6.6168), (16, 9.7770)])
def test_server_updates_per_s_is_the_golden_value(workers, golden):
    assert theory.server_updates_per_s(workers, compute_s=1.0, apply_s=0.1) == near(golden, 4)


@pytest.mark.parametrize("workers", [1, 5, 40, 1000])
def test_server_updates_per_s_agrees_with_mean_value_analysis(workers):
    """A worker that arrives finds, on average, the queue of a system that has one worker less."""
    queue = rate = 0.0
    for count in range(1, workers + 1):
        answer_s = 0.2 * (1 + queue)
        rate = count / (3.0 + answer_s)
        queue = rate * answer_s
    assert theory.server_updates_per_s(workers, compute_s=3.0, apply_s=0.2) == pytest.approx(rate)


def test_surviving_share_is_the_golden_value():
    assert [theory.surviving_share(p) for p in (1, 2, 4, 8)] == [1, 0.5, 0.25, 0.125]


# What has to travel.


def test_bytes_per_nic_is_the_golden_value():
    assert theory.bytes_per_nic(1000, 8) == 1750
    assert theory.bytes_per_nic(1000, 1) == 0


def test_sharded_servers_on_the_workers_hosts_send_as_much_as_a_ring():
    workers, size = 8, 1000
    gradients_to_others, parameters_to_others = [(workers - 1) * size / workers] * 2
    assert theory.bytes_per_nic(size, workers) == gradients_to_others + parameters_to_others


@pytest.mark.parametrize(
    ("algorithm", "golden"), [("ring", 17.672), ("recursive doubling", 37.2), ("rabenseifner", 16.572), ("tree", 69.4)]
)
def test_all_reduce_is_the_golden_value(algorithm, golden):
    links = {"latency_s": 50e-6, "bandwidth_bytes_per_s": 1.25e9, "reduce_bytes_per_s": 8e9}
    assert 1000 * theory.all_reduce_s(algorithm, 10_000_000, 16, **links) == near(golden, 3)


@pytest.mark.parametrize(("algorithm", "by_hand"), [("ring", 102), ("recursive doubling", 101), ("tree", 202)])
def test_two_ranks_all_reduce_a_hundred_bytes_at_one_a_second(algorithm, by_hand):
    """Latency 1 s. The ring sends half a gradient twice; doubling sends a whole one once, the tree there and back."""
    links = {"latency_s": 1.0, "bandwidth_bytes_per_s": 1.0}
    assert theory.all_reduce_s(algorithm, 100, 2, **links) == by_hand
    assert theory.all_reduce_s(algorithm, 100, 1, **links) == 0


@pytest.mark.parametrize("buckets", [1, 2, 3, 7, 20, 60])
@pytest.mark.parametrize("transfer", [0.5, 5.0])
def test_overlapped_step_is_what_is_played_bucket_by_bucket(buckets, transfer):
    free = 0.0
    for bucket in range(1, buckets + 1):
        ready = 1.0 + 2.0 * bucket / buckets
        free = max(free, ready) + 0.05 + transfer / buckets
    step = theory.overlapped_step_s(buckets, forward_s=1.0, backward_s=2.0, transfer_s=transfer, overhead_s=0.05)
    assert step == pytest.approx(free)


def test_best_num_buckets_makes_the_step_shortest():
    times = {"backward_s": 2.0, "overhead_s": 0.02}
    best = theory.best_num_buckets(**times)
    steps = [theory.overlapped_step_s(k, forward_s=1.0, transfer_s=5.0, **times) for k in range(1, 50)]
    assert 1 + np.argmin(steps) == near(best, 0)


def test_in_graph_training_stops_growing_at_the_knee():
    knee = theory.in_graph_knee(compute_s=0.45, client_s=0.05)
    assert knee == pytest.approx(10)
    rates = [theory.in_graph_replicas_per_s(p, compute_s=0.45, client_s=0.05) for p in (1, 5, 9, 10, 11, 100)]
    assert rates == pytest.approx([2, 10, 18, 20, 20, 20])


def test_between_graph_training_grows_with_servers():
    net = {"compute_s": 0.45, "dispatch_s": 0.05, "num_bytes": 1e6, "bandwidth_bytes_per_s": 1e7}
    rates = [theory.between_graph_replicas_per_s(p, **net, num_servers=s) for p, s in ((2, 1), (99, 1), (99, 4))]
    assert rates == pytest.approx([4, 5, 20])
    assert theory.between_graph_replicas_per_s(99, **net) == pytest.approx(5)


# Nonsense.

NONSENSE = [
    (lambda: theory.largest_stable_lr(-1), "staleness must be at least 0, got -1"),
    (lambda: theory.largest_stable_lr(1, curvature=0.0), "curvature must be positive and finite, got 0.0"),
    (lambda: theory.largest_stable_lr(2, momentum=0.9), "closed form for staleness 0 and 1 only, got 2"),
    (lambda: theory.largest_stable_lr(0, momentum=1.0), "momentum must be from 0 to below 1, got 1.0"),
    (lambda: theory.best_lr(-1), "staleness must be at least 0, got -1"),
    (lambda: theory.stationary_variance(0.1, staleness=2), "closed form for staleness 0 and 1 only, got 2"),
    (lambda: theory.stationary_variance(1.0, staleness=1), "diverges: lr must be below 1 at this"),
    (lambda: theory.stationary_variance(2.0), "diverges: lr must be below 2 at this"),
    (lambda: theory.stationary_variance(0.1, noise_std=math.nan), "noise_std must be positive and finite, got nan"),
    (lambda: theory.implicit_momentum(0), "num_workers must be at least 1, got 0"),
    (lambda: theory.local_sgd_limit([1, 4], [1, 0, 2], lr=0.1, every=1), "3 minima of size 1 do not fit"),
    (lambda: theory.local_sgd_limit([1, 4], [1, 0], lr=0.5, every=1), "that worker does not converge"),
    (lambda: theory.harmonic(-1), "n must be at least 0, got -1"),
    (lambda: theory.mean_staleness(4, 5), "num_awaited=5, but there are only 4 workers"),
    (lambda: theory.mean_staleness(4, rule="k-asinc"), "did you mean 'k-async'"),
    (lambda: theory.staleness_probability(-1, 4), "staleness must be at least 0, got -1"),
    (lambda: theory.exponential_arrival_s(0, 4, tail_s=1.0), "num_awaited must be at least 1, got 0"),
    (lambda: theory.exponential_arrival_s(1, 4, tail_s=-1.0), "tail_s must be positive and finite, got -1.0"),
    (lambda: theory.exponential_arrival_s(1, 4, tail_s=1.0, shift_s=-1.0), "shift_s must be a finite number of sec"),
    (lambda: theory.pareto_arrival_s(4, 4, alpha=1.0, least_s=1.0), "arrival 4 of 4 has an infinite mean"),
    (lambda: theory.batch_update_s(4, 0, mean_s=1.0), "num_workers must be at least 1, got 0"),
    (lambda: theory.async_speedup(0), "num_workers must be at least 1, got 0"),
    (lambda: theory.best_share_to_await(shift_s=1.0, tail_s=0.0), "tail_s must be positive and finite, got 0.0"),
    (lambda: theory.server_updates_per_s(4, compute_s=0.0, apply_s=1.0), "compute_s must be positive and finite"),
    (lambda: theory.surviving_share(0), "num_workers must be at least 1, got 0"),
    (lambda: theory.bytes_per_nic(0, 4), "num_bytes must be positive and finite, got 0"),
    (lambda: reduced("rings", 4), "did you mean 'ring'"),
    (lambda: reduced("tree", 6), "tree is written for a power of two, got 6 workers: take a ring"),
    (lambda: reduced("ring", 0), "num_workers must be at least 1, got 0"),
    (lambda: reduced("ring", 4, reduce_bytes_per_s=0.0), "reduce_bytes_per_s must be positive and finite, got 0.0"),
    (lambda: buckets(0, 1.0), "num_buckets must be at least 1, got 0"),
    (lambda: buckets(2, -1.0), "forward_s must be a finite number of seconds, 0 or more, got -1.0"),
    (lambda: theory.best_num_buckets(backward_s=1.0, overhead_s=0.0), "overhead_s must be positive and finite"),
    (lambda: theory.in_graph_replicas_per_s(0, compute_s=1.0, client_s=1.0), "num_workers must be at least 1, got 0"),
    (lambda: theory.in_graph_knee(compute_s=1.0, client_s=math.inf), "client_s must be positive and finite, got inf"),
    (lambda: between(num_servers=0), "num_servers must be at least 1, got 0"),
    (lambda: between(num_bytes=-1.0), "num_bytes must be positive and finite, got -1.0"),
]


def reduced(algorithm: str, workers: int, **changes: float) -> float:
    return theory.all_reduce_s(algorithm, 100, workers, latency_s=0.0, bandwidth_bytes_per_s=1.0, **changes)


def buckets(count: int, forward_s: float) -> float:
    return theory.overlapped_step_s(count, forward_s=forward_s, backward_s=1.0, transfer_s=1.0, overhead_s=1.0)


def between(**changes: float) -> float:
    usual = {"compute_s": 1.0, "dispatch_s": 0.0, "num_bytes": 1.0, "bandwidth_bytes_per_s": 1.0}
    return theory.between_graph_replicas_per_s(4, **usual | changes)


@pytest.mark.parametrize(("call", "message"), NONSENSE, ids=[message for _, message in NONSENSE])
def test_nonsense_is_refused_with_what_was_asked_and_got(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_every_function_says_where_it_comes_from_and_shows_a_value():
    every = [getattr(theory, name) for name in theory.__all__]
    assert len(every) > 20
    assert not [f.__name__ for f in every if not all(word in f.__doc__ for word in ("Args:", "Source: ", ">>> "))]
