"""Workers die, come back, and others go on: the same on real processes and on a virtual clock.

What must be true afterwards is the same as of any run: the ledger balances, the replicas hold the same bits, and a
replay of the trace ends at them, however the group has changed on the way.
"""

import os
import random
import signal

import numpy as np
import pytest
import torch
from toys import countdown, failure, regression, train, until

import distlab as dl
from distlab.errors import Deadlock
from distlab.fabric.membership import Membership, Peer
from distlab.reports import ledger, replay
from distlab.trace import KINDS

WORKERS = [Peer("worker", i) for i in range(4)]
NESTEROV = lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)  # noqa: E731
GROUPS = [
    dl.AllReduce(),
    dl.AllReduce(algorithm="ring"),
    dl.AllReduce(bucket_bytes=1),
    dl.AllReduce(accumulate=2),
    dl.AllReduce(compression=dl.TopK(share=0.3)),
    dl.LocalSGD(every=3),
    dl.LocalSGD(every=2, outer=NESTEROV),
]
SURVIVORS = [
    dl.AsyncPS(locking="server"),
    dl.SyncPS(num_backup_workers=1),
    dl.SyncPS(on_too_few="shrink"),
    *GROUPS,
]


@pytest.fixture(scope="module")
def local():
    """Four real workers, whose gradients take long enough for a death to fall in between."""
    with dl.LocalCluster(num_workers=4, compute_time_s=0.004) as cluster:
        yield cluster


@pytest.fixture(params=["real", "gloo", "simulated"])
def cluster(request, local):
    if request.param == "gloo":
        return dl.LocalCluster(num_workers=4, compute_time_s=0.004, links="gloo")
    return (
        local if request.param == "real" else dl.SimulatedCluster(4, compute=dl.laws.Gamma(mean_s=0.004, variation=0.3))
    )


def sound(run: dl.Run) -> bool:
    """All that must be true of any run."""
    assert run.ledger.problems == ()
    assert all(replica.equal(run.params) for replica in run.replicas.values())
    assert run.replay().params.equal(run.params)
    return True


# What each has been told


def test_everybody_is_present_at_first_and_worker_0_is_first():
    members = Membership()
    assert members.present(WORKERS) == WORKERS
    assert members.first(WORKERS) == WORKERS[0]


def test_who_is_lost_or_has_left_is_not_present():
    members = Membership()
    members.tell("lost", WORKERS[0])
    members.tell("left", WORKERS[2])
    assert members.present(WORKERS) == [WORKERS[1], WORKERS[3]]
    assert (members.era, members.first(WORKERS)) == (2, WORKERS[1])


def test_who_has_left_in_peace_is_still_the_first():
    members = Membership()
    members.tell("left", WORKERS[0])
    assert members.first(WORKERS) == WORKERS[0]


def test_who_comes_back_is_present_but_the_last_to_be_first():
    members = Membership()
    members.tell("lost", WORKERS[0])
    members.tell("came", WORKERS[0])
    assert members.present(WORKERS) == WORKERS
    assert members.first(WORKERS) == WORKERS[1]
    assert list(members.arrivals) == [(WORKERS[0], 2)]
    for worker in WORKERS[1:]:
        members.tell("lost", worker)
    assert members.first(WORKERS) == WORKERS[0]


# Deaths


@pytest.mark.parametrize("who", [0, 2])
@pytest.mark.parametrize("strategy", SURVIVORS, ids=repr)
def test_the_others_go_on_without_a_worker_that_dies(cluster, strategy, who):
    run = train(regression("momentum"), strategy, cluster.kill(worker=who, at_step=7), 80)
    assert run.version == run.num_updates == 80
    assert run.trace.where("death").who == [f"worker {who}"]
    assert sorted(run.steps) == [f"worker {i}" for i in range(4) if i != who]
    assert sound(run)


