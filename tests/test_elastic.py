"""Workers that join and leave: nothing is lost, nothing waits for ever, and no sample is forgotten or used twice."""

import random
from itertools import pairwise

import pytest
import torch
from toys import countdown, refused, regression, train, until

import distlab as dl
from distlab.data import Deal, Stream

RANKS = (dl.AllReduce(), dl.AllReduce(algorithm="ring", accumulate=2), dl.LocalSGD(every=3))
SERVERS = (
    dl.AsyncPS(locking="server"),
    dl.AsyncPS(locking="server", num_servers=2),
    dl.AsyncPS(apply_every=2, distinct=True),
    dl.AsyncPS(max_clock_gap=1),
    dl.SyncPS(),
    dl.SyncPS(num_backup_workers=1),
    dl.SyncPS(num_servers=2, on_too_few="shrink"),
    dl.WorkerApplies(),
    dl.Hogwild(),
)
SIMULATED = dl.SimulatedCluster(3, compute=0.1)
DOWN_AND_UP = SIMULATED.remove_worker(at_s=0.35).remove_worker(at_s=0.6).add_worker(at_s=1.5).add_worker(at_s=1.9)


def places(run: dl.Run, fate: str = "applied") -> list[int]:
    """Where in the stream the batches of the gradients that met a fate are."""
    return sorted(e.batch for e in run.ledger.entries if e.fate == fate)


def sound(run: dl.Run) -> bool:
    """The ledger balances, and doing it again ends at the same bits."""
    return run.ledger.balances and run.replay().params.equal(run.params)


def sizes(run: dl.Run) -> list[int]:
    """How many gradients each update held, without repetitions in a row."""
    counts = torch.as_tensor(run.applies["version"].copy()).unique(return_counts=True)[1].tolist()
    return [counts[0]] + [b for a, b in pairwise(counts) if a != b]


@pytest.mark.parametrize("strategy", RANKS, ids=repr)
def test_from_three_to_one_to_three_within_an_epoch_every_sample_comes_once(strategy):
    run = train(regression(), strategy, DOWN_AND_UP, 12 if isinstance(strategy, dl.LocalSGD) else 24)
    each = strategy.gradients_per_update(1)
    assert sizes(run) == [3 * each, 2 * each, each, 2 * each, 3 * each]
    assert places(run) == list(range(len(run.ledger.entries)))
    counts = run.sample_counts()["applied"]
    assert counts.max() - counts.min() <= 1
    assert sound(run)


@pytest.mark.parametrize("strategy", SERVERS, ids=repr)
def test_servers_workers_leave_and_come_back_and_nothing_is_lost(strategy):
    run = train(regression(), strategy, DOWN_AND_UP, 40)
    assert [(e.kind, e.who) for e in run.trace if e.kind == "leave"] == [("leave", "worker 2"), ("leave", "worker 1")]
    assert {(e.kind, e.worker) for e in run.trace if e.kind == "join"} == {("join", 1), ("join", 2)}
    assert run.num_updates == 40
    assert run.ledger.counts["lost"] == 0
    assert run.ledger.balances
    if not isinstance(strategy, dl.WorkerApplies):
        assert sound(run)


def test_synchronous_server_waits_for_as_many_as_there_are():
    """By hand: every gradient is 1, so every update takes away 1, whoever is there."""
    run = train(countdown(), dl.SyncPS(), DOWN_AND_UP, 30)
    assert run.params[0] == -30
    assert sizes(run) == [3, 2, 1, 2, 3]


@pytest.mark.parametrize("strategy", [*RANKS, *SERVERS], ids=repr)
def test_run_can_become_larger_than_it_began(strategy):
    cluster = dl.SimulatedCluster(2, compute=0.1).add_worker(at_s=0.25).add_worker(at_s=0.5)
    run = train(regression(), strategy, cluster, 40)
    assert set(run.steps) >= {f"worker {i}" for i in range(4)}
    assert {e.worker for e in run.ledger.entries} == {0, 1, 2, 3}
    if strategy in RANKS:
        assert places(run) == list(range(len(run.ledger.entries)))
        assert sizes(run)[-1] == strategy.gradients_per_update(4)
    assert isinstance(strategy, dl.WorkerApplies) or sound(run)


