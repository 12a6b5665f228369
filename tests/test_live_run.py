"""A run under way: look at it, stop it, kill it, run again on the same cluster."""

import gc
import os
from pathlib import Path

import pytest
from toys import Watched, countdown, regression, train, until

import distlab as dl
from distlab.clusters.base import ClusterClosed

LONG = 10_000_000
STRATEGIES = [
    dl.AsyncPS(locking="server"),
    dl.SyncPS(),
    dl.AllReduce(),
    dl.InGraph(),
    dl.SingleWorker(),
    dl.BroadcastGradients(),
]


def pids(live: dl.LiveRun) -> dict[str, int]:
    return live.launched.pids


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_stop_ends_a_run_after_whole_updates(two, strategy):
    live = dl.start(countdown(), strategy, two, num_updates=LONG)
    until(lambda: live.version >= 20)
    live.stop()
    run = live.wait()
    assert 20 <= run.num_updates < LONG
    assert run.params[0] == -run.num_updates == -run.version


def test_stop_before_the_first_update_ends_a_run(two):
    live = dl.start(countdown(), dl.AsyncPS(), two, num_updates=LONG)
    live.stop()
    assert live.wait().num_updates < LONG


def test_stopped_run_balances_its_gradients(three):
    live = dl.start(countdown(), dl.SyncPS(), three, num_updates=LONG)
    until(lambda: live.version >= 5)
    live.stop()
    trace = live.wait().trace
    computed, applied, unused = (len(trace.select(kind)) for kind in ("compute", "apply", "unused"))
    assert computed == applied + unused


def test_live_run_says_how_far_it_is(two):
    live = dl.start(regression(), dl.AsyncPS(), two, num_updates=LONG)
    until(lambda: live.version > 0)
    assert repr(live).startswith("LiveRun(AsyncPS() on LocalCluster(num_workers=2): running, ")
    assert live.loss > 0
    assert len(live.trace.select("apply")) > 0
    live.stop()
    live.wait()
    assert ": ended, " in repr(live)


def test_kill_ends_every_process_and_keeps_the_trace(two):
    live = dl.start(countdown(), dl.AsyncPS(), two, num_updates=LONG)
    until(lambda: live.version > 0)
    processes = Watched(pids(live).values())
    live.kill()
    assert len(processes.pids) == 3
    assert processes.alive(within_s=0) == []
    with pytest.raises(dl.ProcessLost, match=r"the run was ended by LiveRun.kill\(\)") as ended:
        live.wait()
    assert ended.value.run.num_updates > 0


def test_wait_gives_the_same_run_twice(one):
    live = dl.start(countdown(), dl.SingleWorker(), one, num_updates=3)
    assert live.wait() is live.wait()
    live.kill()
    live.stop()
    assert live.wait().version == 3


def test_forgotten_run_ends(two):
    live = dl.start(countdown(), dl.AsyncPS(), two, num_updates=LONG)
    processes = Watched(pids(live).values())
    del live
    gc.collect()
    assert processes.alive() == []


def test_finished_run_leaves_no_process(two):
    live = dl.start(countdown(), dl.AllReduce(), two, num_updates=3)
    processes = Watched(pids(live).values())
    live.wait()
    assert processes.alive(within_s=0) == []


def test_second_run_on_a_cluster_has_new_processes_and_the_same_numbers(two):
    lives = []
    for _ in range(2):
        lives.append(dl.start(regression(), dl.SyncPS(), two, num_updates=5))
        lives[-1].wait()
    assert not set(pids(lives[0]).values()) & set(pids(lives[1]).values())
    assert lives[0].wait().params.equal(lives[1].wait().params)


def test_leaving_the_context_ends_what_runs():
    with dl.LocalCluster(num_workers=2) as cluster:
        live = dl.start(countdown(), dl.AsyncPS(), cluster, num_updates=LONG)
        processes = Watched(pids(live).values())
    assert processes.alive(within_s=0) == []


def test_closed_cluster_refuses_runs():
    with dl.LocalCluster(num_workers=2) as cluster:
        assert repr(cluster) == "LocalCluster(num_workers=2)"
    assert repr(cluster) == "LocalCluster(num_workers=2) (closed)"
    with pytest.raises(ClusterClosed, match="make a new one"):
        train(countdown(), dl.AsyncPS(), cluster, 1)


def test_repr_of_a_padded_cluster_says_so(padded):
    assert repr(padded) == "LocalCluster(num_workers=4, compute_time_s=0.005)"


def test_repr_of_a_run_says_what_it_was(one):
    run = train(countdown(), dl.SingleWorker(), one, 3)
    assert repr(run).startswith("Run(SingleWorker() on LocalCluster(num_workers=1): 3 updates in ")


def test_prints_of_workers_arrive_labelled(two, capsys):
    def loud(outputs, targets):
        if os.getpid() != me:  # checking the task prints too
            print("one\ntwo")
            print("no newline", end="")
        return outputs.mean()

    me = os.getpid()
    train(countdown(loss=loud), dl.AllReduce(), two, 1)
    told = capsys.readouterr().out.splitlines()
    lines = ["one", "two", "no newline"]
    assert sorted(told) == sorted(f"[worker {w}] {line}" for w in (0, 1) for line in lines)


def test_padding_makes_every_gradient_take_its_time(padded):
    computed = train(countdown(), dl.AsyncPS(), padded, 12).trace.select("compute")
    assert (computed["end_s"] - computed["start_s"]).min() >= 0.005


def test_a_new_run_on_a_cluster_ends_the_one_before_it(two):
    older = dl.start(countdown(), dl.AsyncPS(), two, num_updates=LONG)
    until(lambda: older.version > 0)
    newer = dl.start(countdown(), dl.AsyncPS(), two, num_updates=5)
    assert newer.wait().version == 5
    with pytest.raises(dl.ProcessLost, match="the run was ended by a newer run on the same cluster") as ended:
        older.wait()
    assert ended.value.run.num_updates > 0


def test_a_simulated_run_can_be_killed():
    live = dl.start(countdown(), dl.AsyncPS(), dl.SimulatedCluster(2), num_updates=LONG)
    until(lambda: live.version > 0)
    live.kill()
    with pytest.raises(dl.ProcessLost, match=r"the run was ended at .* s by LiveRun.kill\(\)"):
        live.wait()


def test_a_run_leaves_no_folder_behind(two):
    live = dl.start(countdown(), dl.AsyncPS(), two, num_updates=5)
    folder = Path(live.launched._home.folder)
    assert folder.exists()
    live.wait()
    assert not folder.exists()
