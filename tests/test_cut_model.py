"""`InGraph(place=...)`: a model that is cut over devices trains as the whole one does, and only activations travel."""

import os
import signal
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from toys import OPTIMIZERS, failure, refused, regression, train, until

import distlab as dl
from distlab.fabric import wire
from distlab.fabric.network import IDEAL
from distlab.roles import client

LONG = 10_000_000
CUT = dl.InGraph(place={"0": 0, "2": 1})  # of the regression's 5-4-1 network
WORLDS = ["simulated", "real"]


@pytest.fixture(params=WORLDS)
def world(request, clusters):
    """Clusters of both worlds, by their number of workers."""
    return clusters.__getitem__ if request.param == "real" else dl.SimulatedCluster


def chain(*widths: int) -> nn.Sequential:
    """Linear layers with a Tanh between any two."""
    layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).double()


class Net(nn.Module):
    """Named parts, whose forward pass each test writes itself."""

    def __init__(self, forward, **parts: nn.Module) -> None:
        super().__init__()
        self._forward = forward
        for name, part in parts.items():
            self.add_module(name, part)
        self.double()

    def forward(self, x):
        return self._forward(self, x)


class Pair(nn.Module):
    """Takes two tensors, and returns two."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, a, b):
        return self.one(a) * b, self.two(b)


class Offset(nn.Module):
    """Takes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self):
        return 2 * self.weight


class Scaled(nn.Module):
    """Takes a tensor and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x, factor):
        return x * self.weight * factor


class Frequencies(nn.Module):
    """Returns complex numbers."""

    def forward(self, x):
        return torch.fft.fft(x)


class Counted(nn.Module):
    """A buffer that is a new tensor after every call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls = self.calls + 1
        return x


class Fixed(Net):
    """Its BatchNorm stays in eval mode, whatever it is told."""

    def train(self, mode: bool = True):
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.training = False
        return self


def linears(names: str, **others: nn.Module) -> dict[str, nn.Module]:
    """A 5-4 layer "a", 4-4 layers and a 4-1 layer "z", as `names` says."""
    sizes = {"a": (5, 4), "z": (4, 1)}
    return {name: nn.Linear(*sizes.get(name, (4, 4))) for name in names} | others


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def skip(net, x):
    h = net.a(x)
    return net.z(h + net.c(torch.tanh(net.b(h)) + h))


def sometimes(net, x):
    """Module b's part is in every second step alone."""
    net.steps = getattr(net, "steps", 0) + 1
    return net.z(net.a(x) + (net.b(net.a(x)) if net.steps % 2 else 0))


def without_grad(net, x):
    with torch.no_grad():
        h = net.a(x)
    return net.z(h)


def in_place(net, x):
    h = net.a(x)
    y = net.b(h)
    h.mul_(2)
    return net.z(y + h)


def by_list(net, x):
    for layer in net.layers:
        x = layer(x)
    return x


def listed() -> nn.Module:
    net = Net(by_list, **linears("abz"))
    net.layers = [net.a, net.b, net.z]
    return net


def abz(net, x):
    return net.z(net.b(net.a(x)))


def net(names: str, place: dict[str, int], forward=abz, **others):
    """A model's factory, and where its modules are."""
    return lambda: Net(forward, **linears(names), **{name: make() for name, make in others.items()}), place