@pytest.mark.parametrize("strategy", [dl.AllReduce(), dl.LocalSGD(every=3)], ids=repr)
def test_no_gradient_is_in_vain_when_one_joins_or_leaves(strategy):
    run = train(regression(), strategy, DOWN_AND_UP, 20)
    assert run.ledger.counts["applied"] == len(run.ledger.entries)


def random_scenario(seed: int) -> dl.SimulatedCluster:
    draw = random.Random(seed)
    cluster = dl.SimulatedCluster(draw.choice((2, 3, 4)), compute=0.1, network=dl.Network(latency_s=0.004))
    for _ in range(draw.choice((2, 3, 5))):
        what, at_s = draw.choice(("add", "remove", "kill", "revive")), round(draw.uniform(0.15, 2.0), 2)
        if what == "add":
            cluster = cluster.add_worker(at_s=at_s)
        elif what == "remove":
            cluster = cluster.remove_worker(at_s=at_s)
        else:
            cluster = getattr(cluster, what)(worker=draw.randrange(1, cluster.num_workers), at_s=at_s)
    return cluster


@pytest.mark.parametrize("strategy", [dl.AllReduce(), dl.AllReduce(accumulate=2), dl.LocalSGD(every=3)], ids=repr)
@pytest.mark.parametrize("seed", range(25))
def test_no_sample_is_used_twice_whoever_comes_goes_and_dies(strategy, seed):
    run = train(regression(), strategy, random_scenario(seed), 15)
    applied, others = places(run), {e.batch for e in run.ledger.entries if e.fate != "applied"}
    assert len(set(applied)) == len(applied)
    if isinstance(strategy, dl.AllReduce):
        assert applied == list(range(len(applied)))
    else:  # who died in the middle of a round has taken what it had computed of it, and left the rest
        assert len(set(range(max(applied))) - set(applied) - others) <= 3 * len(run.trace.where("death"))
    assert sound(run)


@pytest.mark.parametrize("links", ["memory", "gloo"])
@pytest.mark.parametrize("strategy", [dl.AllReduce(), dl.LocalSGD(every=2), dl.SyncPS()], ids=repr)
def test_real_run_goes_down_to_one_worker_and_up_to_three(strategy, links):
    with dl.LocalCluster(3, compute_time_s=0.01, links=links) as cluster:
        live = dl.start(regression(), strategy, cluster, num_updates=1_000_000)

        def workers() -> int:
            rows = live.trace.applies
            return len(set(rows["worker"][rows["version"] == live.version - 3].tolist()))

        until(lambda: workers() == 3)
        for ask, wanted in (
            (live.remove_worker, 2),
            (live.remove_worker, 1),
            (live.add_worker, 2),
            (live.add_worker, 3),
        ):
            ask()
            until(lambda wanted=wanted: workers() == wanted)
        live.stop()
        run = live.wait()
    assert run.ledger.balances
    assert run.ledger.counts["lost"] == run.ledger.counts["dropped"] == 0
    if not isinstance(strategy, dl.SyncPS):
        assert places(run) == list(range(len(run.ledger.entries)))
    assert sound(run)


def test_newcomer_can_be_killed_and_asked_to_leave():
    live = dl.start(regression(), dl.AllReduce(), dl.SimulatedCluster(2, compute=0.1), num_updates=40, paused=True)
    live.step(20)
    with pytest.raises(ValueError, match="there is no worker 2"):
        live.kill(worker=2)
    live.add_worker()
    live.add_worker()
    live.step(100)
    live.kill(worker=3)
    live.step(100)
    live.remove_worker(worker=2)
    run = live.wait()
    assert {(e.kind, e.worker) for e in run.trace if e.kind in ("join", "death", "leave")} == {
        ("join", 2), ("join", 3), ("death", 3), ("leave", 2),
    }  # fmt: skip
    assert sound(run)