@pytest.mark.parametrize("strategy", GROUPS, ids=repr)
def test_two_that_die_one_after_the_other_leave_a_group_of_two(cluster, strategy):
    run = train(regression("adam"), strategy, cluster.kill(worker=3, at_step=8).kill(worker=0, at_step=9), 30)
    last = run.applies[run.applies["version"] == 30]
    assert sorted(set(last["worker"].tolist())) == [1, 2]
    assert sound(run)


def test_last_one_left_goes_on_alone(cluster):
    for worker in (0, 1, 3):
        cluster = cluster.kill(worker=worker, at_step=5 + worker)
    run = train(regression(), dl.AllReduce(), cluster, 40)
    assert run.applies["worker"][run.applies["version"] == 40].tolist() == [2]
    assert sound(run)


def test_group_that_has_lost_one_takes_the_mean_of_those_that_are_left(cluster):
    """By hand: every gradient is 1, so every update takes away 1, with four workers and with three."""
    run = train(countdown(), dl.AllReduce(), cluster.kill(worker=1, at_step=4), 20)
    assert run.params[0] == -20
    assert [int((run.applies["version"] == v).sum()) for v in (1, 20)] == [4, 3]


def test_step_in_which_one_dies_is_dropped_and_its_batches_come_again(cluster):
    run = train(regression(), dl.AllReduce(), cluster.kill(worker=1, at_step=4), 20)
    dropped = [e for e in run.ledger.entries if e.fate == "dropped"]
    again = {e.worker: e.batch for e in run.ledger.entries if e.fate == "applied" and e.version == 5}
    assert again == {0: 16, 2: 17, 3: 18}
    assert dropped
    assert {e.batch for e in dropped} <= {16, 17, 18, 19}


def test_local_sgd_loses_no_step_of_those_that_are_left(cluster):
    """Their moves are still there when the group has changed."""
    run = train(regression(), dl.LocalSGD(every=3), cluster.kill(worker=1, at_step=4), 10)
    assert {e.fate for e in run.ledger.entries if e.worker != 1} == {"applied"}


def test_group_with_uneven_data_goes_on(cluster):
    live = dl.start(regression(), dl.AllReduce(), cluster.kill(worker=1, at_step=4), num_batches=[12, 20, 16, 9])
    run = live.wait()
    assert [int((run.applies["worker"] == w).sum()) for w in (0, 2, 3)] == [12, 16, 9]
    assert sound(run)


@pytest.mark.parametrize("strategy", [dl.AllReduce(on_too_few="stop"), dl.LocalSGD(on_too_few="stop"), dl.SyncPS()])
def test_run_that_is_to_stop_names_who_died(cluster, strategy):
    with pytest.raises(dl.ProcessLost, match=r"^worker 1 .*was lost"):
        train(regression(), strategy, cluster.kill(worker=1, at_step=4), 100)


def test_all_that_die_end_the_run_with_the_last_ones_name(cluster):
    for worker in range(4):
        cluster = cluster.kill(worker=worker, at_step=3 + worker)
    with pytest.raises(dl.ProcessLost, match=r"^worker \d .*was lost"):
        train(regression(), dl.AllReduce(), cluster, 100)


def test_on_too_few_is_checked():
    for strategy, known in ((dl.SyncPS, "wait"), (dl.AllReduce, "shrink"), (dl.LocalSGD, "shrink")):
        with pytest.raises(ValueError, match=f"on_too_few='{known}s': did you mean '{known}'"):
            strategy(on_too_few=known + "s")


def test_waiting_for_one_that_never_comes_back_is_said_on_a_virtual_clock():
    cluster = dl.SimulatedCluster(2).kill(worker=1, at_step=4)
    with pytest.raises(Deadlock, match=r"worker 0 .*waits? for.*; worker 1 was lost$"):
        train(regression(), dl.SyncPS(on_too_few="wait"), cluster, 20)