MODELS = {
    "in two": (lambda: chain(5, 4, 1), {"0": 0, "2": 1}),
    "in three": (lambda: chain(5, 4, 4, 1), {"0": 0, "2": 1, "4": 2}),
    "neighbours on one device": (lambda: chain(5, 4, 4, 1), {"0": 0, "1": 0, "2": 0, "3": 1, "4": 1}),
    "two pieces on one device": (lambda: chain(5, 4, 4, 1), {"0": 0, "4": 0, "2": 1}),
    "a whole Sequential": (lambda: nn.Sequential(chain(5, 4, 4), chain(4, 4, 1)), {"0": 0, "1": 1}),
    "skip connections": net("abcz", {"a": 0, "b": 1, "c": 0, "z": 1}, skip),
    "a shared layer": net("abz", {"b": 0}, lambda n, x: n.z(n.b(n.b(n.a(x)).tanh()))),
    "two of one tensor": net("abcz", {"b": 0, "c": 1}, lambda n, x: (h := n.a(x).tanh(), n.z(n.b(h) * n.c(h)))[1]),
    "an unused output": net("abz", {"b": 0}, lambda n, x: (n.b(n.a(x)), n.z(n.a(x)))[1]),
    "not in every step": net("abz", {"b": 0}, sometimes),
    "a device not in every step": net("abz", {"a": 0, "b": 1}, sometimes),
    "two and two": net("abz", {"p": 0, "a": 1}, lambda n, x: n.z(sum(n.p(n.a(x), n.b(n.a(x))))), p=Pair),
    "one tensor twice": net("az", {"p": 0}, lambda n, x: (h := n.a(x), n.z(sum(n.p(h, h))))[1], p=Pair),
    "one of two outputs": net("az", {"p": 0}, lambda n, x: n.z(n.p(n.a(x), n.a(x))[1]), p=Pair),
    "no input": net("az", {"o": 0}, lambda n, x: n.z(n.a(x) + n.o()), o=Offset),
    "a number as input": net("az", {"p": 0}, lambda n, x: n.z(n.p(n.a(x), x.mean())), p=Scaled),
    "complex outputs": net("az", {"f": 0}, lambda n, x: n.z(n.f(n.a(x)).abs()), f=Frequencies),
    "integer inputs": net("z", {"e": 0}, lambda n, x: n.z(n.e((x[:, 0] > 0).long())), e=lambda: nn.Embedding(2, 4)),
    "the client between": net("abcdz", {"b": 0, "d": 1}, lambda n, x: n.z(n.d(n.c(n.b(n.a(x)))))),
    "frozen": net("az", {"b": 0}, b=lambda: frozen(nn.Linear(4, 4))),
    "frozen and first": net("z", {"a": 0, "z": 1}, lambda n, x: n.z(n.a(x)), a=lambda: frozen(nn.Linear(5, 4))),
    "without a gradient": net("az", {"a": 0}, without_grad),
    "in place before": net("az", {"b": 0}, b=lambda: nn.ReLU(inplace=True)),
    "in place after": net("az", {"a": 0}, b=lambda: nn.ReLU(inplace=True)),
    "in place on the input": net("az", {"b": 0}, in_place, b=nn.Tanh),
    "in a list as well": (listed, {"a": 0, "b": 1}),
    "eval mode": (lambda: Fixed(abz, **linears("az", b=nn.BatchNorm1d(4))), {"b": 0}),
    "a part in eval mode": (lambda: Fixed(abz, **linears("az", b=nn.Sequential(nn.BatchNorm1d(4)))), {"b": 0}),
}
NO_COPIES = (
    "not in every step",
    "a device not in every step",
    "a number as input",
)  # they count calls, and look at the whole batch


def batch_norms() -> nn.Module:
    norms = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    return nn.Sequential(nn.Linear(5, 4), norms[0], nn.Linear(4, 4), norms[1], nn.Linear(4, 1)).double()


def devices(place: dict[str, int]) -> int:
    return 1 + max(place.values())


def uncut(task: dl.Task, num_workers: int, num_updates: int = 6) -> dl.Run:
    """The whole model, on one worker with the whole batch."""
    whole = task.but(batch_size=num_workers * task.batch_size)
    return train(whole, dl.SingleWorker(), dl.SimulatedCluster(1), num_updates)


def assert_equals_uncut(task: dl.Task, strategy: dl.Strategy, cluster, num_updates: int = 6) -> dl.Run:
    """The same parameters and buffers; returns the run."""
    run, whole = train(task, strategy, cluster, num_updates), uncut(task, cluster.num_workers, num_updates)
    assert (whole.params - uncut(task, cluster.num_workers, 1).params).abs().max() > 1e-4, "it does not even move"
    torch.testing.assert_close(run.params, whole.params, rtol=0, atol=1e-12)
    return run