def test_last_worker_stays(capsys):
    cluster = dl.SimulatedCluster(2, compute=0.1).remove_worker(at_s=0.2).remove_worker(at_s=0.5)
    run = train(regression(), dl.AllReduce(), cluster, 20)
    assert run.num_updates == 20
    assert "worker 0 is the only one, and stays" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        (dl.InGraph(), "the client's graph"),
        (dl.SingleWorker(), "those that it began with"),
        (dl.SyncPS(semantics="tf1"), "counts its replicas once"),
        (dl.AllReduce(engine="ddp"), "makes its group once"),
        (dl.BroadcastGradients(), "optimizer state"),
    ],
    ids=repr,
)
def test_strategy_whose_workers_are_fixed_says_why(strategy, why):
    cluster = dl.LocalCluster(3) if strategy.real_only else SIMULATED
    refused(ValueError, f"no worker can join or leave .*{why}", strategy=strategy, cluster=cluster.add_worker(at_s=1.0))


def test_chief_that_leaves_hands_over_to_the_next(tmp_path):
    cluster = SIMULATED.remove_worker(worker=0, at_s=0.55)
    task, folder = regression(), tmp_path / "kept"
    task = task.but(validation=task.train)
    run = dl.train(
        task, dl.AllReduce(), cluster, num_updates=20, evaluate_every=2, checkpoint_dir=folder, checkpoint_every=4,
        progress=False,
    )  # fmt: skip
    assert [e.worker for e in run.trace.where("chief")] == [1]
    assert run.evaluations["version"].tolist() == list(range(0, 21, 2))
    kept = dl.load_checkpoint(folder, task)
    assert kept.version == 20
    assert kept.common["vectors"]["params"].equal(run.params)
    assert sorted(run.replicas) == ["worker 1", "worker 2"]


@pytest.mark.parametrize("strategy", RANKS, ids=repr)
@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
def test_run_that_goes_on_with_others_begins_where_the_samples_ended(strategy, num_workers, tmp_path):
    task = regression()
    first = dl.train(task, strategy, DOWN_AND_UP, num_updates=12, checkpoint_dir=tmp_path, progress=False)
    cluster = dl.SimulatedCluster(num_workers, compute=0.1)
    second = dl.train(task, strategy, cluster, num_updates=20, resume=tmp_path, progress=False)
    total = len(places(first)) + len(places(second))
    assert places(first) + places(second) == list(range(total))
    assert sound(second)


def test_scenario_reads_as_it_is_written(tmp_path):
    cluster = SIMULATED.remove_worker(worker=1, at_s=2).remove_worker(at_s=3).add_worker(at_s=4)
    assert repr(cluster).endswith(".remove_worker(worker=1, at_s=2).remove_worker(at_s=3).add_worker(at_s=4)")
    path = tmp_path / "lines.json"
    path.write_text('[{"kind": "remove_worker", "worker": 1, "at_s": 2}, {"kind": "add_worker", "at_s": 4}]')
    assert repr(SIMULATED.scenario(path)).endswith(".remove_worker(worker=1, at_s=2).add_worker(at_s=4)")
    with pytest.raises(ValueError, match="there is no worker 3"):
        SIMULATED.remove_worker(worker=3, at_s=1.0)
    assert SIMULATED.add_worker(at_s=1.0).remove_worker(worker=3, at_s=2.0).changes


def test_server_that_is_lost_takes_those_who_joined_with_it(tmp_path):
    """All begin anew at the checkpoint, as many as the cluster has."""
    cluster = dl.SimulatedCluster(2, compute=0.1).add_worker(at_s=0.3).kill(server=0, at_s=1.0)
    run = dl.train(
        regression(), dl.SyncPS(), cluster, num_updates=30, checkpoint_dir=tmp_path, checkpoint_every=2, progress=False
    )
    assert sizes(run)[-1] == 2
    assert sound(run)


def test_stream_is_dealt_anew_by_hand():
    stream = Stream((torch.arange(100),), batch_size=2, index=1, num_workers=3)
    assert [stream.place(k) for k in range(3)] == [1, 4, 7]
    assert [stream.dealt(k) for k in range(3)] == [0, 3, 6]
    stream.deal(Deal(2, 6, 0, 1), Deal(4, 8, 1, 2))
    assert [stream.place(k) for k in range(2, 7)] == [6, 7, 9, 11, 13]
    assert stream.indices(4).equal(stream.at(9))


