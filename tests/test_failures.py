"""What goes wrong during a run reaches the caller, names who it was, and leaves no process."""

import os
import time

import pytest
import torch
from toys import countdown, failure, regression, spoiled, train

import distlab as dl
from distlab.errors import RemoteError, RemoteTraceback

LONG = 10_000_000
STRATEGIES = [dl.AsyncPS(), dl.SyncPS(), dl.AllReduce(), dl.WorkerApplies(), dl.BroadcastGradients()]


class Boom(Exception):
    """An exception of the user's own."""


class Awkward(Exception):
    """One that pickle cannot make again."""

    def __init__(self, first, second) -> None:
        super().__init__(f"{first} and {second}")


def raising(error):
    """A loss that raises `error()` at the spoiled target."""

    def loss(outputs, targets):
        if (targets > 1000).any():
            raise error()
        return (outputs - targets).square().mean()

    return spoiled(5000.0, loss=loss)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_loss_that_is_not_finite_names_worker_and_step(two, strategy):
    error = failure(dl.start(spoiled(float("nan")), strategy, two, num_updates=LONG))
    assert isinstance(error, dl.NonFiniteLoss)
    assert str(error).startswith("the loss became nan on worker 1 at step 3: the learning rate is too large")
    assert (error.who, error.step) == ("worker 1", 3)


def test_loss_that_is_not_finite_names_the_client_in_graph(two):
    error = failure(dl.start(spoiled(float("inf")), dl.InGraph(), two, num_updates=LONG))
    assert str(error).startswith("the loss became inf on client 0 at step 3")


@pytest.mark.parametrize("strategy", [dl.SyncPS(), dl.AllReduce(), dl.InGraph()], ids=repr)
def test_loss_that_is_not_finite_keeps_the_history(two, strategy):
    run = failure(dl.start(spoiled(float("nan")), strategy, two, num_updates=LONG)).run
    assert run.history["update"].tolist() == [1, 2, 3]
    assert run.error.startswith("NonFiniteLoss: the loss became nan")


@pytest.mark.parametrize("strategy", [dl.AsyncPS(), dl.SyncPS(), dl.AllReduce()], ids=repr)
def test_exception_in_user_code_arrives_as_itself(two, strategy):
    live = dl.start(raising(lambda: Boom("no such target")), strategy, two, num_updates=LONG)
    pid = live.launched.pids["worker 1"]
    error = failure(live)
    assert type(error) is Boom
    assert str(error) == "no such target"
    assert error.__notes__[0].startswith(f"raised on worker 1 (pid {pid})")


def test_exception_in_user_code_brings_its_remote_traceback(two):
    error = failure(dl.start(raising(lambda: Boom("!")), dl.AsyncPS(), two, num_updates=LONG))
    assert isinstance(error.__cause__, RemoteTraceback)
    assert ", in loss\n" in str(error.__cause__)
    assert str(error.__cause__).splitlines()[-2].endswith("Boom: !")


def test_exception_ends_the_others_even_if_they_are_busy(two):
    def loss(outputs, targets):
        if os.getpid() != me and torch.initial_seed() % 1_000_003 == 0:  # worker 0
            time.sleep(3600)
        if os.getpid() != me:
            raise Boom("!")
        return outputs.mean()

    me = os.getpid()
    error = failure(dl.start(countdown(loss=loss), dl.AllReduce(), two, num_updates=5))
    assert error.__notes__[0].startswith("raised on worker 1")


def test_exception_on_a_replica_arrives(two):
    def forward(model, inputs):
        if os.getpid() != me:
            raise Boom("in a replica")
        return model(inputs)

    me = os.getpid()
    error = failure(dl.start(regression(forward=forward), dl.InGraph(), two, num_updates=LONG))
    assert str(error) == "in a replica"
    assert "raised on replica" in error.__notes__[0]


def test_exception_that_cannot_be_pickled_arrives_as_text(two):
    error = failure(dl.start(raising(lambda: Awkward(1, 2)), dl.AsyncPS(), two, num_updates=LONG))
    assert isinstance(error, RemoteError)
    assert str(error).endswith("Awkward: 1 and 2")
    assert "raised on worker 1" in error.__notes__[0]


def test_exception_on_the_server_arrives(two):
    def optimizer(params):
        if os.getpid() != me:
            raise Boom("no optimizer today")
        return torch.optim.SGD(params, lr=0.1)

    me = os.getpid()
    error = failure(dl.start(regression().but(optimizer=optimizer), dl.AsyncPS(), two, num_updates=5))
    assert str(error) == "no optimizer today"
    assert "raised on server 0" in error.__notes__[0]


def test_cluster_can_be_used_again_after_a_failure(two):
    failure(dl.start(raising(lambda: Boom("!")), dl.AllReduce(), two, num_updates=LONG))
    assert train(countdown(), dl.AllReduce(), two, 3).version == 3


def test_error_says_so_again_at_the_second_wait(two):
    live = dl.start(raising(lambda: Boom("!")), dl.AsyncPS(), two, num_updates=LONG)
    first = failure(live)
    with pytest.raises(Boom) as again:
        live.wait()
    assert again.value is first


def test_failed_run_without_parameters_says_so(two):
    run = failure(dl.start(spoiled(float("nan")), dl.SyncPS(), two, num_updates=LONG)).run
    with pytest.raises(dl.DistlabError, match="ended before its processes could hand over parameters"):
        run.model  # noqa: B018
