"""The simulated world: one clock, one seed, one run; and the strategies cannot tell it from the real one."""

import math

import numpy as np
import pytest
import torch
from toys import regression

import distlab as dl
from distlab.fabric.base import Kind, Peer
from distlab.fabric.network import IDEAL
from distlab.fabric.simulated import SimulatedFabric, SimulatedLink, World
from distlab.trace import Buffer, Recorder

STRATEGIES = [
    dl.SingleWorker(),
    dl.InGraph(),
    dl.AsyncPS(),
    dl.SyncPS(),
    dl.AllReduce(),
    dl.Hogwild(),
    dl.WorkerApplies(),
    dl.BroadcastGradients(),
]


def run(strategy, cluster, num_updates=20, task=None):
    return dl.train(task or regression(), strategy, cluster, num_updates=num_updates, progress=False)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_same_seed_gives_the_same_bits_and_another_seed_does_not(strategy):
    one, two, other = (run(strategy, dl.SimulatedCluster(6, seed=seed)) for seed in (7, 7, 8))
    assert one.params.equal(two.params)
    assert one.trace.rows.tobytes() == two.trace.rows.tobytes()
    assert one.trace.rows.tobytes() != other.trace.rows.tobytes()


def test_64_asynchronous_workers_are_the_same_twice_to_the_bit():
    task = dl.tasks.digits(lr=0.01)
    one, two, other = (run(dl.AsyncPS(), dl.SimulatedCluster(64, seed=s), 200, task) for s in (7, 7, 8))
    assert one.params.equal(two.params)
    assert one.trace.rows.tobytes() == two.trace.rows.tobytes()
    assert not one.params.equal(other.params)


@pytest.mark.parametrize("strategy", [dl.SingleWorker(), dl.InGraph(), dl.SyncPS(), dl.AllReduce()], ids=repr)
def test_synchronous_strategy_ends_at_the_bits_of_the_real_world(two, strategy):
    real, simulated = run(strategy, two), run(strategy, dl.SimulatedCluster(2))
    assert real.params.equal(simulated.params)


def test_callers_random_numbers_and_threads_are_left_alone():
    torch.manual_seed(5)
    np.random.seed(5)
    expected = torch.rand(1), np.random.rand()
    threads = torch.get_num_threads()
    torch.manual_seed(5)
    np.random.seed(5)
    run(dl.AsyncPS(), dl.SimulatedCluster(3))
    assert (torch.rand(1), np.random.rand(), torch.get_num_threads()) == (*expected, threads)


def test_constant_times_add_up_on_an_ideal_network():
    made = run(dl.SyncPS(), dl.SimulatedCluster(3, compute=0.1, network=IDEAL, apply_time=0.02), 10)
    assert made.seconds == pytest.approx(10 * 0.12, abs=1e-9)


def test_a_slow_worker_is_slow_only_while_the_scenario_says_so():
    cluster = dl.SimulatedCluster(2, compute=0.1, network=IDEAL).slow(worker=1, factor=5, from_s=0.25, to_s=0.75)
    trace = run(dl.AsyncPS(), cluster, 40).trace
    rows = trace.select("compute", who="worker 1")
    times = np.round(rows["end_s"] - rows["start_s"], 6)
    slow = (rows["start_s"] > 0.25 - 1e-9) & (rows["start_s"] < 0.75 - 1e-9)
    assert set(times[slow]) == {0.5}
    assert set(times[~slow]) == {0.1}


def test_a_dead_worker_does_not_stop_an_asynchronous_run():
    made = run(dl.AsyncPS(), dl.SimulatedCluster(4, compute=0.1).kill(worker=0, at_s=1), 100)
    assert made.num_updates == 100
    assert [(e.who, e.start_s) for e in made.trace.where("death")] == [("worker 0", pytest.approx(1))]
    assert made.trace.select("compute", worker=0)["end_s"].max() <= 1
    assert made.ledger.balances


@pytest.mark.parametrize("strategy", [dl.SyncPS(), dl.AllReduce(on_too_few="stop"), dl.InGraph()], ids=repr)
def test_a_dead_worker_ends_a_synchronous_run_and_is_named(strategy):
    with pytest.raises(dl.ProcessLost, match=r"(worker|replica) 1 was lost at 1 s") as error:
        run(strategy, dl.SimulatedCluster(4, compute=0.1).kill(worker=1, at_s=1), 100)
    assert 5 < error.value.run.num_updates < 12


