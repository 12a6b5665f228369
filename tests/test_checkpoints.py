"""Checkpoints: what goes on from one ends where it would have, and what is damaged is refused with its reason."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn
from toys import DEADLINE_S, nesterov, regression, until

import distlab as dl
from distlab import checkpoint as file
from distlab.__main__ import main
from distlab.checkpoint import Checkpoint, checkpoints, sealed, write
from distlab.data import Stream
from distlab.packing import apart, together

EVERY, END = 7, 20
KILLS = int(os.environ.get("DISTLAB_KILLS", "3"))  # of each strategy; `make kills` does 30


def dropout_and_batchnorm() -> nn.Module:
    """All that a worker alone has: random numbers and buffers."""
    layers = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 1)
    return nn.Sequential(*layers).double()


def task_of(optimizer: str = "adam") -> dl.Task:
    return regression(optimizer, model=dropout_and_batchnorm)


def train(strategy, cluster, folder=None, *, task=None, resume=None, every=EVERY, num_updates=END) -> dl.Run:
    kept = {} if folder is None else {"checkpoint_dir": folder, "checkpoint_every": every}
    task = task or task_of()
    return dl.train(task, strategy, cluster, num_updates=num_updates, resume=resume, progress=False, **kept)


DETERMINISTIC = [
    (dl.SingleWorker(), 1),
    (dl.SyncPS(), 3),
    (dl.SyncPS(num_servers=2), 3),
    (dl.SyncPS(num_servers=2, placement="greedy"), 2),
    (dl.AllReduce(), 3),
    (dl.AllReduce(accumulate=2, bucket_bytes=64), 2),
    (dl.AllReduce(compression=dl.TopK(share=0.3)), 3),
    (dl.InGraph(), 3),
    (dl.InGraph(place={"0": 0, "3": 1}), 2),
    (dl.AsyncPS(), 1),
    (dl.AsyncPS(locking="tensor", num_servers=2), 1),
    (dl.AsyncPS(compensation=dl.DelayCompensation(adaptive=True)), 1),
    (dl.LocalSGD(every=3), 2),
    (dl.LocalSGD(every=2, outer=nesterov), 2),
    (dl.Hogwild(), 1),
]


# The same bits


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize(("strategy", "num_workers"), DETERMINISTIC, ids=str)
def test_resumed_run_ends_at_the_bits_of_the_uninterrupted_one(strategy, num_workers, optimizer, tmp_path):
    task = task_of(optimizer)
    if isinstance(strategy, dl.LocalSGD):
        task = task.but(optimizer=lambda params: torch.optim.Adam(params, lr=0.003))
    cluster = dl.SimulatedCluster(num_workers)
    whole = train(strategy, cluster, task=task)
    saved = train(strategy, cluster, tmp_path, task=task)
    assert [path.name for path in checkpoints(tmp_path)] == [f"version-{v:08}" for v in (7, 14, 20)]
    resumed = train(strategy, cluster, task=task, resume=tmp_path / "version-00000007")
    for run in (saved, resumed, resumed.replay()):
        assert run.params.equal(whole.params)
        assert all(run.local[name].equal(whole.local[name]) for name in whole.local)
    assert resumed.ledger.balances
    assert set(resumed.applies["version"]) == set(range(8, 21))
    for name, held in whole.replicas.items():
        assert resumed.replicas[name].equal(held)


@pytest.mark.parametrize(("strategy", "num_workers"), DETERMINISTIC, ids=str)
def test_real_processes_go_on_from_a_checkpoint_too(strategy, num_workers, clusters, tmp_path):
    task = task_of("momentum").but(batch_size=8, seed=3)
    task = task.but(optimizer=lambda params: torch.optim.SGD(params, lr=0.002, momentum=0.9))
    whole = train(strategy, clusters[num_workers], tmp_path, task=task)
    resumed = train(strategy, clusters[num_workers], task=task, resume=tmp_path / "version-00000014")
    assert resumed.params.equal(whole.params)
    assert all(resumed.local[name].equal(whole.local[name]) for name in whole.local)
    loaded = dl.load_checkpoint(tmp_path, task)
    assert loaded.evaluate(task.train) == whole.evaluate(task.train)
    assert (loaded.version, loaded.params.equal(whole.params)) == (END, True)
    for held in whole.replicas.values():
        assert held.equal(loaded.params)


def test_settings_that_an_optimizer_changes_itself_go_on(tmp_path):
    class Shrinking(torch.optim.SGD):
        """It counts in its settings, as schedule-free optimizers do."""

        def step(self, closure=None):
            for group in self.param_groups:
                group["weight_decay"] = group["weight_decay"] * 0.9
            return super().step()

    task = task_of().but(optimizer=lambda params: Shrinking(params, lr=0.01, weight_decay=0.5))
    whole = train(dl.AllReduce(), dl.SimulatedCluster(2), tmp_path, task=task)
    resumed = train(dl.AllReduce(), dl.SimulatedCluster(2), task=task, resume=tmp_path / "version-00000007")
    assert resumed.params.equal(whole.params)


def test_data_that_draws_random_numbers_goes_on(tmp_path):
    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, index):
            x = torch.randn(5, dtype=torch.float64) + index
            return x, x.sum(0, keepdim=True) * random.random()

    task = task_of("sgd").but(train=Noisy(), optimizer=lambda params: torch.optim.SGD(params, lr=1e-4))
    for strategy in (dl.SyncPS(), dl.AllReduce(), dl.InGraph()):
        folder = tmp_path / strategy.name
        whole = train(strategy, dl.SimulatedCluster(2), folder, task=task)
        resumed = train(strategy, dl.SimulatedCluster(2), task=task, resume=folder / "version-00000007")
        assert resumed.params.equal(whole.params)


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import distlab as dl
import test_checkpoints as here

strategy, num_workers = here.KILLED[int(sys.argv[1])]
with dl.LocalCluster(num_workers, compute_time_s=0.002) as cluster:
    run = dl.train(
        here.task_of(), strategy, cluster, num_updates=150, progress=False, checkpoint_dir=sys.argv[2],
        checkpoint_every=5, resume=dl.latest_checkpoint(sys.argv[2]),
    )
print(run.params.numpy().tobytes().hex())
"""
KILLED = [(dl.SyncPS(num_servers=2), 2), (dl.AllReduce(), 2), (dl.InGraph(), 2), (dl.AsyncPS(), 1)]


