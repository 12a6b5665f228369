"""Who applies has an updater; threads that apply at once share parameters and state, and nothing else."""

import threading

import pytest
import torch
from torch import nn
from toys import OPTIMIZERS, regression

import distlab as dl
from distlab.fabric import Peer
from distlab.fabric.torch_fabric import TorchFabric
from distlab.flat import Flat
from distlab.roles.updater import Gradient, Updater
from distlab.trace import Recorder


def updater(task: dl.Task, events: list | None = None) -> Updater:
    sink = (events if events is not None else []).append
    fabric = TorchFabric(Peer("server", 0), {"server": 1}, Recorder("server", 0, sink), token=1)
    return Updater(fabric, task, Flat(task.build()))


def gradient(made: Updater, value: float, worker: int = 0) -> Gradient:
    return Gradient(torch.full_like(made.flat.params, value), 0, worker, 0, 4, 0.0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_lanes_share_the_optimizers_state(optimizer):
    shared, alone = (updater(regression(optimizer)) for _ in range(2))
    for step in range(6):
        shared.apply(gradient(shared, step + 1.0), lane=step % 3)
        alone.apply(gradient(alone, step + 1.0))
    assert shared.flat.params.equal(alone.flat.params)
    assert shared.version == 6


def test_lanes_do_not_share_gradients():
    made = updater(regression())
    made.apply(gradient(made, 1.0), lane=0)
    made.apply(gradient(made, 5.0), lane=1)
    assert made.lane(0).grads.unique().tolist() == [1]
    assert made.lane(1).grads.unique().tolist() == [5]


@pytest.mark.parametrize("trial", range(8))
def test_first_updates_may_come_at_the_same_time(trial):
    """An optimizer makes its state in its first step: a second thread must not find it half made."""
    made = updater(regression("adam", model=lambda: nn.Sequential(*(nn.Linear(20, 20) for _ in range(30))).double()))
    barrier, errors = threading.Barrier(4), []

    def push(worker: int) -> None:
        barrier.wait()
        try:
            made.apply(gradient(made, 1.0, worker), lane=worker)
        except KeyError as error:
            errors.append(error)

    threads = [threading.Thread(target=push, args=(w,)) for w in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (errors, made.version) == ([], 4)


def test_several_gradients_are_one_update_with_their_mean():
    made = updater(regression(optimizer="sgd"))
    before = made.flat.params.clone()
    assert made.apply(gradient(made, 1.0), gradient(made, 3.0, worker=1)) == 1
    mean = torch.full_like(before, 2.0)
    torch.testing.assert_close(made.flat.params, before - 0.02 * mean * (before != 0))


def test_an_update_is_recorded_once_per_gradient():
    events: list = []
    made = updater(regression(), events)
    made.apply(gradient(made, 1.0), gradient(made, 3.0, worker=1))
    made._fabric.record.flush()
    assert events[0][["worker", "version"]].tolist() == [(0, 1), (1, 1)]
