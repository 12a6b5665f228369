"""Runs for other tools: what Chrome's format and TensorBoard ask for, and nothing lost on the way."""

import importlib
import json
import sys
from collections import Counter

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from toys import regression, watchable

import distlab as dl
from distlab.__main__ import main
from distlab.trace import EVENT, Trace

MODULE = importlib.import_module("distlab.reports.event_files")  # its function hides it


@pytest.fixture(scope="module")
def run() -> dl.Run:
    cluster = dl.SimulatedCluster(3, compute=0.1, network=dl.Network(latency_s=0.01), apply_time=0.01)
    return dl.train(regression(), dl.SyncPS(num_backup_workers=1), cluster.slow(worker=2, factor=3), num_updates=12)


@pytest.fixture(scope="module")
def events(run, tmp_path_factory) -> list[dict]:
    path = run.export(tmp_path_factory.mktemp("export") / "trace.json")
    return json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))["traceEvents"]


def test_every_event_is_a_slice_in_the_row_of_its_process(run, events):
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(rows.values()) == sorted(run.trace.who)
    slices = [e for e in events if e["ph"] == "X"]
    assert Counter((rows[e["tid"]], e["name"]) for e in slices) == Counter((e.who, e.kind) for e in run.trace)
    assert all(e["dur"] > 0 and e["ts"] >= 0 and e["pid"] == 1 for e in slices)
    first, said = next(e for e in slices if e["name"] == "push"), next(iter(run.trace.where("push")))
    assert first["ts"] == pytest.approx(said.start_s * 1e6)
    assert first["args"]["bytes"] == said.bytes
    assert first["args"]["peer"] == "server 0"


def test_an_arrow_goes_from_each_gradient_that_was_used_to_its_apply(run, events):
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == len(run.trace.select("apply")) == 24
    slices = [e for e in events if e["ph"] == "X"]
    for number, start in starts.items():
        for end, kind in ((start, "compute"), (ends[number], "apply")):
            around = [s for s in slices if s["tid"] == end["tid"] and s["ts"] <= end["ts"] <= s["ts"] + s["dur"]]
            assert kind in {s["name"] for s in around}
        assert start["ts"] <= ends[number]["ts"]


def test_table_as_csv_comes_back(run, tmp_path):
    back = pd.read_csv(run.export(tmp_path / "trace.csv"), keep_default_na=False, na_values=[""])
    assert back["kind"].tolist() == [event.kind for event in run.trace]
    assert back["bytes"].sum() == run.bytes_sent


def test_what_cannot_be_exported_is_said(run, tmp_path):
    with pytest.raises(ValueError, match=r"ends in .json \(for Perfetto\) or .csv, or is a folder's"):
        run.export(tmp_path / "trace.txt")
    with pytest.raises(ValueError, match="nothing to export"):
        dl.reports.export(Trace(np.zeros(0, EVENT)), tmp_path / "trace.json")


@pytest.mark.parametrize("name", ["x.json", "x.csv", "board"])
def test_path_that_cannot_be_written_to_is_named_in_the_same_words(run, tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=rf"^path='.*file/{name}' cannot be written to: \[Errno \d+\] Not a directory"):
        run.export(tmp_path / "file" / name)


@pytest.mark.parametrize("name", ["x.json", "x.csv"])
def test_file_in_a_folder_that_is_not_there_is_refused(run, tmp_path, name):
    with pytest.raises(OSError, match=rf"^path='.*nowhere/{name}' cannot be written to: \[Errno \d+\] No such file"):
        run.export(tmp_path / "nowhere" / name)


def test_name_that_is_empty_is_refused(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="path='' names no folder"):
        run.export("")
    run.save("kept")
    done = CliRunner().invoke(main, ["trace", "kept", "--out", ""])
    assert (done.exit_code, "path='' names no folder" in done.output) == (1, True)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_case_of_an_ending_does_not_matter(run, tmp_path):
    assert json.loads(run.export(tmp_path / "X.JSON").read_text())["traceEvents"]
    assert len(pd.read_csv(run.export(tmp_path / "X.Csv"))) == len(run.trace)


def test_name_with_a_dot_may_be_a_folders(run, tmp_path):
    (tmp_path / "runs.old").mkdir()
    for name in ("lr0.1", "run.v2", "runs.old"):
        assert len(read(run, tmp_path / name).Scalars("train/loss")) == 12
    (tmp_path / "lr0.2").write_text("mine")
    with pytest.raises(OSError, match=r"lr0.2' cannot be written to: .*File exists"):
        run.export(tmp_path / "lr0.2")
    for name in ("trace.jsn", "trace.parquet", "trace.TXT"):
        with pytest.raises(ValueError, match=rf"'{name}': the name of a trace ends in .json"):
            run.export(tmp_path / name)


