"""Traces for other tools: what Chrome's format asks for, and nothing lost on the way."""

import json
from collections import Counter

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from toys import regression

import distlab as dl
from distlab.__main__ import main
from distlab.trace import EVENT, Trace


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
    with pytest.raises(ValueError, match=r"ends in .json \(for Perfetto\) or .csv"):
        run.export(tmp_path / "trace.txt")
    with pytest.raises(ValueError, match="nothing to export"):
        dl.reports.export(Trace(np.zeros(0, EVENT)), tmp_path / "trace.json")


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