@pytest.mark.parametrize("number", range(len(KILLED)), ids=lambda number: str(KILLED[number][0]))
def test_script_that_is_killed_again_and_again_ends_at_the_same_bits(number, tmp_path):
    """`resume=latest_checkpoint(folder)` makes it a script that can be cut off anywhere."""
    strategy, num_workers = KILLED[number]
    whole = train(strategy, dl.SimulatedCluster(num_workers), num_updates=150)
    draw, parts = random.Random(number), [sys.executable, "-W", "ignore", "-c"]
    script = [*parts, SCRIPT.format(tests=str(Path(__file__).parent)), str(number), str(tmp_path)]
    for _ in range(KILLS):
        before = dl.latest_checkpoint(tmp_path)
        with subprocess.Popen(script, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            until(lambda: process.poll() is not None or dl.latest_checkpoint(tmp_path) != before)  # noqa: B023
            time.sleep(draw.uniform(0, 0.15))  # a random moment
            process.send_signal(signal.SIGKILL)
    done = subprocess.run(script, capture_output=True, text=True, timeout=DEADLINE_S)
    last = done.stdout.strip().splitlines()
    if done.returncode:  # it had come to its end before the last kill
        assert "holds 150 updates already" in done.stderr
        assert dl.load_checkpoint(tmp_path).params.equal(whole.params)
    else:
        assert last[-1] == whole.params.numpy().tobytes().hex()


# Every gradient once


def batches_in(run: dl.Run, *, up_to: int = 1 << 60) -> set[tuple[int, int]]:
    used = [(e.worker, e.batch) for e in run.ledger.entries if e.fate == "applied" and e.version <= up_to]
    assert len(used) == len(set(used))
    return set(used)


@pytest.mark.parametrize(
    "strategy",
    [
        dl.AsyncPS(),
        dl.AsyncPS(apply_every=2),
        dl.AsyncPS(max_clock_gap=1),
        dl.SyncPS(num_backup_workers=1, requeue=True),
    ],
    ids=repr,
)
def test_no_gradient_is_lost_or_doubled_where_workers_are_at_different_places(strategy, tmp_path):
    """Those that were on their way when the checkpoint was made are computed again."""
    cluster = dl.SimulatedCluster(3, compute=dl.laws.Gamma(mean_s=0.1, variation=0.6))
    first = train(strategy, cluster, tmp_path, num_updates=60, every=25)
    second = train(strategy, cluster, resume=tmp_path / "version-00000025", num_updates=60)
    before, after = batches_in(first, up_to=25), batches_in(second)
    assert not before & after
    for worker in range(3):
        used = sorted(place for w, place in before | after if w == worker)
        assert used == list(range(worker, 3 * len(used), 3))


@pytest.mark.parametrize("strategy", [dl.AsyncPS(), dl.AsyncPS(locking="server"), dl.AsyncPS(num_servers=2)], ids=repr)
def test_real_workers_compute_every_batch_once(strategy, three, tmp_path):
    counts = [9, 12, 7]
    told = {"num_batches": counts, "progress": False}
    for number in range(4):
        folder = tmp_path / str(number)
        first = dl.train(task_of(), strategy, three, **told, checkpoint_dir=folder, checkpoint_every=4)
        oldest = dl.load_checkpoint(checkpoints(folder)[0])
        before = batches_in(first, up_to=oldest.version)
        after = batches_in(dl.train(task_of(), strategy, three, **told, resume=oldest.path))
        assert not before & after
        assert before | after == {(worker, 3 * k + worker) for worker in range(3) for k in range(counts[worker])}


def test_others_in_number_share_what_is_left_of_the_data(tmp_path):
    """Three workers have used 7 rounds of 3 batches: ranks begin with the 22nd, others with a round of their own."""
    train(dl.SyncPS(num_servers=2), dl.SimulatedCluster(3), tmp_path)
    kept = dl.load_checkpoint(tmp_path / "version-00000007")
    for strategy, first in ((dl.SyncPS(), 20), (dl.SyncPS(num_servers=3), 20), (dl.AllReduce(), 21)):
        run = train(strategy, dl.SimulatedCluster(2), resume=kept.path)
        assert sorted(e.batch for e in run.ledger.entries) == list(range(first, first + 26))
        assert run.num_updates == 13
        assert run.replay().params.equal(run.params)


def test_state_is_cut_anew_for_another_number_of_servers(tmp_path):
    """Three shards, then one, then two: as long as the workers are the same, the bits are too."""
    whole = train(dl.SyncPS(), dl.SimulatedCluster(2))
    train(dl.SyncPS(num_servers=3), dl.SimulatedCluster(2), tmp_path / "a", num_updates=7)
    train(dl.SyncPS(), dl.SimulatedCluster(2), tmp_path / "b", resume=tmp_path / "a", num_updates=14)
    last = train(dl.SyncPS(num_servers=2), dl.SimulatedCluster(2), resume=tmp_path / "b")
    assert last.params.equal(whole.params)


def test_strategy_can_be_another_where_the_optimizer_is_the_same(tmp_path):
    whole = train(dl.AllReduce(algorithm="rank 0"), dl.SimulatedCluster(2), tmp_path)
    other = train(dl.SyncPS(), dl.SimulatedCluster(2), resume=tmp_path / "version-00000014")
    assert torch.allclose(other.params, whole.params, rtol=0, atol=1e-12)


def test_dead_worker_holds_up_no_checkpoint(tmp_path):
    cluster = dl.SimulatedCluster(3).kill(worker=1, at_step=4)
    first = train(dl.AsyncPS(), cluster, tmp_path, num_updates=60, every=20)
    assert [path.name[-2:] for path in checkpoints(tmp_path)] == ["20", "40", "60"]
    second = train(dl.AsyncPS(), dl.SimulatedCluster(3), resume=tmp_path / "version-00000040", num_updates=60)
    assert min(e.batch for e in second.ledger.entries if e.worker == 1) == 3 * 4 + 1
    assert not batches_in(first, up_to=40) & batches_in(second)


def test_rank_that_has_died_and_come_back_is_in_the_checkpoint(tmp_path):
    cluster = dl.SimulatedCluster(3).kill(worker=0, at_step=9).revive(worker=0, at_s=1.2)
    run = train(dl.AllReduce(), cluster, tmp_path)
    assert dl.load_checkpoint(tmp_path).params.equal(run.params)
    assert len(dl.load_checkpoint(tmp_path).own) == 3


def test_run_that_is_stopped_can_go_on(two, tmp_path):
    live = dl.start(task_of(), dl.AllReduce(), two, num_updates=10**6, checkpoint_dir=tmp_path)
    until(lambda: live.version > 10)
    live.stop()
    run = live.wait()
    assert dl.load_checkpoint(tmp_path).version == run.version
    whole = train(dl.AllReduce(), two, num_updates=run.version + 5)
    assert train(dl.AllReduce(), two, resume=tmp_path, num_updates=run.version + 5).params.equal(whole.params)


# Going back to the last one


HOLDERS = [
    (dl.SyncPS(), 2, {"server": 0}),
    (dl.SyncPS(num_servers=2), 3, {"server": 1}),
    (dl.SyncPS(num_backup_workers=1), 3, {"server": 0}),
    (dl.AsyncPS(), 1, {"server": 0}),
    (dl.AsyncPS(num_servers=2, locking="server"), 3, {"server": 1}),
    (dl.InGraph(), 2, {"client": 0}),
    (dl.InGraph(place={"0": 0, "3": 1}), 2, {"client": 0}),
]
IN_STEP = ("SyncPS()", "SyncPS(num_servers=2)", "InGraph", "AsyncPS()")


def check_that_it_went_back(run: dl.Run, strategy: dl.Strategy, num_workers: int, who: dict[str, int]) -> None:
    (back,) = run.trace.where("restore")
    assert back.who == " ".join(f"{role} {index}" for role, index in who.items())
    assert 0 < back.version == run.begin.version < 60 == run.version
    assert sorted(set(run.applies["version"])) == list(range(1, 61))
    assert run.ledger.balances
    assert run.replay().params.equal(run.params)
    made = run.trace.select("apply", "client 0" if "client" in who else "server 0")
    again = len(made) - len(np.unique(made[["version", "worker", "step"]]))
    assert again <= run.ledger.counts["lost"], "and what was on its way"
    if repr(strategy).startswith(IN_STEP):
        assert run.params.equal(train(strategy, dl.SimulatedCluster(num_workers), num_updates=60).params)


@pytest.mark.parametrize(("strategy", "num_workers", "who"), HOLDERS, ids=str)
def test_run_goes_back_to_its_last_checkpoint_when_a_holder_dies(strategy, num_workers, who, tmp_path):
    cluster = dl.SimulatedCluster(num_workers)
    ends = train(strategy, cluster, num_updates=60).applies["end_s"]
    run = train(strategy, cluster.kill(**who, at_s=float(ends[len(ends) * 2 // 3])), tmp_path, num_updates=60)
    check_that_it_went_back(run, strategy, num_workers, who)


@pytest.mark.parametrize(("strategy", "num_workers", "who"), HOLDERS, ids=str)
def test_so_do_real_processes(strategy, num_workers, who, tmp_path, capsys):
    with dl.LocalCluster(num_workers, compute_time_s=0.01) as cluster:
        live = dl.start(task_of(), strategy, cluster, num_updates=60, checkpoint_dir=tmp_path, checkpoint_every=EVERY)
        until(lambda: dl.latest_checkpoint(tmp_path) is not None and live.version > 12)
        live.kill(**who)
        check_that_it_went_back(live.wait(), strategy, num_workers, who)
    assert "killed by SIGKILL; all begin anew at the checkpoint of version " in capsys.readouterr().out


def test_run_goes_back_to_where_it_went_on_from_if_there_is_nothing_newer(tmp_path):
    train(dl.SyncPS(), dl.SimulatedCluster(2), tmp_path / "a")
    cluster = dl.SimulatedCluster(2).kill(server=0, at_s=0.35)
    run = train(dl.SyncPS(), cluster, tmp_path / "b", resume=tmp_path / "a", num_updates=40, every=100)
    assert [row.version for row in run.trace.where("restore")] == [20]
    assert run.params.equal(train(dl.SyncPS(), dl.SimulatedCluster(2), num_updates=40).params)


def test_chief_evaluates_on_when_the_run_has_gone_back(tmp_path):
    task, cluster = task_of().but(validation=task_of().train), dl.SimulatedCluster(2).kill(server=0, at_s=1.5)
    told = {"checkpoint_dir": tmp_path, "checkpoint_every": 5, "evaluate_every": 5, "progress": False}
    run = dl.train(task, dl.SyncPS(), cluster, num_updates=20, **told)
    assert run.evaluations["version"].tolist() == [0, 5, 10, 10, 15, 20]
    assert run.evaluations["loss"].nunique() == 5


def test_run_that_is_to_stop_stops_though_it_goes_back(two, tmp_path):
    told = {"num_updates": 10**6, "checkpoint_dir": tmp_path, "checkpoint_every": EVERY}
    live = dl.start(task_of(), dl.SyncPS(), two, **told)
    until(lambda: dl.latest_checkpoint(tmp_path) is not None)
    server = live.launched.pids["server 0"]
    os.kill(server, signal.SIGSTOP)  # so that it does not hear it
    live.stop()
    os.kill(server, signal.SIGKILL)
    run = live.wait()
    assert run.version == run.trace.select("restore")["version"].max()


def test_kill_ends_a_run_that_is_going_back(two, tmp_path):
    live = dl.start(task_of(), dl.SyncPS(), two, num_updates=10**6, checkpoint_dir=tmp_path, checkpoint_every=EVERY)
    for _ in range(5):
        before = dl.latest_checkpoint(tmp_path)
        until(lambda before=before: dl.latest_checkpoint(tmp_path) != before)
        live.kill(server=0)
    live.kill()
    with pytest.raises(dl.ProcessLost, match=r"the run was ended by LiveRun.kill\(\)"):
        live.wait()


def test_second_death_goes_back_again(tmp_path):
    cluster = dl.SimulatedCluster(2).kill(server=0, at_s=1.5).kill(server=0, at_s=2.5)
    run = train(dl.SyncPS(), cluster, tmp_path, num_updates=40)
    assert len(run.trace.select("restore")) == 2
    assert run.ledger.balances
    assert run.params.equal(train(dl.SyncPS(), dl.SimulatedCluster(2), num_updates=40).params)


def test_run_that_gets_no_further_ends(tmp_path):
    """Or it would go back to the same checkpoint for ever."""
    cluster = dl.SimulatedCluster(2)
    for number in range(9):
        cluster = cluster.kill(server=0, at_s=1.5 + number / 4)
    with pytest.raises(dl.ProcessLost, match="server 0 was lost"):
        train(dl.SyncPS(), cluster, tmp_path, num_updates=60)


@pytest.mark.parametrize("kind", [dl.SimulatedCluster, dl.LocalCluster])
def test_holder_that_dies_before_there_is_a_checkpoint_ends_the_run(kind, tmp_path):
    with kind(2) as cluster, pytest.raises(dl.ProcessLost, match="server 0"):
        train(dl.SyncPS(), cluster.kill(server=0, at_s=0.0), tmp_path)


def test_error_in_your_own_code_does_not_go_back(tmp_path):
    def schedule(version):
        if version == 9:
            raise ZeroDivisionError("here")
        return 1.0

    with pytest.raises(ZeroDivisionError):
        train(dl.SyncPS(), dl.SimulatedCluster(2), tmp_path, task=task_of().but(lr_schedule=schedule))


# The files


def test_tensors_bear_the_names_of_the_model(tmp_path):
    from safetensors.torch import load_file

    run = train(dl.AllReduce(), dl.SimulatedCluster(2), tmp_path)
    tensors = load_file(tmp_path / "version-00000020" / "tensors.safetensors")
    for name, parameter in run.model.named_parameters():
        assert tensors[f"params/{name}"].equal(parameter)
    assert tensors["optimizer.exp_avg/0.weight"].shape == (6, 5)


def test_five_newest_are_kept(tmp_path):
    train(dl.SingleWorker(), dl.SimulatedCluster(1), tmp_path, every=2)
    assert [path.name[-2:] for path in checkpoints(tmp_path)] == ["12", "14", "16", "18", "20"]
    assert len(list(tmp_path.iterdir())) == 5


def test_folder_that_vanishes_is_said_and_training_goes_on(two, tmp_path, capsys):
    folder = tmp_path / "kept"
    live = dl.start(task_of(), dl.AllReduce(), two, num_updates=400, checkpoint_dir=folder, checkpoint_every=100)
    shutil.rmtree(folder)
    assert live.wait().version == 400
    assert f"a checkpoint could not be written to {folder}: FileNotFoundError" in capsys.readouterr().out


@pytest.mark.parametrize(
    "value", [None, True, 3, 2.5, float("inf"), "x", [], {1: [2, {"a": None}]}, [[], {}]], ids=repr
)
def test_plain_values_come_back_from_json(value):
    assert together(json.loads(json.dumps(apart(value, {}))), {}) == value


# What is refused


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    train(dl.SyncPS(num_servers=2), dl.SimulatedCluster(2), folder)
    return folder / "version-00000014"


def damaged(data: bytes, draw: random.Random) -> bytes:
    """`data` with one thing wrong: a bit, a byte, some bytes missing, some more, or some twice."""
    at, other = draw.randrange(len(data)), draw.randrange(1, 64)
    return draw.choice(
        [
            data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :],
            data[:at] + bytes([data[at] ^ draw.randrange(1, 256)]) + data[at + 1 :],
            data[:at],
            data[:at] + data[at + other :],
            data + draw.randbytes(other),
            data[:at] + data[at : at + other] + data[at:],
            b"",
        ]
    )


def test_300_damaged_checkpoints_are_refused_with_the_reason(good, tmp_path):
    draw, reasons = random.Random(0), set()
    for _ in range(300):
        folder = tmp_path / "x" / good.name
        shutil.copytree(good, folder)
        name = draw.choice(["checkpoint.json", "tensors.safetensors"])
        (folder / name).write_bytes(damaged((good / name).read_bytes(), draw))
        with pytest.raises(dl.BadCheckpoint, match=f"{good.name} cannot be used: .*{name}") as caught:
            dl.load_checkpoint(folder)
        reasons.add(str(caught.value.__cause__).split(" (")[0])
        shutil.rmtree(tmp_path / "x")
    assert reasons == {
        "checkpoint.json does not hold a checkpoint",
        "checkpoint.json has been altered",
        "tensors.safetensors is not the file that checkpoint.json tells of",
    }


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": 2}, "it has format 2, this version of distlab reads 1"),
        ({"names": ["a"]}, "its parts do not fit together"),
        ({"shapes": [[1]]}, "its parts do not fit together"),
        ({"dtype": "nonsense"}, "its parts do not fit together"),
        ({"vectors": ["params", "more"]}, "its parts do not fit together"),
        ({"rest": {"dict": []}}, "its parts do not fit together"),
        ({"rest": 3}, "its parts do not fit together"),
    ],
    ids=str,
)
def test_words_that_do_not_fit_are_refused_though_their_digest_does(good, tmp_path, change, reason):
    shutil.copytree(good, tmp_path / good.name)
    words = json.loads((good / "checkpoint.json").read_text())
    del words["digest"]
    (tmp_path / good.name / "checkpoint.json").write_text(sealed(words | change))
    with pytest.raises(dl.BadCheckpoint, match=reason):
        dl.load_checkpoint(tmp_path / good.name)


def test_missing_file_and_the_last_good_one_are_named(good, tmp_path):
    shutil.copytree(good.parent, tmp_path, dirs_exist_ok=True)
    newest = dl.latest_checkpoint(tmp_path)
    (newest / "tensors.safetensors").unlink()
    with pytest.raises(dl.BadCheckpoint, match=f"{newest} cannot be used: .*; the newest good one .*{good.name}") as e:
        dl.load_checkpoint(tmp_path)
    assert "No such file" in str(e.value)
    assert good.exists()


def test_half_written_checkpoint_is_none(good, tmp_path):
    """What was being written when the power went has another name."""
    shutil.copytree(good, tmp_path / f"{file.MAKING}half")
    assert dl.latest_checkpoint(tmp_path) is None
    with pytest.raises(FileNotFoundError, match="there is no checkpoint in"):
        dl.load_checkpoint(tmp_path)
    train(dl.SyncPS(), dl.SimulatedCluster(2), tmp_path, num_updates=1)
    assert [path.name for path in tmp_path.iterdir()] == ["version-00000001"]


@pytest.mark.usefixtures("no_process_starts")
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"task": regression()}, dl.BadCheckpoint, "is of another task: its names"),
        ({"task": task_of().but(seed=1)}, dl.BadCheckpoint, "is of another task: its seed 0, this task's 1"),
        (
            {"task": task_of("sgd")},
            ValueError,
            r"has the state of torch.optim.adam.Adam, under SyncPS.*by torch.optim.sgd",
        ),
        ({"num_updates": 14}, ValueError, "holds 14 updates already: .* larger than that, got 14"),
        ({"resume": 3}, TypeError, "resume must be the path of a checkpoint, got 3"),
        ({"resume": "nowhere"}, FileNotFoundError, "there is no checkpoint in nowhere"),
        ({"strategy": dl.WorkerApplies()}, ValueError, "cannot go on from a checkpoint: it is a misreading"),
        ({"checkpoint_every": 3}, ValueError, "checkpoint_every=3 needs a folder"),
        ({"checkpoint_dir": "x", "checkpoint_every": 0}, ValueError, "checkpoint_every must be at least 1"),
        ({"checkpoint_dir": 3}, TypeError, "checkpoint_dir must be the path of a folder, got 3"),
        ({"checkpoint_dir": __file__}, OSError, "cannot be written to"),
    ],
    ids=str,
)
def test_what_cannot_be_is_said_before_any_process_starts(good, two, monkeypatch, tmp_path, changes, error, message):
    monkeypatch.chdir(tmp_path)
    usual = {"task": task_of(), "strategy": dl.SyncPS(), "cluster": two, "num_updates": 20, "resume": good}
    with pytest.raises(error, match=message):
        dl.start(**usual | changes)


