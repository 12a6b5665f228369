"""Curvature is measured as it is; who is past the limit for gradients as old as his own is told, and nobody else."""

import math
import random
import sys
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from toys import OPTIMIZERS, Scalar, countdown, halving, regression, spoiled, train

import distlab as dl
from distlab.reports import curvature, stability
from distlab.reports.stability import affordable_s, limit_at

MODULE = sys.modules["distlab.reports.stability"]  # the package names the function
LIMIT = dl.theory.largest_stable_lr(7)  # eight equal workers
EQUAL = dl.SimulatedCluster(8, compute=0.1)


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """What is measured unasked must not depend on how busy the machine is."""
    monkeypatch.setattr(MODULE, "LEAST_S", 30.0)


def bowl(*curvatures: float, lr: float = 0.1, **changes) -> dl.Task:
    """The loss is Σ curvature·w²/2, from w = 1."""
    bends = torch.tensor(curvatures, dtype=torch.float64)
    parts = {
        "model": lambda: Diagonal(len(curvatures)),
        "loss": lambda outputs, targets: (outputs.square() @ bends / 2).mean(),
        "optimizer": lambda params: torch.optim.SGD(params, lr=lr),
        "name": "bowl",
    }
    return countdown(**parts | changes)


class Diagonal(nn.Module):
    """So many parameters; its outputs are they, whatever the input."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight.expand(len(x), -1)


class Once(torch.autograd.Function):
    """The square, which cannot be differentiated twice."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


def at(share: float, **changes) -> dl.Task:
    """A bowl of curvature 3 with a learning rate of `share` times the limit at staleness 7."""
    return bowl(3.0, lr=share * LIMIT / 3, **changes)


