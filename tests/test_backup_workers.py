"""Spare workers: the server takes the first N gradients, and what comes later was in vain.

Times are checked against closed forms, on an ideal network; TensorFlow 1's tokens against twenty lines of our own.
Seeds are fixed, and 3 % is at least one and a half standard errors of a sample, unless a test says otherwise. The last
of 100 workers with a Pareto law of alpha 2 is left out: its variance is infinite, so no sample has a mean to speak of.
"""

import heapq
import math
import os
import signal
from collections import deque
from functools import cache
from statistics import mean

import numpy as np
import pytest
from toys import countdown, failure, refused, train, until

import distlab as dl
from distlab.roles.server import ServerPort
from distlab.roles.tokens import Tokens
from distlab.roles.worker import Worker

IDEAL = dl.Network(latency_s=0.0, bandwidth_bytes_per_s=math.inf)
SLOW_NETWORK = dl.Network(latency_s=0.3, bandwidth_bytes_per_s=math.inf)  # while a gradient takes about a second
EXPONENTIAL = dl.laws.Exponential(mean_s=1.0)
SHIFTED = dl.laws.ShiftedExponential(shift_s=1.0, tail_s=1.0)
PARETO = dl.laws.Pareto(alpha=2.0, least_s=1.0)
STEADY = dl.laws.Gamma(mean_s=1.0, variation=0.1)
EXACT, TF1 = (dl.SyncPS(num_backup_workers=1, semantics=word) for word in ("exact", "tf1"))
LONG = 10_000_000


@cache
def timed(strategy: dl.Strategy, num_workers: int, num_updates: int, law: dl.laws.Law) -> dl.Run:
    """A run without gradients on an ideal network."""
    cluster = dl.SimulatedCluster(num_workers, compute=law, network=IDEAL, gradients="none", seed=1)
    return train(countdown(), strategy, cluster, num_updates)


def first(num_awaited: int, num_workers: int = 8, **options) -> dl.SyncPS:
    """The first so many of so many workers."""
    return dl.SyncPS(num_backup_workers=num_workers - num_awaited, **options)


@pytest.mark.parametrize(("awaited", "updates"), [(1, 2500), (2, 1300), (4, 700)])
def test_an_update_of_the_first_k_takes_as_long_as_the_closed_form_if_late_workers_are_cancelled(awaited, updates):
    run = timed(first(awaited, late="cancel"), 8, updates, EXPONENTIAL)
    expected = dl.theory.exponential_arrival_s(awaited, 8, tail_s=1.0)
    assert 1 / run.updates_per_s == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(("awaited", "updates", "expected"), [(1, 1600, 0.405), (2, 1000, 0.632), (4, 700, 1.034)])
def test_an_update_takes_longer_if_late_workers_finish_first(awaited, updates, expected):
    """There is no closed form: the figures are from a larger sample of an independent model."""
    assert 1 / timed(first(awaited), 8, updates, EXPONENTIAL).updates_per_s == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(("awaited", "updates"), [(2, 2200), (4, 800), (8, 400)])
def test_a_batch_from_whomever_is_there_sooner_than_one_from_distinct_workers(awaited, updates):
    expected = dl.theory.batch_update_s(awaited, 8, mean_s=1.0)
    synchronous = timed(first(awaited, late="cancel", distinct=False), 8, updates, EXPONENTIAL)
    asynchronous = timed(dl.AsyncPS(apply_every=awaited), 8, updates, EXPONENTIAL)
    assert 1 / synchronous.updates_per_s == pytest.approx(expected, rel=0.03)
    assert 1 / asynchronous.updates_per_s == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(("awaited", "updates"), [(96, 40), (98, 60), (100, 200)])
def test_of_100_workers_the_last_few_cost_as_the_closed_form_says(awaited, updates):
    run = timed(first(awaited, 100, late="cancel"), 100, updates, SHIFTED)
    expected = dl.theory.exponential_arrival_s(awaited, 100, tail_s=1.0, shift_s=1.0)
    assert 1 / run.updates_per_s == pytest.approx(expected, rel=0.03)


def test_of_100_workers_four_spares_save_less_if_nobody_is_cancelled():
    assert 1 / timed(first(96, 100), 100, 40, SHIFTED).updates_per_s == pytest.approx(4.224, rel=0.03)


@pytest.mark.parametrize(("awaited", "updates"), [(96, 120), (98, 160)])
def test_of_100_workers_with_a_heavy_tail_four_spares_save_almost_three_quarters(awaited, updates):
    """The standard error is 2 and 2.6 %."""
    run = timed(first(awaited, 100, late="cancel"), 100, updates, PARETO)
    expected = dl.theory.pareto_arrival_s(awaited, 100, alpha=2.0, least_s=1.0)
    assert 1 / run.updates_per_s == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("options", [{}, {"late": "cancel"}, {"requeue": True}], ids=str)