class Flattened(torch.optim.Optimizer):
    """Looks at whole matrices: each step has the norm of its matrix' gradient taken out."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / (p.grad.norm() + 0.1), alpha=group["lr"])


OTHERS = {
    "weight decay": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.5),
    "groups by position": lambda given: torch.optim.SGD(
        [
            {"params": (params := list(given))[:1], "lr": 0.001},
            {"params": params[1:3]},
            {"params": params[3:], "lr": 0.1},
        ],
        lr=0.03,
    ),
    "whole matrices": lambda params: Flattened(params, lr=0.02),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.02),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["in two", "skip connections"])
def test_cut_model_trains_as_the_whole_one(world, name, optimizer):
    model, place = MODELS[name]
    assert_equals_uncut(regression(optimizer, model=model), dl.InGraph(place=place), world(2))


@pytest.mark.parametrize(("name", "copies"), [(n, c) for n in MODELS for c in (1, 2) if c == 1 or n not in NO_COPIES])
def test_every_shape_of_model_trains_as_the_whole_one(name, copies):
    model, place = MODELS[name]
    task, cluster = regression("adam", model=model), dl.SimulatedCluster(copies * devices(place))
    run = assert_equals_uncut(task, dl.InGraph(place=place), cluster)
    assert run.ledger.balances
    assert run.num_updates == 6


@pytest.mark.parametrize("name", ["in three", "two and two", "integer inputs", "complex outputs"])
def test_every_kind_of_tensor_travels_between_processes(clusters, name):
    model, place = MODELS[name]
    assert_equals_uncut(regression("momentum", model=model), dl.InGraph(place=place), clusters[devices(place)])


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("name", OTHERS)
def test_optimizer_sees_the_whole_model(name, copies):
    task = regression().but(optimizer=OTHERS[name])
    assert_equals_uncut(task, CUT, dl.SimulatedCluster(2 * copies))
    assert_equals_uncut(task, dl.InGraph(place={"0": 0}), dl.SimulatedCluster(copies))


def test_schedule_is_kept_by_devices_and_client():
    task = regression("momentum", lr_schedule=lambda version: 0.5**version)
    assert_equals_uncut(task, dl.InGraph(place={"2": 0}), dl.SimulatedCluster(1))


def test_copies_of_a_cut_model_train_as_the_whole_one(four):
    assert_equals_uncut(regression("adam"), CUT, four)


def test_fewer_samples_than_copies_leave_some_idle():
    task = regression("adam", batch_size=1, train=tuple(t[:3] for t in regression().train))
    run = train(task, dl.InGraph(place={"0": 0}), dl.SimulatedCluster(3), 4)
    torch.testing.assert_close(run.params, uncut(task, 3, 4).params, rtol=0, atol=1e-12)
    small = train(task.but(batch_size=1), CUT, dl.SimulatedCluster(2), 4)
    torch.testing.assert_close(small.params, uncut(task, 2, 4).params, rtol=0, atol=1e-12)


def test_inputs_may_be_a_dict():
    x, y = regression().train
    task = regression("adam", train=({"x": x, "y": y}), loss=lambda out, batch: F.mse_loss(out, batch["y"]))
    task = task.but(forward=lambda model, inputs: model(inputs["x"]))
    assert_equals_uncut(task, CUT, dl.SimulatedCluster(4))


def test_uneven_parts_weigh_what_they_hold(monkeypatch):
    monkeypatch.setattr(client, "pieces", lambda batch, parts: list(batch.split([11, 5])))
    run = assert_equals_uncut(regression("adam"), CUT, dl.SimulatedCluster(4))
    assert run.applies["samples"][:4].tolist() == [6, 5, 3, 2]


def test_forward_of_the_task_may_call_parts():
    task = regression("adam", forward=lambda model, x: model[2](2 * model[0](x)))
    assert_equals_uncut(task, CUT, dl.SimulatedCluster(2))


# What travels


def sent(run: dl.Run, step: int) -> list[tuple[str, int]]:
    """Who sent how many bytes in a step, in order."""
    return [(e.who, e.bytes) for e in run.trace.where("send") if e.step == step]


def of(*shapes: tuple[int, ...], plan: int) -> int:
    """The bytes of a message with float64 tensors of these shapes, and a plan of so many numbers."""
    numbers = [torch.zeros(plan, dtype=torch.int64)] if plan else []
    return wire.size([*(torch.zeros(shape, dtype=torch.float64) for shape in shapes), *numbers])


def wide(width: int) -> dl.Task:
    """Few activations, and as many parameters as you like."""
    layers = lambda: nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3))  # noqa: E731
    return regression(model=lambda: nn.Sequential(layers(), nn.Linear(3, 5), layers(), nn.Linear(3, 1)).double())


@pytest.mark.parametrize("width", [2, 2000])
def test_only_activations_travel(world, width):
    run = train(wide(width), dl.InGraph(place={"0": 0, "2": 1}), world(2), 3)
    word = of(plan=0)
    ways = [of((8, 5), plan=5), of((8, 3), plan=0)], [of((8, 3), plan=2), word, of((8, 5), plan=0)]
    forward, (back, no_input, with_input) = ways
    messages = [*forward, *forward, back, with_input, back, no_input, word, word]
    for step in range(3):
        assert sorted(size for _, size in sent(run, step)) == sorted(messages)
    assert run.bytes_sent == 3 * sum(messages), "the parameters in the end are left out"


def test_raw_data_gets_no_gradient():
    run = train(regression(), dl.InGraph(place={"0": 0}), dl.SimulatedCluster(1), 1)
    assert [size for who, size in sent(run, 0) if who == "replica 0"] == [of((4, 4), plan=0), of(plan=0)]


def test_copies_take_parameters_along():
    run = train(regression(), CUT, dl.SimulatedCluster(4), 1)
    first = next(size for who, size in sent(run, 0) if who == "client 0")
    assert first == of((48,), (8, 5), plan=5), "20 + 4 parameters, padded to 32 + 16"


def test_neighbours_in_a_sequential_are_one_call():
    run = train(regression(), dl.InGraph(place={"0": 0, "1": 0, "2": 0}), dl.SimulatedCluster(1), 1)
    assert len(sent(run, 0)) == 2 + 2 + 1
    assert len(run.trace.where("compute")) == 2
    apart = train(regression(), dl.InGraph(place={"0": 0, "2": 0}), dl.SimulatedCluster(1), 1)
    assert len(sent(apart, 0)) == 2 * (2 + 2) + 1


@pytest.mark.parametrize("forward", [lambda m, x: m[2](x + m[1](m[0](x))), lambda m, x: m[2](m[0](x))])
def test_neighbours_cannot_be_called_one_by_one(forward):
    task = regression(model=lambda: chain(5, 5, 1), forward=forward)
    with pytest.raises(TypeError, match=r"0 \+ 1 run as one, .* called by itself: hold them in a ModuleList"):
        train(task, dl.InGraph(place={"0": 0, "1": 0}), dl.SimulatedCluster(1), 2)


# Who waits for whom


def seconds(place, num_workers: int, compute=0.3, task=None) -> float:
    """The virtual time of an update."""
    cluster = dl.SimulatedCluster(num_workers, compute=compute, network=IDEAL)
    return 1 / train(task or regression(), dl.InGraph(place=place), cluster, 4).updates_per_s


@pytest.mark.parametrize("copies", [1, 2, 3, 5])
def test_equal_copies_take_the_time_of_one(copies):
    assert seconds(None, copies) == pytest.approx(0.3)
    assert seconds({"0": 0}, copies) == pytest.approx(0.3)


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_chain_takes_the_sum_of_its_devices(copies):
    assert seconds(CUT.place, 2 * copies, [0.3, 0.5] * copies) == pytest.approx(0.8)


def test_pieces_of_a_device_share_its_time():
    task = regression(model=lambda: chain(5, 4, 4, 1))
    assert seconds({"0": 0, "4": 0, "2": 1}, 2, task=task) == pytest.approx(0.6)


def test_slowest_copy_sets_the_pace():
    assert seconds(CUT.place, 4, [0.1, 0.1, 0.5, 0.7]) == pytest.approx(1.2)
    assert seconds(CUT.place, 4, [0.5, 0.7, 0.1, 0.1]) == pytest.approx(1.2)


@pytest.mark.parametrize("place", [None, {"0": 0, "1": 0, "2": 0}])
@pytest.mark.parametrize("num_workers", [3, 4])
def test_real_copies_compute_at_the_same_time(place, num_workers):
    with dl.LocalCluster(num_workers, compute_time_s=0.2) as cluster:
        run = train(regression(), dl.InGraph(place=place), cluster, 3)
    for step in range(3):
        (loss,) = (e for e in run.trace.where("loss") if e.step == step)
        rows = run.trace.select("compute")
        rows = rows[rows["step"] == step]
        for way in (rows[rows["end_s"] <= loss.start_s], rows[rows["start_s"] >= loss.end_s]):
            assert len(way) == num_workers
            assert way["start_s"].max() < way["end_s"].min()


# Buffers, random numbers, and who evaluates


@pytest.mark.parametrize("place", [{"1": 0}, {"3": 0}, {"0": 0, "1": 0, "2": 1, "3": 1}, {"0": 0}])
def test_buffers_are_those_of_the_whole_model(world, place):
    task = regression("adam", model=batch_norms, validation=regression().train)
    run = assert_equals_uncut(task, dl.InGraph(place=place), world(devices(place)))
    whole = uncut(task, devices(place))
    assert sorted(run.local) == sorted(whole.local)
    assert all(torch.allclose(run.local[name], whole.local[name], rtol=0, atol=1e-12) for name in whole.local)
    assert run.evaluate() == pytest.approx(whole.evaluate(), rel=1e-12)
    assert run.model[3].running_mean.abs().max() > 0


@pytest.mark.parametrize("place", [{"1": 0}, {"0": 0}])
def test_buffer_that_is_made_anew_is_handed_over(place):
    model = lambda: nn.Sequential(nn.Linear(5, 4), Counted(), nn.Linear(4, 1)).double()  # noqa: E731
    assert train(regression(model=model), dl.InGraph(place=place), dl.SimulatedCluster(1), 5).local["1.calls"] == 5


def test_buffers_of_copies_are_those_of_the_first():
    task = regression(model=batch_norms)
    run = train(task, dl.InGraph(place={"1": 0, "3": 1}), dl.SimulatedCluster(4), 1)
    h = task.build()[0](first_batch(task, 16)[:8])
    torch.testing.assert_close(run.local["1.running_mean"], 0.1 * h.detach().mean(0))


def first_batch(task: dl.Task, batch_size: int) -> torch.Tensor:
    from distlab.data import Stream

    return Stream(task.train, batch_size=batch_size, seed=task.seed).batch(0)[0]


@pytest.fixture(scope="module")
def noisy(two):
    """A real run of a cut model with dropout, on a device and with the client."""
    layers = lambda: nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Dropout(0.2), nn.Linear(8, 1)).double()  # noqa: E731
    task = regression("adam", model=layers)
    return task, train(task, dl.InGraph(place={"0": 0, "1": 0, "3": 1}), two, 8)


def test_dropout_on_a_device_is_reproducible(noisy, two):
    task, run = noisy
    assert train(task, run.algorithm, two, 8).params.equal(run.params)
    assert not run.params.equal(train(task.but(seed=1), run.algorithm, two, 8).params)


def test_real_run_is_replayed_to_the_bit(noisy):
    _, run = noisy
    again = run.replay()
    assert again.params.equal(run.params)
    assert [again.losses[v] for v in run.applies["version"]] == run.applies["loss"].tolist()


@pytest.mark.parametrize("strategy", [CUT, dl.InGraph(place={"0": 0, "2": 0}), dl.InGraph(place={"2": 0})], ids=repr)
def test_evaluations_are_those_of_the_whole_model(world, strategy, tmp_path):
    task = regression("adam", validation=regression().train, metrics={"error": nn.L1Loss()})
    how = {"num_updates": 6, "evaluate_every": 3, "progress": False}
    run = dl.train(task, strategy, world(strategy.num_devices), log_dir=tmp_path, **how)
    whole = dl.train(task.but(batch_size=4 * strategy.num_devices), dl.SingleWorker(), dl.SimulatedCluster(1), **how)
    assert run.evaluations["version"].tolist() == [0, 3, 6]
    for name in ("loss", "error"):
        np.testing.assert_allclose(run.evaluations[name], whole.evaluations[name], rtol=1e-12)
    assert run.evaluate() == run.evaluations[["loss", "error"]].iloc[-1].to_dict()
    assert len(list(tmp_path.iterdir())) == 1


def test_looking_changes_nothing():
    task = regression("adam", validation=regression().train)
    looked = dl.train(task, CUT, dl.SimulatedCluster(2), num_updates=6, evaluate_every=1, progress=False)
    assert looked.params.equal(train(task, CUT, dl.SimulatedCluster(2), 6).params)


@pytest.mark.parametrize("world", WORLDS)
def test_stopped_run_ends_with_the_parameters_of_its_version(world, two):
    cluster = two if world == "real" else dl.SimulatedCluster(2)
    live = dl.start(regression(), CUT, cluster, num_updates=LONG)
    until(lambda: live.version > 0)
    live.stop()
    run = live.wait()
    assert 0 < run.version < LONG
    assert run.replay().params.equal(run.params)


def test_batches_are_one_stream():
    run = dl.train(regression(), CUT, dl.SimulatedCluster(2), num_batches=(2, 5), progress=False)
    assert run.version == 3
    torch.testing.assert_close(run.params, uncut(regression(), 2, 3).params, rtol=0, atol=1e-12)


def test_device_shows_the_parameters_that_it_holds():
    live = dl.start(regression(), CUT, dl.SimulatedCluster(2), num_updates=3, paused=True)
    live.step(10_000)
    run, held = live.wait(), live.params()
    assert held["replica 0"].equal(run.params[: len(held["replica 0"])])
    assert held["replica 1"].equal(run.params[len(held["replica 0"]) :])


# What is refused, and what goes wrong


@pytest.mark.parametrize(
    ("place", "error", "told"),
    [
        ({"1": 0, "O": 0}, ValueError, "place has 'O', but the model has no such module: there is 0, 1, 2"),
        ({"": 0}, ValueError, "place has '', but the model has no such module"),
        ({}, TypeError, "place must say which module is on which device, such as {'0': 0}, got {}"),
        (["0"], TypeError, r"place must say which module .*, got \['0'\]"),
        ({0: 0}, TypeError, "place must say which module .*, got {0: 0}"),
        ({"0": -1}, ValueError, r"place\['0'\] must be at least 0, got -1"),
        ({"0": True}, TypeError, r"place\['0'\] must be a whole number, got True"),
        ({"0": 1.0}, TypeError, r"place\['0'\] must be a whole number, got 1.0"),
        ({"0": 0, "2": 2}, ValueError, "place uses device 2, but nothing is on device 1"),
        ({"0": 0, "1": 1, "2": 2}, ValueError, "place needs 3 workers for each replica, got 2 in all"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("no_process_starts")
def test_place_that_cannot_be_is_refused(place, error, told):
    with pytest.raises(error, match=told):
        dl.train(regression(), dl.InGraph(place=place), dl.LocalCluster(2), num_updates=5)


@pytest.mark.usefixtures("no_process_starts")
def test_near_miss_is_named():
    model = lambda: Net(abz, features=nn.Linear(5, 1))  # noqa: E731
    task, told = regression(model=model, forward=lambda m, x: m.features(x)), "did you mean 'features'"
    refused(ValueError, told, task=task, strategy=dl.InGraph(place={"feature": 0}))


@pytest.mark.usefixtures("no_process_starts")
def test_place_within_a_place_is_refused():
    model = lambda: nn.Sequential(chain(5, 4, 1)).double()  # noqa: E731
    strategy = dl.InGraph(place={"0": 0, "0.2": 1})
    refused(
        ValueError,
        "place has '0.2', which is inside '0': place one of them",
        task=regression(model=model),
        strategy=strategy,
    )


def tied() -> nn.Module:
    net = Net(lambda n, x: n.z(n.c(n.b(n.a(x)))), **linears("abcz"))
    net.c.weight = net.b.weight
    return net


@pytest.mark.parametrize("place", [{"b": 0, "c": 1}, {"b": 0}, {"b": 0, "c": 0}], ids=str)
@pytest.mark.usefixtures("no_process_starts")
def test_weights_tied_across_pieces_are_refused(place):
    told = "b.weight and c.weight are one tensor: place both modules on one device, in one piece"
    refused(ValueError, told, task=regression(model=tied), strategy=dl.InGraph(place=place))


def test_weights_tied_within_a_piece_are_trained():
    model = lambda: Net(lambda n, x: n.inner(x), inner=tied())  # noqa: E731
    assert_equals_uncut(regression("adam", model=model), dl.InGraph(place={"inner": 0}), dl.SimulatedCluster(1))


@pytest.mark.parametrize(
    ("forward", "told"),
    [
        (lambda n, x: n.z(n.a(input=x)), "a was called with input=: a placed module takes tensors, by position"),
        (lambda n, x: n.z(n.p(n.a(x), (1, 2))), "p was called with Tensor, tuple: a placed module takes tensors"),
        (lambda n, x: n.z(n.d(n.a(x))["out"]), "d returned a dict: on a device it must be a tensor, or a tuple of"),
        (
            lambda n, x: n.z(n.n(n.a(x))[0]),
            "n returned a tuple: on a device it must be a tensor, or a tuple of tensors",
        ),
    ],
)
def test_call_that_cannot_travel_names_its_module(two, forward, told):
    others = {"p": First(), "d": Answering(lambda x: {"out": x}), "n": Answering(lambda x: (x, None))}
    task = regression(model=lambda: Net(forward, **linears("az", **others)))
    with pytest.raises(TypeError, match=told):
        train(task, dl.InGraph(place={"a": 0, "p": 0, "d": 1, "n": 1}), two, 2)


class First(nn.Module):
    """Of what it takes, the first is what it returns."""

    def forward(self, x, *others):
        return x


class Answering(nn.Module):
    """Returns what it is told to."""

    def __init__(self, answer) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, x):
        return self.answer(x)


class Boom(Exception):
    """An exception of the user's own."""