def told(
    task: dl.Task, strategy: dl.Strategy, cluster: dl.SimulatedCluster = EQUAL, num_updates: int = 200
) -> list[str]:
    """The warnings of a run."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(task, strategy, cluster, num_updates)
    return [str(w.message) for w in caught if w.category is dl.DivergenceWarning]


def diverged(task: dl.Task, strategy: dl.Strategy) -> dl.NonFiniteLoss:
    """How a run ends that is to lose its footing."""
    with pytest.warns(dl.DivergenceWarning) as caught, pytest.raises(dl.NonFiniteLoss) as ended:
        train(task, strategy, EQUAL, 1_000_000)
    assert [str(w.message) for w in caught if w.category is dl.DivergenceWarning] == ended.value.__notes__[-1:]
    return ended.value


def test_curvature_of_one_parameter_is_its_own():
    assert curvature(bowl(3.0), bowl(3.0).build()) == pytest.approx(3, rel=1e-12)


@pytest.mark.parametrize("bends", [(1.0, 5.0, 2.0), (1.0, 0.0), (2.0, -7.0), (-1.0, -4.0)], ids=str)
def test_curvature_is_the_largest_and_not_the_largest_in_size(bends):
    assert curvature(bowl(*bends), bowl(*bends).build()) == pytest.approx(max(bends), rel=0.01, abs=0.01)


def test_curvature_is_that_of_the_written_down_hessian():
    task = regression()
    model = task.build()
    names, params = zip(*model.named_parameters(), strict=True)

    def loss(*values):
        return F.mse_loss(torch.func.functional_call(model, dict(zip(names, values, strict=True)), task.train[0]), y)

    y = task.train[1]
    rows = torch.autograd.functional.hessian(loss, tuple(p.detach() for p in params))
    whole = torch.cat([torch.cat([b.reshape(p.numel(), -1) for b in row], 1) for p, row in zip(params, rows)])  # noqa: B905
    assert curvature(task, model) == pytest.approx(torch.linalg.eigvalsh(whole)[-1].item(), rel=0.01)


def test_loss_that_is_linear_has_no_curvature():
    assert curvature(countdown(), countdown().build()) == 0


def test_curvature_leaves_dropout_out():
    model = lambda: nn.Sequential(Diagonal(1), nn.Dropout(0.5))  # noqa: E731
    assert curvature(bowl(3.0, model=model), model()) == pytest.approx(3)


def test_curvature_goes_through_attention():
    def forward(model, x):
        tokens = model(x).view(-1, 1, 2, 2)
        return F.scaled_dot_product_attention(tokens, tokens, tokens).flatten(1).sum(1, keepdim=True)

    task = regression(model=lambda: nn.Linear(5, 4).double(), forward=forward)
    assert curvature(task, task.build()) > 0


def test_limit_is_exact_at_whole_ages_and_lower_in_between():
    assert [limit_at(float(age), 0.0) for age in (0, 1, 7)] == pytest.approx([2, 1, LIMIT])
    assert limit_at(7.0, 0.0) < limit_at(6.3, 0.0) < limit_at(6.0, 0.0)


@pytest.mark.parametrize("momentum", [0.3, 0.9, 0.99])
@pytest.mark.parametrize("age", [0, 1, 2, 7, 16])
def test_limit_with_momentum_is_exact_up_to_age_1_and_then_above_the_true_one(momentum, age):
    """The true one: where a root of z^(age+1) − (1 + m) z^age + m z^(age−1) + a leaves the unit circle."""
    limit = limit_at(float(age), momentum)

    def largest_root(a: float) -> float:
        terms = np.zeros(max(age, 1) + 2)
        terms[:3] = 1, -(1 + momentum), momentum
        terms[max(age, 1) + 1 if age else 1] += a
        return abs(np.roots(terms)).max()

    assert largest_root(1.001 * limit) > 1
    assert (largest_root(0.999 * limit) < 1) == (age < 2)
    assert largest_root(0.6 * limit) < 1


def test_asynchronous_run_past_the_limit_is_told_in_numbers():
    (text,) = told(at(1.2), dl.AsyncPS())
    assert f"learning rate {0.4 * LIMIT:.3g} × curvature 3 (at the final parameters) is 1.18 × the limit" in text
    assert "for a constant staleness of 6.86 (the mean; 95 % are up to 7)" in text
    assert 'AsyncPS(lr_by_staleness="1/(1+s)"), AsyncPS(max_clock_gap=...), or a learning rate below 0.0' in text


def test_warning_points_at_the_line_that_called():
    with pytest.warns(dl.DivergenceWarning) as trained:
        dl.train(at(1.2), dl.AsyncPS(), EQUAL, num_updates=200, progress=False)
    with pytest.warns(dl.DivergenceWarning) as waited:
        dl.start(at(1.2), dl.AsyncPS(), EQUAL, num_updates=200).wait()
    assert [w.filename for w in (*trained, *waited)] == [__file__] * 2


def test_run_is_judged_once():
    live = dl.start(at(1.2), dl.AsyncPS(), EQUAL, num_updates=200)
    with pytest.warns(dl.DivergenceWarning):
        live.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        live.wait()


@pytest.mark.parametrize(
    ("share", "strategy"),
    [(0.8, dl.AsyncPS()), (1.2, dl.SyncPS()), (1.2, dl.AllReduce()), (12.0, dl.SyncPS()), (1.2, dl.WorkerApplies())],
    ids=repr,
)
def test_run_within_the_limit_is_left_alone(share, strategy):
    assert told(at(share), strategy) == []


@pytest.mark.filterwarnings("ignore::distlab.DivergenceWarning")
def test_law_who_is_told_moves_away_and_who_is_not_comes_closer():
    for share, grows in ((1.2, True), (0.8, False)):
        task = at(share)
        near, far = (abs(train(task, dl.AsyncPS(), EQUAL, n).params[0].item()) for n in (500, 1000))
        assert (far > near) is grows


def test_run_without_gradients_measures_nothing():
    assert told(at(1.2), dl.AsyncPS(), dl.SimulatedCluster(8, compute=0.1, gradients="none")) == []


def test_what_would_take_long_is_not_measured_unasked(monkeypatch):
    monkeypatch.setattr(MODULE, "LEAST_S", 0.0)
    run = train(at(0.8), dl.AsyncPS(), EQUAL, 200)
    with pytest.raises(TimeoutError):
        affordable_s(run, run.task)
    with pytest.raises(TimeoutError, match=r"takes longer than 0\.0 s"):
        stability(run, run.task, within_s=0.0)
    assert told(at(1.2), dl.AsyncPS()) == []


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_what_goes_wrong_while_measuring_does_not_touch_the_run(monkeypatch, error):
    def measure(*args, **options):
        raise error("no")

    monkeypatch.setattr(MODULE, "stability", measure)
    assert told(at(1.2), dl.AsyncPS()) == []


def test_interrupt_while_measuring_goes_through(monkeypatch):
    def measure(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(MODULE, "stability", measure)
    with pytest.raises(KeyboardInterrupt):
        told(at(1.2), dl.AsyncPS())


def test_result_is_the_same_measured_or_not(monkeypatch):
    with pytest.warns(dl.DivergenceWarning):
        measured = train(at(1.2), dl.AsyncPS(), EQUAL, 200)
    monkeypatch.setattr(MODULE, "warn_if_diverging", lambda *args: None)
    plain = train(at(1.2), dl.AsyncPS(), EQUAL, 200)
    assert measured.params.equal(plain.params)
    assert measured.trace.rows.tobytes() == plain.trace.rows.tobytes()


@pytest.mark.filterwarnings("error::distlab.DivergenceWarning")
def test_check_of_a_strategy_is_not_about_the_learning_rate_of_its_toy(monkeypatch):
    monkeypatch.setattr(MODULE, "limit_at", lambda *args: 1e-9)
    assert "kept its promises" in dl.check_strategy(dl.AsyncPS(), num_cases=8)


def test_random_states_of_the_caller_stay():
    model = lambda: nn.Sequential(nn.Linear(5, 1), nn.Dropout()).double()  # noqa: E731
    run = train(regression(model=model), dl.AsyncPS(), EQUAL, 20)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    run.stability()
    affordable_s(run, run.task)
    assert torch.get_rng_state().equal(before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]


def test_loss_that_left_the_finite_brings_the_numbers_and_the_ways_out():
    (note,) = diverged(at(30.0), dl.AsyncPS()).__notes__[-1:]
    assert "learning rate 2.09 × curvature 3 (at the initial parameters) is 2" in note
    assert "What helps: AsyncPS(lr_by_staleness" in note


def test_synchronous_run_that_diverged_is_not_sent_to_the_switches():
    (note,) = diverged(bowl(3.0, lr=8.0), dl.SyncPS()).__notes__[-1:]
    assert "is 12.00 × the limit, 2, for a constant staleness of 0" in note
    assert note.endswith("What helps: a learning rate below 0.667")


def test_loss_that_bad_data_spoiled_is_not_blamed_on_the_rate(two):
    with pytest.warns(dl.DivergenceWarning), pytest.raises(dl.NonFiniteLoss) as ended:
        train(spoiled(math.nan), dl.SyncPS(), two, 100)
    assert "What helps, if all data is finite: a learning rate below 0.02" in ended.value.__notes__[-1]


def test_warning_made_an_error_does_not_hide_the_error_of_the_run():
    with warnings.catch_warnings():
        warnings.simplefilter("error", dl.DivergenceWarning)
        with pytest.raises(dl.NonFiniteLoss, match="the loss became"):
            train(at(30.0), dl.AsyncPS(), EQUAL, 1_000_000)
        with pytest.raises(dl.DivergenceWarning):
            train(at(1.2), dl.AsyncPS(), EQUAL, 200)


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        (lambda params: torch.optim.Adam(params, lr=9.0), "the limit is one of SGD .* not of Adam"),
        (lambda params: torch.optim.SGD(params, lr=9.0, momentum=0.9, nesterov=True), "plain momentum, not of SGD"),
        (
            lambda params: torch.optim.SGD([{"params": [p], "lr": i + 1.0} for i, p in enumerate(params)], lr=9.0),
            "not of SGD",
        ),
    ],
    ids=["adam", "nesterov", "groups"],
)
def test_optimizer_without_a_known_limit_gets_numbers_and_no_verdict(optimizer, why):
    model = lambda: nn.Sequential(Scalar(1.0), Both())  # noqa: E731
    task = countdown(model=model, loss=lambda outputs, targets: (1.5 * outputs**2).mean(), optimizer=optimizer)
    found = train(task, dl.AsyncPS(), EQUAL, 20).stability()
    assert found.curvature > 0 < found.mean_staleness
    assert math.isnan(found.limit)
    assert not found.is_past
    with pytest.raises(AssertionError, match=f"no verdict, .*{why}"):
        raise AssertionError(found)


class Both(nn.Module):
    """Adds a second parameter, so that there can be two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift


