"""All-reduce in buckets that overlap with backward, and over gradients that each worker has added up first."""

import os
import threading
import time
from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint
from toys import DEADLINE_S, OPTIMIZERS, countdown, failure, linear, moved, regression, slope, spoiled, train, until

import distlab as dl
from distlab.collectives import ALGORITHMS
from distlab.errors import BadMessage
from distlab.fabric.gloo_link import DIRECT_BYTES
from distlab.flat import TAIL, Flat
from distlab.roles.exchange import FIRST_BUCKET_BYTES, Exchange, in_buckets

NUM_UPDATES = 10
BUCKETED = [
    dl.AllReduce(bucket_bytes=1),
    dl.AllReduce(bucket_bytes=200),
    dl.AllReduce(algorithm="ring", bucket_bytes=300),
]
ADDING = [
    dl.AllReduce(accumulate=3, bucket_bytes=1),
    dl.AllReduce(accumulate=3),
    dl.AllReduce(accumulate=3, overlap=False),
]
DDP = [
    dl.AllReduce(engine="ddp"),
    dl.AllReduce(engine="ddp", accumulate=3),
    dl.AllReduce(engine="ddp", bucket_bytes=64),
]
ALL_SENT = dl.AllReduce(compression=dl.TopK(share=1.0))
each_kind = pytest.mark.parametrize(
    "strategy",
    [
        dl.AllReduce(bucket_bytes=64),
        dl.AllReduce(accumulate=2),
        dl.AllReduce(accumulate=2, bucket_bytes=1),
        dl.AllReduce(compression=dl.TopK(share=0.3)),
    ],
    ids=repr,
)


@cache
def alone(cluster, optimizer: str, batch_size: int) -> torch.Tensor:
    """What one worker makes of it."""
    return train(regression(optimizer, batch_size=batch_size), dl.SingleWorker(), cluster, NUM_UPDATES).params


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("strategy", [*BUCKETED, *ADDING, *DDP, ALL_SENT], ids=repr)
def test_all_reduce_of_any_kind_equals_one_worker_with_the_whole_batch(clusters, strategy, num_workers, optimizer):
    run = train(regression(optimizer, batch_size=4), strategy, clusters[num_workers], NUM_UPDATES)
    whole = alone(clusters[1], optimizer, 4 * num_workers * strategy.accumulate)
    torch.testing.assert_close(run.params, whole, rtol=0, atol=1e-12)


@each_kind
def test_replicas_stay_identical_and_replay_ends_at_the_same_bits(three, strategy):
    run = train(regression("adam"), strategy, three, NUM_UPDATES)
    assert all(params.equal(run.params) for params in run.replicas.values())
    assert run.replay().params.equal(run.params)


def test_an_update_holds_every_gradient_that_was_added_up():
    run = train(regression(), dl.AllReduce(accumulate=3), dl.SimulatedCluster(2), 4)
    assert run.steps == {"worker 0": 12, "worker 1": 12}
    assert (run.history["num_gradients"] == 6).all()
    assert (run.history["staleness"] == 0).all()


# Buckets


@given(
    sizes=st.lists(st.integers(1, 1 << 14).map(lambda n: 16 * n), min_size=1, max_size=30),
    itemsize=st.sampled_from([4, 8]),
    bucket_bytes=st.integers(1, 1 << 22) | st.integers(1, 2000),
)
def test_buckets_hold_every_parameter_once_from_the_last_to_the_first(sizes, itemsize, bucket_bytes):
    buckets = in_buckets(sizes, itemsize, bucket_bytes)
    assert [i for held in buckets for i in held] == list(reversed(range(len(sizes))))
    assert all(buckets)


@given(
    sizes=st.lists(st.integers(1, 1 << 14).map(lambda n: 16 * n), min_size=1, max_size=30),
    bucket_bytes=st.integers(1, 1 << 22) | st.integers(1, 2000),
)
def test_a_bucket_is_closed_as_soon_as_it_is_full_and_not_before(sizes, bucket_bytes):
    buckets = in_buckets(sizes, 4, bucket_bytes)
    for number, held in enumerate(buckets):
        limit = bucket_bytes if number else min(bucket_bytes, FIRST_BUCKET_BYTES)
        assert sum(4 * sizes[i] for i in held[:-1]) < limit
        assert held is buckets[-1] or sum(4 * sizes[i] for i in held) >= limit


