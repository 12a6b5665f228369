"""Under a synchronous strategy everybody looks equally slow; who was waited for is in the arrivals."""

import os
import time

import pytest
import torch
from toys import countdown, regression, train

import distlab as dl

SYNCHRONOUS = [dl.AllReduce(), dl.SyncPS(), dl.InGraph(), dl.LocalSGD(every=3)]


@pytest.mark.parametrize("strategy", SYNCHRONOUS, ids=repr)
def test_slow_worker_is_blamed_whoever_applies(strategy):
    cluster = dl.SimulatedCluster(4, compute=dl.laws.Gamma(mean_s=0.1)).slow(worker=2, factor=3)
    found = train(countdown(), strategy, cluster, 20).blame()
    assert (found.worker, found.times_last[2], found.updates) == (2, 20, 20)


def test_waits_are_those_of_the_clock():
    """Worker 1 takes .3 s, the others .1 and .15: it alone is waited for .15 s in each of 10 updates."""
    cluster = dl.SimulatedCluster(3, compute=[0.1, 0.3, 0.15], network=dl.Network(latency_s=0.0))
    found = train(countdown(), dl.AllReduce(), cluster, 10).blame()
    assert found.waited_s == pytest.approx({0: 0, 1: 1.5, 2: 0}, abs=1e-4)
    assert str(found).startswith("worker 1 came last in 10 of 10 updates, and was waited for alone 1.5 s of the 1.5 s")


class Late(torch.autograd.Function):
    """The identity, whose backward takes 200 ms on rank 1."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if os.environ["RANK"] == "1":
            time.sleep(0.2)  # this is the straggler, not a wait for something
        return gradient


class Ranked(dl.AllReduce):
    """Tells user code which rank it is on."""

    def run(self, fabric, job):
        os.environ["RANK"] = str(fabric.me.index)
        return super().run(fabric, job)


@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 64}, {"engine": "ddp"}], ids=str)
def test_straggler_in_a_real_backward_is_named(three, options):
    task = regression(forward=lambda model, x: Late.apply(model(x)))
    found = train(task, Ranked(**options), three, 5).blame()
    assert (found.worker, found.times_last[1], found.updates) == (1, 5, 5)
    assert found.waited_s[1] > 0.5


def test_spares_save_what_the_slowest_cost():
    cluster = dl.SimulatedCluster(4, compute=[0.1, 0.1, 0.2, 0.4], network=dl.Network(latency_s=0.0))
    table = train(countdown(), dl.AllReduce(), cluster, 10).how_many_backups()
    assert table["seconds"].tolist() == pytest.approx([0.4, 0.2, 0.1, 0.1], abs=1e-3)
    assert table["saved"].tolist() == pytest.approx([0, 0.5, 0.75, 0.75], abs=1e-2)
    assert table["wasted"].tolist() == [0, 0.25, 0.5, 0.75]


def test_prediction_is_what_spares_then_save():
    law = dl.laws.ShiftedExponential(shift_s=0.1, tail_s=0.1)
    said = train(countdown(), dl.SyncPS(), dl.SimulatedCluster(8, compute=law, seed=1), 400).how_many_backups()
    spared = train(
        countdown(), dl.SyncPS(num_backup_workers=2, late="cancel"), dl.SimulatedCluster(8, compute=law, seed=2), 400
    )
    assert 1 / spared.updates_per_s == pytest.approx(said["seconds"][2], rel=0.05)


def test_asynchronous_runs_have_nobody_to_blame():
    with pytest.raises(ValueError, match="blame is for synchronous runs"):
        train(countdown(), dl.AsyncPS(), dl.SimulatedCluster(3), 10).blame()
