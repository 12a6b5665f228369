"""AllReduce(engine="ddp"): torch's own DistributedDataParallel as the oracle, in the same frame."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_ledger_and_replay import mixed
from test_listeners import LOOPBACK, listeners
from torch import nn
from toys import DEADLINE_S, countdown, failure, linear, moved, refused, regression, slope, train, until

import distlab as dl

ENGINE = dl.AllReduce(engine="ddp")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_ddp_and_distlab_agree(three, accumulate):
    runs = [
        train(regression("adam"), dl.AllReduce(engine=engine, accumulate=accumulate), three, 10)
        for engine in ("ddp", "distlab")
    ]
    torch.testing.assert_close(runs[0].params, runs[1].params, rtol=0, atol=1e-12)


def test_replay_of_ddp_ends_close_by(three):
    run = train(regression("adam"), ENGINE, three, 10)
    torch.testing.assert_close(run.replay().params, run.params, rtol=0, atol=1e-12)


def test_torch_sums_and_distlab_does_not(two):
    torchs, ours = (train(regression(), s, two, 3).trace.select("reduce")["bytes"] for s in (ENGINE, dl.AllReduce()))
    assert (torchs.tolist(), ours.min() > 0) == ([0] * 6, True)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_ddp_ends_with_the_worker_that_has_the_least_data(three, accumulate):
    task, strategy = linear(), dl.AllReduce(engine="ddp", accumulate=accumulate)
    run = dl.train(task, strategy, three, num_batches=(5, 3, 7), progress=False)
    rounds = 3 // accumulate
    assert run.version == rounds
    assert run.steps == {f"worker {i}": rounds * accumulate for i in range(3)}
    means = [torch.stack([slope(task, w, s, 3) for w in range(3)]).mean(0) for s in range(rounds * accumulate)]
    torch.testing.assert_close(moved(task, run), -sum(means) / accumulate, rtol=0, atol=1e-12)


def test_data_too_scarce_for_one_update_is_refused(no_process_starts):
    told = r"num_batches=\(2, 5\).*accumulate=3"
    refused(ValueError, told, strategy=dl.AllReduce(engine="ddp", accumulate=3), num_batches=(2, 5))


def test_ddp_is_refused_on_a_virtual_clock_before_anything_starts(monkeypatch):
    monkeypatch.setattr(dl.SimulatedCluster, "build", lambda *args: pytest.fail("it was built"))
    told = 'on a simulated cluster this cannot be had: engine="ddp": torch\'s own engine knows no virtual clock'
    refused(ValueError, told, strategy=ENGINE, cluster=dl.SimulatedCluster(2))


def test_ddp_listens_on_loopback_only(two):
    live = dl.start(countdown(), ENGINE, two, num_updates=10**9)
    until(lambda: live.version > 0)
    pids = list(live.launched.pids.values())
    found = listeners(pids)
    live.kill()
    assert len(found) >= len(pids), "torch's own group listens, or this test looks at the wrong place"
    assert set(found) <= LOOPBACK


def test_task_with_a_forward_of_its_own_works(two):
    forward = lambda model, x: model[2](model[1](model[0](2 * x)))  # noqa: E731
    runs = [train(regression(forward=forward), dl.AllReduce(engine=e), two, 5) for e in ("ddp", "distlab")]
    torch.testing.assert_close(runs[0].params, runs[1].params, rtol=0, atol=1e-12)
    assert (runs[0].params - train(regression(), ENGINE, two, 5).params).abs().max() > 1e-6


def test_dropout_and_batch_norm_train_alike_with_both_engines(two):
    """The random numbers that a worker draws, and the statistics that it keeps, are its own with both."""
    runs = [train(mixed(), dl.AllReduce(engine=engine), two, 10) for engine in ("ddp", "distlab")]
    torch.testing.assert_close(runs[0].params, runs[1].params, rtol=0, atol=1e-5)
    statistics = [run.model.state_dict()["1.running_mean"] for run in runs]
    torch.testing.assert_close(*statistics, rtol=0, atol=1e-5)
    assert statistics[0].abs().max() > 0


def test_replicas_start_from_the_chief_and_stay_identical(three):
    task = linear(model=lambda: nn.Linear(5, 1, bias=False).double())
    run = train(task, ENGINE, three, 5)
    assert sorted(run.replicas) == ["worker 0", "worker 1", "worker 2"]
    assert all(params.equal(run.params) for params in run.replicas.values())


SCRIPT = """
import torch
import distlab as dl

task = dl.Task(
    model=lambda: torch.nn.Linear(3, 1), train=(torch.ones(12, 3), torch.ones(12, 1)), batch_size=4,
    loss=torch.nn.functional.mse_loss, optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
)
with dl.LocalCluster(num_workers=2) as cluster:
    for engine in ("distlab", "ddp"):
        strategy = dl.AllReduce(engine=engine, accumulate=2, bucket_bytes=1)
        print(dl.train(task, strategy, cluster, num_updates=3, progress=False).version)
"""


def test_nobody_warns(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command, root = [sys.executable, "-W", "default", tmp_path / "script.py"], Path(__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=DEADLINE_S)
    assert done.stdout == "3\n3\n"
    assert done.stderr == ""


def test_death_of_a_rank_is_named_although_ddp_names_a_port(two):
    live = dl.start(regression(), dl.AllReduce(engine="ddp"), two, num_updates=10**7)
    until(lambda: live.version >= 3)
    os.kill(live.launched.pids["worker 1"], signal.SIGKILL)
    error = failure(live)
    assert isinstance(error, dl.ProcessLost)
    assert str(error).startswith("worker 1 (pid ")
