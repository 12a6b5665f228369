"""The chief evaluates and logs on the way, and nothing about the run changes."""

import random
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from toys import refused, regression, spoiled, watchable

import distlab as dl
from distlab.__main__ import main
from distlab.roles.updater import Params, Updater
from distlab.strategies.base import Layout, Outcome, worker_of
from distlab.trace import KINDS

SYNCHRONOUS = [dl.SingleWorker(), dl.SyncPS(), dl.AllReduce()]
WORLDS = ["simulated", "real"]


def layers() -> nn.Module:
    """Buffers that move, dropout, and a factory that draws a number."""
    np.random.rand()
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1)).double()


def jittered(model, inputs):
    """A forward pass, evaluation's too, that draws from every source of random numbers."""
    return model(inputs) * (1 + torch.rand(()) + np.random.rand() + random.random())


def run(strategy, cluster=None, task=None, num_updates=9, evaluate_every=3, **options) -> dl.Run:
    parts = task or watchable(model=layers), strategy, cluster or dl.SimulatedCluster(2)
    return dl.train(*parts, num_updates=num_updates, evaluate_every=evaluate_every, progress=False, **options)


def figures(evaluations) -> dict[int, dict[str, float]]:
    """version -> what `evaluate` returned."""
    return {row.pop("version"): row for row in evaluations.drop(columns="time_s").to_dict("records")}


def scalars(log_dir) -> dict[str, dict[int, float]]:
    """tag -> version -> value, from the event files of a folder."""
    read = EventAccumulator(str(log_dir)).Reload()
    return {tag: {e.step: e.value for e in read.Scalars(tag)} for tag in read.Tags()["scalars"]}


@pytest.fixture(params=WORLDS)
def cluster(request, two):
    return two if request.param == "real" else dl.SimulatedCluster(2)


@pytest.mark.parametrize("strategy", [*SYNCHRONOUS, dl.InGraph()], ids=repr)
def test_multiples_are_evaluated_and_the_last_figures_are_those_of_the_run(strategy, cluster):
    watched = run(strategy, cluster, watchable())
    assert watched.evaluations.columns.tolist() == ["version", "time_s", "loss", "error"]
    assert watched.evaluations["version"].tolist() == [0, 3, 6, 9]
    assert figures(watched.evaluations)[9] == watched.evaluate()


