"""Old gradients: bounded by a clock, mixed in batches, trusted less, corrected, or kept from racing.

Most of it is pencil arithmetic on one parameter: w starts at 8, the gradient is w, the learning rate 1/2.
"""

import math
import time
from functools import cache

import numpy as np
import pytest
import torch
from toys import OPTIMIZERS, Scalar, countdown, halving, regression, train, train_together

import distlab as dl
from distlab.data import Stream
from distlab.fabric import Peer
from distlab.fabric.torch_fabric import TorchFabric
from distlab.flat import Flat
from distlab.roles.server import WorkerPort
from distlab.roles.updater import Gradient, Updater
from distlab.trace import Buffer, Recorder

IDEAL = dl.Network(latency_s=0.0, bandwidth_bytes_per_s=math.inf)
EXPONENTIAL = dl.laws.Exponential(mean_s=1.0)


def exponential(num_workers: int = 8, **options) -> dl.SimulatedCluster:
    """Exponential times of 1 s on average, on an ideal network."""
    return dl.SimulatedCluster(num_workers, compute=EXPONENTIAL, network=IDEAL, **options)


@cache
def timed(strategy: dl.Strategy, num_updates: int = 6000) -> dl.Run:
    """A run of eight workers without gradients."""
    return train(countdown(), strategy, exponential(gradients="none", seed=1), num_updates)


def largest_lead(run: dl.Run, num_workers: int, *, dead: dict[int, float] | None = None) -> int:
    """How far a worker was ahead of the slowest live one when it began a step: the most, over all steps."""
    rows, dead = run.trace.select("compute"), dead or {}
    ends = [np.sort(rows["end_s"][rows["worker"] == w]) for w in range(num_workers)]

    def lead(worker: int, start_s: float) -> int:
        finished = [int(np.searchsorted(times, start_s, side="right")) for times in ends]
        return finished[worker] - min(n for w, n in enumerate(finished) if dead.get(w, math.inf) > start_s)

    return max(lead(int(row["worker"]), float(row["start_s"])) for row in rows)


@pytest.mark.parametrize("gap", [0, 1, 4])
@pytest.mark.parametrize("num_servers", [1, 3])
def test_no_worker_begins_a_step_further_ahead_than_the_gap_and_some_get_that_far(gap, num_servers):
    strategy = dl.AsyncPS(max_clock_gap=gap, num_servers=num_servers)
    run = train(regression(), strategy, exponential(5), 300)
    assert largest_lead(run, 5) == gap


@pytest.mark.parametrize("gap", [0, 1, 4])
def test_a_killed_worker_holds_nobody_back(gap):
    """Those that it kept waiting go on at the moment of its death."""
    run = train(countdown(), dl.AsyncPS(max_clock_gap=gap), exponential(4).kill(worker=2, at_s=10.0), 200)
    assert run.version == 200
    assert largest_lead(run, 4, dead={2: 10.0}) == gap


def test_without_a_gap_a_worker_runs_away():
    run = train(countdown(), dl.AsyncPS(), exponential(4).slow(worker=0, factor=5), 200)
    assert largest_lead(run, 4) > 20


@pytest.mark.parametrize(("gap", "share"), [(0, 0.367), (1, 0.557), (4, 0.783), (16, 0.922)])
def test_a_larger_gap_hides_more_of_passing_stragglers(gap, share):
    """There is no closed form: the shares are from a larger sample."""
    assert timed(dl.AsyncPS(max_clock_gap=gap)).updates_per_s / 8 == pytest.approx(share, rel=0.03)


@pytest.mark.parametrize("gap", [0, 1, 2, 3, 4])
def test_no_gap_hides_a_lasting_straggler(gap):
    """All are as fast as the slowest, in the long run: a third. Equal times, or gap 0 would wait for the others too."""
    cluster = dl.SimulatedCluster(8, compute=1.0, network=IDEAL, gradients="none").slow(worker=3, factor=3.0)
    run = train(countdown(), dl.AsyncPS(max_clock_gap=gap), cluster, 2400)
    assert run.updates_per_s / 8 == pytest.approx(1 / 3, rel=0.03)


