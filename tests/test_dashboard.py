"""The dashboard of a live run and the picture in it, without a browser."""

import asyncio
import base64
import io
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from toys import Watched, spoiled

import distlab as dl
from distlab import plots
from distlab.dashboard import Dashboard, dashboard
from distlab.plots.overview import Overview
from distlab.plots.tally import Tally, waiting
from distlab.trace import EVENT, KINDS, ROLES, Trace

TASK = dl.tasks.digits()
STRATEGIES = [
    dl.SingleWorker(),
    dl.InGraph(),
    dl.AsyncPS(),
    dl.SyncPS(num_servers=2),
    dl.AllReduce(),
    dl.LocalSGD(every=4),
    dl.Hogwild(),
    dl.WorkerApplies(),
    dl.BroadcastGradients(),
]


def simulated(strategy: dl.Strategy, num_updates: int = 40, num_workers: int = 3) -> dl.Run:
    num_workers = 1 if isinstance(strategy, dl.SingleWorker) else num_workers
    cluster = dl.SimulatedCluster(num_workers)
    return dl.train(TASK, strategy, cluster, num_updates=num_updates, progress=False)


def until(true: Callable[[], bool], timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end, "this never came true"
        time.sleep(0.01)


def size(png: bytes) -> tuple[int, int]:
    return Image.open(io.BytesIO(png)).size


def row(kind: str, who: tuple[str, int], **numbers: float) -> np.ndarray:
    made = np.zeros(1, EVENT)
    made["kind"], made["role"], made["index"] = KINDS.index(kind), ROLES.index(who[0]), who[1]
    made["peer_role"], made["peer"], made["worker"] = -1, -1, -1
    for name, value in numbers.items():
        made[name] = value
    return made


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_picture_in_pieces_shows_what_the_whole_run_was(strategy):
    run = simulated(strategy)
    rows = run.trace.rows
    tally = Tally(run.num_updates)
    for piece in np.array_split(rows, 7):
        tally.add(piece.copy())
    assert tally.version == run.num_updates
    assert tally.who == run.trace.who
    assert sum(tally.links.values()) == run.bytes_sent
    assert tally.now_s == pytest.approx(run.seconds)
    ages = np.arange(len(tally.ages))
    assert (ages * tally.ages).sum() / tally.ages.sum() == pytest.approx(run.mean_staleness)
    versions, times, losses = tally.curve
    assert versions.tolist() == list(range(1, 41))
    assert losses == pytest.approx(run.history["loss"].to_numpy(), rel=0.3)
    assert times[-1] == pytest.approx(run.history["time_s"].iloc[-1], rel=0.1)
    assert plots.plot_overview(run).axes[0].get_xlabel() == "updates applied (version)"


def test_last_updates_are_told_in_words():
    run = simulated(dl.AsyncPS())
    tally = Tally(40)
    tally.add(run.trace.rows.copy())
    last = run.applies[-1]
    assert tally.applied[-1] == (
        f"worker {last['worker']}'s gradient, read at version {last['read']}, was applied by server 0 "
        f"as version 40: staleness {39 - last['read']}"
    )


def test_death_and_return_are_told_and_seen():
    tally = Tally(10)
    tally.add(row("death", ("worker", 1), start_s=2.0, end_s=2.0))
    assert tally.gone == {"worker 1"}
    assert list(tally.notes) == ["0.00 s: worker 1 died"]
    tally.add(row("revive", ("worker", 1), start_s=3.0, end_s=3.0))
    assert tally.gone == set()
    assert tally.notes[-1] == "1.00 s: worker 1 is back: a new process has taken its place"


def test_another_learning_rate_is_told_once():
    live = dl.start(TASK, dl.AllReduce(), dl.SimulatedCluster(3), num_updates=30, paused=True)
    live.step(20)
    live.scale_lr(0.5)
    tally = Tally(30)
    tally.add(live.wait().trace.rows.copy())
    assert [note.split(": ")[1] for note in tally.notes] == [
        f"from version {live.trace.select('rate')['version'][0]} on, the learning rate is 0.5 times the task's"
    ]


@pytest.mark.parametrize("pieces", [1, 10], ids=["in one piece", "one by one"])
def test_what_was_applied_after_the_checkpoint_is_forgotten(pieces):
    def apply(version: int, end_s: float) -> np.ndarray:
        return row("apply", ("server", 0), version=version, read=version - 1, end_s=end_s, loss=1.0)

    rows = [apply(version, version) for version in range(1, 9)]
    rows += [row("restore", ("server", 0), version=5, start_s=9.0, end_s=9.0), apply(6, 10.0)]
    tally = Tally(10)
    for piece in np.array_split(np.concatenate(rows), pieces):
        tally.add(piece)
    assert tally.version == 6
    assert tally.curve[0].tolist() == [1, 2, 3, 4, 5, 6]


def test_curve_of_a_run_without_end_keeps_its_points_and_its_means():
    tally = Tally(num_updates=10**9)
    for first in range(1, 5001, 100):
        rows = np.concatenate(
            [row("apply", ("server", 0), version=v, loss=v, end_s=v) for v in range(first, first + 100)]
        )
        tally.add(rows)
    versions, times, losses = tally.curve
    assert 120 <= len(versions) <= 240
    assert losses == pytest.approx(versions)
    assert times == pytest.approx(versions)
    assert (versions[0], versions[-1]) == (pytest.approx(16), pytest.approx(4992.5, abs=36))


def test_last_point_of_a_curve_is_a_mean_of_no_fewer_versions_than_the_others():
    tally = Tally(num_updates=1000)
    tally.add(np.concatenate([row("apply", ("server", 0), version=v, end_s=v, loss=v) for v in range(1, 482)]))
    assert tally.per_point == 4
    assert tally.curve[0][-2:].tolist() == [473.5, 478.5]  # 472 to 475, 476 to 481


def test_picture_drawn_in_panes_is_the_one_drawn_at_once():
    view = Overview(400, 3)
    for piece in np.array_split(simulated(dl.AsyncPS(), num_updates=400).trace.rows, 9):
        view.add(piece)
        view._refresh()
        assert view._background is None or view.figure not in view._stale
        in_panes = view.png()
    view._stale = {view.figure}
    assert view.png() == in_panes


def curve(losses: list[float], **scores: float) -> Overview:
    """What is shown of these losses, by version, and of a metric of them."""
    view = Overview(len(losses), 2, metric="score")
    for version, loss in enumerate(losses, 1):
        view.add(row("apply", ("server", 0), version=version, read=version - 1, end_s=version, loss=loss))
    for i, score in enumerate(scores.values()):
        view.add(row("metric", ("worker", 0), worker=0, version=i, end_s=i, loss=score))
    view.still()
    return view


@pytest.mark.parametrize("largest", [1e22, 1e300, math.inf])
def test_losses_that_grow_beyond_all_bounds_are_drawn(largest):
    axes = curve([1.0, 1e9, largest]).figure.axes[0]
    assert axes.get_yscale() == "log"
    assert axes.get_ylim()[0] < 1
    assert 1e9 < axes.get_ylim()[1] < math.inf


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("losses", [[2.0, 1.0, 0.0], [1.0, -1.0], [0.0, 0.0], [-5.0, -6.0]])
def test_losses_of_0_and_below_are_drawn(losses):
    axes = curve(losses).figure.axes[0]
    low, high = axes.get_ylim()
    assert axes.get_yscale() == "linear"
    assert low <= min(losses) <= max(losses) <= high
    assert low < high


def test_one_loss_is_a_point():
    assert [curve([1.0] * n).figure.axes[0].lines[0].get_marker() for n in (1, 2)] == ["o", ""]


def test_metric_is_seen_against_updates_and_seconds_whatever_its_values():
    for scores, inside in (({"a": 0.2, "b": 0.9}, True), ({"a": -1.5, "b": -0.2}, False)):
        view = curve([1.0, 0.5], **scores)
        for axes in view._by_score:
            low, high = axes.get_ylim()
            assert low <= min(scores.values()) <= max(scores.values()) <= high
            assert ((low, high) == pytest.approx((0.0, 1.02))) is inside
            assert list(axes.lines[0].get_ydata()) == list(scores.values())
        assert [list(line.get_xdata()) for line in view._scores] == [[0, 1], [0.0, 1.0]]


def test_old_gradients_of_many_workers_share_bars():
    view = Overview(900, 300)
    ages = np.arange(1, 601)
    for age in ages.tolist():
        view.add(row("apply", ("server", 0), version=601, read=600 - age, end_s=1.0, loss=1.0))
    view.still()
    heights = view._bars.get_paths()[0].vertices.reshape(-1, 5, 2)[:, 2, 1]
    assert sum(heights) == pytest.approx(1.0, rel=0.01)
    assert len(heights) <= 200
    assert "a bar for each" in view._mean_told.get_text()
    assert view._ages.get_ylim()[1] < 0.05
    assert sum(view._theory.get_ydata()) == pytest.approx(0.865, abs=0.02), "1 - (1 - 1/300) ** 600"


def test_last_picture_does_not_hang_on_those_before():
    rows = simulated(dl.AsyncPS(), num_updates=200).trace.rows
    views = [Overview(200, 3), Overview(200, 3)]
    for view, pieces in zip(views, (1, 40), strict=True):
        for piece in np.array_split(rows, pieces):
            view.add(piece)
            view.png()
    assert views[0].still() == views[1].still()


def test_who_waits_for_whom():
    waits = row("wait", ("worker", 2), peer_role=1, peer=0, start_s=1.0, end_s=3.0)
    assert waiting(waits, 0.0, 4.0) == {("worker 2", "server 0"): pytest.approx(0.5)}
    assert waiting(waits, 2.0, 4.0) == {("worker 2", "server 0"): pytest.approx(0.5)}
    ranks = [row("reduce", ("worker", rank), step=1, start_s=rank, end_s=4.0) for rank in range(3)]
    shares = waiting(np.concatenate(ranks), 0.0, 4.0)
    assert shares == {("worker 0", "worker 2"): pytest.approx(0.5), ("worker 1", "worker 2"): pytest.approx(0.25)}


@pytest.mark.parametrize("kind", ["compute", "apply", "death"])
def test_run_of_one_event_draws(kind):
    one = row(kind, ("worker", 0), version=1, start_s=5.0, end_s=5.0, loss=1.0)
    assert plots.plot_overview(Trace(one)).axes


def test_nothing_at_all_is_a_picture_of_a_run_that_has_not_begun():
    assert size(Overview(10).png()) == (960, 656)


def test_million_events_leave_a_few_boxes():
    rows = simulated(dl.AsyncPS()).trace.rows
    many = np.tile(rows, 1_000_000 // len(rows) + 1)
    shift = np.repeat(np.arange(len(many) // len(rows)), len(rows))
    for name in ("start_s", "end_s"):
        many[name] += shift * rows["end_s"].max()
    many["version"] += shift * 40
    view = Overview(int(many["version"].max()), 3)
    view.add(many)
    assert view.tally.num_rows == len(many) >= 1_000_000
    assert sum(map(len, view.tally.recent)) <= 1100
    assert len(view.tally.curve[0]) <= 241
    assert size(view.png()) == (960, 656)


@pytest.mark.parametrize("cluster", [dl.LocalCluster, dl.SimulatedCluster], ids=["real", "simulated"])
def test_two_dashboards_agree_and_the_last_picture_stays(cluster):
    live = dl.start(TASK, dl.AsyncPS(), cluster(2), num_updates=60)
    boards = [Dashboard(live), Dashboard(live)]
    for board in boards:
        board.start()
    run = live.wait()
    for board in boards:
        board.finish()
    assert boards[0].png == boards[1].png
    assert size(boards[0].png) == (960, 656)
    assert [board.view.tally.num_rows for board in boards] == [len(run.trace)] * 2
    assert [board.log for board in boards] == ["", ""]


def test_replicas_of_a_client_are_called_so():
    board = Dashboard(dl.start(TASK, dl.InGraph(), dl.SimulatedCluster(2), num_updates=3))
    assert board._worker.options == (("replica 0", 0), ("replica 1", 1))


def test_finished_run_shows_its_last_picture():
    live = dl.start(TASK, dl.SyncPS(), dl.SimulatedCluster(2), num_updates=10)
    live.wait()
    board = Dashboard(live)
    board.start()
    board.finish()
    assert board.view.tally.version == 10
    assert board.drawn >= 1
    assert size(board.png) == (960, 656)


def test_buttons_kill_revive_and_stop_and_say_what_cannot_be():
    with dl.LocalCluster(3) as cluster:
        live = dl.start(TASK, dl.AsyncPS(), cluster, num_updates=1_000_000)
        board = Dashboard(live)
        board.start()
        until(lambda: board.view.tally.version > 20)
        board._worker.value = 1
        press(board, "Kill")
        until(lambda: board.view.tally.gone == {"worker 1"})
        press(board, "Kill")
        until(lambda: "worker 1 is dead already: nothing was killed" in board.log)
        press(board, "Revive")
        until(lambda: board.view.tally.gone == set())
        here = board.view.tally.version
        until(lambda: board.view.tally.version > here)
        board._rate.value = 0.5
        until(lambda: any("the learning rate is 0.5 times" in note for note in board.view.tally.notes))
        press(board, "Add a worker")
        until(lambda: "worker 3" in board.view.tally.who)
        until(lambda: ("worker 3", 3) in board._worker.options)
        pictures = board.drawn
        until(lambda: board.drawn > pictures + 1)
        press(board, "Stop")
        run = live.wait()
    assert {event.who for event in run.trace.where("death")} == {"worker 1"}
    board.finish()
    assert not board._thread.is_alive()


def test_simulated_run_pauses_steps_and_plays():
    live = dl.start(TASK, dl.AsyncPS(), dl.SimulatedCluster(2), num_updates=50, paused=True)
    board = Dashboard(live)
    board.start()
    press(board, "Step")
    until(lambda: live.launched.events >= 1)
    assert live.state == "paused"
    board._speed.value = 100.0
    assert live.paused, "until it shall go on"
    press(board, "Play")
    until(lambda: live.launched._speed == 100.0)
    board._speed.value = math.inf
    until(lambda: live.launched._speed is None)
    assert live.wait().num_updates == 50


class Cell:
    """A notebook's kernel, as far as a dashboard looks; `run` is the number of this run of its one cell."""

    kernel = None

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run, self.shown = 1, []
        monkeypatch.setattr(dashboard, "get_ipython", lambda: self)
        monkeypatch.setattr(dashboard, "display", self.display)
        monkeypatch.setattr(dashboard, "SHOWN", {})

    def get_parent(self) -> dict:
        return {"metadata": {"cellId": "a"}, "header": {"msg_id": str(self.run)}}

    def display(self, what, **how) -> "Cell":
        self.update(what)
        return self

    def update(self, what) -> None:
        self.shown.append(what)


def test_cell_that_is_run_again_lets_go_of_its_run(monkeypatch):
    cell = Cell(monkeypatch)
    live = dl.start(TASK, dl.AsyncPS(), dl.LocalCluster(2), num_updates=1_000_000)
    live.dashboard()
    live.dashboard()
    processes = Watched(live.launched.pids.values())
    until(lambda: live.version > 0)
    first = live._dashboards[0]
    del live
    assert first._live.state == "running", "as long as it is shown"
    cell.run = 2
    live = dl.start(TASK, dl.AsyncPS(), dl.SimulatedCluster(2), num_updates=3)
    live.dashboard()
    assert first._live is None
    assert processes.alive(within_s=10) == []
    assert live.wait().num_updates == 3


def test_finished_run_is_shown_before_its_cell_ends(monkeypatch):
    cell = Cell(monkeypatch)
    live = dl.start(TASK, dl.AsyncPS(), dl.SimulatedCluster(2), num_updates=10)
    live.wait()
    live.dashboard()
    picture, log = cell.shown
    assert base64.b64decode(picture["image/png"]) == live._dashboards[0].png
    assert not any("widget" in kind for kind in picture)
    assert log.data == ""
    assert live._dashboards[0].view.tally.version == 10
    live.wait()


def test_run_that_failed_is_shown_with_its_error_once(monkeypatch):
    cell = Cell(monkeypatch)
    live = dl.start(spoiled(math.nan), dl.AsyncPS(), dl.SimulatedCluster(2), num_updates=1000)
    with pytest.raises(dl.NonFiniteLoss):
        live.wait()
    live.dashboard()
    assert cell.shown[1].data.count("Traceback") == 1
    assert cell.shown[1].data.index("NonFiniteLoss") < cell.shown[1].data.index("Traceback")


@pytest.mark.parametrize("kernel", [True, False])
def test_paused_run_goes_on_where_there_are_no_buttons(monkeypatch, kernel):
    if kernel:
        Cell(monkeypatch)
        monkeypatch.setenv("DISTLAB_HEADLESS", "1")
    live = dl.start(TASK, dl.AsyncPS(), dl.SimulatedCluster(2), num_updates=10, paused=True)
    if kernel:
        live.dashboard()
    else:
        with pytest.warns(UserWarning, match="needs a notebook"):
            live.dashboard()

    async def end() -> dl.Run:
        return await live

    assert asyncio.run(end()).num_updates == 10


def test_what_is_printed_is_not_lost_where_there_is_no_notebook(capsys):
    live = dl.start(TASK, dl.AsyncPS(), dl.SimulatedCluster(2), num_updates=10, paused=True)
    live._listener.say("hear me")
    with pytest.warns(UserWarning, match="needs a notebook"):
        live.dashboard()
    live.wait()
    assert "hear me" in capsys.readouterr().out


def test_menus_say_what_is():
    live = dl.start(TASK, dl.AsyncPS(), dl.SimulatedCluster(2), num_updates=1_000_000)
    board = Dashboard(live)
    assert (board._speed.label, board._rate.label) == ("as fast as it can", "learning rate × 1")
    board.start()
    live.scale_lr(0.7)
    until(lambda: board._rate.label == "learning rate × 0.7")
    live.scale_lr(1.0)
    until(lambda: board._rate.value == 1.0)
    press(board, "Stop")
    assert set(live.wait().trace.select("rate")["loss"]) == {0.7, 1.0}


def test_real_run_pauses_and_plays():
    with dl.LocalCluster(2) as cluster:
        live = dl.start(TASK, dl.AsyncPS(), cluster, num_updates=1_000_000)
        board = Dashboard(live)
        board.start()
        until(lambda: board.view.tally.version > 5)
        press(board, "Pause")
        until(obeyed)
        assert live.paused
        here = live.version
        press(board, "Step")
        until(obeyed)
        assert live.version > here
        until(lambda: board._status.value.startswith("<b>paused</b>"))
        press(board, "Play")
        until(lambda: live.version > here + 20)
        press(board, "Stop")
        live.wait()
    assert board.log == ""


def test_impossible_order_is_told_and_the_picture_goes_on():
    live = dl.start(TASK, dl.AllReduce(), dl.SimulatedCluster(1), num_updates=50, paused=True)
    board = Dashboard(live)
    board.order("Kill worker 7", lambda live: live.kill(worker=7))
    board.start()
    until(lambda: "Kill worker 7: " in board.log)
    live.resume()
    live.wait()
    board.finish()
    assert board.view.tally.version == 50


def obeyed() -> bool:
    """Has every order come to its end?"""
    return not any(thread.name == "distlab-order" for thread in threading.enumerate())


def press(board: Dashboard, name: str) -> None:
    boxes = [child for box in board.box.children[:2] for child in box.children]
    next(child for child in boxes if getattr(child, "description", "") == name).click()


def test_run_can_be_awaited():
    async def both() -> tuple[dl.Run, int]:
        live = dl.start(TASK, dl.AsyncPS(), dl.LocalCluster(2), num_updates=60)
        turns = 0

        async def other() -> None:
            nonlocal turns
            while live.state == "running":
                turns += 1
                await asyncio.sleep(0.01)

        beside = asyncio.create_task(other())
        run = await live
        await beside
        return run, turns

    run, turns = asyncio.run(both())
    assert run.num_updates == 60
    assert turns > 1


def test_await_raises_what_ended_the_run():
    async def fails() -> None:
        live = dl.start(TASK, dl.AllReduce(), dl.SimulatedCluster(2), num_updates=50, paused=True)
        live.kill()
        await live

    with pytest.raises(dl.ProcessLost, match=r"LiveRun\.kill"):
        asyncio.run(fails())


def test_executed_notebook_keeps_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import nbformat

    from lessons.build import Client

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [
        nbformat.v4.new_code_cell(
            "import distlab as dl\n"
            "live = dl.start(dl.tasks.digits(), dl.AsyncPS(), dl.SimulatedCluster(2), num_updates=200)\n"
            "live.dashboard()"
        ),
        nbformat.v4.new_code_cell("run = await live\nrun.num_updates"),
    ]
    Client(notebook, timeout=120, store_widget_state=False).execute(cwd=str(tmp_path))
    kept = [output.get("data", {}) for output in notebook.cells[0].outputs]
    assert any("image/png" in data for data in kept)
    assert not any("application/vnd.jupyter.widget-view+json" in data for data in kept)
    assert notebook.cells[1].outputs[-1].data["text/plain"] == "200"
