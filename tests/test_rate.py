"""`LiveRun.scale_lr`: the learning rate of a run under way."""

import math

import numpy as np
import pytest
from test_ledger_and_replay import mixed
from toys import FAMILY, PLAIN, countdown, until

import distlab as dl
from distlab.fabric import Peer

HALF = 0.5
SLOW = dl.laws.Exponential(mean_s=0.1)


def changed(live: dl.LiveRun, factor: float = HALF, after: int = 5) -> dl.Run:
    """Let a run make some updates, change the rate, and wait until that is in the trace; then let it end."""
    until(lambda: live.version >= after)
    live.scale_lr(factor)
    until(lambda: len(live.trace.select("rate")) > 0)
    last = live.version
    until(lambda: live.version > last + 5)
    live.stop()
    return live.wait()


def stepped(task: dl.Task, strategy: dl.Strategy, cluster: dl.SimulatedCluster, num_updates: int) -> dl.Run:
    """The same in virtual time."""
    live = dl.start(task, strategy, cluster, num_updates=num_updates, paused=True)
    while live.version < num_updates // 3:
        live.step(5)
    live.scale_lr(HALF)
    return live.wait()


def way(run: dl.Run) -> float:
    """How far a countdown has come by its trace: 1 each update, and half of that from the change on."""
    begins = run.trace.select("rate")["version"].min()
    versions = np.unique(run.trace.applies["version"])
    return float((versions < begins).sum() + HALF * (versions >= begins).sum())


@pytest.mark.parametrize("strategy", [dl.AsyncPS(), dl.SyncPS(), dl.AllReduce(), dl.SingleWorker(), dl.InGraph()])
def test_update_is_half_as_long_from_the_version_on_that_the_trace_says(two, strategy):
    run = changed(dl.start(countdown(), strategy, two, num_updates=1_000_000))
    assert set(run.trace.select("rate")["loss"]) == {HALF}
    assert run.params[0].item() == -way(run)
    assert run.params[0].item() > -run.num_updates


@pytest.mark.parametrize("strategy", PLAIN + FAMILY, ids=repr)
def test_replay_of_a_simulated_run_ends_at_the_same_bits(strategy):
    cluster = dl.SimulatedCluster(6, seed=2, compute=SLOW, apply_time=0.03)
    run = stepped(mixed(), strategy, cluster, 30)
    assert len(run.trace.select("rate"))
    assert run.replay().params.equal(run.params)
    whole = dl.train(mixed(), strategy, cluster, num_updates=30, progress=False)
    assert not whole.params.equal(run.params)
    assert np.array_equal(whole.trace.applies["end_s"], run.trace.applies["end_s"]), "and nothing else has changed"


@pytest.mark.parametrize("strategy", PLAIN, ids=repr)
def test_replay_of_a_real_run_ends_at_the_same_bits(two, strategy):
    run = changed(dl.start(mixed(), strategy, two, num_updates=100_000))
    assert run.replay().params.equal(run.params)


@pytest.mark.parametrize("strategy", [dl.AllReduce(), dl.LocalSGD(every=3), dl.AllReduce(engine="ddp")], ids=repr)
def test_all_replicas_change_at_the_same_version(three, strategy):
    run = changed(dl.start(countdown(), strategy, three, num_updates=100_000))
    rows = run.trace.select("rate")
    assert len(set(rows["version"].tolist())) == 1
    assert sorted(rows["index"].tolist()) == [0, 1, 2]


def test_devices_of_a_cut_model_change_at_the_same_version(two):
    strategy = dl.InGraph(place={"0": 0, "3": 1})
    run = changed(dl.start(mixed(), strategy, two, num_updates=100_000))
    rows = run.trace.select("rate")
    assert {dl.trace.ROLES[role] for role in rows["role"]} >= {"replica"}
    assert len(set(rows["version"].tolist())) == 1
    assert run.replay().params.equal(run.params)


def test_devices_do_what_the_client_says_whatever_they_were_told():
    live = dl.start(
        mixed(), dl.InGraph(place={"0": 0, "3": 1}), dl.SimulatedCluster(2, compute=0.1), num_updates=9, paused=True
    )
    live.step(30)
    live.launched.world.nodes[Peer("client", 0)].rate = HALF
    run = live.wait()
    assert {event.who for event in run.trace.where("rate")} == {"client 0", "replica 0", "replica 1"}
    assert len(set(run.trace.select("rate")["version"].tolist())) == 1


