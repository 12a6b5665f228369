"""One worker is four times as slow as the others: what that costs each strategy, against the closed forms."""

import pytest
from toys import regression, train

import distlab as dl

T, SLOW = 0.05, 4
MIXED = dl.SimulatedCluster(4, compute=T).slow(worker=3, factor=SLOW)


@pytest.mark.parametrize(
    ("strategy", "per_s"),
    [
        (dl.AsyncPS(), 3 / T + 1 / (SLOW * T)),
        (dl.SyncPS(), 1 / (SLOW * T)),
        (dl.AllReduce(), 1 / (SLOW * T)),
        (dl.InGraph(), 1 / (SLOW * T)),
        (dl.SyncPS(num_backup_workers=1), 1 / T),
    ],
    ids=repr,
)
def test_rate_with_one_slow_worker_is_the_closed_form(strategy, per_s):
    run = train(regression(), strategy, MIXED, 200)
    assert run.updates_per_s == pytest.approx(per_s, rel=0.02)


def test_asynchronous_training_uses_what_the_slow_worker_can_give():
    """Nothing is lost but its share: one gradient of thirteen."""
    run = train(regression(), dl.AsyncPS(), MIXED, 260)
    assert (run.applies["worker"] == 3).sum() == pytest.approx(260 / 13, abs=1)
    assert run.ledger.counts["dropped"] == run.ledger.counts["lost"] == 0


def test_a_spare_recovers_the_pace_by_dropping_what_is_late():
    run = train(regression(), dl.SyncPS(num_backup_workers=1), MIXED, 100)
    assert (run.applies["worker"] == 3).sum() == 0
    dropped = run.trace.select("drop")
    assert set(dropped["worker"].tolist()) == {3}
    assert len(dropped) == pytest.approx(100 / SLOW, abs=2)
