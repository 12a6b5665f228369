"""Scenarios: the same lines on a simulated cluster and on real processes, from code, from a file, on a live run."""

import json
import time

import pytest
import torch
from toys import countdown, regression, train, until

import distlab as dl
from distlab.clusters.faults import Faults
from distlab.fabric import Peer
from distlab.fabric.network import Change, standing_still
from distlab.fabric.weather import Weather
from distlab.strategies.base import Layout

WHOLE = {
    "slow": {"worker": 1, "factor": 5},
    "throttle": {"worker": 1, "factor": 0.5, "from_s": 1, "to_s": 2},
    "delay": {"worker": 1, "by_s": 0.25, "to_s": 3},
    "partition": {"worker": 0, "from_s": 2},
    "pause": {"worker": 0, "from_s": 1, "to_s": 2},
    "kill": {"server": 0, "at_s": 12},
    "revive": {"worker": 1, "at_s": 3},
}


@pytest.fixture(params=["real", "simulated"])
def cluster(request):
    if request.param == "simulated":
        yield dl.SimulatedCluster(2, compute=0.02)
    else:
        with dl.LocalCluster(num_workers=2, compute_time_s=0.02) as made:
            yield made


def said(cluster: dl.Cluster) -> str:
    return repr(cluster).split(")", 1)[1]


# Lines


@pytest.mark.parametrize("kind", WHOLE)
def test_line_reads_as_it_was_written(cluster, kind):
    words = ", ".join(f"{name}={value:g}" for name, value in WHOLE[kind].items())
    made = getattr(cluster, kind)(**WHOLE[kind])
    assert said(made) == f".{kind}({words})"
    assert said(cluster) == "", "a line makes a new cluster"


def test_kill_at_a_step_reads_as_it_was_written(cluster):
    assert said(cluster.kill(worker=0, at_step=7)) == ".kill(worker=0, at_step=7)"


def test_scenario_of_a_file_is_the_one_of_its_lines(cluster, tmp_path):
    path, by_hand = tmp_path / "scenario.json", cluster
    path.write_text(json.dumps([{"kind": kind} | words for kind, words in WHOLE.items()]))
    for kind, words in WHOLE.items():
        by_hand = getattr(by_hand, kind)(**words)
    assert repr(cluster.scenario(path)) == repr(by_hand)


@pytest.mark.parametrize(
    ("line", "error", "told"),
    [
        ({"kind": "slows", "worker": 0}, ValueError, "kind='slows': did you mean 'slow'"),
        ({"kind": "slow", "workers": 0}, TypeError, "slow has no option 'workers': did you mean 'worker'"),
        ({"worker": 0}, ValueError, 'a mapping such as {"kind": "slow"'),
        ("slow", ValueError, "a mapping such as"),
        ({"kind": "slow", "worker": 2, "factor": 2}, ValueError, "there is no worker 2: this cluster has 0 to 1"),
        ({"kind": "slow", "worker": 0, "factor": "2"}, TypeError, "factor must be a number, got '2'"),
        ({"kind": "slow", "worker": 0, "factor": 0}, ValueError, "factor must be positive and finite, got 0"),
        ({"kind": "throttle", "worker": 0, "factor": 2}, ValueError, "factor must be at most 1"),
        ({"kind": "delay", "worker": 0, "by_s": -1}, ValueError, "by_s must be a finite number of seconds, 0 or more"),
        ({"kind": "pause", "worker": 0, "from_s": 0, "to_s": float("inf")}, ValueError, "a pause ends: say to_s"),
        ({"kind": "slow", "worker": 0, "factor": 2, "from_s": 2, "to_s": 1}, ValueError, "to a later time, got 2 to 1"),
        ({"kind": "kill", "worker": 0}, ValueError, "kill says when, by at_s= or by at_step="),
        ({"kind": "kill", "worker": 0, "at_s": 1, "at_step": 1}, ValueError, "kill says when"),
        ({"kind": "kill", "at_s": 1}, ValueError, "kill names one process, .* got none"),
        ({"kind": "kill", "worker": 0, "server": 0, "at_s": 1}, ValueError, "kill names one process"),
        ({"kind": "kill", "worker": 0, "at_step": 1.5}, TypeError, "at_step must be a whole number"),
        ({"kind": "kill", "worker": 0, "at_step": -1}, ValueError, "at_step must be at least 0, got -1"),
        ({"kind": "revive", "worker": -1, "at_s": 0}, ValueError, "worker must be at least 0"),
    ],
)
def test_bad_line_is_refused_before_anything_starts(cluster, line, error, told):
    with pytest.raises(error, match=told.replace("{", r"\{")):
        cluster.line(line)


@pytest.mark.parametrize(("text", "told"), [("{", "is not JSON"), ('{"kind": "slow"}', "must hold a list of lines")])
def test_file_that_holds_no_lines_is_refused(cluster, tmp_path, text, told):
    path = tmp_path / "scenario.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"scenario.json {told}"):
        cluster.scenario(path)


