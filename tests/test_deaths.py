"""A process that dies is named, with its number and step; what can go on without it does, and all else ends."""

import os
import re
import signal

import pytest
import torch
from toys import countdown, failure, regression, spoiled, until

import distlab as dl

LONG = 10_000_000


def test_process_that_leaves_by_itself_is_named(two):
    def loss(outputs, targets):
        if (targets > 1000).any():
            os._exit(3)
        return outputs.mean()

    live = dl.start(spoiled(5000.0, loss=loss), dl.SyncPS(), two, num_updates=LONG)
    pid = live.launched.pids["worker 1"]
    error = failure(live)
    assert isinstance(error, dl.ProcessLost)
    assert re.fullmatch(
        rf"worker 1 \(pid {pid}\) was lost (at step [0-2] .the last it reported.|before .*): exit code 3", str(error)
    )


@pytest.mark.parametrize(
    ("strategy", "who"),
    [
        (dl.AsyncPS(), "server 0"),
        (dl.SyncPS(), "worker 0"),
        (dl.AllReduce(on_too_few="stop"), "worker 1"),
        (dl.InGraph(), "replica 1"),
        (dl.InGraph(), "client 0"),
        (dl.SingleWorker(), "worker 0"),
    ],
    ids=str,
)
def test_killed_process_ends_the_run_and_is_named(three, strategy, who):
    live = dl.start(countdown(), strategy, three, num_updates=LONG)
    until(lambda: live.version > 0 and who in live.trace.who)
    pid = live.launched.pids[who]
    os.kill(pid, signal.SIGKILL)
    error = failure(live)
    assert isinstance(error, dl.ProcessLost)
    assert str(error).startswith(f"{who} (pid {pid}) was lost at step ")
    assert str(error).endswith(": killed by SIGKILL")
    assert error.run.num_updates > 0


def test_async_ps_goes_on_without_a_killed_worker(three):
    live = dl.start(countdown(), dl.AsyncPS(locking="server"), three, num_updates=LONG)
    until(lambda: "worker 2" in live.trace.who)
    os.kill(live.launched.pids["worker 2"], signal.SIGKILL)
    until(lambda: len(live.trace.select("death")) > 0)
    before = live.version
    until(lambda: live.version > before + 100)
    live.stop()
    run = live.wait()
    assert run.trace.where("death").who == ["worker 2"]
    assert run.params[0] == -run.version < -100


def test_process_killed_before_its_first_step_is_named(two):
    def model():
        if os.getpid() != me:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.nn.Linear(5, 1).double()

    me = os.getpid()
    error = failure(dl.start(regression(model=model), dl.AllReduce(), two, num_updates=5))
    assert str(error).endswith("was lost before it reported a step: killed by SIGKILL")
    assert len(error.run.history) == 0
