"""What the closed forms say happens: to the strategies themselves, on the virtual clock.

No second model of a strategy is involved: what is measured are the traces of ordinary runs. Their seeds are fixed,
and every tolerance is at least twice the standard error of its sample. ``benchmarks/theory_check.py`` prints the
same figures from larger samples.
"""

import math
from functools import cache

import numpy as np
import pytest
import torch
from toys import Scalar, countdown, train

import distlab as dl
from distlab.reports import survivors

IDEAL = dl.Network(latency_s=0.0, bandwidth_bytes_per_s=math.inf)
EXPONENTIAL = dl.laws.Exponential(mean_s=1.0)
LAWS = [EXPONENTIAL, dl.laws.Gamma(mean_s=1.0, variation=0.1), dl.laws.Pareto(alpha=2.5, least_s=1.0)]


@cache
def timed(strategy: dl.Strategy, num_workers: int, num_updates: int, law: dl.laws.Law, apply_time=None) -> dl.Run:
    """A run without gradients on an ideal network."""
    cluster = dl.SimulatedCluster(
        num_workers, compute=law, apply_time=apply_time, network=IDEAL, gradients="none", seed=1
    )
    return train(countdown(), strategy, cluster, num_updates)


@pytest.mark.parametrize("law", LAWS, ids=repr)
def test_asynchronous_gradients_are_p_minus_1_updates_old_under_any_law(law):
    run = timed(dl.AsyncPS(), 8, 12_000 if law is EXPONENTIAL else 4000, law)
    assert run.mean_staleness == pytest.approx(dl.theory.mean_staleness(num_workers=8), rel=0.01)


def test_staleness_is_distributed_as_the_closed_form_under_exponential_times():
    rows = timed(dl.AsyncPS(), 8, 12_000, EXPONENTIAL).applies[100:]  # at first nobody has an old gradient
    staleness = rows["version"] - 1 - rows["read"]
    measured = np.bincount(staleness, minlength=80)[:80].cumsum() / len(rows)
    expected = np.cumsum([dl.theory.staleness_probability(s, num_workers=8) for s in range(80)])
    assert np.abs(measured - expected).max() < 0.01


@pytest.mark.parametrize("workers", [1, 4, 8, 16])
def test_one_server_that_applies_in_turn_is_the_queue_of_the_closed_form(workers):
    law = dl.laws.Exponential(mean_s=0.1)
    run = timed(dl.AsyncPS(locking="server"), workers, 10_000, EXPONENTIAL, law)
    expected = dl.theory.server_updates_per_s(workers, compute_s=1.0, apply_s=0.1)
    assert run.updates_per_s == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("workers", [4, 8, 16])
def test_a_queue_at_the_server_leaves_staleness_at_p_minus_1(workers):
    """An answer that waited for the lock once more would hold updates of those who queue behind it."""
    law = dl.laws.Exponential(mean_s=0.1)
    run = timed(dl.AsyncPS(locking="server"), workers, 10_000, EXPONENTIAL, law)
    assert run.mean_staleness == pytest.approx(workers - 1, rel=0.01)


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_of_updates_that_are_written_back_one_in_p_survives(workers):
    run = timed(dl.WorkerApplies(), workers, 4000, dl.laws.Gamma(mean_s=1.0, variation=0.1))
    assert survivors(run.trace).share == pytest.approx(dl.theory.surviving_share(workers), rel=0.01)


@pytest.mark.parametrize(("workers", "updates"), [(2, 4000), (8, 2000)])
def test_a_synchronous_update_takes_as_long_as_the_last_arrival(workers, updates):
    run = timed(dl.SyncPS(), workers, updates, EXPONENTIAL)
    expected = dl.theory.exponential_arrival_s(workers, workers, tail_s=1.0)
    assert 1 / run.updates_per_s == pytest.approx(expected, rel=0.03)


