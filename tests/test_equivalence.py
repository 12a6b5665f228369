"""Laws: what must equal plain training, and how exactly."""

from functools import cache

import pytest
import torch
from toys import OPTIMIZERS, regression, train

import distlab as dl
from distlab.data import Stream

SYNCHRONOUS = [dl.InGraph(), dl.SyncPS(), dl.AllReduce()]
OTHERS = [*SYNCHRONOUS, dl.AsyncPS(locking="server"), dl.WorkerApplies(), dl.BroadcastGradients()]
NUM_UPDATES = 20


@cache
def alone(cluster, optimizer: str, batch_size: int) -> torch.Tensor:
    """What one worker makes of it."""
    task = regression(optimizer, batch_size=batch_size)
    return train(task, dl.SingleWorker(), cluster, NUM_UPDATES).params


def plain(task: dl.Task) -> torch.nn.Module:
    """The loop that everybody writes."""
    model = task.build()
    optimizer = task.optimizer(model.parameters())
    stream = Stream(task.train, batch_size=task.batch_size, seed=task.seed)
    for step in range(NUM_UPDATES):
        inputs, targets = stream.batch(step)
        optimizer.zero_grad()
        task.loss(model(inputs), targets).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("strategy", SYNCHRONOUS, ids=repr)
def test_synchronous_strategy_equals_one_worker_with_the_whole_batch(clusters, strategy, num_workers, optimizer):
    run = train(regression(optimizer, batch_size=4), strategy, clusters[num_workers], NUM_UPDATES)
    whole = alone(clusters[1], optimizer, 4 * num_workers)
    torch.testing.assert_close(run.params, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_async_ps_with_one_worker_is_plain_training_bit_for_bit(one, optimizer):
    run = train(regression(optimizer), dl.AsyncPS(), one, NUM_UPDATES)
    assert run.params.equal(alone(one, optimizer, 4))


@pytest.mark.parametrize("strategy", OTHERS, ids=repr)
def test_other_strategy_with_one_worker_is_plain_training_bit_for_bit(one, strategy):
    run = train(regression("adam"), strategy, one, NUM_UPDATES)
    assert run.params.equal(alone(one, "adam", 4))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_single_worker_is_the_plain_loop_bit_for_bit(one, optimizer):
    task = dl.tasks.digits().but(optimizer=OPTIMIZERS[optimizer])
    trained = train(task, dl.SingleWorker(), one, NUM_UPDATES).model.state_dict()
    want = plain(task).state_dict()
    assert trained.keys() == want.keys()
    assert all(trained[name].equal(want[name]) for name in want)


def test_single_worker_does_not_depend_on_the_size_of_its_cluster(one, four):
    assert alone(four, "adam", 4).equal(alone(one, "adam", 4))


def test_more_workers_make_another_model(two):
    """Or the equalities above would hold of anything."""
    run = train(regression(), dl.SyncPS(), two, NUM_UPDATES)
    assert (run.params - alone(two, "sgd", 4)).abs().max() > 1e-3


@pytest.mark.parametrize("strategy", SYNCHRONOUS, ids=repr)
def test_synchronous_run_is_the_same_twice(three, strategy):
    first, second = (train(regression("adam"), strategy, three, 10) for _ in range(2))
    assert first.params.equal(second.params)