def test_an_asynchronous_run_without_any_worker_ends_with_an_error():
    cluster = dl.SimulatedCluster(2, compute=0.1).kill(worker=0, at_s=1).kill(worker=1, at_s=2)
    with pytest.raises(dl.PeerLost, match="the last worker was lost"):
        run(dl.AsyncPS(), cluster, 1000)


def test_a_partition_delays_and_loses_nothing():
    cluster = dl.SimulatedCluster(3, compute=0.1).partition(worker=2, from_s=0.5, to_s=3)
    made = run(dl.SyncPS(), cluster, 20)
    gaps = np.diff(np.unique(made.trace.select("apply")["end_s"]))
    assert gaps.max() > 2.4
    assert (gaps > 0.2).sum() == 1
    assert made.ledger.counts["applied"] == 60


def test_a_deadlock_says_who_waits_for_whom():
    cluster = dl.SimulatedCluster(2, compute=0.1).partition(worker=1, from_s=0.5)
    with pytest.raises(dl.Deadlock, match=r"worker 1 waits for the way to server 0") as error:
        run(dl.SyncPS(), cluster, 20)
    assert "worker 0 waits for a message from server 0" in str(error.value)


def test_timing_alone_has_the_same_times_as_with_gradients():
    def times(gradients):
        cluster = dl.SimulatedCluster(5, seed=3, gradients=gradients)
        return run(dl.AsyncPS(), cluster, 60).trace.select("apply")[["version", "worker", "end_s"]]

    assert times("none").tolist() == times("real").tolist()


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_timing_alone_works_for_every_strategy_and_moves_no_parameter(strategy):
    made = run(strategy, dl.SimulatedCluster(3, gradients="none"), 10)
    assert made.num_updates == 10
    assert made.model.state_dict().keys() == regression().build().state_dict().keys()
    assert all(p.equal(q) for p, q in zip(made.model.parameters(), regression().build().parameters(), strict=True))


def test_stepping_shows_a_worker_that_is_behind_the_server():
    live = dl.start(regression(), dl.AsyncPS(), dl.SimulatedCluster(3, seed=1), num_updates=30, paused=True)
    assert live.version == 0
    while live.version < 10:
        live.step()
    held = live.params()
    assert set(held) == {"server 0", "worker 0", "worker 1", "worker 2"}
    assert any(not held[f"worker {i}"].equal(held["server 0"]) for i in range(3))
    assert live.wait().num_updates == 30


def test_stop_of_a_paused_run_ends_it_with_what_it_has():
    live = dl.start(regression(), dl.SyncPS(), dl.SimulatedCluster(2), num_updates=1000, paused=True)
    while live.version < 5:
        live.step(10)
    live.stop()
    assert 5 <= live.wait().num_updates < 10


def test_only_simulated_runs_can_be_paused(two):
    with pytest.raises(ValueError, match="only a simulated run"):
        dl.start(regression(), dl.SyncPS(), two, num_updates=5, paused=True)


def linked():
    """A world of a server and a worker that nobody has told anything yet."""
    world, counts = World(Buffer(lambda rows: None)), {"server": 1, "worker": 1}
    for me in (Peer("server", 0), Peer("worker", 0)):
        record = Recorder(*me, world.events)
        world.nodes[me] = SimulatedFabric(world, me, counts, record, laws={}, changes=[], seed=[0])
        world.nics[me] = dl.fabric.network.Nic(dl.Network())
    world.nodes[Peer("server", 0)].connect(Peer("worker", 0))
    return world, world.nodes[Peer("server", 0)], world.nodes[Peer("worker", 0)]


def received_after_a_killed_receive():
    """Two tasks of the server receive on one link; the first is killed before the message comes."""
    world, server, worker = linked()
    got = []
    doomed = server.spawn(lambda: got.append(("doomed", server.link("worker", 0).recv().step)))
    world.at(0.1, lambda _: doomed.kill())
    world.at(0.2, lambda _: server.spawn(lambda: got.append(("second", server.link("worker", 0).recv().step))))
    world.at(0.3, lambda _: worker.spawn(lambda: worker.link("server", 0).send(Kind.PULL, step=42)))
    while world.running or world.env.now < 0.3:
        world.step()
    return got


def test_a_killed_receive_does_not_swallow_the_next_message():
    assert received_after_a_killed_receive() == [("second", 42)]


