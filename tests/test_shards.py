"""Sharded servers: who holds what, and that it changes the traffic alone."""

import math
import warnings
from functools import cache

import numpy as np
import pytest
import torch
from toys import OPTIMIZERS, countdown, refused, regression, train

import distlab as dl
from distlab.flat import Vector
from distlab.reports import ledger
from distlab.shards import PLACEMENTS, cut
from distlab.trace import EVENT, KINDS, ROLES, Trace

LAYOUT = Vector([torch.Size(shape) for shape in ([6, 8], [100], [3], [200])], torch.float64)  # 24 pieces of 16 elements
SIMULATED = dl.SimulatedCluster(2)
UNEVEN = dl.SimulatedCluster(
    3, compute=dl.laws.Exponential(mean_s=0.1), apply_time=dl.laws.Exponential(mean_s=0.05)
)  # two servers are seldom done with a gradient at the same time


@pytest.fixture(params=["real", "simulated"])
def pair_of_workers(request, two):
    return two if request.param == "real" else SIMULATED


@cache
def end(cluster: dl.LocalCluster, optimizer: str, strategy: dl.Strategy, batch_size: int = 4) -> torch.Tensor:
    """The parameters after 20 updates."""
    return train(regression(optimizer, batch_size=batch_size), strategy, cluster, 20).params