@pytest.mark.parametrize("links", ["memory", "gloo"])
@pytest.mark.parametrize("strategy", [dl.AllReduce(), dl.SyncPS(), dl.Hogwild()], ids=repr)
def test_worker_may_be_added_before_the_first_step(strategy, links):
    """Some processes hear of it before they have begun, and some after."""
    with dl.LocalCluster(2, links=links) as cluster:
        for _ in range(3):
            run = dl.train(regression(), strategy, cluster.add_worker(at_s=0.0), num_updates=60, progress=False)
            assert run.num_updates == 60
            assert run.ledger.balances


@pytest.mark.parametrize("strategy", [dl.AllReduce(), dl.AsyncPS(), dl.Hogwild()], ids=repr)
def test_last_worker_that_was_to_leave_stays_if_all_others_die(strategy):
    cluster = SIMULATED.remove_worker(worker=0, at_s=0.25).kill(worker=1, at_s=0.26).kill(worker=2, at_s=0.27)
    run = train(regression(), strategy, cluster, 20)
    assert run.num_updates == 20
    assert set(run.applies["worker"][run.applies["version"] == 20].tolist()) == {0}


def test_only_rank_waits_for_the_one_that_comes_before_it_leaves():
    """Or nobody would have what it has."""
    cluster = dl.SimulatedCluster(1, compute=0.1).add_worker(at_s=0.0).remove_worker(worker=0, at_s=0.0)
    run = train(regression(), dl.AllReduce(), cluster, 12)
    assert [(e.kind, e.worker) for e in run.trace if e.kind in ("join", "leave")] == [("join", 1), ("leave", 0)]
    assert places(run) == list(range(len(run.ledger.entries)))
    assert sound(run)


def test_round_in_which_one_dies_and_another_comes_uses_no_sample_twice():
    """Those that are left have their moves, and wait for the newcomer's, whose batches come before the next round's."""
    cluster = SIMULATED.kill(worker=2, at_s=0.45).add_worker(at_s=0.47)
    run = train(regression(), dl.LocalSGD(every=3), cluster, 8)
    applied = places(run)
    assert len(set(applied)) == len(applied)
    assert {e.worker for e in run.ledger.entries if e.version == 2} == {0, 1, 2}
    assert sound(run)


def test_checkpoint_has_the_worker_that_is_there_and_not_the_one_that_had_its_number(tmp_path):
    run = dl.train(
        regression(), dl.AllReduce(), DOWN_AND_UP, num_updates=24, checkpoint_dir=tmp_path, checkpoint_every=8,
        progress=False,
    )  # fmt: skip
    kept = dl.load_checkpoint(tmp_path)
    assert kept.version == run.version == 24
    assert len({kept.own[f"worker {i}"]["place"]["dealt"] for i in range(3)}) == 1


@pytest.mark.parametrize("strategy", [dl.AsyncPS(), dl.AllReduce()], ids=repr)
def test_run_whose_last_workers_die_after_others_have_left_ends_with_an_error(strategy):
    cluster = dl.SimulatedCluster(2, compute=0.1).remove_worker(worker=0, at_s=0.25).kill(worker=1, at_s=0.85)
    with pytest.raises(dl.DistlabError, match=r"worker 1 was lost|the last worker"):
        train(regression(), strategy, cluster, 50)


def test_worker_whose_stop_is_still_on_its_way_is_not_taken_for_the_one_that_has_its_number_now():
    slow = dl.Network(latency_s=0.02, bandwidth_bytes_per_s=1e5)
    cluster = dl.SimulatedCluster(2, compute=0.1, network=slow).remove_worker(worker=1, at_s=0.2)
    left_s = next(e.end_s for e in train(regression(), dl.SyncPS(), cluster, 20).trace if e.kind == "leave")
    run = train(regression(), dl.SyncPS(), cluster.add_worker(at_s=left_s + 0.01), 20)
    assert sizes(run)[-1] == 2  # and not one, as if worker 1 had left
    assert run.ledger.counts["lost"] == 0
