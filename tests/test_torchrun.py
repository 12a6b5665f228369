"""The ranks of torchrun: the same script, the same run on all of them, and what becomes of it when one is gone."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from ranks import PATH, Ranks, free_port, torchrun
from toys import DEADLINE_S, until

import distlab as dl
from distlab.clusters.line import Line, Listener, call
from distlab.clusters.member import CONTEXT
from distlab.errors import DistlabError

HOSTS = Path(__file__).parents[1] / "HOSTS.md"
FIXED = 7  # so many of these always end at the same bits
SAME = """
STRATEGIES = [
    dl.SingleWorker(), dl.InGraph(), dl.InGraph(place={"0": 0, "1": 1, "2": 2}), dl.SyncPS(), dl.SyncPS(num_servers=2),
    dl.AllReduce(algorithm="ring"), dl.LocalSGD(every=3), dl.AsyncPS(locking="server"), dl.Hogwild(),
    dl.AsyncPS(num_servers=2, apply_every=2), dl.SyncPS(num_backup_workers=1), dl.AllReduce(engine="ddp"),
    dl.WorkerApplies(), dl.BroadcastGradients(), dl.AllReduce(compression=dl.TopK(share=0.5), accumulate=2),
]
cluster = {"local": lambda: dl.LocalCluster(3), "simulated": lambda: dl.SimulatedCluster(3)}.get(
    os.environ.get("CLUSTER"), dl.TorchrunCluster
)()
for strategy in STRATEGIES:
    if strategy.real_only and isinstance(cluster, dl.SimulatedCluster):
        continue
    run = dl.train(toys.regression(), strategy, cluster, num_updates=12, progress=False)
    say(run=run.strategy, bits=run.params.numpy().tobytes().hex(), version=run.version, who=run.who_applied,
        balances=run.ledger.balances, times=float(run.trace.rows["end_s"].sum()))
    assert 0 < run.startup_s < 30