def exploding(x):
    if os.getpid() != HERE:
        raise Boom("on a device")
    return x


HERE = os.getpid()


def test_exception_on_a_device_arrives_as_itself(two):
    model = lambda: Net(abz, **linears("az", b=Answering(exploding)))  # noqa: E731
    error = failure(dl.start(regression(model=model), dl.InGraph(place={"a": 0, "b": 1}), two, num_updates=LONG))
    assert type(error) is Boom
    assert str(error) == "on a device"
    assert error.__notes__[0].startswith("raised on replica 1")


@pytest.mark.parametrize("strategy", [CUT, dl.InGraph(place={"0": 0})], ids=repr)
@pytest.mark.parametrize("who", ["replica 1", "client 0"])
def test_killed_process_ends_the_run_and_is_named(two, strategy, who):
    live = dl.start(regression(), strategy, two, num_updates=LONG)
    until(lambda: live.version > 0 and who in live.trace.who)
    pid = live.launched.pids[who]
    os.kill(pid, signal.SIGKILL)
    error = failure(live)
    assert isinstance(error, dl.ProcessLost)
    assert str(error).startswith(f"{who} (pid {pid}) was lost at step ")


def test_killed_device_of_a_scenario_is_named():
    with pytest.raises(dl.ProcessLost, match=r"replica 1 was lost at 0.5 s"):
        train(regression(), CUT, dl.SimulatedCluster(2, compute=0.1).kill(worker=1, at_s=0.5), 100)


