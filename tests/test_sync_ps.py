"""The synchronous parameter server: a version is the mean of one fresh gradient from each worker."""

import pytest
from toys import countdown, keys, regression, train

import distlab as dl


@pytest.fixture(scope="module")
def run(three):
    return train(countdown(), dl.SyncPS(), three, 30)


def test_each_version_has_one_gradient_from_each_worker(run):
    applied = run.trace.select("apply")
    assert len(applied) == 90
    for version in range(1, 31):
        assert applied[applied["version"] == version]["worker"].tolist() == [0, 1, 2]


def test_gradients_are_read_at_the_version_before(run):
    applied = run.trace.select("apply")
    assert (applied["read"] == applied["version"] - 1).all()


def test_every_gradient_is_applied(run):
    assert sorted(keys(run.trace.select("compute"))) == sorted(keys(run.trace.select("apply")))
    assert len(run.trace.select("unused")) == 0


def test_an_update_is_the_mean_not_the_sum(run):
    assert run.params[0] == -30


def test_the_server_applies(run):
    assert run.who_applied == ["server 0"]


def test_nobody_pulls_before_the_last_has_pushed(run):
    pushes, pulls = run.trace.select("push"), run.trace.select("pull")
    for version in range(1, 31):
        last = pushes[pushes["read"] == version - 1]["start_s"].max()
        assert pulls[pulls["version"] == version]["end_s"].min() > last


def test_server_that_waits_for_one_worker_does_not_hold_its_lock_meanwhile(two):
    """Or the second push could never arrive."""
    assert train(regression(), dl.SyncPS(), two, 5).version == 5
