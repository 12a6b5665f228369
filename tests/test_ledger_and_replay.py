"""Every gradient has one fate; and a run is nothing but its tape."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from toys import FAMILY, PLAIN, regression

import distlab as dl
from distlab.reports import ledger
from distlab.reports.ledger import FATES
from distlab.trace import EVENT, KINDS, Trace


def mixed(**changes):
    """All that can differ between two runs of a model: dropout, BatchNorm, Adam, a schedule by version."""
    x = torch.randn(120, 6, generator=torch.Generator().manual_seed(1))
    parts = {
        "model": lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3)),
        "train": (x, x[:, :3].argmax(1)),
        "loss": F.cross_entropy,
        "optimizer": lambda params: torch.optim.Adam(params, lr=0.01),
        "lr_schedule": lambda version: 1 / (1 + version / 20),
        "batch_size": 8,
    }
    return dl.Task(**parts | changes)


def run(strategy, cluster, task=None, num_updates=30):
    return dl.train(task or mixed(), strategy, cluster, num_updates=num_updates, progress=False)


def rows(*events):
    """A trace by hand: (kind, worker, step, read, version)."""
    made = np.zeros(len(events), EVENT)
    for row, (kind, worker, step, read, version) in zip(made, events, strict=True):
        row["kind"], row["worker"], row["step"] = KINDS.index(kind), worker, step
        row["read"], row["version"], row["samples"] = read, version, 4
    return Trace(made)


def test_ledger_by_hand():
    book = ledger(
        rows(
            ("compute", 0, 0, 0, 0),
            ("compute", 1, 0, 0, 0),
            ("compute", 0, 1, 1, 1),
            ("compute", 1, 1, 1, 1),
            ("compute", 2, 0, 0, 0),
            ("apply", 0, 0, 0, 1),
            ("drop", 1, 0, 0, 1),
            ("unused", 0, 1, 1, 1),
            ("death", 2, -1, -1, -1),
        )
    )
    assert book.counts == dict.fromkeys(FATES, 0) | {"applied": 1, "dropped": 1, "unused": 2, "lost": 1}
    assert book.samples["unused"] == 8
    assert book.balances


@pytest.mark.parametrize(
    ("events", "text"),
    [
        ([("apply", 0, 0, 0, 1)], "applied, but never computed"),
        ([("compute", 0, 0, 0, 0), ("apply", 0, 0, 0, 1), ("apply", 0, 0, 0, 2)], "was applied, then applied"),
        ([("compute", 0, 0, 0, 0), ("apply", 0, 0, 0, 1), ("drop", 0, 0, 0, 1)], "was applied, then dropped"),
    ],
)
def test_ledger_that_does_not_balance_says_why(events, text):
    book = ledger(rows(*events))
    assert not book.balances
    assert text in book.problems[0]
    assert "DOES NOT BALANCE" in repr(book)


@pytest.mark.parametrize("strategy", PLAIN, ids=repr)
def test_ledger_of_a_real_run_balances_and_samples_come_in_epochs(two, strategy):
    made = run(strategy, two)
    assert made.ledger.balances
    assert made.ledger.counts["applied"] == made.num_updates * strategy.gradients_per_update(2)
    total = sum(made.sample_counts().values())
    assert total.sum() == sum(made.ledger.samples.values())
    if "enough" in strategy.promises:
        assert total.max() - total.min() <= 1  # all workers are at the same place of the same stream


@pytest.mark.parametrize("strategy", PLAIN, ids=repr)
def test_replay_of_a_real_run_ends_at_the_same_bits(two, strategy):
    made = run(strategy, two)
    again = made.replay()
    assert again.params.equal(made.params)
    assert all(again.local[name].equal(made.local[name]) for name in made.local if strategy.final == "server")


@pytest.mark.parametrize("strategy", PLAIN + FAMILY, ids=repr)
def test_replay_of_a_simulated_run_ends_at_the_same_bits(strategy):
    cluster = dl.SimulatedCluster(6, seed=2, compute=dl.laws.Exponential(mean_s=0.1), apply_time=0.03)
    made = run(strategy, cluster)
    assert made.replay().params.equal(made.params)


def test_replay_goes_on_past_a_dead_worker():
    made = run(dl.AsyncPS(), dl.SimulatedCluster(4, compute=0.1).kill(worker=1, at_s=0.55))
    assert made.ledger.counts["lost"] + made.ledger.counts["applied"] + made.ledger.counts["unused"] == len(
        made.ledger.entries
    )
    assert made.replay().params.equal(made.params)


def test_replay_with_another_learning_rate_is_the_run_with_that_rate_where_the_order_is_the_same():
    made, wanted = (run(dl.SyncPS(), dl.SimulatedCluster(3), dl.tasks.digits(lr=lr)) for lr in (0.02, 0.005))
    assert made.replay(lr=0.005).params.equal(wanted.params)
    assert not made.params.equal(wanted.params)


def test_replay_without_a_worker_leaves_its_gradients_out():
    made = run(dl.AsyncPS(locking="server"), dl.SimulatedCluster(3, seed=4), regression(), 60)
    edited = made.replay(without_worker=2)
    theirs = made.trace.select("apply", worker=2)["version"].tolist()
    assert [v for v, loss in edited.losses.items() if np.isnan(loss)] == theirs
    assert 0.2 * 60 < len(theirs) < 0.5 * 60
    assert not edited.params.equal(made.params)


def test_replay_refuses_a_worker_that_is_not_on_the_tape():
    with pytest.raises(ValueError, match=r"without_worker=7: this tape has gradients of workers \[0, 1\]"):
        run(dl.SyncPS(), dl.SimulatedCluster(2)).replay(without_worker=7)


def test_replay_refuses_an_empty_tape():
    with pytest.raises(ValueError, match="nothing to replay"):
        dl.Run("x", "y", rows(("compute", 0, 0, 0, 0)), None, 0, task=mixed(), algorithm=dl.AsyncPS()).replay()


def test_calibrated_cluster_has_the_times_of_its_run(padded):
    made = run(dl.AsyncPS(), padded, regression(), 80)
    cluster = dl.SimulatedCluster.like(made)
    predicted = run(dl.AsyncPS(), cluster, regression(), 80)
    measured = made.trace.select("compute")
    simulated = predicted.trace.select("compute")
    longest = (measured["end_s"] - measured["start_s"]).max()
    assert (simulated["end_s"] - simulated["start_s"]).min() >= 0.005
    assert (simulated["end_s"] - simulated["start_s"]).max() <= longest + 1e-9
    table = dl.compare({"real": made, "simulated": predicted})
    assert list(table.index) == ["real", "simulated"]
    assert table["relative"].iloc[0] == 1


def test_calibration_refuses_a_run_in_which_nothing_happened():
    with pytest.raises(ValueError, match="run it for longer"):
        dl.SimulatedCluster.like(dl.Run("x", "y", rows(("compute", 0, 0, 0, 0)), None, 0, num_workers=2))
