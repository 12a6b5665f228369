"""`InGraph(place=...)`: one model, cut over devices, is the same model."""

import os
import signal

import pytest
import torch
from torch import nn
from toys import OPTIMIZERS, failure, regression, train, until

import distlab as dl
from distlab.fabric import wire

WORLDS = pytest.mark.parametrize("real", [False, True], ids=["simulated", "real"])


def cluster(real: bool, num_workers: int) -> dl.Cluster:
    return dl.LocalCluster(num_workers) if real else dl.SimulatedCluster(num_workers)


class Skip(nn.Module):
    """Named modules; `b` is called twice, `b` and `c` are fed by the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.double()

    def forward(self, x):
        h = torch.tanh(self.a(x))
        return self.d(torch.tanh(self.b(h)) + self.c(h) * self.b(h).relu_())


class Sometimes(Skip):
    """`c` is called with every other batch, or not at all."""

    def forward(self, x):
        h = torch.tanh(self.a(x))
        return self.d(self.c(h) if x[0, 0] > 0 else self.b(h))


class TwoInTwoOut(Skip):
    """A placed module takes two tensors and returns a tuple, of which one holds integers."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x, y):
            return self.inner(x) * y, (y > 0).long()

    def __init__(self) -> None:
        super().__init__()
        self.b = self.Both().double()

    def forward(self, x):
        h = torch.tanh(self.a(x))
        both, positive = self.b(h, self.c(h))
        return self.d(both * positive)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(7, 4), nn.Linear(4, 1)
        self.double()

    def forward(self, x):
        return self.out(self.words((x[:, 0].abs() * 3).long().clamp(max=6)))


class Scaled(nn.Linear):
    def forward(self, x, factor=1):
        return super().forward(x) * factor


class Numbers(Skip):
    def __init__(self) -> None:
        super().__init__()
        self.b = Scaled(4, 4).double()


class Frozen(Skip):
    def __init__(self) -> None:
        super().__init__()
        self.b.requires_grad_(False)


CUTS = [
    (None, {"0": 0, "1": 0, "2": 1}, 2),
    (None, {"0": 0, "1": 1, "2": 2}, 3),
    (None, {"0": 0, "2": 1}, 4),
    (Skip, {"b": 0}, 1),
    (Skip, {"a": 0, "b": 1, "c": 2, "d": 3}, 4),
    (Skip, {"b": 0, "c": 0}, 3),
    (Skip, {"b": 0, "c": 1}, 4),
    (Sometimes, {"b": 0, "c": 1}, 2),
    (TwoInTwoOut, {"b": 0, "d": 1}, 2),
    (Words, {"words": 0}, 1),
    (Words, {"words": 0}, 2),
    (Frozen, {"b": 0, "d": 0}, 1),
]


def task_of(model, optimizer="adam", **changes) -> dl.Task:
    return regression(optimizer, **({} if model is None else {"model": model}) | changes)


@WORLDS
@pytest.mark.parametrize(("model", "place", "workers"), CUTS)
def test_a_cut_model_is_the_uncut_one(real, model, place, workers):
    task = task_of(model)
    whole = train(task.but(batch_size=4 * workers), dl.SingleWorker(), dl.SimulatedCluster(1), 12)
    cut = train(task, dl.InGraph(place=place), cluster(real, workers), 12)
    torch.testing.assert_close(cut.params, whole.params, rtol=0, atol=1e-12)
    assert cut.replay().params.equal(cut.params)
    assert not cut.ledger.problems


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_both_worlds_end_at_the_same_bits(optimizer):
    real, virtual = (
        train(task_of(Skip, optimizer), dl.InGraph(place={"b": 0, "d": 1}), cluster(r, 2), 10) for r in (True, False)
    )
    assert real.params.equal(virtual.params)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda params: torch.optim.SGD([{"params": params[:2], "lr": 0.1}, {"params": params[2:]}], lr=0.01),
        lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.3),
        lambda params: torch.optim.Adafactor(params, lr=0.01),
    ],
)
def test_every_device_has_its_part_of_the_optimizer(optimizer):
    task = task_of(Skip).but(optimizer=optimizer, lr_schedule=lambda version: 1 / (1 + version))
    whole = train(task.but(batch_size=8), dl.SingleWorker(), dl.SimulatedCluster(1), 10)
    cut = train(task, dl.InGraph(place={"a": 0, "c": 1}), dl.SimulatedCluster(2), 10)
    torch.testing.assert_close(cut.params, whole.params, rtol=0, atol=1e-12)


