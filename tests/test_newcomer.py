"""What a newcomer met: each a kind of fault, kept from coming back."""

import gc
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from toys import countdown, regression, train

import distlab as dl
from distlab.__main__ import main


def in_worker(action, task=None):
    """A task whose loss does `action` wherever it is not the caller that computes it."""
    made, caller = task or regression(), os.getpid()

    def loss(outputs, targets):
        if os.getpid() != caller:
            action()
        return torch.nn.functional.mse_loss(outputs, targets)

    return made.but(loss=loss)


def fds():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_failed_runs_leave_no_file_descriptors(two):
    def failing():
        with pytest.raises(ValueError, match="mine"):
            dl.train(task, dl.AsyncPS(), two, num_updates=5, progress=False)

    def mine():
        raise ValueError("mine")

    task = in_worker(mine)
    failing()
    before = fds()
    for _ in range(4):
        failing()
    assert fds() <= before + 2


def test_superseded_runs_leave_no_file_descriptors(two):
    live = dl.start(countdown(), dl.AsyncPS(), two, num_updates=10_000_000)
    before = fds()
    for _ in range(4):
        live = dl.start(countdown(), dl.AsyncPS(), two, num_updates=10_000_000)
    assert fds() <= before + 2
    live.kill()


def test_exit_on_a_worker_does_not_end_the_caller(two):
    with pytest.raises(dl.RemoteError, match="SystemExit: 0") as error:
        dl.train(in_worker(lambda: sys.exit(0)), dl.SyncPS(), two, num_updates=5, progress=False)
    assert "raised on worker" in error.value.__notes__[0]


def test_output_survives_the_borders_of_what_a_pipe_hands_over(one, capsys):
    line = "x" + "é" * 200_001
    dl.train(in_worker(lambda: print(line)), dl.SingleWorker(), one, num_updates=1, progress=False)
    assert capsys.readouterr().out == f"[worker 0] {line}\n"


def test_the_last_worker_to_die_is_named(two):
    task = in_worker(lambda: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(dl.ProcessLost, match=r"worker \d \(pid \d+\) was lost .*: killed by SIGKILL"):
        dl.train(task, dl.AsyncPS(), two, num_updates=5, progress=False)


def refused(error, text, **changes):
    with pytest.raises(error, match=text):
        dl.start(regression().but(**changes), dl.SyncPS(), dl.SimulatedCluster(2), num_updates=1)


def test_optimizer_that_needs_a_closure_is_refused():
    refused(ValueError, "LBFGS needs a closure", optimizer=torch.optim.LBFGS)


def test_optimizer_of_other_parameters_is_refused():
    other = torch.nn.Linear(2, 2)
    refused(ValueError, "other parameters", optimizer=lambda params: torch.optim.SGD(other.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("error", "text", "changes"),
    [
        (TypeError, "metrics must be a dict of functions", {"metrics": {"a": 3}}),
        (ValueError, "a metric cannot be called 'loss'", {"metrics": {"loss": max}}),
        (ValueError, "validation data is empty", {"validation": (torch.zeros(0, 5), torch.zeros(0, 1))}),
        (ValueError, "does not depend on the parameters", {"loss": lambda o, t: o.detach().mean()}),
        (ValueError, r"seed must be below 2 \*\* 40", {"seed": 1 << 62}),
        (TypeError, "a tuple of tensors, got ndarray, ndarray", {"train": (torch.ones(9, 5).numpy(),) * 2}),
        (TypeError, "got a string", {"train": "data.csv"}),
    ],
)
def test_what_can_be_known_before_is_said_before(error, text, changes):
    refused(error, text, **changes)


def test_padding_that_no_machine_can_sleep_is_refused():
    with pytest.raises(ValueError, match="compute_time_s must be at most 1e\\+06 s"):
        dl.LocalCluster(num_workers=1, compute_time_s=1e30)


def test_scenario_options_name_their_neighbour_and_their_type():
    with pytest.raises(TypeError, match="did you mean 'worker'"):
        dl.SimulatedCluster(2).slow(workr=1, factor=2)
    with pytest.raises(TypeError, match="factor must be a number, got '2'"):
        dl.SimulatedCluster(2).slow(worker=1, factor="2")


def test_gradient_that_vanishes_is_seen_by_the_check():
    class Forgetful(dl.AsyncPS):
        def serve(self, server, worker):
            for gradient in worker.pushes():
                if gradient.step % 3 != 2:
                    server.apply(gradient)
                worker.reply()

    with pytest.raises(dl.PromiseBroken, match="vanished: it was neither used nor refused"):
        dl.check_strategy(Forgetful())


def test_run_of_another_task_has_no_model(tmp_path):
    run = dl.train(regression(), dl.SyncPS(), dl.SimulatedCluster(2), num_updates=2, progress=False)
    loaded = dl.load_run(run.save(tmp_path / "run"), dl.tasks.digits())
    with pytest.raises(ValueError, match="parameters of another model"):
        loaded.model  # noqa: B018


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("train --num-workers 0", "num_workers must be at least 1, got 0"),
        ("train --num-updates 0", "num_updates must be at least 1, got 0"),
        ("compare --figure /nope/x.png", "/nope is not there"),
        ("compare --figure x.foo", "a figure's name ends in one of"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line(line, text, capsys):
    with pytest.raises(SystemExit) as ended:
        main(line.split(), prog_name="distlab")
    assert ended.value.code
    assert text in capsys.readouterr().err.splitlines()[-1]
    assert not Path("x.foo").exists()


@pytest.mark.parametrize("strategy", [dl.SingleWorker(), dl.AllReduce(), dl.AsyncPS(), dl.LocalSGD()], ids=repr)
def test_model_that_clears_its_gradients_in_a_step_is_named(strategy):
    """Or nothing would be learnt, and nobody told: the gradient would be in a tensor that nobody reads."""

    def forward(model, inputs):
        model.zero_grad()
        return model(inputs)

    with pytest.raises(
        RuntimeError, match=r"the gradient of 0.weight was replaced in the middle of a step, as model.zero"
    ):
        train(regression(forward=forward), strategy, dl.SimulatedCluster(1), 5)