# What is left


@pytest.mark.parametrize("place", [None, CUT.place, {"2": 0}, {"0": 0}], ids=str)
def test_run_that_computes_nothing_takes_the_same_time(place):
    def run(gradients):
        return train(regression(), dl.InGraph(place=place), dl.SimulatedCluster(2, gradients=gradients), 5)

    hollow, real = run("none"), run("real")
    assert hollow.seconds == real.seconds
    assert hollow.bytes_sent == real.bytes_sent
    assert hollow.params.equal(run("none").params)
    assert hollow.applies["loss"].size == 10
    assert np.isnan(hollow.applies["loss"]).all()


def test_saved_run_comes_back_and_is_replayed(noisy, tmp_path):
    task, run = noisy
    loaded = dl.load_run(run.save(tmp_path), task, run.algorithm)
    assert loaded.params.equal(run.params)
    assert loaded.replay().params.equal(run.params)


def test_replay_at_another_rate_is_the_run_at_that_rate():
    task = regression("momentum")
    other = task.but(optimizer=lambda params: torch.optim.SGD(params, lr=0.001, momentum=0.9))
    replay = train(task, CUT, dl.SimulatedCluster(2), 6).replay(lr=0.001)
    assert replay.params.equal(train(other, CUT, dl.SimulatedCluster(2), 6).params)