def test_the_first_bucket_is_full_with_one_mebibyte_by_hand():
    """Nine parameters of half a MiB, buckets of 2 MiB."""
    buckets = in_buckets([1 << 17] * 9, 4, 2 << 20)
    assert buckets == [[8, 7], [6, 5, 4, 3], [2, 1, 0]]


def test_without_overlap_all_is_one_bucket():
    assert in_buckets([1 << 20] * 3, 4, None) == [[2, 1, 0]]


@pytest.mark.parametrize("bucket_bytes", [1, 130, 200, 10_000, None])
def test_buckets_cover_the_message_once_and_the_first_has_its_tail(bucket_bytes):
    flat = Flat(regression().build())
    exchange = Exchange(flat, bucket_bytes=bucket_bytes)
    start, stop = exchange.buckets[0]
    assert stop == len(flat.message)
    assert stop - start > TAIL
    assert exchange.buckets[-1][0] == 0
    assert all(after[1] == before[0] for before, after in pairwise(exchange.buckets))


@pytest.mark.parametrize("bucket_bytes", [1, 130, 200])
def test_a_bucket_is_where_its_parameters_are(bucket_bytes):
    flat = Flat(regression().build())
    exchange = Exchange(flat, bucket_bytes=bucket_bytes)
    for (start, stop), held in zip(exchange.buckets, exchange.parameters, strict=True):
        flat.message.zero_()[start:stop] = 1
        touched = [i for i, parameter in enumerate(flat.parameters) if parameter.grad.all()]
        assert touched == sorted(held)


# Overlap


SHARES = [0.2, 0.4, 0.6, 1.0]  # of backward, after which a bucket of one parameter is there: 16, 16, 16, 32 elements
SLOW = dl.Network(latency_s=0.01, bandwidth_bytes_per_s=1e9)
EACH_ITS_OWN = dl.AllReduce(bucket_bytes=1)


def overlaps(run: dl.Run, num_steps: int, compute_s: float) -> None:
    """Every bucket waits for its share of backward, and the first does not wait for more."""
    for worker in range(2):
        computes, reduces = (run.trace.select(kind, worker=worker) for kind in ("compute", "reduce"))
        for step in range(num_steps):
            [compute], sums = computes[computes["step"] == step], reduces[reduces["step"] == step]
            there = [compute["start_s"] + compute_s * (1 + 2 * share) / 3 for share in SHARES]
            assert (sums["start_s"] >= torch.tensor(there).numpy() - 1e-6).all()
            assert sums["start_s"][0] < compute["end_s"]


def test_first_bucket_is_summed_before_backward_ends_on_a_virtual_clock():
    run = train(regression(), EACH_ITS_OWN, dl.SimulatedCluster(2, compute=1.0, network=SLOW), 5)
    overlaps(run, 5, compute_s=1.0)


def test_first_bucket_is_summed_before_emulated_backward_ends_on_real_processes():
    with dl.LocalCluster(num_workers=2, compute_time_s=0.2) as cluster:
        overlaps(train(regression(), EACH_ITS_OWN, cluster, 2), 2, compute_s=0.2)


class Telling(Exchange):
    """Tells the model's parameters when the first bucket is summed."""

    def __init__(self, flat, *options):
        super().__init__(flat, *options)
        self.summed = flat.parameters[0].summed = threading.Event()

    def sum_bucket(self, ranks, message, number):
        super().sum_bucket(ranks, message, number)
        self.summed.set()


class Told(dl.AllReduce):
    def exchange(self, flat):
        return Telling(flat, self.algorithm, self.bucket_bytes)


class Gate(torch.autograd.Function):
    """Lets gradients through once the first bucket is summed."""

    @staticmethod
    def forward(ctx, x, parameter):
        ctx.parameter = parameter
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        assert ctx.parameter.summed.wait(DEADLINE_S), "the first bucket waits for the whole of backward"
        return grad, None


class Gated(nn.Sequential):
    def forward(self, x):
        return self[1](Gate.apply(self[0](x), self[0].weight))


def test_gradients_of_the_last_layer_are_summed_while_backward_waits_at_the_first(two):
    """No clock: backward would never end if nothing were summed before it has."""
    task = regression(model=lambda: Gated(nn.Linear(5, 4), nn.Linear(4, 1)).double())
    assert train(task, Told(bucket_bytes=1), two, 3).version == 3