def test_process_that_a_strategy_does_not_have_cannot_be_killed(cluster):
    for strategy, words, has in ((dl.AllReduce(), {"server": 0}, "none"), (dl.AsyncPS(), {"server": 5}, "0 to 0")):
        with pytest.raises(ValueError, match=rf"there is no server . to kill under .*: it has {has}"):
            train(regression(), strategy, cluster.kill(**words, at_s=1), 5)


# What is due


LAYOUT = Layout({"worker": 2})


def test_lines_are_due_in_the_order_of_their_times():
    faults = Faults((Change("kill", 1, 5.0), Change("slow", 0, 1.0, 3.0, 2.0)), LAYOUT)
    assert faults.next_s == 1.0
    assert [(peer.index, change.kind, begins) for peer, change, begins in faults.due(4.0)] == [
        (0, "slow", True),
        (0, "slow", False),
    ]
    assert [change.kind for _, change, _ in faults.due(5.0)] == ["kill"]
    assert faults.next_s == float("inf")


def test_weather_of_a_process_is_the_product_of_what_holds():
    changes = [
        Change("slow", 0, 0.0, factor=2.0),
        Change("slow", 0, 1.0, factor=3.0),
        Change("delay", 0, 1.0, by_s=0.5),
    ]
    changes += [
        Change("throttle", 0, 1.0, factor=0.5),
        Change("partition", 0, 1.0, 2.0),
        Change("slow", 1, 0.0, factor=9.0),
    ]
    faults = Faults(tuple(changes), LAYOUT)
    assert faults.weather(Peer("worker", 0)) == Weather(2.0), "from the beginning"
    faults.due(1.0)
    assert faults.weather(Peer("worker", 0)) == Weather(6.0, 0.5, 0.5, cut=True)
    faults.due(2.0)
    assert faults.weather(Peer("worker", 0)) == Weather(6.0, 0.5, 0.5)
    assert faults.weather(Peer("worker", 1)) == Weather(9.0)


def test_in_graph_a_worker_is_a_replica():
    faults = Faults((Change("slow", 1, 0.0, factor=2.0),), Layout({"client": 1, "replica": 2}))
    assert faults.weather(Peer("replica", 1)).slow == 2.0


def test_weather_travels_as_words():
    here, there = Weather(2.5, 0.125, 1e-3, cut=True), Weather()
    there.change(here.said)
    assert there == here


def test_work_is_done_later_by_the_pauses_that_fall_into_it():
    pauses = [Change("pause", 0, 1.0, 2.0), Change("pause", 0, 3.0, 3.5), Change("slow", 0, 0.0, 9.0)]
    assert standing_still(pauses, 0.0, 1.0) == 1.0
    assert standing_still(pauses, 0.0, 1.5) == 2.5
    assert standing_still(pauses, 1.5, 1.75) == 2.25
    assert standing_still(pauses, 0.5, 2.5) == 4.0


# What comes true


def gradients(run: dl.Run) -> dict[int, int]:
    """How many of each worker were applied."""
    return {w: int((run.applies["worker"] == w).sum()) for w in range(2)}


def test_slow_worker_computes_so_many_times_as_long(cluster):
    run = train(regression(), dl.AsyncPS(), cluster.slow(worker=1, factor=5), 60)
    times = [run.trace.select("compute", worker=w) for w in range(2)]
    one, other = [float((rows["end_s"] - rows["start_s"]).min()) for rows in times]
    assert other >= 5 * 0.02 - 1e-9
    assert one < 2.5 * 0.02
    assert gradients(run)[0] > 3 * gradients(run)[1]


def test_slow_worker_is_so_from_a_moment_to_another(cluster):
    run = train(regression(), dl.AllReduce(), cluster.slow(worker=1, factor=10, from_s=0.2, to_s=0.6), 40)
    rows = run.trace.select("compute", worker=1)
    took = rows["end_s"] - rows["start_s"]
    assert 2 <= (took >= 0.2 - 1e-9).sum() <= 4
    assert took[0] < 0.1
    assert took[-1] < 0.1


def test_delayed_worker_waits_for_its_messages(cluster):
    run = train(countdown(), dl.SyncPS(), cluster.delay(worker=1, by_s=0.05), 10)
    rounds = run.applies["end_s"][run.applies["worker"] == 0]
    assert min(rounds[1:] - rounds[:-1]) >= 2 * 0.05, "there and back"


def test_throttled_worker_waits_for_the_bytes(cluster):
    """1.25e9 bytes/s, of which a ten-thousandth: 4 kB take 32 ms."""
    task = regression(model=lambda: torch.nn.Linear(5, 100).double(), loss=lambda out, y: (out.mean(1) ** 2).mean())
    run = train(task, dl.SyncPS(), cluster.throttle(worker=1, factor=1e-4), 10)
    rounds = run.applies["end_s"][run.applies["worker"] == 0]
    assert min(rounds[1:] - rounds[:-1]) >= 2 * 0.03