def test_hogwild_changes_too(two):
    run = changed(dl.start(countdown(), dl.Hogwild(), two, num_updates=1_000_000))
    assert run.params[0].item() > -run.num_updates + 1


def test_every_server_says_it_for_itself(two):
    run = changed(dl.start(mixed(), dl.AsyncPS(num_servers=2, locking="server"), two, num_updates=100_000))
    rows = run.trace.select("rate")
    assert sorted(rows["index"].tolist()) == [0, 1]
    assert {dl.trace.ROLES[role] for role in rows["role"]} == {"server"}
    assert str(run.trace.where("rate")[0]).endswith("the learning rate is 0.5 times the task's")


@pytest.mark.parametrize("strategy", [dl.AllReduce(), dl.Hogwild()], ids=repr)
@pytest.mark.parametrize("kind", ["real", "simulated"])
def test_who_comes_later_is_told(two, strategy, kind):
    cluster = two if kind == "real" else dl.SimulatedCluster(2, compute=0.01)
    live = dl.start(countdown(), strategy, cluster, num_updates=1_000_000, paused=kind == "simulated")
    advance(live, lambda: live.version >= 5)
    live.scale_lr(HALF)
    live.kill(worker=1)
    advance(live, lambda: len(live.trace.select("death")) == 1)
    live.revive(worker=1)
    advance(live, lambda: (1, True) in {(e.worker, e.version > 6) for e in late(live)})
    live.stop()
    run = live.wait()
    rows = run.trace.select("rate")
    assert set(rows["loss"].tolist()) == {HALF}
    came_s = run.trace.select("revive")["start_s"][0]
    assert (rows["index"][rows["start_s"] > came_s] == 1).any(), "the new process has begun at it"


def advance(live: dl.LiveRun, condition) -> None:
    if live.is_simulated:
        while not condition():
            live.step(20)
    until(condition)


def late(live: dl.LiveRun) -> list[dl.Event]:
    """What was applied by worker 1 after it came back."""
    came = live.trace.select("revive")["start_s"]
    return [e for e in live.trace.where("apply", who="worker 1") if len(came) and e.start_s > came[0]]


def test_run_that_begins_anew_at_a_checkpoint_keeps_its_rate(two, tmp_path):
    strategy = dl.AsyncPS(locking="server")
    live = dl.start(
        countdown(), strategy, two, num_updates=1_000_000, checkpoint_dir=tmp_path / "kept", checkpoint_every=20
    )
    until(lambda: live.version > 40)
    live.scale_lr(HALF)
    until(lambda: len(live.trace.select("rate")) == 1)
    live.kill(server=0)
    until(lambda: len(live.trace.select("rate")) == 2)
    live.stop()
    run = live.wait()
    back, again = run.trace.select("restore"), run.trace.select("rate")[1]
    assert again["version"] == back["version"][0] + 1
    assert again["loss"] == HALF


def test_stability_is_judged_at_the_rate_at_the_end():
    task = countdown(loss=lambda outputs, targets: (outputs**2 / 2).mean())
    run = stepped(task, dl.SingleWorker(), dl.SimulatedCluster(1), 30)
    whole = dl.train(task, dl.SingleWorker(), dl.SimulatedCluster(1), num_updates=30, progress=False)
    assert (whole.stability().lr, run.stability().lr) == (1.0, HALF)


@pytest.mark.parametrize("factor", [0, -1.0, math.nan, math.inf, "half", True])
def test_impossible_factor_is_refused(factor):
    live = dl.start(countdown(), dl.AsyncPS(), dl.SimulatedCluster(1), num_updates=3, paused=True)
    with pytest.raises((ValueError, TypeError), match="factor"):
        live.scale_lr(factor)
    live.wait()
    with pytest.raises(dl.DistlabError, match="the run has ended"):
        live.scale_lr(1.0)


def test_factor_of_one_is_the_tasks_own():
    live = dl.start(countdown(), dl.AsyncPS(), dl.SimulatedCluster(1), num_updates=9, paused=True)
    live.scale_lr(1.0)
    run = live.wait()
    assert not len(run.trace.select("rate"))
    assert run.params[0].item() == -9