@pytest.mark.parametrize("awaited", [2, 4])
def test_staleness_is_conserved(awaited):
    batch = timed(dl.AsyncPS(apply_every=awaited), 4000 // awaited)
    distinct = timed(dl.AsyncPS(apply_every=awaited, distinct=True), 6000 // awaited)
    of_batch = dl.theory.mean_staleness(8, awaited, rule="k-batch-async")
    of_distinct = dl.theory.mean_staleness(8, awaited, rule="k-async")
    assert batch.mean_staleness == pytest.approx(of_batch, rel=0.01) == (8 - 1) / awaited
    assert distinct.mean_staleness == pytest.approx(of_distinct, rel=0.01) == (8 - awaited) / awaited


def test_distinct_waits_and_mixes_no_worker_with_itself():
    rows = timed(dl.AsyncPS(apply_every=4, distinct=True), 1500).applies
    assert all(len(set(rows["worker"][rows["version"] == v].tolist())) == 4 for v in range(1, 1501))


def in_turn(num_workers: int = 2) -> dl.SimulatedCluster:
    """Equal workers, so that they take turns: from its second on a gradient is num_workers - 1 updates old."""
    return dl.SimulatedCluster(num_workers, compute=1.0, network=IDEAL)


def ends_at(num_updates: int, num_workers: int = 3, task: dl.Task | None = None, **options) -> float:
    return train(task or halving(), dl.AsyncPS(**options), in_turn(num_workers), num_updates).params[0].item()


@pytest.mark.parametrize(
    ("factor", "by_hand"),
    [
        (None, [4, 0, -4, -6]),  # three gradients of 8, then one of what it was after the first: 4 / 2
        ("1/s", [4, 0, -2, -3]),  # 8 - 4, - 4 / 1, - 4 / 2, - (4 / 2) / 2
        ("1/(1+s)", [4, 2, 0.6666666666666667, 0]),  # 8 - 4, - 4 / 2, - 4 / 3, - (4 / 2) / 3
        (lambda s: 1 / 2**s, [4, 2, 1, 0.5]),  # 8 - 4, - 4 / 2, - 4 / 4, - (4 / 2) / 4
        (lambda s: float(s == 0), [4, 4, 4, 4]),  # the old ones not at all
    ],
    ids=["plain", "1/s", "1/(1+s)", "halved", "fresh only"],
)
def test_learning_rate_by_staleness_is_pencil_arithmetic(factor, by_hand):
    """The three start together, so the first gradients are 0, 1 and 2 updates old, the next ones 2."""
    for updates, value in enumerate(by_hand, start=1):
        assert ends_at(updates, lr_by_staleness=factor) == pytest.approx(value, abs=1e-12)


def test_learning_rate_by_staleness_weighs_the_gradients_of_a_batch():
    """Gradients 8 and 8 of age 0 make 4; then worker 2's 8 of age 1 and worker 0's, 8 too, of age 1: half of 4."""
    assert ends_at(1, apply_every=2, lr_by_staleness="1/(1+s)") == 4
    assert ends_at(2, apply_every=2, lr_by_staleness="1/(1+s)") == 2


def test_learning_rate_by_staleness_weighs_a_batch_of_several_ages():
    """Of two workers, 0 is fast. It sends 8 (age 0) and 8 (age 0): w = 4. Then 4 (age 0), and 1 sends 8 (age 1): the
    mean of 4 · 1 and 8 · 1/2 is 4, and half of it is taken away: 2. Unweighed it would be 4 - 3 = 1."""
    cluster = dl.SimulatedCluster(2, compute=[1.0, 3.5], network=IDEAL)
    ends = [
        train(halving(), dl.AsyncPS(apply_every=2, lr_by_staleness=factor), cluster, 2).params[0].item()
        for factor in ("1/(1+s)", None)
    ]
    assert ends == [2, 1]


def test_with_adam_staleness_scales_the_learning_rate_and_not_the_gradient():
    """Adam does not see how long a gradient is: its first steps have the length of the learning rate."""
    task = countdown(optimizer=lambda params: torch.optim.Adam(params, lr=0.1, eps=0.0))
    plain, scaled = (ends_at(3, 3, task, lr_by_staleness=factor) for factor in (None, "1/(1+s)"))
    assert plain == pytest.approx(-0.3)
    assert scaled == pytest.approx(-0.1 * (1 + 1 / 2 + 1 / 3))


def quadratic(curvature: float) -> dl.Task:
    """From w = 1, the gradient is curvature · w."""
    return halving(
        model=lambda: Scalar(1.0),
        loss=lambda outputs, targets: curvature * (outputs**2 / 2).mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.3),
    )


@pytest.mark.filterwarnings("error::distlab.DivergenceWarning")
@pytest.mark.parametrize("apply_every", [1, 3])
@pytest.mark.parametrize("num_workers", [1, 2, 5, 9])
def test_the_true_curvature_makes_old_gradients_fresh(num_workers, apply_every):
    """On a quadratic, g + h (w - w_read) is the gradient at w: sequential SGD, whatever the staleness."""
    h, updates = 1.7, 40
    strategy = dl.AsyncPS(compensation=lambda g, moved: g + h * moved, apply_every=apply_every)
    for cluster in (in_turn(num_workers), exponential(num_workers)):
        run = train(quadratic(h), strategy, cluster, updates)
        assert abs(run.params[0] - (1 - 0.3 * h) ** updates) < 1e-12
        assert run.mean_staleness > 0.8 or num_workers < 5
        assert run.replay().params.equal(run.params)


def test_without_compensation_it_is_not_sequential():
    """And said to be past the limit for gradients so old, as it would not be with it."""
    with pytest.warns(dl.DivergenceWarning, match="1.39 × the limit"):
        run = train(quadratic(1.7), dl.AsyncPS(), in_turn(5), 40)
    assert abs(run.params[0] - (1 - 0.3 * 1.7) ** 40) > 1e-3


def test_delay_compensation_is_the_formula():
    g, moved = torch.tensor([2.0, -3.0]), torch.tensor([0.5, 1.0])
    assert dl.DelayCompensation(strength=0.1)(g, moved).tolist() == pytest.approx([2 + 0.1 * 4 * 0.5, -3 + 0.1 * 9])


def test_adaptive_delay_compensation_is_the_formula():
    """λ₀ / √(mean square + 1e-7), which is a running mean that starts at 0 and keeps 95 %."""
    compensate, mean_square = dl.DelayCompensation(strength=2.0, adaptive=True), 0.0
    for g, moved in [(2.0, 0.5), (-1.0, 0.25), (3.0, -1.0)]:
        mean_square = 0.95 * mean_square + 0.05 * g**2
        expected = g + 2.0 / math.sqrt(mean_square + 1e-7) * g**2 * moved
        tensors = (torch.tensor([value], dtype=torch.float64) for value in (g, moved))
        assert compensate(*tensors).item() == pytest.approx(expected, rel=1e-12)


def test_delay_compensation_by_hand():
    """Two workers: 8 - 8/2 = 4. Then 8 is one update old and w has moved by -4: 8 + .01 · 64 · (-4) = 5.44, and
    4 - 5.44/2 = 1.28."""
    assert ends_at(2, 2, compensation=dl.DelayCompensation(strength=0.01)) == pytest.approx(1.28, abs=1e-12)


def test_a_run_does_not_use_up_the_compensation_it_was_given():
    strategy = dl.AsyncPS(compensation=dl.DelayCompensation(adaptive=True))
    first, second = (train(regression(), strategy, exponential(3), 30) for _ in range(2))
    assert first.params.equal(second.params)


@pytest.mark.parametrize(("compensation", "copies"), [(None, 0), (dl.DelayCompensation(), 3)])
def test_the_server_keeps_a_copy_per_worker_only_where_it_compensates(monkeypatch, compensation, copies):
    ports, init = [], WorkerPort.__init__
    monkeypatch.setattr(WorkerPort, "__init__", lambda self, *args: (init(self, *args), ports.append(self))[0])
    train(countdown(), dl.AsyncPS(compensation=compensation), exponential(3), 20)
    assert len(ports) == 3
    assert sum(port.sent is not None for port in ports) == copies


class Unhurried(torch.optim.Optimizer):
    """SGD with learning rate 1 that lets other threads run between reading a tensor and writing it back."""

    def __init__(self, params) -> None:
        super().__init__(params, {"lr": 1.0})

    @torch.no_grad()
    def step(self):
        for param in self.param_groups[0]["params"]:
            read = param.clone()
            time.sleep(0.001)
            param.copy_(read - param.grad)


class Pair(torch.nn.Module):
    """Two parameters, each with a gradient of 1."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (torch.nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2))

    def forward(self, x):
        return (self.one + self.other).expand(len(x))


@pytest.mark.parametrize("locking", ["tensor", "server"])
def test_no_update_is_lost_between_real_workers(four, locking):
    run = train_together(countdown(model=Pair, optimizer=Unhurried), dl.AsyncPS(locking=locking), four, 10)
    assert run.version == len(run.applies) > 40
    assert [p.item() for p in run.model.parameters()] == [-run.version] * 2


@pytest.mark.parametrize("locking", ["tensor", "server"])
def test_momentum_is_the_servers_and_not_a_workers(four, locking):
    """All push ones; four momenta would each be at their own beginning."""
    task = countdown(optimizer=lambda params: torch.optim.SGD(params, lr=1.0, momentum=0.5))
    run = train_together(task, dl.AsyncPS(locking=locking), four, 5)
    velocity, w = 0.0, 0.0
    for _ in range(run.version):
        velocity = 0.5 * velocity + 1.0
        w -= velocity
    assert run.params[0] == pytest.approx(w, abs=1e-6)


MAKERS = OPTIMIZERS | {"adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)}


@cache
def plain(optimizer: str) -> torch.Tensor:
    """The loop that everybody writes."""
    task = regression().but(optimizer=MAKERS[optimizer])
    model, stream = task.build(), Stream(task.train, batch_size=4, seed=task.seed)
    stepper = task.optimizer(model.parameters())
    for step in range(25):
        inputs, targets = stream.batch(step)
        stepper.zero_grad()
        task.loss(model(inputs), targets).backward()
        stepper.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("optimizer", MAKERS)
def test_threads_that_lock_tensors_share_the_optimizers_state(optimizer):
    def updater(by_tensor: bool) -> Updater:
        fabric = TorchFabric(Peer("server", 0), {"server": 1}, Recorder("server", 0, Buffer(list)), token=1)
        task = regression().but(optimizer=MAKERS[optimizer])
        return Updater(fabric, task, Flat(task.build()), by_tensor=by_tensor)

    shared, alone = updater(by_tensor=True), updater(by_tensor=False)
    for step in range(6):
        values = torch.full_like(alone.flat.params, step + 1.0)
        shared.apply(Gradient(values, 0, 0, step, 4, 0.0), lane=step % 3)
        alone.apply(Gradient(values, 0, 0, step, 4, 0.0))
    for mine, theirs in zip(*(made.flat.views(made.flat.params) for made in (shared, alone)), strict=True):
        assert mine.equal(theirs)


@pytest.mark.parametrize("world", ["real", "simulated"])
@pytest.mark.parametrize("locking", ["none", "tensor", "server"])
@pytest.mark.parametrize("optimizer", ["momentum", "adam", "adamw"])
def test_one_asynchronous_worker_is_plain_training_bit_for_bit(one, optimizer, locking, world):
    cluster = one if world == "real" else dl.SimulatedCluster(1)
    run = train(regression().but(optimizer=MAKERS[optimizer]), dl.AsyncPS(locking=locking), cluster, 25)
    trained = torch.cat([p.detach().flatten() for p in run.model.parameters()])
    assert trained.equal(plain(optimizer))


def test_distinct_with_a_gap_is_refused():
    with pytest.raises(ValueError, match="distinct=True and max_clock_gap= would wait for each other"):
        train(countdown(), dl.AsyncPS(distinct=True, max_clock_gap=1), in_turn(2), 5)


def test_more_distinct_gradients_than_workers_are_refused():
    with pytest.raises(ValueError, match="2 workers cannot give 3 gradients of distinct workers"):
        train(countdown(), dl.AsyncPS(apply_every=3, distinct=True), in_turn(2), 5)


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"max_clock_gap": -1}, ValueError, "max_clock_gap must be at least 0, got -1"),
        ({"max_clock_gap": 0.5}, TypeError, "max_clock_gap must be a whole number, got 0.5"),
        ({"apply_every": 0}, ValueError, "apply_every must be at least 1, got 0"),
        ({"lr_by_staleness": "1/t"}, ValueError, "lr_by_staleness='1/t': did you mean '1/s'.*or a function"),
        ({"lr_by_staleness": 0.5}, TypeError, "lr_by_staleness must be a word or a function of staleness, got 0.5"),
        ({"compensation": 0.04}, TypeError, r"compensation must be a function \(gradient, moved\) .*, got 0.04"),
        ({"locking": "tensors"}, ValueError, "locking='tensors': did you mean 'tensor'"),
    ],
)
def test_bad_option_is_refused_by_name(options, error, told):
    with pytest.raises(error, match=told):
        dl.AsyncPS(**options)


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"strength": 0.0}, ValueError, "strength must be positive and finite, got 0.0"),
        ({"strength": "much"}, TypeError, "strength must be a number, got 'much'"),
        ({"adaptiv": True}, TypeError, "DelayCompensation has no option 'adaptiv': did you mean 'adaptive'"),
    ],
)
def test_bad_compensation_is_refused_by_name(options, error, told):
    with pytest.raises(error, match=told):
        dl.DelayCompensation(**options)


@pytest.mark.parametrize(
    "strategy",
    [
        dl.AsyncPS(compensation=dl.DelayCompensation(strength=0.1), apply_every=2),
        dl.AsyncPS(compensation=dl.DelayCompensation(adaptive=True), lr_by_staleness="1/s", max_clock_gap=1),
        dl.AsyncPS(apply_every=2, distinct=True, lr_by_staleness="1/(1+s)", num_servers=2),
    ],
    ids=repr,
)
def test_rules_for_old_gradients_keep_the_promises_of_every_strategy(strategy):
    assert "kept its promises in 10" in dl.check_strategy(strategy, num_cases=10)


def test_rounds_that_are_applied_one_by_one_are_half_as_stale_as_free_workers():
    """With no gap allowed all read the same version, and each finds one more update before it than the last."""
    cluster = dl.SimulatedCluster(8, compute=dl.laws.Exponential(mean_s=1.0), network=IDEAL, gradients="none", seed=1)
    rows = train(countdown(), dl.AsyncPS(max_clock_gap=0), cluster, 8 * 40).applies
    assert (rows["version"] - 1 - rows["read"]).tolist() == list(range(8)) * 40  # (P - 1) / 2 on average