@cache
def timed(num_layers: int, transfer_s: float, overlap: bool) -> tuple[float, float]:
    """The time of an update and of what it sends, on two workers that compute for 0.3 s."""
    model = lambda: nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(num_layers)])  # noqa: E731
    task = countdown(model=model, train=(torch.zeros(16, 64), torch.zeros(16)), batch_size=2)
    bandwidth = num_layers * 64 * 64 * 4 / transfer_s
    cluster = dl.SimulatedCluster(2, compute=0.3, network=dl.Network(latency_s=0.002, bandwidth_bytes_per_s=bandwidth))
    run = train(task, dl.AllReduce(bucket_bytes=1, overlap=overlap), cluster, 10)
    sent = run.trace.select("reduce", worker=0)
    assert len(sent) == 10 * (num_layers if overlap else 1)
    return 1 / run.updates_per_s, sent["bytes"].sum() / 10 / bandwidth


@pytest.mark.parametrize("transfer_s", [0.05, 1.0], ids=["hidden", "bottleneck"])
@pytest.mark.parametrize("num_layers", [2, 4, 8])
def test_update_in_buckets_takes_as_long_as_its_closed_form(num_layers, transfer_s):
    got, wire_s = timed(num_layers, transfer_s, True)
    parts = {"forward_s": 0.1, "backward_s": 0.2, "transfer_s": wire_s, "overhead_s": 0.002}
    assert got == pytest.approx(dl.theory.overlapped_step_s(num_layers, **parts), rel=0.01)


@pytest.mark.parametrize("num_layers", [2, 8])
def test_update_without_overlap_takes_computing_and_then_all_of_the_transfer(num_layers):
    got, wire_s = timed(num_layers, 0.05, False)
    assert got == pytest.approx(0.3 + wire_s + 0.002, rel=0.001)
    assert got > timed(num_layers, 0.05, True)[0] + 0.01


def test_only_the_last_gradient_of_an_update_is_summed_while_backward_runs():
    run = train(regression(), dl.AllReduce(accumulate=3, bucket_bytes=1), dl.SimulatedCluster(2, compute=1.0), 4)
    assert set(run.trace.select("reduce")["step"].tolist()) == {2, 5, 8, 11}


# Uneven data


def means(task: dl.Task, num_batches: tuple[int, ...], every: int) -> torch.Tensor:
    """The sum, over all updates, of the mean of the gradients that there are."""
    total = torch.zeros(5, dtype=torch.float64)
    for start in range(0, max(num_batches), every):
        held = [(w, s) for w, n in enumerate(num_batches) for s in range(start, min(start + every, n))]
        total += torch.stack([slope(task, *one, len(num_batches)) for one in held]).mean(0)
    return total