def test_waiting_for_one_that_never_comes_back_can_be_stopped(local):
    live = dl.start(regression(), dl.SyncPS(on_too_few="wait"), local.kill(worker=1, at_step=4), num_updates=10**6)
    until(lambda: len(live.trace.select("death")) == 1)
    live.stop()
    assert live.wait().num_updates == 4


# Coming back


@pytest.mark.parametrize("who", [0, 2])
@pytest.mark.parametrize("strategy", [*SURVIVORS, dl.SyncPS(on_too_few="wait")], ids=repr)
def test_worker_that_comes_back_takes_part_again(cluster, strategy, who):
    run = train(
        regression("momentum"), strategy, cluster.kill(worker=who, at_step=7).revive(worker=who, at_s=0.03), 150
    )
    (back,) = run.trace.select("revive")
    mine = run.applies[run.applies["worker"] == who]
    assert (mine["end_s"] < back["end_s"]).any()
    assert (mine["end_s"] > back["end_s"]).any()
    assert sorted(run.steps) == [f"worker {i}" for i in range(4)]
    assert sound(run)


def test_worker_that_comes_back_goes_on_where_it_was(cluster):
    """No batch is left out, none is applied twice."""
    run = train(
        regression(), dl.SyncPS(on_too_few="wait"), cluster.kill(worker=2, at_step=7).revive(worker=2, at_s=0), 30
    )
    assert run.applies["step"][run.applies["worker"] == 2].tolist() == list(range(30))


def test_chief_that_comes_back_does_not_undo_what_was_learnt(cluster):
    """TensorFlow 1's restores the last checkpoint over the live servers."""
    run = train(
        countdown(), dl.AsyncPS(locking="server"), cluster.kill(worker=0, at_step=9).revive(worker=0, at_s=0), 200
    )
    assert len(run.trace.select("revive")) == 1
    assert run.params[0] == -200


def test_worker_that_comes_back_never_counts_twice(cluster):
    """TensorFlow 1 lets one worker supply both gradients of a step."""
    cluster = (
        cluster.kill(worker=1, at_step=5).revive(worker=1, at_s=0).kill(worker=2, at_step=9).revive(worker=2, at_s=0)
    )
    run = train(regression(), dl.SyncPS(num_backup_workers=1, on_too_few="wait"), cluster, 100)
    for version in range(1, 101):
        workers = run.applies["worker"][run.applies["version"] == version].tolist()
        assert len(workers) == len(set(workers)) == 3


def test_worker_that_comes_back_has_the_optimizer_state_of_the_others(cluster):
    """Or its momentum would start from nothing, and the replicas go apart."""
    run = train(regression("adam"), dl.AllReduce(), cluster.kill(worker=1, at_step=7).revive(worker=1, at_s=0), 60)
    assert len(run.replicas) == 4
    assert sound(run)


def test_worker_that_is_there_is_revived_once_it_has_died(cluster):
    run = train(regression(), dl.AllReduce(), cluster.revive(worker=1, at_s=0).kill(worker=1, at_step=7), 60)
    assert [row["worker"] for row in run.trace.select("revive")] == [1]
    assert sound(run)


TWICE = (
    dl.SimulatedCluster(3, compute=0.1)
    .kill(worker=0, at_step=5)
    .revive(worker=0, at_s=1)
    .kill(worker=0, at_s=2.05)
    .revive(worker=0, at_s=3)
)


@pytest.mark.parametrize("strategy", [*GROUPS, dl.AsyncPS(), dl.SyncPS(on_too_few="wait"), dl.Hogwild()], ids=repr)
def test_worker_that_dies_and_comes_back_twice_is_accounted_for(strategy):
    """The second time in the middle of what it does for the first time since: its steps have numbers of their own."""
    run = train(regression("momentum"), strategy, TWICE, 150 if strategy.gradients_per_update(3) == 1 else 60)
    assert len(run.trace.select("revive")) == 2
    assert run.ledger.problems == ()
    assert run.replay().params.equal(run.params)


