"""In-graph replication: one client, its replicas, and the order of things within a step."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from toys import OPTIMIZERS, countdown, regression, train

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


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_simulated_replicas_equal_one_worker_with_the_whole_batch(num_workers, optimizer):
    task = regression(optimizer)
    run = train(task, dl.InGraph(), dl.SimulatedCluster(num_workers), 20)
    whole = train(task.but(batch_size=4 * num_workers), dl.SingleWorker(), dl.SimulatedCluster(1), 20)
    torch.testing.assert_close(run.params, whole.params, rtol=0, atol=1e-12)


class Powers(nn.Module):
    """A single weight; keeps its large input for backward, and returns as much."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x):
        return (self.weight * x).sin()


def test_what_is_kept_for_backward_survives_the_next_message(three):
    """The gradient of the outputs comes in the memory that the inputs came in."""
    x = torch.randn(24, 20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    task = regression(model=Powers, train=(x, x.cos()), loss=F.mse_loss)
    whole = train(task.but(batch_size=12), dl.SingleWorker(), three, 4)
    torch.testing.assert_close(train(task, dl.InGraph(), three, 4).params, whole.params, rtol=0, atol=1e-12)
    assert (whole.params[0] - 1).abs() > 1e-3


def test_replica_shows_the_parameters_that_it_was_sent():
    live = dl.start(regression(), dl.InGraph(), dl.SimulatedCluster(2), num_updates=3, paused=True)
    live.step(10_000)
    held = live.params()
    assert held["replica 0"].equal(held["replica 1"])
    assert live.wait().params.equal(train(regression(), dl.InGraph(), dl.SimulatedCluster(2), 3).params)
    before = train(regression(), dl.InGraph(), dl.SimulatedCluster(2), 2).params
    assert held["replica 0"].equal(before), "those of the last update's gradient"


def test_word_to_stop_is_not_counted():
    run = train(countdown(), dl.InGraph(), dl.SimulatedCluster(2), 4)
    rows = run.trace.select("send")
    assert len(rows) == 4 * 2 * 4
    assert rows["step"].max() == 3


def test_replica_may_change_its_inputs_in_place(two):
    model = lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(5, 1)).double()  # noqa: E731
    whole = train(regression(model=model, batch_size=8), dl.SingleWorker(), two, 4)
    torch.testing.assert_close(
        train(regression(model=model), dl.InGraph(), two, 4).params, whole.params, rtol=0, atol=1e-12
    )


def test_buffer_that_is_made_anew_is_handed_over():
    class Counted(nn.Linear):
        def __init__(self):
            super().__init__(5, 1, dtype=torch.float64)
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x):
            self.calls = self.calls + 1
            return super().forward(x)

    assert train(regression(model=Counted), dl.InGraph(), dl.SimulatedCluster(2), 4).local["calls"] == 4


@pytest.mark.parametrize("forward", [lambda model, x: model(x).mean(0, keepdim=True), lambda model, x: model(x).mean()])
def test_model_that_takes_a_mean_over_its_batch_is_refused(two, forward):
    """Each replica would take it over its part, and the update would be another one."""
    task = regression(forward=forward, loss=lambda outputs, targets: outputs.pow(2).mean())
    with pytest.raises(ValueError, match="it must not take a mean over its batch, of which it sees a part"):
        train(task, dl.InGraph(), two, 5)