@pytest.mark.parametrize(
    "strategy", [*BUCKETED, *ADDING, dl.AllReduce(accumulate=2, bucket_bytes=1), ALL_SENT], ids=repr
)
def test_the_mean_is_over_the_real_gradients_when_data_ends_in_the_middle_of_an_update(strategy):
    task, num_batches = linear(), (5, 3, 7)
    run = dl.train(task, strategy, dl.SimulatedCluster(3), num_batches=num_batches, progress=False)
    assert run.steps == {"worker 0": 5, "worker 1": 3, "worker 2": 7}
    assert run.version == -(-7 // strategy.accumulate)
    torch.testing.assert_close(moved(task, run), -means(task, num_batches, strategy.accumulate), rtol=0, atol=1e-12)


@each_kind
def test_real_run_on_uneven_data_is_the_simulated_one_and_ends_with_equal_replicas(three, strategy):
    runs = [
        dl.train(regression("adam"), strategy, cluster, num_batches=(5, 3, 7), progress=False)
        for cluster in (three, dl.SimulatedCluster(3))
    ]
    for run in runs:
        assert run.steps == {"worker 0": 5, "worker 1": 3, "worker 2": 7}
        assert all(params.equal(run.params) for params in run.replicas.values())
    assert runs[0].params.equal(runs[1].params)
    assert runs[0].replay().params.equal(runs[0].params)


@pytest.mark.parametrize(
    "strategy", [BUCKETED[0], *ADDING[:2], *DDP[:2], dl.AllReduce(compression=dl.TopK(share=0.3))], ids=repr
)
def test_stop_ends_a_run_of_any_kind_with_equal_replicas(two, strategy):
    live = dl.start(regression(), strategy, two, num_updates=10**9)
    until(lambda: live.version > 3)
    live.stop()
    run = live.wait()
    assert all(params.equal(run.params) for params in run.replicas.values())
    assert run.version >= 4
    assert run.steps == dict.fromkeys(["worker 0", "worker 1"], run.version * strategy.accumulate)


class Leaving(dl.AllReduce):
    """Worker 1 is told to stop before it has begun, worker 0 never."""

    def run(self, fabric, job):
        fabric.stopping = fabric.me.index == 1
        return super().run(fabric, job)


@pytest.mark.parametrize("options", [{"bucket_bytes": 1}, {"accumulate": 2}, {"engine": "ddp"}], ids=str)
def test_all_stop_at_the_same_update_though_one_alone_was_told(two, options):
    run = train(regression(), Leaving(**options), two, 10**9)
    assert run.version == 1
    assert all(params.equal(run.params) for params in run.replicas.values())


@pytest.mark.parametrize("options", [{"bucket_bytes": 1}, {"overlap": False}, {"engine": "ddp"}], ids=str)
def test_workers_do_not_wait_for_each_other_before_all_gradients_of_an_update_are_added_up(two, options, tmp_path):
    """Worker 1 begins its first one only when worker 0 is at its second."""
    caller, calls = os.getpid(), []

    def forward(model, x):
        if os.getpid() != caller:  # checking a task computes too
            calls.append(1)
            if (torch.initial_seed(), len(calls)) == (0, 2):
                (tmp_path / "second").touch()
            elif (torch.initial_seed(), len(calls)) == (1, 1):
                until((tmp_path / "second").exists)
        return model(x)

    task = regression(forward=forward, seed=0)
    assert train(task, dl.AllReduce(accumulate=2, **options), two, 2).version == 2


class Late(torch.autograd.Function):
    """Backward has all gradients, and goes on for a while, where the loss is not finite."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if not grad.isfinite().all():
            time.sleep(0.3)
        return grad


def test_gradient_of_a_loss_that_is_not_finite_is_applied_by_nobody(two):
    """Though by the time that its worker says so, the others have had the time to sum it."""
    task = spoiled(float("nan"), forward=lambda model, x: model(Late.apply(x.clone().requires_grad_())))
    error = failure(dl.start(task, EACH_ITS_OWN, two, num_updates=10**6))
    assert (error.who, error.step) == ("worker 1", 3)
    assert error.run.history["update"].tolist() == [1, 2, 3]


# Parameters that are not used, or twice


class Skipping(nn.Module):
    """Leaves its middle layer out where a batch says so: other ranks may have another batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 1)

    def forward(self, x):
        x = self.first(x)
        return self.last(x if x.sum() > 0 else self.middle(x))


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 1)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.last(self.two(self.one(x).tanh()))


