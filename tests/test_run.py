"""What a run leaves: tables, sentences, a model, a folder."""

import json

import numpy as np
import pytest
import torch
from toys import regression, train, train_together

import distlab as dl
from distlab.errors import DistlabError
from distlab.fabric import Peer
from distlab.run import run_from
from distlab.strategies.base import Outcome
from distlab.trace import EVENT, Trace


@pytest.fixture(scope="module")
def task():
    return dl.tasks.digits()


@pytest.fixture(scope="module")
def run(task, two):
    return train_together(task, dl.AsyncPS(), two, 30)


@pytest.fixture
def folder(run, tmp_path):
    return run.save(tmp_path / "saved")


def test_saved_run_comes_back_as_it_was(run, folder, task):
    back = dl.load_run(folder, task)
    assert repr(back) == repr(run)
    assert back.trace.rows.tobytes() == run.trace.rows.tobytes()
    assert back.history.equals(run.history)
    assert back.summary() == run.summary()
    assert (back.version, back.steps, back.startup_s) == (run.version, run.steps, run.startup_s)


def test_saved_run_evaluates_to_the_same_numbers(run, folder, task):
    assert dl.load_run(folder, task).evaluate() == run.evaluate()
    assert run.evaluate()["accuracy"] > 0.5


def test_saved_buffers_come_back(two, tmp_path):
    model = lambda: torch.nn.Sequential(torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1)).double()  # noqa: E731
    run = train(regression(model=model), dl.SyncPS(), two, 5)
    back = dl.load_run(run.save(tmp_path), run.task)
    mine, theirs = run.model.state_dict(), back.model.state_dict()
    assert all(mine[name].equal(theirs[name]) for name in mine)
    assert mine["0.num_batches_tracked"] == 5


def test_saved_folder_holds_no_pickle(folder):
    assert sorted(p.name for p in folder.iterdir()) == ["model.safetensors", "run.json", "trace.npz"]
    np.load(folder / "trace.npz", allow_pickle=False)["rows"]


def test_loaded_run_without_its_task_has_tables_but_no_model(folder):
    back = dl.load_run(folder)
    assert len(back.history) == back.version
    with pytest.raises(DistlabError, match=r"load it with load_run\(path, task=..., strategy=...\)"):
        back.model  # noqa: B018


def test_missing_folder_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        dl.load_run(tmp_path / "nowhere")


@pytest.mark.parametrize("said", [{"name": "my project"}, {"format": 2}, ["a", "list"], 3])
def test_foreign_folder_is_refused(folder, said):
    (folder / "run.json").write_text(json.dumps(said))
    with pytest.raises(DistlabError, match="is not a run that this version of distlab can read"):
        dl.load_run(folder)


def test_foreign_table_is_refused(folder):
    np.savez(folder / "trace.npz", rows=np.zeros(3))
    with pytest.raises(DistlabError, match="does not hold a trace"):
        dl.load_run(folder)


def test_pickled_table_is_refused(folder):
    np.savez(folder / "trace.npz", rows=np.array([{"any": "object"}], dtype=object))
    with pytest.raises(ValueError, match="allow_pickle=False"):
        dl.load_run(folder)


def test_history_has_a_row_per_update(run):
    history = run.history
    assert history["update"].tolist() == list(range(1, run.version + 1))
    assert list(history.columns) == [
        "update", "time_s", "loss", "worker", "version_read", "staleness", "num_gradients",
    ]  # fmt: skip
    assert set(history["worker"]) == {0, 1}


def test_history_of_a_synchronous_run_names_no_single_worker(two):
    history = train(regression(), dl.SyncPS(), two, 4).history
    assert history["worker"].tolist() == [-1] * 4
    assert history["num_gradients"].tolist() == [2] * 4


def test_model_is_of_the_first_process_with_the_most_updates(task):
    outcomes = {Peer("worker", i): Outcome(torch.tensor([float(i)]), version) for i, version in enumerate((3, 5, 5))}
    made = run_from(dl.AllReduce(), "", task, outcomes, trace=Trace(np.zeros(0, EVENT)))
    assert (made.params.tolist(), made.version) == ([1.0], 5)


def test_summary_says_who_applied(run):
    summary = run.summary()
    assert summary["who_applied"] == "server 0"
    assert (summary["strategy"], summary["updates"]) == ("AsyncPS()", run.version)
    assert summary["bytes_sent"] == run.trace.rows["bytes"].sum() > 0


def test_summary_counts_the_workers_that_applied(two):
    assert train(regression(), dl.AllReduce(), two, 2).summary()["who_applied"] == "2 workers"
    run = train_together(regression(), dl.BroadcastGradients(), two, 3)
    assert run.summary()["who_applied"] == "server 0 and 2 workers"


def test_trace_is_in_order_of_time(run):
    ends = run.trace.rows["end_s"]
    assert (np.diff(ends) >= 0).all()
    assert run.trace.rows["start_s"].min() == 0


def test_trace_selects_by_kind_process_and_worker(run):
    mine = run.trace.where("push", who="worker 1")
    assert {e.who for e in mine} == {"worker 1"}
    assert len(mine) == len(run.trace.select("push", worker=1)) > 0


@pytest.mark.parametrize(
    ("asked", "told"),
    [({"kind": "aply"}, "no event of kind 'aply': there is compute"), ({"who": "server"}, "as in 'server 0'")],
)
def test_trace_refuses_what_it_does_not_know(run, asked, told):
    with pytest.raises(ValueError, match=told):
        run.trace.select(**asked)


def test_trace_as_a_table_has_the_fields_of_an_event(run):
    table = run.trace.table()
    assert len(table) == len(run.trace)
    assert set(table.columns) == set(dl.Event.__dataclass_fields__)


def test_trace_cannot_be_altered(run):
    with pytest.raises(ValueError, match="read-only"):
        run.trace.rows["version"][0] = 9


def test_evaluation_weighs_batches_by_their_size():
    task = regression(metrics={"ones": lambda outputs, targets: torch.ones(())})
    model, samples = task.build(), task.train
    whole, parts = (task.evaluate(model, samples, batch_size=n) for n in (61, 7))
    assert parts == pytest.approx(whole)
    assert parts["ones"] == pytest.approx(1.0)
    assert model.training


def test_evaluation_without_data_says_what_to_pass(two):
    run = train(regression(), dl.SingleWorker(), two, 2)
    with pytest.raises(ValueError, match=r"pass Task\(validation=...\) or evaluate\(samples=...\)"):
        run.evaluate()
