"""Hogwild: workers that apply to shared memory; nothing is waited for, no file stays, and a death ends nothing."""

import fcntl
import os
import signal
import tempfile
import time

import pytest
import torch
from toys import OPTIMIZERS, Watched, countdown, failure, keys, regression, train, until

import distlab as dl
from distlab.fabric import Peer
from distlab.fabric.base import NUM_COUNTS
from distlab.fabric.torch_fabric import TorchFabric
from distlab.flat import Flat
from distlab.strategies.base import Job
from distlab.strategies.hogwild import Memory
from distlab.trace import Buffer, Recorder

LONG = 10_000_000


def fabric(index, folder):
    """Worker `index` of two, in this process."""
    record = Recorder("worker", index, Buffer(lambda rows: None))
    return TorchFabric(Peer("worker", index), {"worker": 2}, record, token=1, folder=folder and str(folder))


@pytest.fixture
def ends(tmp_path):
    """The same memory, as two workers see it."""
    return [fabric(i, tmp_path).shared("params", 32, torch.float64) for i in range(2)]


@pytest.fixture(scope="module")
def run(four):
    """200 updates by four real workers."""
    return train(countdown(), dl.Hogwild(), four, 200)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("world", ["real", "simulated"])
def test_one_worker_is_plain_training_bit_for_bit(one, world, optimizer):
    cluster = one if world == "real" else dl.SimulatedCluster(1)
    task = regression(optimizer)
    alone = train(task, dl.SingleWorker(), cluster, 20)
    assert train(task, dl.Hogwild(), cluster, 20).params.equal(alone.params)


def test_simulated_workers_lose_nothing():
    made = train(countdown(), dl.Hogwild(), dl.SimulatedCluster(4, compute=0.1), 200)
    assert (made.params[0], made.version) == (-200, 200)
    assert {fate: count for fate, count in made.ledger.counts.items() if count} == {"applied": 200, "unused": 3}


def test_simulated_equal_workers_settle_at_staleness_n_minus_1_after_one_round():
    made = train(countdown(), dl.Hogwild(), dl.SimulatedCluster(4, compute=0.1), 40)
    assert made.history["staleness"].tolist() == [0, 1, 2] + [3] * 37


def test_momentum_is_each_workers_own():
    """Each takes away 1, then 1.5: together 5. With one momentum for both it would be 6.125."""
    task = countdown(optimizer=lambda params: torch.optim.SGD(params, lr=1.0, momentum=0.5))
    assert train(task, dl.Hogwild(), dl.SimulatedCluster(2, compute=0.1), 4).params[0] == -5


def test_schedule_counts_versions():
    """0 + 1 + 2 + 3; by the workers' own steps it would be 0 + 0 + 1 + 1."""
    task = countdown(lr_schedule=lambda version: float(version))
    assert train(task, dl.Hogwild(), dl.SimulatedCluster(2, compute=0.1), 4).params[0] == -6


def test_timing_alone_has_the_same_times_as_with_gradients():
    def ends(gradients):
        cluster = dl.SimulatedCluster(3, gradients=gradients)
        return train(countdown(), dl.Hogwild(), cluster, 20).trace.select("apply")["end_s"].tolist()

    assert ends("real") == ends("none")


def test_random_clusters_break_no_promise():
    assert "kept its promises" in dl.check_strategy(dl.Hogwild())


def test_real_workers_make_every_version_once(run):
    assert sorted(run.trace.select("apply")["version"]) == list(range(1, 201))
    assert (run.version, run.num_updates) == (200, 200)


def test_real_gradients_are_each_applied_or_unused(run):
    computed, applied, unused = (keys(run.trace.select(kind)) for kind in ("compute", "apply", "unused"))
    assert sorted(applied + unused) == sorted(computed) == sorted(set(computed))
    assert run.ledger.balances


def test_each_worker_applies_its_own_and_sends_nothing(run):
    rows = run.trace.select("apply")
    assert rows["index"].tolist() == rows["worker"].tolist()
    assert run.bytes_sent == 0


def test_a_race_loses_updates_and_never_makes_one(run):
    assert -200 <= run.params[0] < -100


def test_real_run_learns(four):
    made = train(dl.tasks.digits(), dl.Hogwild(), four, 400)
    assert made.evaluate()["accuracy"] >= 0.9
    assert made.history["loss"][-20:].mean() < made.history["loss"][:20].mean() / 4