def test_replay_without_a_device_is_refused():
    run = train(regression(), CUT, dl.SimulatedCluster(2), 2)
    with pytest.raises(ValueError, match="all replicas compute one gradient: none can be left out of it"):
        run.replay(without_worker=1)


def test_client_applies_and_the_ledger_balances(noisy):
    _, run = noisy
    assert run.who_applied == ["client 0"]
    assert run.ledger.balances
    assert run.ledger.counts["applied"] == 16
    assert run.sample_counts()["applied"].sum() == 64
    assert run.steps == {"replica 0": 8, "replica 1": 8}


@pytest.mark.parametrize(
    "place", [{"3": 0}, {"0": 0, "1": 0, "2": 0, "3": 0}, {"0": 0, "1": 1, "3": 1}, {"0": 0, "2": 1, "3": 2}], ids=str
)
def test_promises_are_kept_however_the_model_is_cut(place):
    assert "kept its promises" in dl.check_strategy(dl.InGraph(place=place), num_cases=12)


def test_broken_promise_of_a_cut_model_is_shown_with_a_number_of_workers_that_fits():
    class Forgetful(dl.InGraph):
        def gradients_per_update(self, num_workers):
            return num_workers + 1

    with pytest.raises(dl.PromiseBroken, match=r"do not hold 3 gradients each(.|\n)*num_workers=2"):
        dl.check_strategy(Forgetful(place={"0": 0, "3": 1}), num_cases=3)