@pytest.mark.parametrize("at_s", [1.0, 1.02, 1.1])
@pytest.mark.parametrize("strategy", [*GROUPS, dl.AsyncPS(), dl.SyncPS(on_too_few="wait")], ids=repr)
def test_worker_that_dies_again_before_its_first_gradient_has_lived_once(strategy, at_s):
    """Of the life between, the trace holds no gradient; the one after must not begin twice in a replay."""
    cluster = dl.SimulatedCluster(3, compute=0.1).kill(worker=0, at_step=5).revive(worker=0, at_s=1)
    cluster = cluster.kill(worker=0, at_s=at_s).revive(worker=0, at_s=1.5)
    normed = lambda: torch.nn.Sequential(torch.nn.BatchNorm1d(5), torch.nn.Dropout(0.5), torch.nn.Linear(5, 1)).double()  # noqa: E731
    gently = lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.5)  # noqa: E731
    run = train(
        regression().but(model=normed, optimizer=gently),
        strategy,
        cluster,
        150 if strategy.gradients_per_update(3) == 1 else 40,
    )
    assert len(run.trace.select("revive")) == 2
    assert run.ledger.problems == ()
    assert run.replay().params.equal(run.params)


LATENT = dl.SimulatedCluster(3, compute=0.1, network=dl.Network(latency_s=0.05))


@pytest.mark.parametrize("at_s", [6.5, 6.55])
def test_worker_that_comes_back_after_the_end_does_not_begin_anew(at_s):
    """It would train once more, alone, from its own first parameters."""
    run = train(regression(), dl.AllReduce(), LATENT.kill(worker=0, at_step=5).revive(worker=0, at_s=at_s), 40)
    assert len(run.trace.select("revive")) == 1
    assert 0 not in run.trace.select("regroup")["index"]
    assert run.version == 40
    assert sound(run)


def test_state_that_nobody_holds_any_more_ends_the_run():
    """Worker 1 dies before worker 0, which has come back, was given its state."""
    cluster = LATENT.kill(worker=0, at_step=5).kill(worker=2, at_step=5)
    cluster = cluster.revive(worker=0, at_s=1.5).kill(worker=1, at_s=1.52)
    with pytest.raises(dl.ProcessLost, match="the parameters are gone"):
        train(regression(), dl.AllReduce(), cluster, 40)


@pytest.mark.parametrize("at_s", [1.7, 2.0, 2.73, 4.0])
@pytest.mark.parametrize(
    ("strategy", "most"), [(dl.AllReduce(), 45), (dl.AllReduce(accumulate=3), 15), (dl.LocalSGD(every=4), 12)], ids=repr
)
def test_worker_that_comes_back_has_no_more_data_than_it_had(strategy, most, at_s):
    """Also where the others were past its share by then."""
    cluster = dl.SimulatedCluster(2, compute=0.1).kill(worker=1, at_step=16).revive(worker=1, at_s=at_s)
    run = dl.train(regression(), strategy, cluster, num_batches=[45, 19], progress=False)
    assert run.num_updates <= most
    assert len([e for e in run.ledger.entries if e.worker == 1 and e.fate == "applied"]) <= 19
    assert sound(run)


@pytest.mark.parametrize("at_s", [3.9, 4.0, 4.05, 4.1])
@pytest.mark.parametrize("strategy", [dl.AllReduce(), dl.LocalSGD(every=4)], ids=repr)
def test_worker_that_comes_back_when_all_is_nearly_over_ends_with_the_others(strategy, at_s):
    cluster = dl.SimulatedCluster(3, compute=0.1).kill(worker=1, at_step=16).revive(worker=1, at_s=at_s)
    num_updates = 10 if isinstance(strategy, dl.LocalSGD) else 40
    run = train(regression(), strategy, cluster, num_updates)
    assert run.num_updates == num_updates
    assert sound(run)