def test_partition_delays_and_loses_nothing(cluster):
    run = train(regression(), dl.AsyncPS(locking="server"), cluster.partition(worker=1, from_s=0.2, to_s=0.6), 60)
    ends = run.applies["end_s"][run.applies["worker"] == 1]
    assert max(ends[1:] - ends[:-1]) >= 0.35
    assert run.ledger.counts["lost"] == 0
    assert run.ledger.balances


def test_paused_worker_stands_still_and_goes_on(cluster):
    run = train(regression(), dl.AsyncPS(locking="server"), cluster.pause(worker=1, from_s=0.2, to_s=0.6), 60)
    ends = run.applies["end_s"][run.applies["worker"] == 1]
    assert max(ends[1:] - ends[:-1]) >= 0.35
    assert run.ledger.balances


def test_server_and_client_can_be_killed(cluster):
    for strategy, words in ((dl.AsyncPS(), {"server": 0}), (dl.InGraph(), {"client": 0})):
        (who,) = words
        with pytest.raises(dl.ProcessLost, match=f"^{who} 0 .*was lost"):
            train(regression(), strategy, cluster.kill(**words, at_s=0.1), 10**6)


def test_one_of_two_shards_that_dies_ends_the_run_with_its_name(cluster):
    with pytest.raises(dl.ProcessLost, match=r"^server 1 .*was lost"):
        train(regression(), dl.AsyncPS(num_servers=2), cluster.kill(server=1, at_s=0.1), 10**6)


def test_worker_dies_at_the_step_that_was_said(cluster):
    run = train(regression(), dl.AsyncPS(), cluster.kill(worker=1, at_step=5), 60)
    assert run.applies["step"][run.applies["worker"] == 1].tolist() == [0, 1, 2, 3, 4]


# On a live run


@pytest.fixture
def live(cluster):
    """A simulated one is so far ahead that it is slowed down by the work of a gradient."""
    live = dl.start(regression(), dl.AsyncPS(locking="server"), cluster, num_updates=10**6)
    until(lambda: live.version > 10)
    yield live
    live.kill()


def applied_by(live: dl.LiveRun, worker: int) -> int:
    return len(live.trace.select("apply", worker=worker))


def test_live_worker_can_be_killed_and_revived(live):
    live.kill(worker=1)
    until(lambda: len(live.trace.select("death")) == 1)
    live.revive(worker=1)
    until(lambda: len(live.trace.select("revive")) == 1)
    before = applied_by(live, 1)
    until(lambda: applied_by(live, 1) > before + 5)
    live.stop()
    run = live.wait()
    assert run.ledger.balances
    assert run.replay().params.equal(run.params)


def test_live_worker_can_be_slowed_down(live):
    live.slow(worker=1, factor=20)

    def is_slow() -> bool:
        rows = live.trace.select("compute", worker=1)
        return bool((rows["end_s"] - rows["start_s"] >= 0.4 - 1e-9).any())

    until(is_slow)
    live.stop()
    assert live.wait().ledger.balances


@pytest.mark.parametrize(
    "change",
    [
        lambda live: live.pause(worker=1, for_s=0.4),
        lambda live: live.partition(worker=1, for_s=0.4),
        lambda live: live.delay(worker=1, by_s=0.4, for_s=0.4),
    ],
)
def test_live_worker_can_be_held_up_for_a_while(live, change):
    change(live)

    def has_waited() -> bool:
        ends = live.trace.select("apply", worker=1)["end_s"]
        return len(ends) > 2 and max(ends[1:] - ends[:-1]) >= 0.35

    until(has_waited)
    live.stop()
    assert live.wait().ledger.balances


def test_live_change_is_checked(live):
    with pytest.raises(ValueError, match="there is no worker 7: this cluster has 0 to 1"):
        live.kill(worker=7)
    with pytest.raises(TypeError, match="slow has no option 'factors': did you mean 'factor'"):
        live.slow(worker=0, factors=2)
    with pytest.raises(ValueError, match="a pause ends: say for_s"):
        live.pause(worker=0)


def test_nothing_can_be_done_to_a_run_that_has_ended(cluster):
    live = dl.start(regression(), dl.AsyncPS(), cluster, num_updates=5)
    live.wait()
    with pytest.raises(dl.DistlabError, match="the run has ended"):
        live.slow(worker=1, factor=2)


def test_kill_without_a_name_ends_the_whole_run(cluster):
    live = dl.start(regression(), dl.AsyncPS(), cluster, num_updates=10**6)
    until(lambda: live.version > 0)
    start = time.monotonic()
    live.kill()
    assert live.launched.wait(0) is not None
    assert time.monotonic() - start < 60
