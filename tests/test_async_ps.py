"""The asynchronous parameter server: who applies, what is lost (nothing), how old gradients are."""

import numpy as np
import pytest
import torch
from toys import OPTIMIZERS, countdown, halving, keys, regression, together, train, train_together

import distlab as dl
from distlab.data import Stream

LOCKINGS = ["none", "server"]


@pytest.fixture(scope="module", params=LOCKINGS)
def run(request, four):
    """200 updates by four workers."""
    return train(countdown(), dl.AsyncPS(locking=request.param), four, 200)


def test_200_updates_make_versions_1_to_200_once_each(run):
    assert sorted(run.trace.select("apply")["version"]) == list(range(1, 201))
    assert (run.version, run.num_updates) == (200, 200)


def test_every_gradient_is_applied_or_unused_once(run):
    computed, applied, unused = (keys(run.trace.select(kind)) for kind in ("compute", "apply", "unused"))
    assert sorted(applied + unused) == sorted(computed) == sorted(set(computed))
    assert len(run.trace.select("drop")) == 0


def test_every_gradient_computed_is_pushed(run):
    assert sorted(keys(run.trace.select("push"))) == sorted(keys(run.trace.select("compute")))


def test_the_server_applies_and_nobody_else(run):
    assert run.trace.where("apply").who == run.who_applied == ["server 0"]


def test_nothing_is_broadcast(run):
    """A worker gets parameters when it asks: once at the start, then as the answer to each push."""
    for worker in range(4):
        pulls, pushes = (run.trace.select(kind, worker=worker) for kind in ("pull", "push"))
        assert len(pulls) == len(pushes) + 1


def test_a_worker_reads_what_it_pulled(run):
    for worker in range(4):
        pulled = run.trace.select("pull", worker=worker)["version"]
        read = run.trace.select("compute", worker=worker)["read"]
        assert read.tolist() == pulled[:-1].tolist()
        assert (np.diff(pulled) >= 0).all()


def test_steps_of_a_worker_follow_each_other(run):
    for worker in range(4):
        steps = run.trace.select("compute", worker=worker)["step"].tolist()
        assert steps == list(range(run.steps[f"worker {worker}"]))


def test_mean_staleness_is_at_most_n_minus_1(run):
    """By telescoping: a gradient's age is at most the distance to its worker's previous update."""
    n, u = 4, run.num_updates
    assert run.mean_staleness <= n - 1 - n * (n - 1) / (2 * u)


def test_equal_workers_settle_at_staleness_n_minus_1(padded):
    """While all four are there; one that stands still for k versions at either end takes away k / 120."""
    applied = train_together(countdown(), dl.AsyncPS(), padded, 30).trace.select("apply")
    meanwhile = applied[np.isin(applied["version"], together(applied))]
    assert len(meanwhile) > 100
    assert (meanwhile["version"] - 1 - meanwhile["read"]).mean() == pytest.approx(4 - 1, abs=0.5)


def test_server_lock_loses_nothing(four):
    run = train(countdown(), dl.AsyncPS(locking="server"), four, 300)
    assert run.params[0] == -300


def test_replay_from_the_trace_gives_each_loss(four):
    """Asynchronous training is SGD with old gradients: w(v) = w(v - 1) - w(read) / 2."""
    run = train(halving(), dl.AsyncPS(locking="server"), four, 60)
    w = [8.0]
    for row in run.trace.select("apply"):
        w.append(w[-1] - 0.5 * w[row["read"]])
        assert (
            row["loss"] == w[row["read"]] * w[row["read"]] / 2
        )  # as torch squares; Python's power can differ by a bit
    assert run.params[0] == w[-1]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_serial_replay_ends_in_the_same_bits(four, optimizer):
    task = regression(optimizer)
    run = train(task, dl.AsyncPS(locking="server"), four, 40)
    model, past = task.build(), [task.build().state_dict()]
    stepper = task.optimizer(model.parameters())
    for row in run.trace.select("apply"):
        old = task.build()
        old.load_state_dict(past[row["read"]])
        stream = Stream(task.train, batch_size=4, index=int(row["worker"]), num_workers=4, seed=task.seed)
        inputs, targets = stream.batch(int(row["step"]))
        task.loss(old(inputs), targets).backward()
        for mine, theirs in zip(model.parameters(), old.parameters(), strict=True):
            mine.grad = theirs.grad
        stepper.step()
        past.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    assert all(tensor.equal(past[-1][name]) for name, tensor in run.model.state_dict().items())


def test_digits_reach_90_percent(four):
    run = train(dl.tasks.digits(), dl.AsyncPS(), four, 400)
    assert run.evaluate()["accuracy"] >= 0.9


def test_momentum_is_the_servers(two):
    """Two workers, one momentum: the same updates as by one worker, if all gradients are equal."""
    task = countdown(optimizer=lambda params: torch.optim.SGD(params, lr=1.0, momentum=0.5))
    shared = train(task, dl.AsyncPS(locking="server"), two, 20)
    assert shared.params.equal(train(task, dl.SingleWorker(), two, 20).params)