@pytest.mark.parametrize(("place", "there"), [(None, False), (CUT.place, True)])
def test_own_work_of_the_client_is_on_the_trace(place, there):
    run = train(regression(), dl.InGraph(place=place), dl.SimulatedCluster(2), 2)
    assert (len(run.trace.where("unplaced")) > 0) is there


def test_cut_strategies_can_be_compared_and_kept_in_sets():
    assert len({CUT, dl.InGraph(place={"0": 0, "2": 1}), dl.InGraph(place={"0": 0}), dl.InGraph()}) == 3


def test_reentrant_checkpoint_around_a_placed_module_is_refused():
    """It would call it again in backward, where nobody comes back to it: the gradients would be wrong."""

    def forward(model, inputs):
        inside = checkpoint(model[1], model[0](inputs), use_reentrant=True)
        return model[2](inside)

    layers = lambda: nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 1)).double()  # noqa: E731
    task = regression(model=layers, forward=forward)
    with pytest.raises(RuntimeError, match="1 was called again in backward, as torch"):
        train(task, dl.InGraph(place={"1": 0}), dl.SimulatedCluster(1), 3)


def test_optimizer_that_may_look_at_all_parameters_at_once_is_pointed_at():
    class Clipping(torch.optim.SGD):
        """One that torch does not know."""

    task = regression().but(optimizer=lambda params: Clipping(params, lr=0.1))
    with pytest.warns(
        UserWarning, match="Clipping may look at all parameters at once: on devices each has its own part"
    ):
        train(task, dl.InGraph(place={"0": 0, "2": 1}), dl.SimulatedCluster(2), 3)


def test_no_device_of_a_cut_model_could_be_spared():
    run = train(regression(), dl.InGraph(place={"0": 0, "2": 1}), dl.SimulatedCluster(4), 3)
    with pytest.raises(ValueError, match="in-graph one client drives every device: none of them could be spared"):
        run.how_many_backups()