def test_asynchronous_chief_evaluates_the_first_version_it_holds_from_each_multiple_on():
    watched = run(dl.AsyncPS(), dl.SimulatedCluster(4), num_updates=60, evaluate_every=10)
    held = watched.trace.select("compute", who="worker 0")["read"].tolist()
    firsts = sorted({version // 10: version for version in sorted(held, reverse=True)}.values())
    evaluated = watched.evaluations["version"].tolist()
    assert [version for version in evaluated if version < 60] == firsts
    assert any(version % 10 for version in firsts), "with four workers, it must miss some"


@pytest.mark.parametrize("strategy", SYNCHRONOUS, ids=repr)
def test_figures_are_those_of_a_run_that_ended_there(strategy):
    task = watchable(model=layers)
    evaluated = figures(run(strategy, task=task).evaluations)
    assert evaluated[0] == task.evaluate(task.build())
    assert evaluated[6] == run(strategy, task=task, num_updates=6, evaluate_every=None).evaluate()


@pytest.mark.parametrize("strategy", [dl.AsyncPS(), dl.SyncPS(), dl.InGraph(), dl.WorkerApplies()], ids=repr)
def test_simulated_run_does_not_change_by_a_bit(strategy, tmp_path):
    task = watchable(model=layers, forward=jittered, lr_schedule=lambda version: random.random())
    watched = run(strategy, dl.SimulatedCluster(3), task, 20, 2, log_dir=tmp_path)
    alone = run(strategy, dl.SimulatedCluster(3), task, 20, None)
    assert watched.params.equal(alone.params)
    assert all(watched.local[name].equal(alone.local[name]) for name in alone.local)
    rest = watched.trace.rows[~np.isin(watched.trace.rows["kind"], [KINDS.index("evaluate"), KINDS.index("metric")])]
    assert rest.tobytes() == alone.trace.rows.tobytes(), "not even time"
    assert len(watched.evaluations) > 5


def test_real_run_does_not_change_by_a_bit(two, tmp_path):
    task = watchable(model=layers, forward=jittered)
    watched = run(dl.AllReduce(), two, task, log_dir=tmp_path)
    alone = run(dl.AllReduce(), two, task, evaluate_every=None)
    assert watched.params.equal(alone.params)
    assert all(watched.local[name].equal(alone.local[name]) for name in alone.local)


def test_strategy_of_ones_own_has_a_chief_for_nothing():
    class Alone(dl.Strategy):
        def layout(self, num_workers):
            return Layout({"worker": 1})

        def run(self, fabric, job):
            worker = worker_of(fabric, job)
            updater = Updater(fabric, job.task, worker.flat)
            for batch in worker.batches():
                version = updater.apply(worker.gradient(Params(worker.flat.params, updater.version), batch))
                worker.ended = version == job.num_updates
            return Outcome(worker.flat.params, version)

    assert run(Alone()).evaluations["version"].tolist() == [0, 3, 6, 9]


@pytest.mark.parametrize("strategy", [dl.SyncPS(), dl.InGraph()], ids=repr)
def test_event_files_hold_what_the_chief_saw(strategy, cluster, tmp_path):
    task = watchable(lr_schedule=lambda version: 0.5**version)
    watched = run(strategy, cluster, task, log_dir=tmp_path / "new" / "folder")
    (file,) = (tmp_path / "new" / "folder").iterdir()
    read = scalars(file)
    assert set(read) == {"train/loss", "train/lr_factor", "validation/loss", "validation/error"}
    seen = watched.trace.where("loss") or watched.trace.where("compute", who="worker 0")
    assert read["train/loss"] == pytest.approx({e.version if e.version >= 0 else e.step: e.loss for e in seen})
    assert read["train/lr_factor"] == {version: 0.5**version for version in range(9)}
    for name in ("loss", "error"):
        assert read[f"validation/{name}"] == pytest.approx(
            {v: f[name] for v, f in figures(watched.evaluations).items()}
        )


def test_failed_run_keeps_losses_and_closes_its_event_file(tmp_path):
    with pytest.raises(dl.NonFiniteLoss, match="worker 1 at step 3") as error:
        run(dl.SyncPS(), task=spoiled(float("nan"), validation=regression().train), evaluate_every=2, log_dir=tmp_path)
    left = error.value.run
    assert left.evaluations.columns.tolist() == ["version", "time_s", "loss"]
    assert left.evaluations["version"].tolist() == [0, 2]
    assert list(scalars(tmp_path)["train/loss"]) == [e.version for e in left.trace.where("compute", who="worker 0")]
    assert not [thread for thread in threading.enumerate() if "Writer" in type(thread).__name__]


def test_killed_chief_leaves_its_losses_and_the_next_worker_takes_over():
    watched = run(dl.AsyncPS(), dl.SimulatedCluster(3, compute=0.1).kill(worker=0, at_s=1.0), num_updates=60)
    (became,) = watched.trace.where("chief")
    assert became.who == "worker 1"
    assert 1.0 < became.end_s < 1.3
    assert set(watched.trace.where("evaluate").who) == {"worker 0", "worker 1"}
    assert watched.evaluations["version"].max() >= 57
    assert watched.evaluations["loss"].notna().all()
    assert (watched.evaluations["time_s"] < 1.0).any()
    assert watched.evaluations["error"].notna().all(), "metrics of a lost chief are in its trace"


def test_metrics_are_events_of_the_trace(cluster):
    watched = run(dl.SyncPS(), cluster, watchable())
    metrics = list(watched.trace.where("metric"))
    assert [(e.worker, e.version) for e in metrics] == [(0, 0), (0, 3), (0, 6), (0, 9)]
    assert [e.loss for e in metrics] == watched.evaluations["error"].tolist()
    assert metrics[-1].loss == watched.evaluate()["error"]
    assert str(metrics[1]).startswith("worker 0: metric 0 of version 3 was ")
    from_the_trace_alone = replace(watched, judged=())
    assert from_the_trace_alone.evaluations.equals(watched.evaluations)


def test_run_that_computes_nothing_has_evaluations_without_figures():
    watched = run(dl.SyncPS(), dl.SimulatedCluster(2, gradients="none"))
    assert watched.evaluations["version"].tolist() == [0, 3, 6, 9]
    assert watched.evaluations[["loss", "error"]].isna().all(axis=None)


def test_run_without_evaluation_has_an_empty_table():
    table = run(dl.SyncPS(), evaluate_every=None).evaluations
    assert table.columns.tolist() == ["version", "time_s", "loss"]
    assert table.empty


def test_saved_evaluations_come_back(tmp_path):
    watched = run(dl.SyncPS())
    assert dl.load_run(watched.save(tmp_path)).evaluations.equals(watched.evaluations)


def test_command_line_prints_the_evaluations(tmp_path):
    words = ["train", "--strategy", "sync-ps", "--num-workers", "2", "--num-updates", "20", "--evaluate-every", "10"]
    done = CliRunner().invoke(main, [*words, "--log-dir", str(tmp_path)])
    first, *rows = [line.split() for line in done.output.splitlines()][-6:-2]
    assert first == ["version", "time_s", "loss", "accuracy"]
    assert [row[0] for row in rows] == ["0", "10", "20"]
    assert set(scalars(tmp_path)["validation/accuracy"]) == {0, 10, 20}


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"evaluate_every": 0}, ValueError, "evaluate_every must be at least 1, got 0"),
        ({"evaluate_every": 1.5}, TypeError, "evaluate_every must be a whole number, got 1.5"),
        ({"log_dir": 3}, TypeError, r"log_dir must be the path of a folder, got 3 \(int\)"),
    ],
)
@pytest.mark.usefixtures("no_process_starts")
def test_bad_option_is_refused(options, error, told):
    refused(error, told, task=watchable(), num_updates=5, **options)


@pytest.mark.usefixtures("no_process_starts")
def test_evaluation_without_data_is_refused():
    told = r"evaluate_every=3, but this task has no validation data: pass Task\(validation=...\)"
    refused(ValueError, told, task=regression(), num_updates=5, evaluate_every=3)


@pytest.mark.usefixtures("no_process_starts")
def test_metric_that_is_called_as_a_column_is_refused():
    task = watchable(metrics={"version": nn.L1Loss()})
    refused(ValueError, "a metric cannot be called 'version' here", task=task, num_updates=5, evaluate_every=3)


@pytest.mark.usefixtures("no_process_starts")
def test_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    told = "log_dir='.*file/a' cannot be written to: .*Not a directory"
    refused(OSError, told, num_updates=5, log_dir=tmp_path / "file" / "a")
    refused(ValueError, "log_dir='' names no folder", num_updates=5, log_dir="")


@pytest.mark.usefixtures("no_process_starts")
def test_missing_tensorboard_is_said(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    told = r"log_dir='.*' needs tensorboard: pip install 'distlab\[tensorboard\]'"
    refused(ModuleNotFoundError, told, num_updates=5, log_dir=tmp_path)