def wide(num_bytes: int) -> dl.Task:
    """A task whose gradient has so many bytes."""
    model = lambda: torch.nn.Linear(num_bytes // 4, 1, bias=False)  # noqa: E731
    return countdown(model=model, train=(torch.zeros(16, num_bytes // 4), torch.zeros(16)))


def pulled(run: dl.Run) -> dict[tuple[int, int], dict[int, int]]:
    """(worker, step that it had finished before) -> server -> the version that came from there."""
    found: dict[tuple[int, int], dict[int, int]] = {}
    for worker, step, server, version in run.trace.select("pull")[["worker", "step", "peer", "version"]].tolist():
        found.setdefault((worker, step), {})[server] = version
    return found


def test_ranges_by_hand():
    """24 pieces for 5 servers: 4, 5, 5, 5, 5."""
    ranges = [shard.ranges for shard in cut(LAYOUT, 5)]
    assert ranges == [((0, 64),), ((64, 144),), ((144, 224),), ((224, 304),), ((304, 384),)]


@pytest.mark.parametrize("num_servers", [1, 2, 3, 7, 23, 24])
def test_ranges_are_equal_to_one_piece(num_servers):
    lengths = [stop - start for shard in cut(LAYOUT, num_servers) for start, stop in shard.ranges]
    assert len(lengths) == num_servers
    assert max(lengths) - min(lengths) <= 16


def test_round_robin_by_hand():
    """Tensors 0 and 2 for one, 1 and 3 for the other, whatever their size."""
    first, second = cut(LAYOUT, 2, "round-robin")
    assert first.ranges == ((0, 48), (160, 176))
    assert first.shapes == (torch.Size([6, 8]), torch.Size([3]))
    assert second.ranges == ((48, 160), (176, 384))


def test_greedy_by_hand():
    """The largest, of 208, for one; 112, 48 and 16 for the other, which has 176 then."""
    first, second = cut(LAYOUT, 2, "greedy")
    assert first.ranges == ((176, 384),)
    assert second.ranges == ((0, 48), (48, 160), (160, 176))


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("num_servers", [1, 2, 3, 4])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_shards_cover_every_element_once(placement, num_servers, whole):
    shards = cut(LAYOUT, num_servers, placement, whole=whole)
    held = [element for shard in shards for start, stop in shard.ranges for element in range(start, stop)]
    assert sorted(held) == list(range(384))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_all_take_and_put_is_the_whole(placement):
    vector, copy = torch.arange(384.0), torch.zeros(384)
    for shard in cut(LAYOUT, 3, placement):
        shard.put(shard.take(vector), copy)
    assert copy.equal(vector)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_one_puts_nothing_where_another_holds(placement):
    first, second, third = cut(LAYOUT, 3, placement)
    vector = torch.zeros(384)
    second.put(torch.ones_like(second.take(vector)), vector)
    assert second.take(vector).all()
    assert not first.take(vector).any()
    assert not third.take(vector).any()


def test_table_of_shards_by_hand():
    """Of the first weight's 20 elements the first server holds one piece, the next the rest."""
    table = dl.SyncPS(num_servers=3).shards(regression())
    assert table.values.tolist() == [
        [0, "0.weight", 0, 16, 128],
        [1, "0.weight", 16, 20, 32],
        [1, "0.bias", 0, 4, 32],
        [2, "2.weight", 0, 4, 32],
        [2, "2.bias", 0, 1, 8],
    ]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("num_servers", [1, 2, 4])
def test_table_of_shards_has_the_bytes_of_the_model(num_servers, placement):
    task = dl.tasks.digits()
    table = dl.AsyncPS(num_servers=num_servers, placement=placement).shards(task)
    assert table["bytes"].sum() == sum(p.numel() * p.element_size() for p in task.build().parameters())
    assert set(table["server"]) == set(range(num_servers))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_sync_ps_on_three_servers_makes_the_parameters_of_one(pair_of_workers, placement, optimizer):
    sharded = end(pair_of_workers, optimizer, dl.SyncPS(num_servers=3, placement=placement))
    assert sharded.equal(end(pair_of_workers, optimizer, dl.SyncPS()))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_sync_ps_on_three_servers_equals_plain_training(pair_of_workers, placement, optimizer):
    sharded = end(pair_of_workers, optimizer, dl.SyncPS(num_servers=3, placement=placement))
    for plain, batch_size in ((dl.AllReduce(), 4), (dl.SingleWorker(), 8)):
        want = end(pair_of_workers, optimizer, plain, batch_size)
        torch.testing.assert_close(sharded, want, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore::distlab.DivergenceWarning")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_async_ps_on_two_servers_is_that_on_one_bit_for_bit_if_the_order_is_the_same(optimizer):
    cluster = dl.SimulatedCluster(3, compute=0.1)
    one, two = (train(regression(optimizer), dl.AsyncPS(num_servers=n), cluster, 30) for n in (1, 2))
    assert one.applies["worker"].tolist() == two.applies["worker"].tolist()
    assert two.params.equal(one.params)


def test_pull_from_two_servers_can_mix_versions_and_the_run_still_replays_to_the_bit():
    run = train(regression("adam"), dl.AsyncPS(num_servers=2), UNEVEN, 40)
    assert any(versions[0] != versions[1] for versions in pulled(run).values())
    assert run.replay().params.equal(run.params)


def test_synchronous_pull_never_mixes_versions():
    run = train(regression(), dl.SyncPS(num_servers=2), UNEVEN, 20)
    assert all(versions[0] == versions[1] for versions in pulled(run).values())


def test_each_server_is_told_the_version_that_it_sent_itself():
    """Or a gradient's age would be that of another shard."""
    run = train(regression(), dl.AsyncPS(num_servers=2), UNEVEN, 40)
    sent = pulled(run)
    applied = run.trace.select("apply")[["index", "worker", "step", "read"]].tolist()
    assert len(applied) == 80
    assert all(read == sent[worker, step - 1][server] for server, worker, step, read in applied)


@pytest.mark.parametrize("num_servers", [2, 4, 8])
def test_every_server_carries_its_share_of_the_bytes(num_servers):
    cluster = dl.SimulatedCluster(3, gradients="none")
    trace = train(wide(400_000), dl.AsyncPS(num_servers=num_servers), cluster, 30).trace
    moved = np.concatenate([trace.select("push"), trace.select("pull")])
    shares = np.bincount(moved["peer"], weights=moved["bytes"]) / moved["bytes"].sum()
    assert shares == pytest.approx([1 / num_servers] * num_servers, rel=0.01)


def test_as_many_servers_as_workers_on_their_machines_move_the_bytes_of_a_ring():
    """What a worker and the server beside it say to each other needs no network."""
    trace = train(wide(4_000_000), dl.SyncPS(num_servers=8), dl.SimulatedCluster(8, gradients="none"), 5).trace
    far = [rows[rows["peer"] != rows["worker"]] for rows in (trace.select("push"), trace.select("pull"))]
    pushes, pulls = far[0], far[1][far[1]["version"] > 0]
    out = np.bincount(pushes["worker"], pushes["bytes"]) + np.bincount(pulls["peer"], pulls["bytes"])
    assert out / 5 == pytest.approx([dl.theory.bytes_per_nic(4e6, 8)] * 8, rel=0.01)


@pytest.mark.parametrize("num_servers", [1, 2, 4])
def test_all_servers_have_their_message_before_an_answer_is_awaited(num_servers):
    """A second of computing, one for the way there, one for the way back: the number of servers is not in it."""
    network = dl.Network(latency_s=1.0, bandwidth_bytes_per_s=math.inf)
    run = train(
        wide(4000), dl.AsyncPS(num_servers=num_servers), dl.SimulatedCluster(1, compute=1.0, network=network), 9
    )
    assert 1 / run.updates_per_s == pytest.approx(3.0)


@pytest.mark.parametrize("num_servers", [1, 2, 4])
def test_so_many_servers_are_so_many_times_as_fast_where_their_network_cards_are_full(num_servers):
    network = dl.Network(latency_s=1e-3, bandwidth_bytes_per_s=1e8)
    cluster = dl.SimulatedCluster(32, compute=0.01, network=network, gradients="none")
    run = train(wide(400_000), dl.AsyncPS(num_servers=num_servers), cluster, 600)
    cards = {"num_bytes": 400_000, "bandwidth_bytes_per_s": 2 * 1e8, "num_servers": num_servers}
    expected = dl.theory.between_graph_replicas_per_s(32, compute_s=0.01, dispatch_s=0.0, **cards)
    assert expected == 250 * num_servers
    assert run.updates_per_s == pytest.approx(expected, rel=0.01)


class ByNorm(torch.optim.SGD):
    """Divides the gradient of every tensor by its norm: half a tensor would have another."""

    def step(self, closure=None):
        for param in (p for group in self.param_groups for p in group["params"]):
            param.grad = param.grad / (param.grad.norm() + 1e-3)
        super().step()


UNKNOWN = [lambda params: ByNorm(params, lr=0.02), lambda params: torch.optim.Adagrad(params, lr=0.02)]


@pytest.mark.parametrize("optimizer", UNKNOWN, ids=["ByNorm", "Adagrad"])
def test_optimizer_that_may_need_whole_tensors_gets_them_and_a_warning_says_so(optimizer):
    task, strategy = regression().but(optimizer=optimizer), dl.SyncPS(num_servers=3)
    with pytest.warns(
        UserWarning, match=r"the servers get these and not equal ranges: see SyncPS.shards\(task\)"
    ) as told:
        run = dl.train(task, strategy, SIMULATED, num_updates=20, progress=False)
    assert told[0].filename == __file__
    assert sorted(strategy.shards(task)["tensor"]) == ["0.bias", "0.weight", "2.bias", "2.weight"]  # each in one piece
    assert run.params.equal(train(task, dl.SyncPS(), SIMULATED, 20).params)


def test_who_asks_for_whole_tensors_is_not_warned():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(regression().but(optimizer=UNKNOWN[0]), dl.SyncPS(num_servers=2, placement="greedy"), SIMULATED, 3)


def test_optimizer_with_groups_of_its_own_gets_whole_tensors():
    task = regression().but(
        optimizer=lambda ps: torch.optim.SGD([{"params": ps[:1], "lr": 0.1}, {"params": ps[1:]}], lr=0.02)
    )
    with pytest.warns(UserWarning, match="whole tensors"):
        train(task, dl.SyncPS(num_servers=2), SIMULATED, 3)


@pytest.mark.parametrize(
    ("strategy", "told"),
    [
        (dl.AsyncPS(num_servers=6), "num_servers is 6, but the parameters make only 5 pieces of 16"),
        (dl.SyncPS(num_servers=5, placement="greedy"), "num_servers is 5, but there are only 4 tensors to place"),
        (dl.SyncPS(num_servers=5, placement="round-robin"), "num_servers is 5, but there are only 4 tensors to place"),
    ],
)
def test_more_servers_than_there_is_to_hold_are_refused_before_a_process_starts(no_process_starts, strategy, told):
    refused(ValueError, told, task=regression(), strategy=strategy)


@pytest.mark.parametrize("kind", [dl.AsyncPS, dl.SyncPS])
@pytest.mark.parametrize(
    ("option", "error", "told"),
    [
        ({"placement": "gready"}, ValueError, "placement='gready': did you mean 'greedy'"),
        ({"placement": "round robin"}, ValueError, "placement='round robin': did you mean 'round-robin'"),
        ({"num_servers": 0}, ValueError, "num_servers must be at least 1, got 0"),
        ({"num_servers": 2.0}, TypeError, "num_servers must be a whole number, got 2.0"),
        ({"num_server": 2}, TypeError, "has no option 'num_server': did you mean 'num_servers'"),
    ],
)
def test_bad_option_of_sharding_says_what_was_meant(kind, option, error, told):
    with pytest.raises(error, match=told):
        kind(**option)


@pytest.mark.parametrize(
    "strategy", [dl.AsyncPS(num_servers=2), dl.SyncPS(num_servers=3, num_backup_workers=2)], ids=repr
)
def test_ledger_of_a_sharded_run_balances(strategy):
    run = train(regression(), strategy, UNEVEN, 40)
    assert run.ledger.balances
    assert run.version == 40


def test_gradient_that_one_server_applied_and_the_other_dropped_is_split_by_hand():
    rows = np.zeros(6, EVENT)
    rows["kind"] = [KINDS.index(kind) for kind in ("compute", "apply", "drop", "compute", "apply", "apply")]
    rows["role"], rows["index"] = ROLES.index("server"), [0, 0, 1, 0, 0, 1]
    rows["worker"], rows["version"] = [0, 0, 0, 1, 1, 1], [0, 3, 2, 0, 4, 7]
    book = ledger(Trace(rows))
    assert [(entry.fate, entry.version) for entry in book.entries] == [("split", 3), ("applied", 4)]
    assert book.balances


def test_worker_that_dies_between_two_servers_leaves_its_gradient_split():
    """And so is the last one: the server that missed a part makes its twentieth update of another's gradient."""
    cluster = dl.SimulatedCluster(3, compute=0.1, network=dl.Network(bandwidth_bytes_per_s=1e4))
    rows = train(regression(), dl.AsyncPS(num_servers=2), cluster, 20).trace.select("apply", worker=1)
    first, second = rows["end_s"][rows["step"] == 1]
    run = train(regression(), dl.AsyncPS(num_servers=2), cluster.kill(worker=1, at_s=(first + second) / 2), 20)
    fates = {(entry.worker, entry.step): entry.fate for entry in run.ledger.entries}
    assert fates[1, 1] == "split"
    assert run.ledger.counts["split"] == 2
    assert run.ledger.balances
    assert run.replay().params.equal(run.params)


def test_servers_with_spare_workers_choose_each_for_itself():
    run = train(
        regression(),
        dl.SyncPS(num_servers=3, num_backup_workers=2),
        dl.SimulatedCluster(
            4, compute=dl.laws.Exponential(mean_s=0.1), apply_time=dl.laws.Exponential(mean_s=0.05), seed=1
        ),
        40,
    )
    assert run.ledger.counts["split"] > 0
    assert run.ledger.balances
    assert run.replay().params.equal(run.params)