def normalised() -> nn.Module:
    layers = nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize("place", [{"0": 0, "1": 0}, {"1": 0, "2": 1}, {"3": 0}])
def test_buffers_are_those_of_the_uncut_model_wherever_they_moved(place):
    workers, task = 1 + max(place.values()), task_of(normalised)
    whole = train(task.but(batch_size=4 * workers), dl.SingleWorker(), dl.SimulatedCluster(1), 9)
    cut = train(task, dl.InGraph(place=place), dl.SimulatedCluster(workers), 9)
    assert cut.local.keys() == whole.local.keys()
    for name, value in whole.local.items():
        torch.testing.assert_close(cut.local[name], value, rtol=0, atol=1e-12)
    assert cut.evaluate(task.train)["loss"] == pytest.approx(whole.evaluate(task.train)["loss"], abs=1e-12)


def test_the_client_evaluates_what_its_devices_hold():
    task = task_of(Skip).but(validation=regression().train)
    whole = dl.train(task.but(batch_size=8), dl.SingleWorker(), dl.SimulatedCluster(1), num_updates=9, evaluate_every=3)
    cut = dl.train(task, dl.InGraph(place={"a": 0, "d": 1}), dl.SimulatedCluster(2), num_updates=9, evaluate_every=3)
    assert cut.evaluations["version"].tolist() == [0, 3, 6, 9]
    assert cut.evaluations["loss"].tolist() == pytest.approx(whole.evaluations["loss"].tolist(), abs=1e-12)


def sent_bytes(run: dl.Run) -> int:
    """Of one update in the middle."""
    rows = run.trace.select("send")
    return int(rows["bytes"][rows["step"] == 5].sum())


def test_a_step_costs_the_bytes_of_its_activations():
    """Forward: inputs and outputs, with a plan of 4 or 5 numbers; backward: gradients, with one of 2; then the word."""
    model = lambda: nn.Sequential(nn.Linear(5, 300), nn.Tanh(), nn.Linear(300, 1)).double()  # noqa: E731
    run = train(task_of(model), dl.InGraph(place={"0": 0, "2": 1}), dl.SimulatedCluster(2), 8)
    x, h, y = torch.zeros(8, 5).double(), torch.zeros(8, 300).double(), torch.zeros(8, 1).double()
    plan = [torch.zeros(n, dtype=torch.int64) for n in range(6)]
    first = [[x, plan[5]], [h], [h, plan[2]], []]  # the data need no gradient
    second = [[h, plan[5]], [y], [y, plan[2]], [h]]
    assert sent_bytes(run) == sum(map(wire.size, [*first, *second, [], []]))


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def test_neighbours_on_a_device_are_one_call():
    run = train(task_of(deep), dl.InGraph(place=dict.fromkeys("0123", 0)), dl.SimulatedCluster(1), 8)
    assert len(run.trace.select("compute")) == 2 * 8


def test_devices_of_a_chain_take_turns_and_its_copies_do_not():
    place = {"0": 0, "2": 1}
    chain, copies = (
        train(regression(), dl.InGraph(place=place), dl.SimulatedCluster(n, compute=0.3, network=dl.Network()), 10)
        for n in (2, 8)
    )
    assert 1 / chain.updates_per_s == pytest.approx(0.6, rel=0.02)
    assert 1 / copies.updates_per_s == pytest.approx(0.6, rel=0.02)


def test_replicas_compute_at_the_same_time():
    """Three and more: more than one of them waits in the client at any time."""
    with dl.LocalCluster(4, compute_time_s=0.3) as four:
        rows = train(regression(), dl.InGraph(), four, 3).trace.select("compute")
    for step in range(3):
        of_step = rows[rows["step"] == step]
        for forward in (True, False):
            ends = [of_step[of_step["worker"] == w] for w in range(4)]
            mine = [sorted(r.tolist(), key=lambda row: row[9])[0 if forward else 1] for r in ends]
            assert max(row[9] for row in mine) < min(row[10] for row in mine)


def test_outputs_larger_than_the_parameters_survive_until_backward(three):
    """A link's memory is used again by the message that brings the gradient."""
    task = regression(
        model=lambda: nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 1)).double(),
        forward=lambda model, x: model(x.repeat(1, 200).unsqueeze(-1)).squeeze(-1),
        loss=lambda out, y: ((out - y) ** 2).mean(),
    )
    whole = train(task.but(batch_size=12), dl.SingleWorker(), three, 8)
    torch.testing.assert_close(train(task, dl.InGraph(), three, 8).params, whole.params, rtol=0, atol=1e-12)


