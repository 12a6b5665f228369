"""Models, data and schedules as people write them, under several workers."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from toys import Scalar, countdown, regression, train

import distlab as dl

STRATEGIES = [
    dl.AsyncPS(locking="server"),
    dl.SyncPS(),
    dl.AllReduce(),
    dl.InGraph(),
    dl.SingleWorker(),
    dl.BroadcastGradients(),
]


class Kitchen(nn.Module):
    """All that makes sharing parameters hard: tied weights, in-place ReLU, dropout, BatchNorm, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.norm, self.relu, self.drop = nn.BatchNorm1d(64), nn.ReLU(inplace=True), nn.Dropout(0.1)
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        x = x + 0.1 * self.frozen(x)
        x = self.drop(self.relu(self.norm(self.first(x))))
        return self.head(self.relu(self.second(x)))


@pytest.fixture(scope="module")
def run(three):
    return train(dl.tasks.digits().but(model=Kitchen), dl.AsyncPS(), three, 400)


def test_model_with_everything_trains_under_three_async_workers(run):
    assert run.evaluate()["accuracy"] > 0.8


def test_tied_weights_stay_tied(run):
    model = run.model
    assert model.first.weight is model.second.weight
    assert run.params.numel() == 64 * 64 + 64 * 4 + 640 + 16, "laid out once; the frozen layer not at all"


def test_frozen_parameters_do_not_change(run):
    assert run.model.frozen.weight.equal(run.task.build().frozen.weight)
    assert not run.model.frozen.weight.requires_grad


def test_buffers_are_the_chiefs(run):
    assert run.model.norm.num_batches_tracked == run.steps["worker 0"]
    assert run.model.norm.running_mean.abs().max() > 0


@pytest.mark.parametrize("strategy", [dl.SyncPS(), dl.AllReduce(), dl.InGraph(), dl.SingleWorker()], ids=repr)
def test_model_with_everything_runs_under_other_strategies(two, strategy):
    run = train(dl.tasks.digits().but(model=Kitchen), strategy, two, 60)
    assert run.evaluate()["accuracy"] > 0.5


@pytest.mark.parametrize("strategy", [dl.AsyncPS(), dl.InGraph()], ids=repr)
def test_batches_may_be_dicts_with_a_forward_of_their_own(two, strategy):
    x, y = regression().train
    task = regression(
        train={"features": x, "wanted": y},
        forward=lambda model, batch: model(batch["features"]),
        loss=lambda outputs, batch: F.mse_loss(outputs, batch["wanted"]),
    )
    pairs = train(regression(), dl.SingleWorker(), two, 10)
    assert train(task, dl.SingleWorker(), two, 10).params.equal(pairs.params)
    assert train(task, strategy, two, 10).version == 10


class Squares(Dataset):
    """Items are (a dict, a target)."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int):
        return {"a": torch.tensor([float(i)]), "b": torch.tensor([1.0])}, torch.tensor([float(i * i)])


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, *, a, b):
        return self.layer(torch.cat([a, b], 1) / 20)


@pytest.mark.parametrize("strategy", [dl.AsyncPS(), dl.AllReduce(), dl.InGraph()], ids=repr)
def test_data_may_be_a_map_style_dataset(two, strategy):
    task = regression("adam", train=Squares(), model=TwoInputs)
    run = train(task, strategy, two, 30)
    assert run.version == 30
    assert run.evaluate(samples=Squares())["loss"] < task.evaluate(task.build(), Squares())["loss"]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_learning_rate_schedule_counts_versions(two, strategy):
    """Full steps for versions 1 to 10, none after: whoever computed the gradients."""
    task = countdown(lr_schedule=lambda version: 1.0 if version < 10 else 0.0)
    assert train(task, strategy, two, 20).params[0] == -10


@pytest.mark.parametrize("strategy", [*STRATEGIES, dl.WorkerApplies()], ids=repr)
def test_model_may_be_larger_than_any_message_before(two, strategy):
    """A link's buffers begin at 64 kB; this model has 150 kB, its whole batch of inputs 82 kB."""
    run = train(dl.tasks.digits(hidden=512, batch_size=160), strategy, two, 4)
    assert run.version == 4
    assert run.params.numel() * 4 > 1 << 17


def test_num_samples_says_how_long_in_samples(two):
    lengths = {
        strategy.name: dl.train(countdown(), strategy, two, num_samples=90, progress=False).version
        for strategy in (dl.AsyncPS(), dl.SyncPS(), dl.InGraph(), dl.SingleWorker())
    }
    assert lengths == {"async-ps": 23, "sync-ps": 12, "in-graph": 12, "single-worker": 23}


def test_workers_draw_different_random_numbers(two):
    class Noisy(Scalar):
        def forward(self, x):
            return self.weight.expand(len(x)) + torch.rand(1)

    run = train(countdown(model=lambda: Noisy(0.0)), dl.SyncPS(), two, 3)
    losses = run.trace.select("compute")["loss"] - run.trace.select("compute")["read"] * -1.0
    assert len(set(losses.tolist())) == 6


def test_model_is_a_new_one_on_each_call(run):
    first, second = run.model, run.model
    first.head.weight.data.zero_()
    assert second.head.weight.abs().max() > 0
    assert not second.training


def test_build_leaves_the_callers_random_numbers_alone():
    task = regression()
    torch.manual_seed(3)
    want = torch.rand(1)
    torch.manual_seed(3)
    task.build()
    task.check()
    assert torch.rand(1).equal(want)
