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
from distlab.roles.updater import ELEMENTWISE, Gradient, Lane, Updater
from distlab.trace import Buffer, Recorder


def updater(task: dl.Task, events: list | None = None) -> Updater:
    sink = (events if events is not None else []).append
    fabric = TorchFabric(Peer("server", 0), {"server": 1}, Recorder("server", 0, Buffer(sink)), token=1)
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
    assert [made.lane(n).params[0].grad.unique().tolist() for n in (0, 1)] == [[1], [5]]


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


@pytest.mark.parametrize("kind", sorted(ELEMENTWISE, key=lambda kind: kind.__name__))
def test_one_flat_parameter_gives_the_bits_of_many(kind):
    """A subclass is not known to be elementwise, so it gets every tensor by itself."""
    shapes = [(3, 5), (7,), (), (2, 3, 4), (40, 40)]
    task = regression().but(model=lambda: nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes]))
    flats = [Flat(task.build()) for _ in range(2)]
    kinds = kind, type("Own", (kind,), {})
    lanes = [Lane(task.but(optimizer=k), flat, None) for k, flat in zip(kinds, flats, strict=True)]
    for _ in range(5):
        mean = torch.randn(flats[0].size) * (flats[1].params != 0)
        for lane in lanes:
            lane.step(mean)
    assert [len(lane.params) for lane in lanes] == [1, len(shapes)]
    assert flats[0].params.equal(flats[1].params)


def test_several_gradients_are_one_update_with_their_mean():
    made = updater(regression(optimizer="sgd"))
    before = made.flat.params.clone()
    assert made.apply(gradient(made, 1.0), gradient(made, 3.0, worker=1)) == 1
    for now, was in zip(made.flat.views(made.flat.params), made.flat.views(before), strict=True):
        torch.testing.assert_close(now, was - 0.02 * 2.0)


def test_an_update_is_recorded_once_per_gradient():
    events: list = []
    made = updater(regression(), events)
    made.apply(gradient(made, 1.0), gradient(made, 3.0, worker=1))
    made._fabric.record.flush()
    assert events[0][["worker", "version"]].tolist() == [(0, 1), (1, 1)]
