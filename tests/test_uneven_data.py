"""Workers with unequal amounts of data: who is out of it leaves, and the run ends with the last one."""

from functools import cache

import numpy as np
import pytest
import torch
from toys import countdown, refused, regression

import distlab as dl

NUM_BATCHES = (10, 20, 30, 40)  # the chief has the fewest
OWN = [  # strategies in which every worker has its own data
    dl.AsyncPS(),
    dl.AsyncPS(max_clock_gap=1),
    dl.AsyncPS(apply_every=2),
    dl.AsyncPS(apply_every=2, distinct=True),
    dl.AsyncPS(num_servers=2),
    dl.SyncPS(),
    dl.SyncPS(num_servers=2),
    dl.SyncPS(num_backup_workers=1),
    dl.SyncPS(num_backup_workers=1, late="cancel"),
    dl.SyncPS(num_backup_workers=1, num_servers=2),
    dl.SyncPS(semantics="tf1"),
    dl.SyncPS(semantics="tf1", num_backup_workers=1),
    dl.AllReduce(),
    dl.Hogwild(),
    dl.WorkerApplies(),
    dl.BroadcastGradients(),
]
ALL = [dl.SingleWorker(), dl.InGraph(), *OWN]
IN_STEP = [dl.SyncPS(), dl.SyncPS(num_servers=2), dl.AllReduce()]
LAWS = [dl.laws.Constant(0.1), dl.laws.Exponential(mean_s=0.1)]
SIMULATED = dl.SimulatedCluster(4, compute=LAWS[1])


def fed(strategy, cluster=SIMULATED, num_batches=NUM_BATCHES, task=None) -> dl.Run:
    return dl.train(task or regression("adam"), strategy, cluster, num_batches=num_batches, progress=False)


@cache
def simulated(strategy: dl.Strategy, law: dl.laws.Law = LAWS[1]) -> dl.Run:
    """A run that several tests look at."""
    return fed(strategy, dl.SimulatedCluster(4, compute=law))


def steps(num_batches, role: str = "worker") -> dict[str, int]:
    return {f"{role} {i}": count for i, count in enumerate(num_batches)}


@pytest.mark.parametrize("law", LAWS, ids=repr)
@pytest.mark.parametrize("strategy", OWN, ids=repr)
def test_every_worker_does_all_of_its_batches_and_no_more(strategy, law):
    assert simulated(strategy, law).steps == steps(NUM_BATCHES)


@pytest.mark.parametrize("strategy", ALL, ids=repr)
def test_ledger_balances_when_workers_leave_one_after_the_other(strategy):
    book = simulated(strategy).ledger
    assert book.balances
    assert len(book.entries) == (10 if strategy == dl.SingleWorker() else 100)
    assert book.counts["lost"] == book.counts["unused"] == 0


@pytest.mark.parametrize("strategy", ALL, ids=repr)
def test_replay_of_a_run_on_uneven_data_ends_at_the_same_bits(strategy):
    run = simulated(strategy)
    assert run.replay().params.equal(run.params)


@pytest.mark.parametrize(
    "strategy", [s for s in OWN if "num_backup_workers" not in repr(s) and "tf1" not in repr(s)], ids=repr
)
def test_every_batch_is_in_the_model_where_nothing_is_dropped(strategy):
    assert simulated(strategy).ledger.counts["applied"] == 100


def test_a_gradient_that_waits_for_another_in_vain_is_unused():
    """Three batches, two to an update."""
    run = fed(dl.AsyncPS(apply_every=2), dl.SimulatedCluster(2), (1, 2))
    assert run.version == 1
    assert len(run.trace.select("unused")) == run.ledger.counts["unused"] == 1


def test_single_worker_has_the_data_of_the_chief():
    run = simulated(dl.SingleWorker())
    assert run.steps == {"worker 0": 10}
    assert run.version == 10


def test_in_graph_has_all_data_in_one_stream():
    """A hundred batches, of which every update takes one for each of four replicas."""
    run = simulated(dl.InGraph())
    assert run.steps == steps([25] * 4, "replica")
    assert run.version == 25
    assert run.ledger.samples["applied"] == simulated(dl.AsyncPS()).ledger.samples["applied"]