def test_a_version_has_the_first_n_of_distinct_workers_and_only_fresh_ones(options):
    rows = timed(first(5, **options), 8, 300, EXPONENTIAL).applies
    assert (rows["read"] == rows["version"] - 1).all()
    for version in range(1, 301):
        assert len(set(rows["worker"][rows["version"] == version].tolist())) == 5
    assert len(rows) == 5 * 300


def test_a_version_has_the_gradients_that_came_first():
    run = timed(first(5), 8, 300, EXPONENTIAL)
    ends = run.trace.select("compute")
    for version in (1, 2, 150, 300):
        fresh = ends[ends["version"] == version - 1]
        soonest = fresh[np.argsort(fresh["end_s"])][:5]["worker"]
        applied = run.applies["worker"][run.applies["version"] == version]
        assert sorted(soonest.tolist()) == sorted(applied.tolist())


def test_every_late_gradient_is_dropped_by_its_version():
    run = timed(first(5), 8, 300, EXPONENTIAL)
    dropped, counts = run.trace.select("drop"), run.ledger.counts
    assert (dropped["read"] < dropped["version"]).all()
    assert counts["dropped"] == len(dropped) > 300
    assert run.ledger.balances


@pytest.mark.parametrize(("late", "network"), [("drop", IDEAL), ("drop", SLOW_NETWORK), ("cancel", SLOW_NETWORK)])
def test_a_worker_is_told_whether_its_gradient_was_dropped(monkeypatch, late, network):
    told, push = {}, ServerPort.push

    def heard(self, gradient):
        params = push(self, gradient)
        if not self.worker.ended:
            told[gradient.worker, gradient.step] = params.dropped
        return params

    monkeypatch.setattr(ServerPort, "push", heard)
    cluster = dl.SimulatedCluster(4, compute=EXPONENTIAL, network=network)
    run = train(countdown(), first(2, 4, late=late), cluster, 100)
    fates = {(e.worker, e.step): e.fate == "dropped" for e in run.ledger.entries}
    assert set(told.values()) == {True, False}
    assert told == {key: fates[key] for key in told}