def test_message_does_not_overtake_the_one_before_whose_delay_was_longer():
    """Or a rank that comes back would take the state for its answer."""
    cluster = dl.SimulatedCluster(2, compute=0.1).delay(worker=1, by_s=0.1, from_s=1.45, to_s=2.45)
    cluster = cluster.kill(worker=1, at_step=18).revive(worker=1, at_s=2.4)
    assert sound(dl.train(regression(), dl.AllReduce(), cluster, num_batches=[45, 19], progress=False))


def test_worker_that_comes_back_and_dies_at_once_does_not_end_the_run(local):
    live = dl.start(regression(), dl.AsyncPS(locking="server"), local, num_updates=10**6)
    until(lambda: live.version > 5)
    live.kill(worker=1)
    live.revive(worker=1)
    before = live.launched.pids["worker 1"]
    until(lambda: live.launched.pids["worker 1"] != before)
    os.kill(live.launched.pids["worker 1"], signal.SIGKILL)
    until(lambda: len(live.trace.select("death")) == 2)
    now = live.version
    until(lambda: live.version > now + 20)
    live.stop()
    assert live.wait().ledger.balances


# The chief


@pytest.mark.parametrize("strategy", [dl.AsyncPS(), dl.AllReduce(), dl.SyncPS(on_too_few="shrink")], ids=repr)
def test_another_becomes_chief_and_evaluates(cluster, strategy):
    task = regression(validation=regression().train)
    live = dl.start(task, strategy, cluster.kill(worker=0, at_step=9), num_updates=240, evaluate_every=5)
    run = live.wait()
    (became,) = run.trace.where("chief")
    assert became.who == "worker 1"
    assert run.trace.where("evaluate").who == ["worker 0", "worker 1"]
    assert run.evaluations["version"].max() >= 235


def test_buffers_are_the_new_chiefs(cluster):
    model = lambda: torch.nn.Sequential(torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1)).double()  # noqa: E731
    run = train(regression(model=model), dl.AllReduce(), cluster.kill(worker=0, at_step=9), 30)
    assert run.model.state_dict()["0.num_batches_tracked"] == len(run.trace.select("compute", who="worker 1"))


# Real processes only


@pytest.mark.parametrize("strategy", [dl.AsyncPS(), dl.AllReduce()], ids=repr)
def test_death_from_outside_is_noticed_within_a_second(local, strategy, capsys):
    live = dl.start(regression(), strategy, local, num_updates=10**6)
    until(lambda: len(live.trace.select("compute", worker=2)) > 0)
    pid = live.launched.pids["worker 2"]
    last = live.trace.select(who="worker 2")["end_s"].max()
    os.kill(pid, signal.SIGKILL)
    until(lambda: len(live.trace.select("death")) == 1)
    before = live.version
    until(lambda: live.version > before + 20)
    live.stop()
    run = live.wait()
    assert run.trace.select("death")["end_s"][0] - last < 1.5, "of it up to 0.1 s until we looked"
    said = capsys.readouterr().out
    assert f"[worker 2] worker 2 (pid {pid}) was lost at step " in said
    assert "killed by SIGKILL; the others go on" in said


def test_process_that_gives_no_sign_of_life_is_ended_and_named():
    with dl.LocalCluster(num_workers=2, failure_timeout_s=0.5) as cluster:
        live = dl.start(regression(), dl.SyncPS(), cluster, num_updates=10**6)
        until(lambda: len(live.trace.select("compute", worker=1)) > 0)
        pid = live.launched.pids["worker 1"]
        os.kill(pid, signal.SIGSTOP)
        error = failure(live)
    assert str(error).startswith(f"worker 1 (pid {pid}) was lost at step ")
    assert str(error).endswith("silent for 0.5 s, and ended")