def test_in_graph_leaves_what_is_less_than_a_batch_for_every_replica():
    """Two and three batches are two rounds of two; the fifth has no fellow."""
    assert fed(dl.InGraph(), dl.SimulatedCluster(2), (2, 3)).steps == steps([2, 2], "replica")


@pytest.mark.parametrize("strategy", IN_STEP, ids=repr)
def test_a_version_holds_a_gradient_of_every_worker_that_still_has_data(strategy):
    rows = simulated(strategy).applies
    for version in range(1, 41):
        still = [worker for worker, count in enumerate(NUM_BATCHES) if count >= version]
        assert sorted(rows["worker"][rows["version"] == version]) == still
    assert np.bincount(rows["version"])[1:].tolist() == [4] * 10 + [3] * 10 + [2] * 10 + [1] * 10


@pytest.mark.parametrize("strategy", [dl.SyncPS(), dl.AllReduce()], ids=repr)
def test_the_mean_is_over_the_workers_that_still_have_data(strategy):
    """Every gradient is 1, and so is their mean: forty updates take away 40. Quarters of the sums would take 25."""
    assert fed(strategy, task=countdown()).params[0] == -40


def test_replicas_stay_identical_when_workers_have_run_out_of_data():
    run = simulated(dl.AllReduce())
    assert sorted(run.replicas) == [f"worker {i}" for i in range(4)]
    assert all(params.equal(run.params) for params in run.replicas.values())


def test_sync_ps_and_all_reduce_agree_on_uneven_data():
    torch.testing.assert_close(simulated(dl.SyncPS()).params, simulated(dl.AllReduce()).params, rtol=0, atol=1e-12)


def test_bounded_clocks_do_not_wait_for_a_worker_that_has_left():
    """The last worker is thirty steps past the chief's last."""
    rows = simulated(dl.AsyncPS(max_clock_gap=1)).trace.select("compute")
    left_s = rows["end_s"][rows["worker"] == 0].max()
    assert (rows["start_s"][rows["worker"] == 3] > left_s).sum() >= 28


def test_update_that_a_leaving_worker_completes_has_its_tokens_by_hand():
    """Worker 0 leaves after its one batch, and the update no longer waits for worker 1, whose two gradients are both
    too late. It draws the token 0 that was left, then one of version 1: without those it would wait for ever."""
    run = fed(dl.SyncPS(semantics="tf1"), dl.SimulatedCluster(2, compute=[1.0, 2.0]), (1, 2), countdown())
    assert run.steps == steps([1, 2])
    assert run.params[0] == -1
    assert run.ledger.counts["dropped"] == 2


@pytest.mark.parametrize("strategy", [dl.AsyncPS(), dl.SyncPS(), dl.AllReduce(), dl.SyncPS(semantics="tf1")], ids=repr)
def test_real_run_ends_by_itself_when_all_data_is_used(three, strategy):
    run = fed(strategy, three, (2, 4, 7))
    assert run.steps == steps([2, 4, 7])
    assert run.ledger.balances
    assert run.ledger.counts["lost"] == run.ledger.counts["unused"] == 0


def test_real_sync_ps_and_all_reduce_agree_on_uneven_data(three):
    first, second = (fed(strategy, three, (2, 4, 7)) for strategy in (dl.SyncPS(), dl.AllReduce()))
    assert first.version == second.version == 7
    assert np.bincount(first.applies["version"])[1:].tolist() == [3, 3, 2, 2, 1, 1, 1]
    torch.testing.assert_close(first.params, second.params, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"num_batches": (1, 2, 3)}, ValueError, "num_batches has 3 numbers for 2 workers"),
        ({"num_batches": ()}, ValueError, "num_batches has 0 numbers for 2 workers"),
        ({"num_batches": (0, 1)}, ValueError, "num_batches must be at least 1, got 0"),
        ({"num_batches": (1.0, 2)}, TypeError, r"num_batches must be a whole number, got 1.0 \(float\)"),
        ({"num_batches": 5}, TypeError, "num_batches must have a number for each of the 2 workers, got 5"),
        ({"num_batches": (1, 2), "num_updates": 5}, ValueError, "say how long: .* one of them"),
        ({"num_batches": (1, 2), "num_samples": 5}, ValueError, "say how long: .* one of them"),
    ],
)
def test_number_of_batches_is_a_positive_int_for_every_worker(no_process_starts, options, error, told):
    refused(error, told, **options)