def test_momentum_is_part_of_the_verdict():
    task = halving(optimizer=OPTIMIZERS["momentum"])
    found = train(task, dl.SyncPS(), EQUAL, 5).stability()
    assert (found.momentum, found.limit) == (0.9, pytest.approx(3.8))
    assert "and momentum 0.9" in str(found)


def test_schedule_is_part_of_the_learning_rate():
    task = bowl(3.0, lr=0.1, lr_schedule=lambda version: 1 - version / 10)
    assert train(task, dl.SingleWorker(), EQUAL, 10).stability().lr == pytest.approx(0.01)


def test_loss_that_cannot_be_differentiated_twice_has_no_verdict():
    task = halving(loss=lambda outputs, targets: (Once.apply(outputs) ** 2).mean())
    found = train(task, dl.AsyncPS(), EQUAL, 20).stability()
    assert math.isnan(found.curvature)
    assert "no verdict, the loss cannot be differentiated twice" in str(found)


def test_loaded_run_needs_its_task(tmp_path):
    run = train(at(0.8), dl.AsyncPS(), EQUAL, 50)
    run.save(tmp_path)
    assert dl.load_run(tmp_path, run.task).stability() == run.stability()
    with pytest.raises(dl.DistlabError, match=r"load it with load_run\(path, task="):
        dl.load_run(tmp_path).stability()