@WORLDS
def test_stopped_run_has_the_parameters_of_its_last_update(real):
    live = dl.start(task_of(Skip), dl.InGraph(place={"b": 0, "d": 1}), cluster(real, 2), num_updates=10**7)
    until(lambda: live.version >= 5)
    live.stop()
    run = live.wait()
    again = train(task_of(Skip), dl.InGraph(place={"b": 0, "d": 1}), dl.SimulatedCluster(2), run.num_updates)
    assert again.params.equal(run.params)


def test_replay_with_another_rate_is_the_run_with_that_rate():
    slow = task_of(Skip, "sgd")
    fast = slow.but(optimizer=lambda params: torch.optim.SGD(params, lr=0.05))
    run, other = (train(t, dl.InGraph(place={"b": 0}), dl.SimulatedCluster(1), 8) for t in (slow, fast))
    assert run.replay(lr=0.05).params.equal(other.params)
    with pytest.raises(ValueError, match="in-graph, all replicas compute one gradient"):
        run.replay(without_worker=0)


def test_time_alone_can_be_simulated():
    law = {"compute": 0.1, "gradients": "none"}
    run = train(task_of(Skip), dl.InGraph(place={"b": 0, "d": 1}), dl.SimulatedCluster(2, **law), 8)
    assert (run.num_updates, len(run.trace.select("unplaced")) > 0) == (8, True)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 5).double(), nn.Linear(5, 5).double()
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x)).sum(1, keepdim=True)


@pytest.mark.parametrize(
    ("error", "text", "model", "place"),
    [
        (ValueError, "place has 'd2', but the model has no such module: did you mean 'd'?", Skip, {"d2": 0}),
        (ValueError, "place has '', but", Skip, {"": 0}),
        (ValueError, "place has 'b.inner' and 'b'", TwoInTwoOut, {"b": 0, "b.inner": 0}),
        (ValueError, "a.weight and b.weight are one tensor", Tied, {"a": 0, "b": 1}),
        (ValueError, "a.weight and b.weight are one tensor", Tied, {"a": 0}),
        (ValueError, r"place\['a'\] must be at least 0", Skip, {"a": -1}),
        (TypeError, r"place\['a'\] must be a whole number, got '1'", Skip, {"a": "1"}),
        (TypeError, r"place\['a'\] must be a whole number, got True", Skip, {"a": True}),
        (TypeError, "place must say which module is on which device", Skip, {}),
        (TypeError, "place must say which module is on which device", Skip, ["a"]),
        (ValueError, "place uses device 2, but nothing is on device 1", Skip, {"a": 0, "b": 2}),
        (ValueError, "place needs 3 workers for each replica, got 2 in all", Skip, {"a": 0, "b": 1, "c": 2}),
    ],
)
def test_bad_places_are_refused_before_a_process_starts(no_process_starts, two, error, text, model, place):
    with pytest.raises(error, match=text):
        train(task_of(model), dl.InGraph(place=place), two, 5)


@pytest.mark.parametrize(
    ("error", "text", "forward"),
    [
        (TypeError, r"b was called with Tensor, factor=: a placed module takes", lambda m, x: m.b(m.a(x), factor=2)),
        (TypeError, r"b was called with Tensor, int: a placed", lambda m, x: m.b(m.a(x), 2)),
    ],
)
def test_what_goes_wrong_at_a_crossing_is_said(error, text, forward):
    with pytest.raises(error, match=text):
        train(task_of(Numbers).but(forward=forward), dl.InGraph(place={"b": 0}), dl.SimulatedCluster(1), 3)


@pytest.mark.parametrize("who", ["replica 1", "client 0"])
def test_death_of_a_device_or_of_the_client_is_named(two, who):
    live = dl.start(task_of(Skip), dl.InGraph(place={"b": 0, "d": 1}), two, num_updates=10**7)
    until(lambda: live.version >= 3)
    os.kill(live.launched.pids[who], signal.SIGKILL)
    error = failure(live)
    assert isinstance(error, dl.ProcessLost)
    assert str(error).startswith(f"{who} (pid ")


def test_check_finds_nothing_wrong_with_cut_models():
    assert "kept its promises" in dl.check_strategy(dl.InGraph(place={"0": 0, "3": 1, "1": 1}), num_cases=8)