def test_a_link_that_hands_a_message_to_a_killed_receive_is_caught(monkeypatch):
    recv = SimulatedLink.recv

    def remembering(self):
        self.handed = [*getattr(self, "handed", []), self.node.world.current]
        return recv(self)

    def swallowing(self, message):
        if getattr(self, "handed", [None])[0] in self.node.tasks:
            self.inbox.append(message)
            self.wake()  # else: the first who asked is gone, and the message with it

    monkeypatch.setattr(SimulatedLink, "recv", remembering)
    monkeypatch.setattr(SimulatedLink, "deliver", swallowing)
    with pytest.raises(dl.Deadlock, match="server 0 waits for a message from worker 0"):
        received_after_a_killed_receive()


def test_a_message_is_a_copy_as_soon_as_it_is_posted():
    world, server, worker = linked()
    values, got = torch.ones(3), []
    worker.spawn(lambda: got.append(worker.link("server", 0).recv().values))
    server.spawn(lambda: (server.link("worker", 0).post(Kind.PARAMS, [values]), values.zero_()))
    while world.running:
        world.step()
    assert got[0].tolist() == [1, 1, 1]


def test_a_lock_is_had_by_one_task_at_a_time_in_the_order_of_asking():
    world, server, _ = linked()
    seen = []

    def hold(name):
        with server.lock("x"), server.lock("x"):  # a task may take it twice
            seen.append(f"{name} in")
            server.block(world.env.timeout(1.0), "time")
            seen.append(f"{name} out")

    for name in "abc":
        server.spawn(hold, name)
    while world.running:
        world.step()
    assert seen == ["a in", "a out", "b in", "b out", "c in", "c out"]


def test_incast_queues_at_the_receiving_nic():
    network = dl.Network(latency_s=0.0, bandwidth_bytes_per_s=1e5)
    for workers in (1, 2, 4, 8):
        made = run(dl.SyncPS(), dl.SimulatedCluster(workers, compute=1.0, network=network), 3)
        size = made.trace.select("push")["bytes"][0]
        last = np.diff(np.unique(made.trace.select("apply")["end_s"]))
        assert last == pytest.approx([1 + 2 * workers * size / 1e5 - (workers - 1) * size / 1e5] * 2, rel=0.35)
        assert last.min() > 1 + workers * size / 1e5


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: dl.SimulatedCluster(0), "num_workers must be at least 1"),
        (lambda: dl.SimulatedCluster(2, compute=-1.0), "seconds must be positive and finite, got -1.0"),
        (lambda: dl.SimulatedCluster(2, compute=math.nan), "seconds must be positive and finite, got nan"),
        (lambda: dl.SimulatedCluster(2, compute=[0.1]), "compute has 1 laws for 2 workers"),
        (lambda: dl.SimulatedCluster(2, gradients="nona"), "did you mean 'none'"),
        (lambda: dl.SimulatedCluster(2, netwrk=None), "did you mean 'network'"),
        (lambda: dl.SimulatedCluster(2).slow(worker=2, factor=2), "there is no worker 2: this cluster has 0 to 1"),
        (lambda: dl.SimulatedCluster(2).slow(worker=0, factor=0), "factor must be positive and finite, got 0"),
        (lambda: dl.SimulatedCluster(2).kill(worker=0, at_s=-1), "from 0 s or later"),
        (lambda: dl.SimulatedCluster(2).slow(worker=0, factor=2, from_s=3, to_s=2), "got 3 to 2"),
        (lambda: dl.Network(latency_s=-1.0), "latency_s must be 0 or more"),
        (lambda: dl.Network(bandwidth_bytes_per_s=0.0), "bandwidth_bytes_per_s must be positive"),
        (lambda: dl.laws.Pareto(alpha=1.0, least_s=1.0).mean_s, "infinite mean"),
        (lambda: dl.laws.Empirical([]), "at least one time"),
    ],
)
def test_bad_clusters_are_refused_with_the_case(make, text):
    with pytest.raises((ValueError, TypeError), match=text):
        make()


def test_a_chief_that_dies_before_it_sent_the_first_parameters_ends_the_run():
    network = dl.Network(latency_s=0.5)
    with pytest.raises(dl.PeerLost, match="worker 0 was lost"):
        run(dl.AsyncPS(), dl.SimulatedCluster(3, network=network).partition(worker=0).kill(worker=0, at_s=0.1), 10)