"""


def test_same_script_ends_at_the_same_bits_on_every_cluster_and_on_every_rank(tmp_path):
    alone = {}
    for name in ("local", "simulated"):
        (tmp_path / name).mkdir()
        with Ranks(SAME, 1, tmp_path / name, CLUSTER=name) as one:
            one.wait()
            alone[name] = one.said(0)
    every = torchrun(SAME, 3, tmp_path / "torchrun")
    assert every[0] == every[1] == every[2]
    assert [line["run"] for line in every[0]] == [line["run"] for line in alone["local"]]
    assert all(line["balances"] and line["version"] >= 12 for line in every[0])
    for lines in alone.values():
        assert [line["bits"] for line in lines[:FIXED]] == [line["bits"] for line in every[0][:FIXED]]


def test_page_and_command_line_run_under_torchrun_and_say_it_once(tmp_path):
    code, printed = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", HOSTS.read_text(), re.DOTALL)[0]
    (tmp_path / "page.py").write_text(code)
    assert started("page.py", folder=tmp_path) == printed
    said = started("-m", "distlab", "train", "--torchrun", "--num-updates", "20", folder=tmp_path)
    assert said.count("AsyncPS() on TorchrunCluster() of 2") == 1


def started(*command: str, folder: Path) -> str:
    """What torchrun prints, with two ranks."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    env = os.environ | {"PYTHONPATH": PATH}
    done = subprocess.run(
        [*torchrun, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


LIFE = """
cluster = dl.TorchrunCluster(compute_time_s=0.01)
task = toys.regression()
live = dl.start(task, dl.AllReduce(), cluster, num_updates=10**6)
if cluster.is_chief:
    toys.until(lambda: live.version > 5)
    live.remove_worker()
    live.add_worker()
    live.add_worker()
    toys.until(lambda: len(live.trace.where("join")) == 2)
    joined = live.version
    toys.until(lambda: live.version > joined + 5)
    live.stop()
run = live.wait()
places = sorted(e.batch for e in run.ledger.entries)
say(kinds=[e.kind for e in run.trace if e.kind in ("leave", "join")], once=places == list(range(len(places))),
    balances=run.ledger.balances, replays=run.replay().params.equal(run.params))

kept = sys.argv[1] + "/kept"
scenario = cluster.kill(server=1, at_s=0.3)
run = dl.train(task, dl.SyncPS(num_servers=3), scenario, num_updates=60, checkpoint_dir=kept, checkpoint_every=5,
               progress=False)
say(kinds=[e.kind for e in run.trace if e.kind in ("death", "restore")], version=run.version,
    bits=run.params.numpy().tobytes().hex(), replays=run.replay().params.equal(run.params))
run = dl.train(task, dl.SyncPS(), cluster, num_updates=70, progress=False,
               resume=dl.latest_checkpoint(kept) if cluster.is_chief else "seen by nobody")
say(version=run.version, began=run.begin.version, bits=run.params.numpy().tobytes().hex())
run = dl.train(task, dl.SyncPS(), cluster, num_updates=70, progress=False)
say(bits=run.params.numpy().tobytes().hex())
run = dl.train(task, dl.AsyncPS(), cluster.kill(worker=1, at_step=4), num_updates=60, progress=False)
say(kinds=[e.kind for e in run.trace if e.kind == "death"], version=run.version, lost=run.ledger.counts["lost"])
"""


def test_workers_come_go_and_die_and_runs_go_on_from_checkpoints(tmp_path):
    with Ranks(LIFE, 3, tmp_path) as ranks:
        ranks.wait()
        every = [ranks.said(rank) for rank in range(3)]
    assert every[0] == every[1] == every[2]
    elastic, back, resumed, whole, died = every[0]
    assert elastic["kinds"] == ["leave", "join", "join"]
    assert elastic["once"]
    assert elastic["balances"]
    assert elastic["replays"]
    assert back["kinds"] == ["death", "restore"]
    assert back["version"] == 60
    assert back["replays"]
    assert (resumed["began"], resumed["version"]) == (60, 70)
    assert resumed["bits"] == whole["bits"]
    assert died["kinds"] == ["death"]
    assert died["version"] == 60


ERRORS = """
cluster = dl.TorchrunCluster(failure_timeout_s=5.0)

def caught(task=None, strategy=None, **changes):
    try:
        told = {"num_updates": 20, "progress": False} | changes
        dl.train(task or toys.regression(), strategy or dl.AsyncPS(), cluster, **told)
        say(error="none", text="")
    except Exception as error:
        say(error=type(error).__name__, text=str(error), notes=getattr(error, "__notes__", []),
            cause=str(error.__cause__), run=hasattr(error, "run") and len(error.run.trace) > 0)

class OwnError(Exception):
    pass

def failing(kind):
    calls = []

    def loss(*batch):
        calls.append(1)
        if os.environ["RANK"] == "2" and len(calls) == 4:
            raise kind("in vain")
        return torch.nn.functional.mse_loss(*batch)

    return toys.regression(loss=loss)

caught(num_updates=0)
caught(num_updates=20 + (rank == 2))
caught(strategy=dl.SyncPS() if rank == 1 else dl.AllReduce())
caught(toys.regression(train=(torch.ones(61, 5).double(), torch.full((61, 1), float(rank == 2)).double())))
caught(failing(KeyError), dl.SyncPS())
caught(failing(OwnError), dl.AllReduce(on_too_few="stop"))
caught(toys.spoiled(float("nan")), dl.SyncPS())
caught(strategy=dl.SyncPS(num_backup_workers=1, late="cancel"))
caught(strategy=dl.InGraph(place={"0": 0, "2": 1}))
caught(resume=sys.argv[1] + "/nothing")
cluster.close()
caught()
cluster = dl.TorchrunCluster()
caught()
"""


def test_all_ranks_get_the_same_error(tmp_path):
    with Ranks(ERRORS, 3, tmp_path) as ranks:
        ranks.wait()
        every = [ranks.said(rank) for rank in range(3)]
    for line in zip(*every, strict=True):
        assert [said["error"] for said in line] == [line[0]["error"]] * 3
        assert [said["text"] for said in line] == [line[0]["text"]] * 3
    none, number, strategy, data, known, own, loss, cancel, place, resume, closed, well = every[1]
    assert "num_updates" in none["text"]
    assert "rank 2 calls for a run with num_updates=21, rank 0 with 20" in number["text"]
    assert "rank 1 calls for a run with strategy='SyncPS()', rank 0 with 'AllReduce()'" in strategy["text"]
    assert "rank 2 calls for a run with a checksum of its data=" in data["text"]
    assert "seed what it draws" in data["text"]
    assert (known["error"], known["text"]) == ("KeyError", "'in vain'")
    assert "raised on worker 2 (rank 2) at step 2" in known["notes"][0]
    assert 'raise kind("in vain")' in known["cause"]
    assert known["run"]
    assert (own["error"], own["text"]) == ("RemoteError", "__main__.OwnError: in vain") or "OwnError" in own["text"]
    assert loss["error"] == "NonFiniteLoss"
    assert "cannot be called off" in cancel["text"]
    assert "place needs 2 workers" in place["text"]
    assert resume["error"] == "FileNotFoundError"
    assert "there is no checkpoint in" in resume["text"]
    assert closed["error"] == "ClusterClosed"
    assert well["error"] == "none"


GONE = """
cluster = dl.TorchrunCluster(compute_time_s=0.01, failure_timeout_s=3.0)
live = dl.start(toys.regression(), eval(os.environ["STRATEGY"]), cluster, num_updates=int(os.environ["UPDATES"]))
toys.until(lambda: live.version > 5)
say(begun=True, children=[] if rank else live.launched.pids)
try:
    run = live.wait()
    say(version=run.version, deaths=[e.who for e in run.trace if e.kind == "death"], balances=run.ledger.balances)
except Exception as error:
    say(error=type(error).__name__, text=str(error))
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "silent"])
@pytest.mark.parametrize("strategy", ["dl.AsyncPS()", "dl.AllReduce()"])
def test_rank_that_is_gone_takes_its_worker_and_the_others_go_on(strategy, how, tmp_path):
    with Ranks(GONE, 3, tmp_path, STRATEGY=strategy, UPDATES="600") as ranks:
        until(lambda: all(ranks.said(rank) for rank in range(3)))
        os.kill(ranks.processes[2].pid, how)
        ranks.wait(0, 1)
        assert ranks.said(0)[1] == ranks.said(1)[1]
        assert ranks.said(0)[1] == {"version": 600, "deaths": ["worker 2"], "balances": True}
        why = "silent for 3 s" if how == signal.SIGSTOP else "rank 2 is gone"  # the host, or the process
        assert why in ranks.printed(0)


def test_run_ends_everywhere_when_the_rank_that_leads_it_is_gone(tmp_path):
    with Ranks(GONE, 3, tmp_path, STRATEGY="dl.AsyncPS()", UPDATES="1000000") as ranks:
        until(lambda: all(ranks.said(rank) for rank in range(3)))
        ranks.processes[0].kill()
        ranks.wait(1, 2)
        for rank in (1, 2):
            assert ranks.said(rank)[1]["error"] == "ProcessLost"
            assert "rank 0, which leads the run, is gone" in ranks.said(rank)[1]["text"]


def test_rank_that_ends_before_it_calls_is_named(tmp_path):
    body = """
    cluster = dl.TorchrunCluster()
    if rank == 1:
        sys.exit(0)
    try:
        dl.train(toys.regression(), dl.AsyncPS(), cluster, num_updates=5, progress=False)
    except dl.ProcessLost as error:
        say(text=str(error))
    """
    with Ranks(body, 2, tmp_path) as ranks:
        ranks.wait()
        assert "rank 1 is gone" in ranks.said(0)[0]["text"]


def test_one_rank_is_enough(tmp_path):
    body = """
    run = dl.train(toys.regression(), dl.SyncPS(), dl.TorchrunCluster(), num_updates=5, progress=False)
    say(version=run.version, clocks=run.clocks)
    """
    with Ranks(body, 1, tmp_path) as ranks:
        ranks.wait()
        assert ranks.said(0) == [{"version": 5, "clocks": {}}]


def test_without_torchrun_it_says_what_to_do(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(DistlabError, match=r"torchrun --nproc-per-node 4 script.py.*LocalCluster needs nothing"):
        dl.TorchrunCluster()


def test_hosts_that_share_no_memory_are_told_so(tmp_path):
    body = """
    cluster = dl.TorchrunCluster()
    try:
        dl.train(toys.regression(), dl.Hogwild(), cluster, num_updates=5, progress=False)
    except ValueError as error:
        say(text=str(error))
    """
    with Ranks(body, 2, tmp_path, LOCAL_WORLD_SIZE="1") as ranks:
        ranks.wait()
        assert "Hogwild() cannot run on several hosts: its workers share memory" in ranks.said(0)[0]["text"]


# The line between two ranks


@pytest.fixture
def lines():
    """A line's two ends, and what each has heard."""
    ours, theirs = CONTEXT.Pipe()
    made = [Line(ours, silence_s=0.6), Line(theirs, silence_s=0.6)]
    heard = [[], []]
    for line, words in zip(made, heard, strict=True):
        line.obey = lambda *said, words=words: words.append(said)
    yield made, heard
    for line in made:
        line.close("the test is over")


def test_line_carries_words_messages_and_plain_bytes(lines):
    (ours, theirs), heard = lines
    near, mine = CONTEXT.Pipe()
    far, yours = CONTEXT.Pipe()
    read, write = CONTEXT.Pipe(duplex=False)
    out, into = CONTEXT.Pipe(duplex=False)
    ours.carry(4, mine)
    theirs.carry(4, yours)
    theirs.carry(5, read, plain=True)
    ours.carry(5, into)
    for line in (ours, theirs):
        line.begin()
    ours.say("xylophone", 7, b"loud")
    near.send_bytes(b"to the far end" * 10_000)
    assert far.recv_bytes() == b"to the far end" * 10_000
    far.send_bytes(b"and back")
    assert near.recv_bytes() == b"and back"
    os.write(write.fileno(), b"printed")
    assert os.read(out.fileno(), 100) == b"printed"
    until(lambda: heard[1] == [("x", 7, b"loud")])
    far.close()
    with pytest.raises(EOFError):
        near.recv_bytes()


def test_line_whose_other_end_is_silent_ends_and_so_do_its_pipes(lines):
    (ours, _), _ = lines
    near, mine = CONTEXT.Pipe()
    ours.carry(1, mine)
    ended = threading.Event()
    ours.on_end = ended.set
    ours.begin()
    assert ended.wait(20)
    assert ours.ended == "it was silent for 0.6 s"
    with pytest.raises(EOFError):
        near.recv_bytes()
    with pytest.raises(DistlabError, match="silent"):
        ours.say("anything")


def test_line_stays_as_long_as_both_ends_give_signs_of_life(lines):
    (ours, theirs), _ = lines
    ours.begin()
    theirs.begin()
    near, mine = CONTEXT.Pipe()
    ours.carry(1, mine)
    assert not near.poll(1.5)
    assert not ours.ended
    assert not theirs.ended


def test_only_who_knows_the_key_is_let_in():
    welcome = []
    listener = Listener("127.0.0.1", b"key", welcome.append)
    silent = socket.create_connection(("127.0.0.1", listener.port))  # holds up nobody
    with pytest.raises(Exception, match="digest"):
        call(("127.0.0.1", listener.port), b"another")
    call(("127.0.0.1", listener.port), b"key").send_bytes(b"hello")
    until(lambda: len(welcome) == 1)
    assert welcome[0].recv_bytes() == b"hello"
    silent.close()
    listener.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", listener.port))