def test_run_does_not_wait_for_ever_for_one_that_does_not_come_to_its_end():
    def loss(outputs, targets):
        if os.getpid() != me and torch.initial_seed() % 1_000_003 == 1:  # worker 1
            import time

            time.sleep(3600)
        return outputs.mean()

    me = os.getpid()
    with dl.LocalCluster(num_workers=2, failure_timeout_s=0.5) as cluster:
        run = train(countdown(loss=loss), dl.AsyncPS(locking="server"), cluster, 20)
    assert run.params[0] == -20
    assert run.trace.where("death").who == ["worker 1"]


def test_run_that_was_asked_to_stop_does_not_wait_for_ever():
    def loss(outputs, targets):
        if os.getpid() != me:
            import time

            time.sleep(3600)
        return outputs.mean()

    me = os.getpid()
    with dl.LocalCluster(num_workers=2, failure_timeout_s=0.5) as cluster:
        live = dl.start(countdown(loss=loss), dl.AllReduce(), cluster, num_updates=20)
        until(lambda: len(live.launched.pids) == 2)
        live.stop()
        assert "not at its end 0.5 s after the run's, and ended" in str(failure(live))


def test_failure_timeout_is_checked():
    with pytest.raises(ValueError, match="failure_timeout_s must be positive and finite, got 0"):
        dl.LocalCluster(num_workers=2, failure_timeout_s=0)


# What a killed process takes with it


def dropout() -> dl.Task:
    """A replay that misses a gradient, used or not, draws other numbers from then on."""
    layers = lambda: torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1)).double()  # noqa: E731
    return regression(model=layers)


def without_last_words(run: dl.Run, seconds: float) -> dl.Trace:
    """The trace as it would be of real processes, which hand over what they recorded only now and then."""
    rows = run.trace.rows
    for death in run.trace.select("death"):
        own = (rows["role"] == death["role"]) & (rows["index"] == death["index"])
        late = (rows["end_s"] > death["end_s"] - seconds) & (rows["end_s"] <= death["end_s"])
        rows = rows[~(own & late) | np.isin(rows["kind"], [KINDS.index("death"), KINDS.index("revive")])]
    return dl.Trace(rows)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("strategy", [dl.AllReduce(), dl.AllReduce(accumulate=2), dl.LocalSGD(every=3)], ids=repr)
def test_ranks_speak_for_each_other_though_more_than_one_dies(strategy, seed):
    draw = random.Random(seed)
    at_s = draw.uniform(0.5, 1.5)
    cluster = dl.SimulatedCluster(4, seed=seed).kill(worker=2, at_s=at_s)
    cluster = cluster.kill(worker=1, at_s=at_s + draw.uniform(0.0, 0.35))
    run = train(dropout(), strategy, cluster, 24)
    heard = without_last_words(run, 0.3)
    assert ledger(heard).balances
    assert replay(heard, run.task, strategy, num_workers=4).params.equal(run.params)


@pytest.mark.parametrize("seed", [11, 13, 14, 29])
@pytest.mark.parametrize("strategy", [dl.AsyncPS(locking="server"), dl.AllReduce(), dl.LocalSGD(every=4)], ids=repr)
def test_lives_that_come_and_go_are_told_apart(strategy, seed):
    """A gradient that was lost on its way to the server is not the next life's first."""
    draw, network = random.Random(seed), dl.Network(latency_s=1e-3)
    cluster = dl.SimulatedCluster(3, compute=dl.laws.Gamma(mean_s=0.004), network=network, seed=seed)
    at_s = draw.uniform(0.05, 0.9) * 0.6
    for _ in range(20):
        at_s += draw.expovariate(20 / 0.6)
        cluster = draw.choice([cluster.kill, cluster.revive, cluster.revive])(worker=draw.randrange(3), at_s=at_s)
    run = train(dropout(), strategy, cluster, 150 * (3 if isinstance(strategy, dl.AsyncPS) else 1))
    assert run.ledger.balances
    assert run.replay().params.equal(run.params)