def test_stop_ends_it_after_the_update_in_progress(two):
    live = dl.start(countdown(), dl.Hogwild(), two, num_updates=LONG)
    until(lambda: live.version > 0)
    live.stop()
    made = live.wait()
    assert made.version == made.num_updates == len(made.trace.select("compute"))


@pytest.mark.parametrize("who", ["worker 0", "worker 2"])
def test_others_go_on_without_a_killed_worker(three, who):
    live = dl.start(countdown(), dl.Hogwild(), three, num_updates=LONG)
    until(lambda: who in live.trace.who)
    os.kill(live.launched.pids[who], signal.SIGKILL)
    until(lambda: len(live.trace.select("death")) > 0)
    before = live.version
    until(lambda: live.version > before + 100)
    live.stop()
    made = live.wait()
    assert made.trace.where("death").who == [who]
    assert made.version > before + 100


def test_a_worker_killed_while_it_holds_the_lock_stops_nobody(two):
    class Dies(dl.Hogwild):
        def run(self, fabric, job):
            if fabric.me.index == 1:
                with fabric.shared("params", Flat(job.task.build()).size, torch.float64).lock:
                    os.kill(os.getpid(), signal.SIGKILL)
            return super().run(fabric, job)

    made = train(countdown(), Dies(), two, 30)
    assert (made.version, made.params[0], made.trace.where("death").who) == (30, -30, ["worker 1"])


def test_a_run_whose_last_worker_dies_ends_with_an_error(two):
    live = dl.start(countdown(), dl.Hogwild(), two, num_updates=LONG)
    until(lambda: live.version > 0)
    for pid in live.launched.pids.values():
        os.kill(pid, signal.SIGKILL)
    assert isinstance(failure(live), dl.ProcessLost)


def test_a_simulated_run_whose_last_worker_dies_ends_with_an_error():
    cluster = dl.SimulatedCluster(2).kill(worker=1, at_s=1).kill(worker=0, at_s=2)
    with pytest.raises(dl.ProcessLost, match="worker 0 was lost at 2 s"):
        train(countdown(), dl.Hogwild(), cluster, 1000)


def test_a_killed_run_says_so_though_one_worker_has_ended_well(two):
    def loss(outputs, targets):
        if os.getpid() != me and torch.initial_seed() == 1:  # worker 1
            time.sleep(3600)
        return outputs.mean()

    me = os.getpid()
    live = dl.start(countdown(loss=loss), dl.Hogwild(), two, num_updates=5)
    assert Watched([live.launched.pids["worker 0"]]).alive() == []
    live.kill()
    assert str(failure(live)) == "the run was ended by LiveRun.kill()"


def test_memory_lies_in_a_private_folder_and_no_file_stays(two, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    live = dl.start(countdown(), dl.Hogwild(), two, num_updates=LONG)
    until(lambda: live.version > 0)
    (file,) = tmp_path.glob("distlab-*/shared-params")
    assert file.parent.stat().st_mode & 0o777 == 0o700
    live.stop()
    live.wait()
    assert not list(tmp_path.glob("distlab-*"))


def test_what_one_end_writes_the_other_sees(ends):
    one, two = ends
    one.values[:], two.counts[-1] = torch.arange(32.0), 7
    assert two.values.tolist() == list(range(32))
    assert one.counts.tolist() == [0] * (NUM_COUNTS - 1) + [7]


def test_lock_keeps_the_other_end_out(ends):
    one, two = ends
    with one.lock:
        with pytest.raises(BlockingIOError):
            fcntl.flock(two.lock.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(two.lock.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_slow_starter_does_not_undo_what_was_learnt(tmp_path):
    task = countdown()
    early, late = (Flat(task.build()) for _ in range(2))
    memory = Memory(fabric(0, tmp_path), Job(task, 10, 2), early)
    memory.shared.values[0] = -3
    assert Memory(fabric(1, tmp_path), Job(task, 10, 2), late).read().values[0] == -3


def test_several_hosts_are_refused():
    with pytest.raises(dl.DistlabError, match=r"worker 1 asked for memory .* only processes of one host can"):
        fabric(1, None).shared("params", 32, torch.float64)
