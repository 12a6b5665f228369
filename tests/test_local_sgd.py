"""Workers that train alone and meet every H steps."""

import pytest
import torch
from toys import countdown, halving, nesterov, refused, regression, train

import distlab as dl
from distlab import data

WORLDS = pytest.mark.parametrize("real", [False, True], ids=["simulated", "real"])


def cluster(real: bool, num_workers: int = 2) -> dl.Cluster:
    return dl.LocalCluster(num_workers) if real else dl.SimulatedCluster(num_workers)


@WORLDS
def test_one_step_a_round_with_plain_sgd_is_all_reduce(real):
    rounds, steps = (
        train(regression(), strategy, cluster(real, 3), 30) for strategy in (dl.LocalSGD(every=1), dl.AllReduce())
    )
    torch.testing.assert_close(rounds.params, steps.params, rtol=0, atol=1e-12)


@WORLDS
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_replicas_are_identical_after_a_round_and_a_replay_ends_there(real, optimizer):
    made = train(regression(optimizer), dl.LocalSGD(every=4), cluster(real, 3), 6)
    assert all(replica.equal(made.params) for replica in made.replicas.values())
    assert made.replay().params.equal(made.params)


def test_every_gradient_of_a_round_counts():
    """Each takes away 1 on its worker; the mean of two workers' moves of -5 is -5."""
    made = train(countdown(), dl.LocalSGD(every=5), dl.SimulatedCluster(2), 4)
    assert (made.params[0], made.version, made.num_updates) == (-20, 4, 4)
    assert made.ledger.counts["applied"] == 4 * 5 * 2


def test_workers_that_share_a_curvature_go_the_path_of_synchronous_sgd():
    """Two steps halve 8 twice, on each worker and so on average: 2, then a half."""
    made = train(halving(), dl.LocalSGD(every=2), dl.SimulatedCluster(3), 2)
    assert made.params[0] == 0.5


def test_outer_optimizer_takes_the_mean_move_as_a_gradient():
    """The first round moves by -5 × .7 × (1 + .9); Nesterov's buffer is then -5 × 1.9 for the second."""
    made = train(countdown(), dl.LocalSGD(every=5, outer=nesterov), dl.SimulatedCluster(2), 2)
    first = 0.7 * (5 + 0.9 * 5)
    second = 0.7 * (5 + 0.9 * (0.9 * 5 + 5))
    torch.testing.assert_close(made.params[0].item(), -(first + second))


def test_a_round_sends_as_much_as_one_step_of_all_reduce():
    few, many = (train(regression(), s, dl.SimulatedCluster(4), 5) for s in (dl.LocalSGD(every=8), dl.AllReduce()))
    assert few.bytes_sent == many.bytes_sent


def test_the_time_of_a_round_is_that_of_its_steps_and_one_all_reduce():
    links = dl.Network(latency_s=0.05)
    made = train(countdown(), dl.LocalSGD(every=8), dl.SimulatedCluster(2, compute=0.1, network=links), 10)
    assert 1 / made.updates_per_s == pytest.approx(8 * 0.1 + 0.05, rel=0.01)


@pytest.mark.parametrize(
    ("error", "text", "options"),
    [
        (ValueError, "every must be at least 1, got 0", {"every": 0}),
        (TypeError, "outer must be a factory of an optimizer, got 0.7", {"outer": 0.7}),
        (ValueError, "algorithm='rign': did you mean 'ring'", {"algorithm": "rign"}),
    ],
)
def test_bad_options_are_named(error, text, options):
    with pytest.raises(error, match=text):
        dl.LocalSGD(**options)


@WORLDS
def test_uneven_data_ends_cleanly_with_equal_replicas(real):
    live = dl.start(regression(), dl.LocalSGD(every=3), cluster(real), num_batches=(4, 8))
    made = live.wait()
    assert made.steps == {"worker 0": 4, "worker 1": 8}
    first, second = made.replicas.values()
    assert first.equal(second)
    assert made.ledger.counts["applied"] == 12
    assert made.replay().params.equal(made.params)


def test_it_keeps_its_promises():
    assert "kept its promises" in dl.check_strategy(dl.LocalSGD(every=3), num_cases=10)


@pytest.mark.parametrize(("every", "end"), [(1, 0.2), (5, 0.307498), (20, 0.467648)])
def test_workers_that_disagree_end_elsewhere_the_longer_they_train_alone(monkeypatch, every, end):
    """Worker 0 wants 1 with curvature 1, worker 1 wants 0 with curvature 4: together they would settle at 1/5."""
    monkeypatch.setattr(data, "permutation", lambda length, seed, epoch: torch.arange(length))  # each its own sample
    told = lambda w, t: (t[:, 0] / 2 * (w - t[:, 1]) ** 2).mean()  # noqa: E731
    wants = torch.tensor([[1.0, 1.0], [4.0, 0.0]], dtype=torch.float64)
    slow = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    task = countdown(train=(torch.zeros(2), wants), loss=told, optimizer=slow, batch_size=1)
    made = train(task, dl.LocalSGD(every=every), dl.SimulatedCluster(2), 200)
    assert made.params[0].item() == pytest.approx(end, abs=1e-6)


@pytest.mark.parametrize("every", [1, 3, 8])
def test_mean_path_of_workers_with_one_hessian_is_that_of_the_big_batch(monkeypatch, every):
    """Only the targets differ between batches."""
    monkeypatch.setattr(data, "permutation", lambda length, seed, epoch: torch.arange(length))
    generator = torch.Generator().manual_seed(0)
    x = torch.eye(4, dtype=torch.float64).repeat(12, 1)  # every batch holds each unit vector once
    y = torch.randn(48, 1, dtype=torch.float64, generator=generator)
    task = regression(model=lambda: torch.nn.Linear(4, 1, bias=False).double(), train=(x, y))
    made = train(task, dl.LocalSGD(every=every), dl.SimulatedCluster(3), 24 // every)
    whole = train(task.but(batch_size=12), dl.SingleWorker(), dl.SimulatedCluster(1), 24)
    torch.testing.assert_close(made.params, whole.params, rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    ("outer", "error", "told"),
    [
        (
            lambda p: torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=1.0),
            ValueError,
            "has other parameters than",
        ),
        (lambda p: 3, TypeError, "must return a torch.optim.Optimizer"),
        (lambda p: torch.optim.LBFGS(p), ValueError, "LBFGS needs a closure"),
    ],
)
def test_outer_optimizer_that_cannot_be_used_is_refused_before_anything_starts(no_process_starts, outer, error, told):
    refused(error, f"outer: .*{told}", strategy=dl.LocalSGD(outer=outer))
