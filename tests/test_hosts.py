"""Three hosts: network namespaces with 5 ms and 100 Mbit/s between them, and a clock of its own for each.

What a loopback cannot show is measured here: a ring beats a star, by as much as the closed forms say.
"""

import time
from statistics import median

import pytest
from hosts import AHEAD_S, Hosts, why_not
from ranks import Ranks
from test_torchrun import FIXED, SAME
from toys import DEADLINE_S, until

from distlab.theory import all_reduce_s, bytes_per_nic

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"no network namespaces here: {why_not()}")
SIZE, LATENCY_S, BITS_PER_S = 3, 5e-3, 100e6
NUM_BYTES = 300_000 * 4  # of the model below
SLOW_S = 3 * DEADLINE_S  # everything takes longer here


@pytest.fixture
def hosts():
    with Hosts(SIZE, latency_s=LATENCY_S, bits_per_s=BITS_PER_S) as made:
        yield made


def ranks_on(hosts: Hosts, body: str, folder, **env: str) -> Ranks:
    """A rank on each host."""
    return Ranks(body, SIZE, folder, host=hosts.address(0), before=hosts.on, LOCAL_WORLD_SIZE="1", **env)


MEASURED = """
cluster = dl.TorchrunCluster()

def task():
    x = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0))
    return dl.Task(
        model=lambda: torch.nn.Linear(1000, 300, bias=False), loss=torch.nn.functional.mse_loss,
        train=(x, x[:, :300].clone()), batch_size=4, optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
    )

def sent(run):
    '''By each host, of what the trace knows: a message from a process to another host's.'''
    counts = [0] * 3
    for event in run.trace:
        if event.kind == "reduce":
            counts[event.worker] += event.bytes
        elif event.kind == "push" or (event.kind == "pull" and event.version):  # the first parameters come once
            worker, server = event.worker, int(event.peer.split()[1]) % 3
            if worker != server:
                counts[worker if event.kind == "push" else server] += event.bytes
    return [count / run.version for count in counts]

for strategy in (
    dl.AllReduce(algorithm="ring", overlap=False), dl.AllReduce(algorithm="rank 0", overlap=False), dl.SyncPS(),
    dl.SyncPS(num_servers=3),
):
    for num_updates in (4, 14):
        run = dl.train(task(), strategy, cluster, num_updates=num_updates, progress=False)
        first = {}
        for version, end_s in run.applies[["version", "end_s"]].tolist():
            first[version] = min(end_s, first.get(version, end_s))
        ends = [first[version] for version in sorted(first)]
        say(sent=sent(run), step_s=[b - a for a, b in zip(ends, ends[1:])])
        toys.until(lambda: rank or os.path.exists(f"{folder}/{len(open(f'{folder}/0.json').readlines())}"))
"""


def quiet(hosts: Hosts) -> list[int]:
    """What each host has sent, once nothing but signs of life is sent any more."""
    last = hosts.sent()

    def is_quiet() -> bool:
        nonlocal last
        time.sleep(0.3)  # a while in which something would be sent
        before, last = last, hosts.sent()
        return sum(last) - sum(before) < 5_000

    until(is_quiet, within_s=SLOW_S)
    return last


def test_ring_and_star_move_the_bytes_and_take_the_time_that_the_closed_forms_say(hosts, tmp_path):
    """A star's hub receives and sends the model twice; a ring's ranks, and shards on the workers' hosts, 4/3 of it."""
    with ranks_on(hosts, MEASURED, tmp_path) as ranks:
        on_the_wire, before = [], hosts.sent()
        for number in range(1, 9):
            until(lambda number=number: len(ranks.said(0)) == number, within_s=SLOW_S)
            now = quiet(hosts)
            on_the_wire.append([b - a for a, b in zip(before, now, strict=True)])
            before = now
            (tmp_path / str(number)).touch()
        ranks.wait(within_s=SLOW_S)
        said = ranks.said(0)[1::2]
    frames = [[(b - a) / 10 for a, b in zip(*on_the_wire[i : i + 2], strict=True)] for i in range(0, 8, 2)]
    ring, star, server, shards = [median(line["step_s"]) for line in said]
    fair, hub, leaf = bytes_per_nic(NUM_BYTES, SIZE), 2 * NUM_BYTES, NUM_BYTES
    for line, wire, expected in zip(
        said, frames, ([fair] * 3, [hub, leaf, leaf], [hub, leaf, leaf], [fair] * 3), strict=True
    ):
        assert line["sent"] == pytest.approx(expected, rel=1e-3)
        assert wire == pytest.approx(expected, rel=0.05)  # and what TCP and the reports of events add
    byte_s = 8 / BITS_PER_S
    ring_s = all_reduce_s("ring", NUM_BYTES, SIZE, latency_s=LATENCY_S, bandwidth_bytes_per_s=1 / byte_s)
    star_s = 2 * (LATENCY_S + (SIZE - 1) * NUM_BYTES * byte_s)
    print(f"\nring {ring:.3f} s, not {ring_s:.3f}; star {star:.3f} s, server {server:.3f} s, not {star_s:.3f};")
    print(f"shards {shards:.3f} s; bytes on the wire {frames}")
    assert ring == pytest.approx(ring_s, rel=0.2)
    assert star == pytest.approx(star_s, rel=0.2)
    assert (SIZE - 1) * NUM_BYTES * byte_s < server < 1.2 * star_s  # who is answered first pushes while others are
    assert ring < star / 2
    assert shards < star


