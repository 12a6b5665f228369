"""Three hosts: network namespaces with 5 ms and 100 Mbit/s between them, and a clock of its own for each.

What a loopback cannot show is seen here: a ring beats a star, clocks are apart, and a host vanishes without a word.
"""

import importlib.util
import time
from pathlib import Path

import pytest
from hosts import AHEAD_S, Hosts, why_not
from ranks import Ranks
from test_torchrun import FIXED, SAME
from toys import DEADLINE_S, until

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.skipif(bool(WHY_NOT), reason=f"no network namespaces here: {WHY_NOT}"),
    pytest.mark.timeout(400),
]
SIZE, LATENCY_S, BITS_PER_S = 3, 5e-3, 100e6
OUTPUTS = 300  # of the model that is measured: it has a thousand times as many parameters
SPEC = importlib.util.spec_from_file_location("hosts_benchmark", Path(__file__).parents[1] / "benchmarks" / "hosts.py")
BENCHMARK = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(BENCHMARK)
SLOW_S = 3 * DEADLINE_S  # everything takes longer here


@pytest.fixture
def hosts():
    with Hosts(SIZE, latency_s=LATENCY_S, bits_per_s=BITS_PER_S) as made:
        yield made


def ranks_on(hosts: Hosts, body: str, folder, **more) -> Ranks:
    """A rank on each host."""
    return Ranks(body, SIZE, folder, host=hosts.address(0), before=hosts.on, LOCAL_WORLD_SIZE="1", **more)


def test_ring_and_star_move_the_bytes_that_the_closed_forms_say_and_the_ring_wins(tmp_path):
    """A star's hub receives and sends the model twice; a ring's ranks, and shards on the workers' hosts, 4/3 of it.
    By how much the ring wins, `benchmarks/hosts.py` says: here other tests may run at the same time."""
    ring, star, server, shards = BENCHMARK.measure(LATENCY_S, BITS_PER_S, OUTPUTS, tmp_path)
    forms = BENCHMARK.expected(4000 * OUTPUTS, LATENCY_S, BITS_PER_S)
    for one, form in ((ring, "ring"), (star, "star"), (server, "star"), (shards, "ring")):
        assert one.sent == pytest.approx(forms[form][0], rel=1e-3)
        assert one.wire == pytest.approx(forms[form][0], rel=0.05)  # and what TCP and the reports of events add
    assert ring.step_s < star.step_s


def test_every_strategy_runs_on_three_hosts_as_on_one(hosts, tmp_path):
    body = SAME.replace("for strategy in STRATEGIES:", "for strategy in [s for s in STRATEGIES if not s.one_host]:")
    body += "    say(clocks=run.clocks, seconds=run.seconds, first=float(run.trace.rows['start_s'].min()))\n"
    (tmp_path / "one").mkdir()
    with Ranks(body, 1, tmp_path / "one", CLUSTER="local") as one:
        one.wait()
        alone = one.said(0)[::2]
    with ranks_on(hosts, body, tmp_path, by_torchrun=True) as ranks:
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
        assert "silent for 3 s" in ranks.printed(0)  # the process, or the host
    assert last[0] == last[1] == {"kinds": [["death", "worker 2"]], "balances": True, "replays": True}
    assert last[2]["error"] == "ProcessLost"
    assert "rank 0, which leads the run, is gone: it was silent for 3 s" in last[2]["text"]