def test_command_writes_the_trace_of_a_saved_run(run, tmp_path):
    run.save(tmp_path / "kept")
    done = CliRunner().invoke(main, ["trace", str(tmp_path / "kept")], catch_exceptions=False)
    assert done.exit_code == 0
    assert "24 apply" in done.output
    assert "https://ui.perfetto.dev" in done.output
    assert json.loads((tmp_path / "kept" / "trace.json").read_text())["traceEvents"]
    done = CliRunner().invoke(main, ["trace", str(tmp_path / "kept"), "--out", str(tmp_path / "trace.png")])
    assert done.exit_code == 1
    assert "Perfetto" in done.output


def test_command_takes_a_file_of_a_saved_run_for_its_folder(run, tmp_path):
    run.save(tmp_path / "kept")
    for name in ("run.json", "trace.npz", "model.safetensors"):
        done = CliRunner().invoke(main, ["trace", str(tmp_path / "kept" / name)], catch_exceptions=False)
        assert (done.exit_code, f"written to {tmp_path / 'kept' / 'trace.json'}" in done.output) == (0, True)


@pytest.mark.parametrize("name", ["", "x.json", "x.csv"])
def test_command_says_which_folder_it_wants(run, tmp_path, name):
    path = tmp_path / name
    run.export(tmp_path / "x.json")
    run.export(tmp_path / "x.csv")
    done = CliRunner().invoke(main, ["trace", str(path)])
    assert done.exit_code == 1
    assert done.output == f"Error: '{path}' is not a folder that run.save, or train --save, has written a run to\n"


# TensorBoard


@pytest.fixture(scope="module")
def watched() -> dl.Run:
    """A run of three workers that goes on after one of them has died, with evaluations."""
    compute, network = dl.laws.Exponential(mean_s=0.1), dl.Network(latency_s=0.01)
    cluster = dl.SimulatedCluster(3, compute=compute, network=network).kill(worker=2, at_s=2)
    return dl.train(watchable(), dl.AsyncPS(), cluster, num_updates=95, evaluate_every=10, progress=False)


def read(run: dl.Run | Trace, folder) -> EventAccumulator:
    """What TensorBoard finds, all points of it."""
    folder = dl.reports.export(run, folder)
    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0}).Reload()


@pytest.fixture(scope="module")
def board(watched, tmp_path_factory) -> EventAccumulator:
    return read(watched, tmp_path_factory.mktemp("board") / "new" / "folder")


def links_of(board: EventAccumulator) -> list[str]:
    return [tag for tag in board.Tags()["scalars"] if tag.startswith("MB_sent/")]


def test_losses_are_there_by_version_and_at_the_times_of_the_run(watched, board):
    points, history = board.Scalars("train/loss"), watched.history
    assert [point.step for point in points] == history["update"].tolist()
    assert [point.value for point in points] == pytest.approx(history["loss"].tolist())
    passed = [point.wall_time - points[0].wall_time for point in points]
    assert passed == pytest.approx((history["time_s"] - history["time_s"][0]).tolist(), abs=1e-5)


def test_evaluations_are_those_of_the_chief(watched, board):
    assert len(watched.evaluations) > 5
    for name in ("loss", "error"):
        found = {point.step: point.value for point in board.Scalars(f"validation/{name}")}
        assert found == pytest.approx(dict(zip(watched.evaluations["version"], watched.evaluations[name], strict=True)))


def test_speed_times_time_is_the_number_of_updates(watched, board):
    points = board.Scalars("speed/updates_per_s")
    assert len(points) == 9
    each_s = watched.seconds / 9
    assert np.diff([point.wall_time for point in points]) == pytest.approx([each_s] * 8, abs=1e-5)
    made = [round(point.value * each_s, 3) for point in points]
    assert made == np.diff([0, *(point.step for point in points)]).tolist()
    assert points[-1].step == sum(made) == 95


def test_staleness_is_that_of_every_gradient_that_was_applied(watched, board):
    histograms = [point.histogram_value for point in board.Histograms("staleness/all")]
    found: Counter[int] = Counter()
    for histogram in histograms:
        limits = zip(histogram.bucket_limit, histogram.bucket, strict=True)
        found.update({int(limit - 0.5): int(count) for limit, count in limits if count})
        assert (histogram.min, histogram.num) == (
            min(int(h - 0.5) for h in histogram.bucket_limit),
            sum(histogram.bucket),
        )
    rows = watched.applies
    assert found == Counter((rows["version"] - 1 - rows["read"]).tolist())
    means = [point.value for point in board.Scalars("staleness/mean")]
    assert means == pytest.approx([histogram.sum / histogram.num for histogram in histograms])


def test_bytes_by_link_grow_to_all_that_was_sent(watched, board):
    pushed = board.Scalars("MB_sent/worker_2_to_server_0")
    rows = watched.trace.select("push", who="worker 2")
    assert pushed[-1].value == pytest.approx(rows["bytes"].sum() / 1e6)
    assert pushed[0].value < pushed[3].value == pushed[-1].value, "it has died"
    assert sum(board.Scalars(tag)[-1].value for tag in links_of(board)) == pytest.approx(watched.bytes_sent / 1e6)
    assert len(links_of(board)) == 6


