"""In-graph replication: one client, its replicas, and the order of things within a step."""

import pytest
import torch
from toys import countdown, regression, train

import distlab as dl


@pytest.fixture(scope="module")
def run(three):
    return train(regression(), dl.InGraph(), three, 10)


def of_step(run: dl.Run, kind: str, step: int):
    rows = run.trace.select(kind)
    return rows[rows["step"] == step]


def test_the_client_applies(run):
    assert run.who_applied == ["client 0"]


def test_replicas_compute_and_the_client_does_not(run):
    assert run.trace.where("compute").who == ["replica 0", "replica 1", "replica 2"]
    assert run.trace.where("loss").who == run.trace.where("dispatch").who == ["client 0"]


def test_every_replica_has_its_work_before_any_answer_is_awaited(run):
    for step in range(10):
        sent = of_step(run, "send", step)["start_s"].tolist()
        assert sorted(sent)[2] <= of_step(run, "wait", step)["start_s"].min()


def test_loss_comes_between_forward_and_backward(run):
    for step in range(10):
        loss, computed = of_step(run, "loss", step), of_step(run, "compute", step)
        assert (computed["end_s"] < loss["start_s"]).sum() == 3
        assert (computed["start_s"] > loss["end_s"]).sum() == 3


def test_batch_of_the_client_is_that_of_all_workers(run):
    assert set(run.trace.select("dispatch")["samples"]) == {12}
    assert set(run.trace.select("apply")["samples"]) == {4}


def test_fewer_samples_than_replicas_leave_some_idle(three):
    task = regression(batch_size=1, train=tuple(t[:3] for t in regression().train))
    whole = train(task.but(batch_size=3), dl.SingleWorker(), three, 6)
    torch.testing.assert_close(train(task, dl.InGraph(), three, 6).params, whole.params, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("second", "text"),
    [
        (lambda out: 1, "the model returned a tuple: on a device it must be a tensor, or a tuple of tensors"),
        (lambda out: out, "InGraph gathers outputs along dim 0: they must be one tensor, got tuple"),
    ],
)
def test_outputs_must_be_one_tensor(two, second, text):
    def both(model, x):
        out = model(x)
        return out, second(out)

    with pytest.raises(TypeError, match=text):
        train(countdown(forward=both, loss=lambda outputs, _: outputs[0].mean()), dl.InGraph(), two, 2)