def told(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient is that of w²/2, and whose value, for the trace, is w itself."""
    half = outputs**2 / 2
    return (half - half.detach() + outputs.detach()).mean()


def path(num_workers: int, lr: float, num_updates: int, seed: int) -> np.ndarray:
    """The parameter after 0, 1, ... updates of an asynchronous run from 1: what was read at each version."""
    task = countdown(
        model=lambda: Scalar(1.0), loss=told, optimizer=lambda params: torch.optim.SGD(params, lr=lr), batch_size=1
    )
    cluster = dl.SimulatedCluster(num_workers, compute=EXPONENTIAL, network=IDEAL, seed=seed)
    rows = train(task, dl.AsyncPS(), cluster, num_updates).trace.select("compute")
    values = np.full(num_updates, np.nan)
    read = rows["version"] < num_updates
    values[rows["version"][read]] = rows["loss"][read]
    return values


def heavy_ball(paths: np.ndarray) -> tuple[float, float]:
    """Momentum and learning rate with which heavy ball fits the mean of `paths` (runs, updates) best."""
    mean = paths.mean(0)
    moves = np.diff(mean)
    momentum, lr = np.linalg.lstsq(np.stack([moves[:-1], -mean[1:-1]], 1), moves[1:], rcond=None)[0]
    return momentum, lr


@pytest.mark.parametrize(("workers", "lr", "updates", "runs"), [(2, 0.55, 8, 200), (4, 0.3, 12, 100)])
def test_the_mean_of_many_asynchronous_runs_moves_with_momentum(workers, lr, updates, runs):
    """The learning rate is the worse determined of the two coefficients: a tenth."""
    momentum, rate = heavy_ball(np.stack([path(workers, lr, updates, seed) for seed in range(runs)]))
    assert momentum == pytest.approx(dl.theory.implicit_momentum(workers), rel=0.03)
    assert rate == pytest.approx(lr / workers, rel=0.1)


@pytest.mark.parametrize("workers", [1, 2, 5, 9])
def test_equal_workers_are_stable_up_to_the_closed_form_and_no_further(workers):
    """They take turns, so every gradient is exactly num_workers - 1 updates old."""
    limit = dl.theory.largest_stable_lr(staleness=workers - 1)
    assert abs(after(400, workers, 0.95 * limit)) < 0.3 < 3 < abs(after(400, workers, 1.05 * limit))


def after(num_updates: int, num_workers: int, lr: float) -> float:
    """The largest parameter near the end of an asynchronous run of equal workers from 1."""
    task = countdown(model=lambda: Scalar(1.0), loss=told, optimizer=lambda params: torch.optim.SGD(params, lr=lr))
    run = train(task, dl.AsyncPS(), dl.SimulatedCluster(num_workers, compute=1.0, network=IDEAL), num_updates)
    return np.abs(run.applies["loss"][-50:]).max()


LINKS = {"latency_s": 1e-3, "bandwidth_bytes_per_s": 1e8}


def wide(num_bytes: int) -> dl.Task:
    """A task whose gradient has so many bytes."""
    model = lambda: torch.nn.Linear(num_bytes // 4, 1, bias=False)  # noqa: E731
    return countdown(model=model, train=(torch.zeros(16, num_bytes // 4), torch.zeros(16)))


@pytest.mark.parametrize("workers", [3, 8])
def test_an_all_reduce_takes_as_long_as_its_ring_and_moves_its_bytes(workers):
    cluster = dl.SimulatedCluster(workers, compute=1.0, network=dl.Network(**LINKS), gradients="none")
    run = train(wide(4_000_000), dl.AllReduce(), cluster, 20)
    assert 1 / run.updates_per_s - 1 == pytest.approx(dl.theory.all_reduce_s("ring", 4e6, workers, **LINKS), rel=0.01)
    assert run.bytes_sent / workers / 20 == pytest.approx(dl.theory.bytes_per_nic(4e6, workers), rel=0.01)


@pytest.mark.parametrize("workers", [1, 4, 64])
def test_a_server_with_a_full_network_card_is_as_fast_as_the_closed_form(workers):
    """One worker waits for its own messages too, which the ceiling leaves out; so here they are small."""
    size, computing = (400, 1.0) if workers < 64 else (400_000, 0.1)
    cluster = dl.SimulatedCluster(workers, compute=computing, network=dl.Network(**LINKS), gradients="none")
    run = train(wide(size), dl.AsyncPS(), cluster, 40 * workers)
    expected = dl.theory.between_graph_replicas_per_s(
        workers, compute_s=computing, dispatch_s=0.0, num_bytes=size, bandwidth_bytes_per_s=2 * 1e8
    )
    assert run.updates_per_s == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("p", [2, 4, 8])
def test_servers_on_the_workers_hosts_send_as_much_as_a_ring(p):
    """What worker i pushes to the other hosts' servers, and what server i answers the other hosts' workers."""
    cluster = dl.SimulatedCluster(p, compute=1.0, network=IDEAL, gradients="none")
    trace = train(wide(4_000_000), dl.SyncPS(num_servers=p), cluster, 10).trace
    pushes, pulls = (rows[rows["peer"] != rows["worker"]] for rows in map(trace.select, ("push", "pull")))
    for host in range(p):
        pushed, answered = pushes[pushes["worker"] == host]["bytes"], pulls[pulls["peer"] == host]["bytes"]
        moved = (p - 1) * (pushed.mean() + answered.mean())
        assert moved == pytest.approx(dl.theory.bytes_per_nic(4e6, p), rel=1e-3)


@pytest.mark.parametrize("p", [1, 4, 64])
def test_one_client_serves_at_most_one_over_its_own_time_and_workers_that_feed_themselves_any_number(p):
    """A step of the client feeds all replicas, then waits for all: it comes to the ceiling from below."""
    law = {"compute": 0.1, "dispatch_time": 0.02, "network": IDEAL, "gradients": "none"}
    fed, own = (train(countdown(), s, dl.SimulatedCluster(p, **law), 40) for s in (dl.InGraph(), dl.SyncPS()))
    assert p * fed.updates_per_s == pytest.approx(p / (0.1 + p * 0.02), rel=0.03)
    assert p * fed.updates_per_s <= dl.theory.in_graph_replicas_per_s(p, compute_s=0.1, client_s=0.02) * 1.03
    assert p * own.updates_per_s == pytest.approx(p / 0.1, rel=0.03)