def test_a_long_run_is_put_together(watched, board, tmp_path, monkeypatch):
    monkeypatch.setattr(MODULE, "MOST_POINTS", 30)
    monkeypatch.setattr(MODULE, "MOST_LINKS", 2)
    few = read(watched, tmp_path)
    points, history = few.Scalars("train/loss"), watched.history
    assert [point.step for point in points] == [*range(4, 95, 4), 95]
    assert points[1].value == pytest.approx(history["loss"][4:8].mean())
    sent = {tag: board.Scalars(tag)[-1].value for tag in links_of(board)}
    first, second, *rest = sorted(sent, key=sent.get, reverse=True)
    wanted = {first: sent[first], second: sent[second], "MB_sent/other_links": sum(sent[tag] for tag in rest)}
    assert {tag: few.Scalars(tag)[-1].value for tag in links_of(few)} == pytest.approx(wanted)


def test_many_ages_share_bars(watched, tmp_path, monkeypatch):
    monkeypatch.setattr(MODULE, "MOST_BARS", 2)
    board = read(watched, tmp_path)
    bars = [point.histogram_value for point in board.Histograms("staleness/all")]
    assert all(len(bar.bucket) <= 2 and sum(bar.bucket) == bar.num for bar in bars)
    assert all(bar.bucket_limit[0] > bar.min and bar.bucket_limit[-1] > bar.max for bar in bars)


def test_run_that_is_exported_again_is_there_once(watched, tmp_path):
    read(watched, tmp_path)
    (tmp_path / "events.out.tfevents.1.of.a.chief").write_bytes(b"")
    assert len(read(watched, tmp_path).Scalars("train/loss")) == 95
    assert len(list(tmp_path.iterdir())) == 2, "what a chief wrote stays"


@pytest.mark.parametrize("strategy", [dl.AllReduce(), dl.InGraph(), dl.Hogwild(), dl.SingleWorker()], ids=repr)
def test_every_kind_of_run_can_be_looked_at(strategy, tmp_path):
    cluster = dl.SimulatedCluster(1 if isinstance(strategy, dl.SingleWorker) else 3)
    run = dl.train(regression(), strategy, cluster, num_updates=4, progress=False)
    board = read(run, tmp_path)
    assert board.Scalars("speed/updates_per_s")[-1].step == len(board.Scalars("train/loss")) == 4
    sent = sum(board.Scalars(tag)[-1].value for tag in links_of(board))
    assert sent == pytest.approx(run.bytes_sent / 1e6)


def test_trace_alone_and_time_alone_can_be_looked_at(watched, tmp_path):
    board = read(watched.trace, tmp_path / "trace")
    assert len(board.Scalars("validation/loss")) == len(watched.evaluations)
    cluster = dl.SimulatedCluster(2, gradients="none")
    run = dl.train(regression(), dl.AsyncPS(), cluster, num_updates=5, progress=False)
    assert "train/loss" not in read(run, tmp_path / "time").Tags()["scalars"]
    nothing = watched.trace.where("compute")
    assert [point.value for point in read(nothing, tmp_path / "nothing").Scalars("speed/updates_per_s")] == [0.0]


def test_run_that_went_on_has_the_versions_that_it_made(tmp_path):
    kept = {"checkpoint_dir": tmp_path / "kept", "checkpoint_every": 10, "progress": False}
    dl.train(regression(), dl.SyncPS(), dl.SimulatedCluster(2), num_updates=20, **kept)
    run = dl.train(
        regression(), dl.SyncPS(), dl.SimulatedCluster(2), num_updates=50, resume=tmp_path / "kept", progress=False
    )
    assert [point.step for point in read(run, tmp_path / "board").Scalars("speed/updates_per_s")][-1] == 50


def test_missing_tensorboard_is_said(watched, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    told = r"path='.*board' needs tensorboard: pip install 'distlab\[tensorboard\]'"
    with pytest.raises(ModuleNotFoundError, match=told):
        watched.export(tmp_path / "board")


def test_folder_that_cannot_be_written_is_refused(watched, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot be written to: .*Not a directory"):
        watched.export(tmp_path / "file" / "board")


def test_command_writes_a_folder_for_tensorboard(run, tmp_path):
    run.save(tmp_path / "kept")
    words = ["trace", str(tmp_path / "kept"), "--out", str(tmp_path / "board")]
    done = CliRunner().invoke(main, words, catch_exceptions=False)
    assert done.exit_code == 0
    assert f"look at it with tensorboard --logdir {tmp_path / 'board'}" in done.output
    assert len(EventAccumulator(str(tmp_path / "board")).Reload().Scalars("train/loss")) == 12