class Twice(nn.Module):
    """Completes the gradient of `inner` twice in one backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 1)

    def forward(self, x):
        again = checkpoint(self.inner, self.first(x), use_reentrant=True)
        return self.last(checkpoint(self.inner, again, use_reentrant=True))


@pytest.mark.parametrize("model", [Skipping, Tied])
@pytest.mark.parametrize("real", [True, False], ids=["real", "simulated"])
def test_parameters_that_are_tied_or_skipped_train_alike_with_and_without_overlap(two, model, real):
    task, cluster = regression("adam", model=lambda: model().double()), two if real else dl.SimulatedCluster(2)
    strategies = dl.AllReduce(bucket_bytes=1), dl.AllReduce(bucket_bytes=200), dl.AllReduce(overlap=False)
    *ours, whole = (train(task, strategy, cluster, 12).params for strategy in strategies)
    assert all(params.equal(whole) for params in ours)


def test_skipped_layer_is_skipped_by_one_rank_while_the_other_needs_it():
    """Or the test above would not look at what it says."""
    used = []
    model = lambda: Skipping().double()  # noqa: E731
    forward = lambda model, x: used.append(bool(model.first(x).sum() > 0)) or model(x)  # noqa: E731
    train(regression("adam", model=model, forward=forward), EACH_ITS_OWN, dl.SimulatedCluster(2), 12)
    pairs = list(zip(used[-24::2], used[-23::2], strict=True))
    assert (True, False) in pairs or (False, True) in pairs


@pytest.mark.parametrize("real", [True, False], ids=["real", "simulated"])
def test_gradient_that_comes_twice_is_refused_by_its_name(two, real):
    task, cluster = regression(model=lambda: Twice().double()), two if real else dl.SimulatedCluster(2)
    told = r"inner\.(weight|bias) got a gradient twice in one backward pass: use AllReduce\(overlap=False\)"
    with pytest.raises(RuntimeError, match=told):
        train(task, EACH_ITS_OWN, cluster, 3)


def test_gradient_that_comes_twice_is_right_without_overlap(two):
    task = regression(model=lambda: Twice().double())
    runs = [train(task, strategy, two, 5) for strategy in (dl.AllReduce(overlap=False), dl.SyncPS())]
    torch.testing.assert_close(runs[0].params, runs[1].params, rtol=0, atol=1e-12)


# Large models travel without a copy


def wide() -> dl.Task:
    """Its matrix is of a size of which even a third is lent from memory to memory."""
    size = 500
    assert size * size * 8 / 3 > DIRECT_BYTES
    x = torch.randn(24, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model = lambda: nn.Sequential(nn.Linear(size, size), nn.Tanh(), nn.Linear(size, 1)).double()  # noqa: E731
    return regression("momentum", train=(x, x[:, :1]), model=model)


@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("options", [*({"algorithm": a} for a in ALGORITHMS), {"bucket_bytes": 1}], ids=str)
def test_large_model_equals_the_whole_batch_and_replays_to_the_same_bits(clusters, options, num_workers):
    run = train(wide(), dl.AllReduce(**options), clusters[num_workers], 3)
    whole = train(wide().but(batch_size=4 * num_workers), dl.SingleWorker(), clusters[1], 3)
    torch.testing.assert_close(run.params, whole.params, rtol=0, atol=1e-12)
    assert all(params.equal(run.params) for params in run.replicas.values())
    assert run.replay().params.equal(run.params)


@pytest.mark.parametrize("numel", [100, DIRECT_BYTES // 8], ids=["small", "large"])
def test_factory_that_makes_a_model_of_another_size_in_every_process_is_refused(two, numel):
    """Or gloo would abort a process to which more is lent than it awaits."""
    model = lambda: nn.Linear(numel + 16 * (os.getpid() % 1000), 1, bias=False).double()  # noqa: E731
    forward = lambda model, x: model.weight.mean().expand(len(x))  # noqa: E731
    with pytest.raises(
        BadMessage, match=r"worker [01] has a model of \d+ numbers .*: the factory must make the same one"
    ):
        train(countdown(model=model, forward=forward), dl.AllReduce(), two, 3)


# Options


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"overlaps": True}, TypeError, "AllReduce has no option 'overlaps': did you mean 'overlap'"),
        ({"bucket_byte": 1}, TypeError, "AllReduce has no option 'bucket_byte': did you mean 'bucket_bytes'"),
        ({"overlap": 1}, TypeError, "overlap must be True or False, got 1"),
        ({"overlap": "no"}, TypeError, "overlap must be True or False, got 'no'"),
        ({"bucket_bytes": 0}, ValueError, "bucket_bytes must be at least 1, got 0"),
        ({"bucket_bytes": True}, TypeError, r"bucket_bytes must be a whole number, got True \(bool\)"),
        ({"bucket_bytes": 1e6}, TypeError, r"bucket_bytes must be a whole number, got 1000000.0 \(float\)"),
        ({"accumulate": 0}, ValueError, "accumulate must be at least 1, got 0"),
        ({"accumulate": True}, TypeError, r"accumulate must be a whole number, got True \(bool\)"),
        ({"engine": "dpp"}, ValueError, "engine='dpp': did you mean 'ddp'"),
        ({"engine": None}, ValueError, "engine=None: there is ddp, distlab"),
        ({"engine": "ddp", "algorithm": "ring"}, ValueError, "algorithm='ring' says how distlab sums"),
        ({"engine": "ddp", "overlap": False}, ValueError, "overlap=False says how distlab sums"),
        (
            {"engine": "ddp", "compression": dl.TopK(share=0.5)},
            ValueError,
            r"compression=TopK\(share=0.5\) says how distlab sums; engine=\"ddp\" does it alone",
        ),
    ],
    ids=str,
)
def test_bad_option_of_all_reduce_is_refused(options, error, told):
    with pytest.raises(error, match=told):
        dl.AllReduce(**options)
