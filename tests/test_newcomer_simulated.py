"""What a newcomer met in the simulated world, and will not meet again."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from toys import PLAIN, countdown, regression

import distlab as dl


def dropping(**changes) -> dl.Task:
    """A task whose model draws random numbers."""
    return regression(
        model=lambda: nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5), nn.Linear(4, 1)).double(), **changes
    )


class Rarely(torch.utils.data.Dataset):
    """Augments one sample in ten, with all the random numbers that there are; the first batches may have none."""

    def __len__(self) -> int:
        return 120

    def __getitem__(self, i: int):
        x = torch.full((5,), i / 120, dtype=torch.float64)
        noise = torch.randn(5) + np.random.randn() + random.gauss(0, 1) if i % 10 == 3 else torch.zeros(5)
        return x + noise, x[:1]


def train(task, strategy, cluster, num_updates=40):
    return dl.train(task, strategy, cluster, num_updates=num_updates, progress=False)


def test_random_numbers_in_the_foreground_do_not_move_a_run():
    cluster = dl.SimulatedCluster(4, seed=1)
    alone = train(dropping(), dl.AsyncPS(), cluster, 200)
    live = dl.start(dropping(), dl.AsyncPS(), cluster, num_updates=200)
    for _ in range(50):
        dropping().build()
    alone.replay()
    assert live.wait().params.equal(alone.params)


def test_two_runs_at_once_draw_their_own_numbers():
    cluster = dl.SimulatedCluster(4, seed=1)
    alone = train(dropping(), dl.AsyncPS(), cluster, 200)
    both = [dl.start(dropping(), dl.AsyncPS(), cluster, num_updates=200) for _ in range(2)]
    assert [live.wait().params.equal(alone.params) for live in both] == [True, True]


def test_a_run_does_not_move_the_random_numbers_of_the_foreground():
    torch.manual_seed(3)
    np.random.seed(3)
    train(dropping(), dl.AsyncPS(), dl.SimulatedCluster(3), 10)
    drawn = torch.rand(1).item(), np.random.rand()
    torch.manual_seed(3)
    np.random.seed(3)
    assert drawn == (torch.rand(1).item(), np.random.rand())


@pytest.mark.parametrize("strategy", PLAIN, ids=repr)
def test_data_that_seldom_draws_random_numbers_replays_to_the_same_bits(strategy):
    task = regression(train=Rarely(), batch_size=3)
    made = train(task, strategy, dl.SimulatedCluster(3, seed=7), 30)
    assert made.replay().params.equal(made.params)


def test_simulated_and_real_workers_draw_the_same_numbers(two):
    task = regression(train=Rarely(), batch_size=3)
    simulated, real = (train(task, dl.SyncPS(), c, 30) for c in (dl.SimulatedCluster(2), two))
    assert simulated.params.equal(real.params)
    assert real.replay().params.equal(real.params)


def test_deadlock_keeps_what_was_measured():
    with pytest.raises(dl.Deadlock) as caught:
        train(countdown(), dl.SyncPS(), dl.SimulatedCluster(3, compute=0.1).partition(worker=1, from_s=0.55), 20)
    assert caught.value.run.num_updates == 5
    assert caught.value.run.ledger.balances


def test_exit_in_user_code_does_not_end_the_caller():
    with pytest.raises(dl.RemoteError, match="SystemExit: 3"):
        train(countdown(optimizer=Exiting), dl.AsyncPS(), dl.SimulatedCluster(2), 5)


class Exiting(torch.optim.SGD):
    """An optimizer that ends the program in its first step."""

    def __init__(self, params) -> None:
        super().__init__(params, lr=1.0)

    def step(self, closure=None) -> None:
        raise SystemExit(3)


class Refuses(dl.AsyncPS):
    """A server that applies nothing, for ever."""

    def serve(self, server, worker):
        for gradient in worker.pushes():
            server.record("drop", gradient)
            worker.reply()


class AppliesTwice(dl.AsyncPS):
    """A server that applies each gradient twice, as one update."""

    def serve(self, server, worker):
        for gradient in worker.pushes():
            with server.guard():
                server.apply(gradient, gradient)
                worker.reply()


@pytest.mark.parametrize(
    ("strategy", "text"),
    [(Refuses(), "it goes on and on"), (AppliesTwice(), "a gradient was applied twice to one version")],
)
def test_check_finds(strategy, text):
    with pytest.raises(dl.PromiseBroken, match=text):
        dl.check_strategy(strategy, num_cases=2)


def test_check_knows_no_other_promises():
    class Typing(dl.SyncPS):
        promises = ("fersh",)

    with pytest.raises(ValueError, match="a promise='fersh': did you mean 'fresh'"):
        dl.check_strategy(Typing())


def test_run_that_computed_nothing_has_no_loss_and_no_replay():
    made = train(countdown(), dl.AsyncPS(), dl.SimulatedCluster(2, gradients="none"), 5)
    assert made.history["loss"].isna().all()
    with pytest.raises(ValueError, match="nothing was computed"):
        made.replay()


def test_closed_cluster_refuses_new_runs():
    with dl.SimulatedCluster(2) as cluster:
        pass
    with pytest.raises(dl.DistlabError, match="this SimulatedCluster was closed"):
        train(countdown(), dl.AsyncPS(), cluster)


def test_async_run_goes_on_without_a_worker_that_never_came():
    assert train(countdown(), dl.AsyncPS(), dl.SimulatedCluster(2).kill(worker=1, at_s=0), 20).num_updates == 20


@pytest.mark.parametrize("workers", [1, 4, 8])
def test_client_hands_out_one_part_after_the_other(workers):
    cluster = dl.SimulatedCluster(
        workers, compute=0.1, dispatch_time=0.02, gradients="none",
        network=dl.Network(latency_s=0.0, bandwidth_bytes_per_s=float("inf")),
    )  # fmt: skip
    assert 1 / train(countdown(), dl.InGraph(), cluster, 20).updates_per_s == pytest.approx(0.1 + workers * 0.02)


@pytest.mark.parametrize(
    ("error", "text", "call"),
    [
        (ValueError, "gave a time of inf s", lambda: dl.laws.Pareto(alpha=1e-3, least_s=0.1)),
        (TypeError, "a time in seconds must be a number, got 'fast'", lambda: "fast"),
        (TypeError, "Empirical needs a list of times", lambda: dl.laws.Empirical(3.0)),
    ],
)
def test_times_that_are_none_are_named(error, text, call):
    with pytest.raises(error, match=text):
        train(countdown(), dl.AsyncPS(), dl.SimulatedCluster(2, compute=call()), 50)


def test_numpy_numbers_are_numbers():
    cluster = dl.SimulatedCluster(np.int64(2), compute=np.array([0.1, 0.2]))
    assert train(countdown(), dl.AsyncPS(), cluster, np.int64(6)).num_updates == 6


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("factor must be at most 1", lambda: dl.SimulatedCluster(2).throttle(worker=0, factor=2.0)),
        ("like takes a run, got 3", lambda: dl.SimulatedCluster.like(3)),
        ("compare takes runs, got 1", lambda: dl.compare([1])),
    ],
)
def test_what_is_no_run_or_no_part_is_refused(text, call):
    with pytest.raises((TypeError, ValueError), match=text):
        call()