def test_every_strategy_runs_on_three_hosts_as_on_one(hosts, tmp_path):
    body = SAME.replace("for strategy in STRATEGIES:", "for strategy in [s for s in STRATEGIES if not s.one_host]:")
    body += "    say(clocks=run.clocks, seconds=run.seconds, first=float(run.trace.rows['start_s'].min()))\n"
    (tmp_path / "one").mkdir()
    with Ranks(body, 1, tmp_path / "one", CLUSTER="local") as one:
        one.wait()
        alone = one.said(0)[::2]
    with ranks_on(hosts, body, tmp_path) as ranks:
        ranks.wait(within_s=SLOW_S)
        every = [ranks.said(rank) for rank in range(SIZE)]
    assert every[0] == every[1] == every[2]
    runs, facts = every[0][::2], every[0][1::2]
    assert [line["run"] for line in runs] == [line["run"] for line in alone]
    assert [line["bits"] for line in runs[:FIXED]] == [line["bits"] for line in alone[:FIXED]]
    assert all(line["balances"] and line["version"] >= 12 for line in runs)
    for line in facts:
        assert line["first"] == 0
        assert line["seconds"] < SLOW_S  # and no thousand seconds, as the clocks are apart
        for rank in (1, 2):
            ahead_s, error_s = line["clocks"][f"rank {rank}"]
            assert LATENCY_S <= error_s < 4 * LATENCY_S
            assert abs(ahead_s + AHEAD_S * rank) <= error_s


CUT = """
cluster = dl.TorchrunCluster(compute_time_s=0.02, failure_timeout_s=float(os.environ["TIMEOUT_S"]))
strategy = eval(os.environ["STRATEGY"])
live = dl.start(toys.regression(), strategy, cluster, num_updates=10**6)
if cluster.is_chief:
    while not os.path.exists(sys.argv[1] + "/stop"):
        say(version=live.version, deaths=len(live.trace.where("death")))
        time.sleep(0.05)
    live.stop()
try:
    run = live.wait()
    say(kinds=[(e.kind, e.who) for e in run.trace if e.kind == "death"], balances=run.ledger.balances,
        replays=isinstance(strategy, dl.AsyncPS) or run.replay().params.equal(run.params))
except Exception as error:
    say(error=type(error).__name__, text=str(error))
"""


def version(ranks: Ranks) -> int:
    """How far the run is, as rank 0 says."""
    return max((line.get("version", 0) for line in ranks.said(0)), default=0)


@pytest.mark.parametrize("strategy", ["dl.AllReduce()", "dl.AsyncPS()"])
def test_host_that_is_cut_off_for_10_s_comes_back_and_nothing_is_lost(strategy, hosts, tmp_path):
    with ranks_on(hosts, CUT, tmp_path, STRATEGY=strategy, TIMEOUT_S="40") as ranks:
        until(lambda: version(ranks) > 10, within_s=SLOW_S)
        hosts.cut(2)
        time.sleep(10)  # is what is asked: for so long
        at = version(ranks)
        hosts.mend(2)
        until(lambda: version(ranks) > at + 50, within_s=SLOW_S)
        (tmp_path / "stop").touch()
        ranks.wait(within_s=SLOW_S)
        last = [ranks.said(rank)[-1] for rank in range(SIZE)]
    assert last[0] == last[1] == last[2] == {"kinds": [], "balances": True, "replays": True}


@pytest.mark.parametrize("strategy", ["dl.AllReduce()", "dl.AsyncPS()"])
def test_host_that_stays_away_is_taken_for_dead_and_the_others_go_on(strategy, hosts, tmp_path):
    with ranks_on(hosts, CUT, tmp_path, STRATEGY=strategy, TIMEOUT_S="3") as ranks:
        until(lambda: version(ranks) > 10, within_s=SLOW_S)
        hosts.cut(2)
        until(lambda: any(line.get("deaths") for line in ranks.said(0)), within_s=SLOW_S)
        at = version(ranks)
        until(lambda: version(ranks) > at + 20, within_s=SLOW_S)
        hosts.mend(2)  # too late: it has ended by itself
        (tmp_path / "stop").touch()
        ranks.wait(within_s=SLOW_S)
        last = [ranks.said(rank)[-1] for rank in range(SIZE)]
        assert "worker 2 (rank 2) was lost" in ranks.printed(0)
        assert "rank 2 is gone: it was silent for 3 s" in ranks.printed(0)
    assert last[0] == last[1] == {"kinds": [["death", "worker 2"]], "balances": True, "replays": True}
    assert last[2]["error"] == "ProcessLost"
    assert "rank 0, which leads the run, is gone: it was silent for 3 s" in last[2]["text"]