def batches(run: dl.Run, worker: int) -> list[int]:
    """Which of its batches became part of an update, in order: one of four workers has every fourth."""
    return [e.batch // 4 for e in run.ledger.entries if e.worker == worker and e.fate == "applied"]


@pytest.mark.parametrize("network", [IDEAL, SLOW_NETWORK], ids=["ideal", "slow"])
@pytest.mark.parametrize("distinct", [True, False], ids=["distinct", "whoever"])
@pytest.mark.parametrize("late", ["drop", "cancel"])
def test_requeue_loses_no_batch(late, distinct, network):
    """A broadcast that crosses a gradient on its way is an answer to it, too: it says that it came too late."""
    strategies = [first(2, 4, late=late, distinct=distinct, requeue=requeue) for requeue in (True, False)]
    cluster = dl.SimulatedCluster(4, compute=EXPONENTIAL, network=network)
    kept, lost = (train(countdown(), strategy, cluster, 40) for strategy in strategies)
    for worker in range(4):
        assert batches(kept, worker) == list(range(len(batches(kept, worker))))
        assert batches(lost, worker) != list(range(len(batches(lost, worker))))


@pytest.mark.parametrize("late", ["drop", "cancel"])
def test_requeue_uses_every_sample_but_for_what_is_in_flight(late):
    """16 samples are a batch of 4 for each of the 4 workers, so each of theirs is used once more per round."""
    cluster = dl.SimulatedCluster(4, compute=STEADY, network=SLOW_NETWORK)
    kept = train(countdown(), first(3, 4, late=late, requeue=True), cluster, 200)
    done = [len(batches(kept, worker)) for worker in range(4)]
    applied = kept.sample_counts()["applied"]
    assert applied.sum() == 200 * 3 * 4
    assert min(done) <= applied.min() <= applied.max() <= max(done)


def test_what_is_cancelled_is_neither_computed_nor_pushed(monkeypatch):
    calls, backward = [], Worker.backward
    monkeypatch.setattr(Worker, "backward", lambda self, *a, **k: calls.append(self.index) or backward(self, *a, **k))
    cluster = dl.SimulatedCluster(4, compute=EXPONENTIAL, network=IDEAL)
    run = train(countdown(), first(2, 4, late="cancel"), cluster, 50)
    cancelled, pushed = (set(map(tuple, run.trace.select(k)[["worker", "step"]])) for k in ("cancel", "push"))
    assert len(cancelled) == run.ledger.counts["cancelled"] == 2 * 50
    assert not cancelled & pushed
    assert len(calls) == len(run.trace.select("compute")) == len(pushed) == 2 * 50


def test_what_is_cancelled_ends_at_the_moment_of_the_update():
    run = timed(first(2, 4, late="cancel"), 4, 100, EXPONENTIAL)
    cancelled, moments = run.trace.select("cancel"), np.unique(run.applies["end_s"])
    assert cancelled["end_s"].tolist() == sorted(moments.tolist() * 2)


def test_spares_serve_from_the_first_update_on_and_not_at_the_price_of_a_smaller_mean():
    """Two of three: the mean of two ones is one."""
    run = train(countdown(), EXACT, dl.SimulatedCluster(3), 20)
    assert run.params[0] == -20
    assert len(run.applies) == 40


SCENARIOS = {
    "healthy": (3, lambda cluster: cluster),
    "dead": (3, lambda cluster: cluster.kill(worker=2, at_s=53)),
    "slow": (3, lambda cluster: cluster.slow(worker=2, factor=5)),
    "two dead": (6, lambda cluster: cluster.kill(worker=4, at_s=53).kill(worker=5, at_s=53)),
}


@cache
def total_s(semantics: str, scenario: str, seeds: int = 2) -> float:
    """How long 300 updates take, a third of the workers being spare; a worker needs 1 s, give or take 10 %."""
    workers, change = SCENARIOS[scenario]
    strategy = dl.SyncPS(num_backup_workers=workers // 3, semantics=semantics)

    def one(seed: int) -> float:
        cluster = dl.SimulatedCluster(workers, compute=STEADY, network=IDEAL, gradients="none", seed=seed)
        return train(countdown(), strategy, change(cluster), 300).seconds

    return mean(one(seed) for seed in range(seeds))


@pytest.mark.parametrize("scenario", ["dead", "slow"])
def test_a_spare_that_is_dead_or_slow_costs_next_to_nothing(scenario):
    assert total_s("exact", scenario) == pytest.approx(total_s("exact", "healthy"), rel=0.05)


def first_k_of(num_workers: int, awaited: int, *, dead=(), slow=(), seed: int) -> float:
    """TensorFlow 1's token queue, a second time and on its own: the time of 300 updates."""
    rng, version, count, now = np.random.default_rng(seed), 0, 0, 0.0
    tokens, waiting, labels = deque([0] * awaited), deque(), [0] * num_workers
    ready = [(rng.normal(1, 0.1) * (5 if w in slow else 1), w) for w in range(num_workers)]
    heapq.heapify(ready)
    while version < 300:
        now, worker = heapq.heappop(ready)
        if worker in dead and now > 53:
            continue
        count += labels[worker] >= version
        if count == awaited:
            version, count = version + 1, 0
            tokens.extend([version] * num_workers)
        waiting.append(worker)
        while tokens and waiting:
            worker = waiting.popleft()
            labels[worker] = tokens.popleft()
            heapq.heappush(ready, (now + rng.normal(1, 0.1) * (5 if worker in slow else 1), worker))
    return now


@pytest.mark.parametrize(
    ("scenario", "fault"),
    [("healthy", {}), ("dead", {"dead": (2,)}), ("slow", {"slow": (2,)}), ("two dead", {"dead": (4, 5)})],
    ids=SCENARIOS,
)
def test_tf1_takes_as_long_as_an_independent_model_of_its_tokens(scenario, fault):
    workers, _ = SCENARIOS[scenario]
    model = mean(first_k_of(workers, workers - workers // 3, **fault, seed=seed) for seed in range(24))
    assert total_s("tf1", scenario) == pytest.approx(model, rel=0.01)


@pytest.mark.parametrize(("scenario", "expected"), [("dead", 447), ("slow", 449), ("two dead", 451)])
def test_tf1_pays_for_a_bad_spare_with_a_third_of_its_time(scenario, expected):
    assert total_s("tf1", scenario) == pytest.approx(expected, rel=0.05)
    assert total_s("tf1", scenario) > 1.3 * total_s("tf1", "healthy")


def test_in_tf1_a_worker_can_contribute_twice_to_a_version():
    rows = timed(TF1, 3, 300, EXPONENTIAL).applies
    pairs = [rows["worker"][rows["version"] == v].tolist() for v in range(1, 301)]
    assert {len(pair) for pair in pairs} == {2}
    assert 0 < sum(len(set(pair)) == 1 for pair in pairs) < 300


def test_in_tf1_a_fresh_gradient_is_dropped_for_its_label_where_many_spares_are_dead():
    cluster = dl.SimulatedCluster(8, compute=STEADY, network=IDEAL, gradients="none")
    for worker in range(4, 8):
        cluster = cluster.kill(worker=worker, at_s=53)
    dropped = train(countdown(), first(4, semantics="tf1"), cluster, 300).trace.select("drop")
    assert (dropped["read"] == dropped["version"]).sum() > 50


@pytest.mark.parametrize(("at_s", "least"), [(53, 1), (10_000, 0)], ids=["dead", "healthy"])
def test_in_tf1_a_dead_spare_leaves_a_token_that_nobody_takes_away(monkeypatch, at_s, least):
    """So the queue is never empty again, and whoever should have waited at it does not."""
    lengths, draw = [], Tokens._draw

    def measured(self, worker):
        self._fill()
        lengths.append(len(self._queue))
        draw(self, worker)

    monkeypatch.setattr(Tokens, "_draw", measured)
    cluster = dl.SimulatedCluster(3, compute=STEADY, network=IDEAL, gradients="none")
    run = train(countdown(), TF1, cluster.kill(worker=2, at_s=at_s), 300)
    assert (min(lengths[:150]), min(lengths[300:])) == (0, least)
    assert len(run.applies) == 600
    assert len(run.trace.select("drop")) == pytest.approx(300, abs=3)


def test_a_killed_spare_does_not_end_a_run_of_real_processes_and_the_next_death_does():
    with dl.LocalCluster(num_workers=3, compute_time_s=0.001) as cluster:
        live = dl.start(countdown(), EXACT, cluster, num_updates=LONG)
        until(lambda: {"worker 0", "worker 1", "worker 2"} <= set(live.trace.who))
        os.kill(live.launched.pids["worker 2"], signal.SIGKILL)
        until(lambda: live.trace.where("death").who == ["worker 2"])
        before = live.version
        until(lambda: live.version > before + 20)
        pid = live.launched.pids["worker 1"]
        os.kill(pid, signal.SIGKILL)
        error = failure(live)
    assert isinstance(error, dl.ProcessLost)
    assert f"worker 1 (pid {pid}) was lost at step" in str(error)


def test_real_processes_with_a_spare_drop_by_version(three):
    run = train(countdown(), EXACT, three, 50)
    rows = run.applies
    assert (rows["read"] == rows["version"] - 1).all()
    assert (run.params[0], len(rows)) == (-50, 100)


def test_a_second_death_ends_a_simulated_run_by_name():
    cluster = dl.SimulatedCluster(3, compute=1.0).kill(worker=2, at_s=10).kill(worker=0, at_s=20)
    with pytest.raises(dl.PeerLost, match="worker 0 was lost"):
        train(countdown(), EXACT, cluster, 100)


@pytest.mark.usefixtures("no_process_starts")
def test_cancelling_on_real_processes_is_refused():
    told = 'on real processes this cannot be had: late="cancel": a gradient that is being computed cannot be called'
    refused(ValueError, told, strategy=dl.SyncPS(num_backup_workers=1, late="cancel"))


@pytest.mark.usefixtures("no_process_starts")
@pytest.mark.parametrize("spares", [2, 5])
def test_more_spares_than_workers_are_refused(spares):
    told = f"num_backup_workers={spares}: of 2 workers nobody would be left to wait for"
    refused(ValueError, told, strategy=dl.SyncPS(num_backup_workers=spares))


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"num_backup_workers": -1}, ValueError, "num_backup_workers must be at least 0, got -1"),
        ({"num_backup_workers": 1.5}, TypeError, "num_backup_workers must be a whole number, got 1.5"),
        ({"late": "cancle"}, ValueError, "late='cancle': did you mean 'cancel'"),
        ({"semantics": "tf2"}, ValueError, "semantics='tf2': did you mean 'tf1'"),
        ({"semantics": "tf1", "requeue": True}, ValueError, 'semantics="tf1" has one server, .* no late=, requeue='),
        ({"semantics": "tf1", "late": "cancel"}, ValueError, 'semantics="tf1" has one server'),
        ({"semantics": "tf1", "num_servers": 2}, ValueError, 'semantics="tf1" has one server'),
        ({"late": "cancel", "num_servers": 2}, ValueError, 'late="cancel" needs one server'),
    ],
)
def test_bad_option_is_refused_by_name(options, error, told):
    with pytest.raises(error, match=told):
        dl.SyncPS(**options)


@pytest.mark.parametrize(
    "strategy",
    [
        dl.SyncPS(num_backup_workers=2, late="cancel", requeue=True, distinct=False),
        dl.SyncPS(num_backup_workers=1, requeue=True, num_servers=2),
        TF1,
    ],
    ids=repr,
)
def test_spares_keep_the_promises_of_every_strategy(strategy):
    assert "kept its promises in 10" in dl.check_strategy(strategy, num_cases=10)