@pytest.mark.usefixtures("no_process_starts")
def test_checkpoints_of_another_run_are_not_written_over(good, two):
    for resume in (None, good):
        with pytest.raises(ValueError, match="does not go on from, the newest version-00000020: say"):
            dl.start(task_of(), dl.SyncPS(), two, num_updates=20, checkpoint_dir=good.parent, resume=resume)
    with pytest.raises(ValueError, match="there are no checkpoints of WorkerApplies"):
        dl.start(task_of(), dl.WorkerApplies(), two, num_updates=20, checkpoint_dir="new")


def test_what_is_written_is_what_is_read(good, tmp_path):
    read = dl.load_checkpoint(good)
    again = dl.load_checkpoint(write(read, tmp_path))
    assert repr(replace(again, path="")) == repr(replace(read, path=""))
    assert again.params.equal(read.params)
    assert (tmp_path / good.name / file.WORDS).read_bytes() == (good / file.WORDS).read_bytes()
    assert isinstance(again, Checkpoint)


def test_position_is_that_of_the_stream(good):
    kept = dl.load_checkpoint(good).own["worker 1"]["place"]
    stream = Stream(task_of().train, batch_size=4, index=1, num_workers=2)
    assert (kept["position"], stream.indices(kept["position"]).tolist()) == (14, stream.indices(14).tolist())


def test_command_line_goes_on(tmp_path):
    words = ["train", "--num-workers", "2", "--strategy", "sync-ps", "--checkpoint-every", "4"]
    for more in (["--num-updates", "6"], ["--num-updates", "9", "--resume", str(tmp_path)]):
        done = CliRunner().invoke(main, [*words, "--checkpoint-dir", str(tmp_path), *more])
        assert done.exit_code == 0, done.output
    assert [path.name[-1:] for path in checkpoints(tmp_path)] == ["4", "6", "8", "9"]
