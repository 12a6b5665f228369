"""What is in the pictures: as many marks as there are events."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgba
from toys import countdown, regression

import distlab as dl
from distlab import plots
from distlab.plots import overview, plot_timeline
from distlab.trace import EVENT, KINDS, Trace

ROOT = Path(__file__).parents[1]


def picture(strategy: dl.Strategy):
    """A run with a slow worker, and the picture of all of it."""
    cluster = dl.SimulatedCluster(3, compute=0.1).slow(worker=1, factor=2.5)
    run = dl.train(countdown(), strategy, cluster, num_updates=10, progress=False)
    return run, plot_timeline(run, to_s=run.seconds)


def legend(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_timeline_crosses_out_what_was_dropped():
    run, figure = picture(dl.SyncPS(num_backup_workers=1))
    crosses = [line for line in figure.axes[0].lines if line.get_marker() == "x"]
    assert len(crosses[0].get_xdata()) == run.ledger.counts["dropped"] > 0
    assert set(crosses[0].get_ydata()) == {run.trace.who.index("worker 1")}
    assert "dropped" in legend(figure)


def test_timeline_shows_what_was_cancelled():
    run, figure = picture(dl.SyncPS(num_backup_workers=1, late="cancel"))
    bars = dict(zip(legend(figure), figure.axes[0].collections, strict=False))
    assert len(bars["cancel"].get_paths()) == run.ledger.counts["cancelled"] > 0


@pytest.mark.parametrize("strategy", [dl.AsyncPS(), dl.SyncPS()], ids=repr)
def test_timeline_of_a_run_without_drops_has_none_in_its_legend(strategy):
    assert "dropped" not in legend(picture(strategy)[1])


# What there is in numbers is there in the picture


@pytest.fixture(scope="module")
def slow_one():
    """Four workers, one of them slow and one that dies, on a network that can be seen."""
    compute, network = dl.laws.Exponential(mean_s=0.1), dl.Network(latency_s=0.01, bandwidth_bytes_per_s=1e6)
    cluster = dl.SimulatedCluster(4, compute=compute, network=network).slow(worker=2, factor=3).kill(worker=3, at_s=2)
    return dl.train(regression(), dl.SyncPS(num_backup_workers=1), cluster, num_updates=30, progress=False)


@pytest.fixture(scope="module")
def hogs():
    cluster = dl.SimulatedCluster(4, compute=dl.laws.Exponential(mean_s=0.1))
    return dl.train(regression(), dl.AsyncPS(), cluster, num_updates=200, progress=False)


def widths(figure) -> dict[str, float]:
    """Of all bars with a label together."""
    return {bars.get_label(): sum(bar.get_width() for bar in bars) for bars in figure.axes[0].containers}


def test_ledger_in_the_picture_is_the_ledger(slow_one):
    counts = {fate: count for fate, count in slow_one.ledger.counts.items() if count}
    assert widths(plots.plot_ledger(slow_one)) == counts
    assert set(counts) >= {"applied", "dropped"}


def test_traffic_in_the_picture_is_what_was_sent(slow_one):
    found = widths(plots.plot_traffic(slow_one))
    assert sum(found.values()) == pytest.approx(slow_one.bytes_sent / 1e6)
    pushed = slow_one.trace.select("push")["bytes"].sum() / 1e6
    assert found["to a server"] == pytest.approx(pushed)
    assert set(found) == {"to a server", "to a worker"}


@pytest.mark.parametrize("strategy", [dl.AllReduce(), dl.InGraph(), dl.LocalSGD(every=2)], ids=repr)
def test_traffic_of_every_kind_is_there(strategy):
    run = dl.train(regression(), strategy, dl.SimulatedCluster(3), num_updates=3, progress=False)
    assert sum(widths(plots.plot_traffic(run)).values()) == pytest.approx(run.bytes_sent / 1e6)


def test_utilization_is_the_time_that_was_spent(slow_one):
    figure = plots.plot_utilization(slow_one)
    colours = {bars.patches[0].get_facecolor(): bars for bars in figure.axes[0].containers}
    computing = colours[to_rgba(plots.ACTIVITIES["compute"][0])]
    rows = slow_one.trace.select("compute", who="worker 0")
    share = (rows["end_s"] - rows["start_s"]).sum() / slow_one.seconds
    assert computing.patches[slow_one.trace.who.index("worker 0")].get_width() == pytest.approx(share, abs=0.01)
    for place in range(len(slow_one.trace.who)):
        assert sum(bars.patches[place].get_width() for bars in figure.axes[0].containers) <= 1.001


def test_staleness_shares_add_up_and_have_the_runs_mean(hogs):
    figure = plots.plot_staleness(hogs)
    bars = figure.axes[0].containers[0]
    assert sum(bar.get_height() for bar in bars) == pytest.approx(1)
    mean = sum(bar.get_height() * (bar.get_x() + bar.get_width() / 2) for bar in bars)
    assert mean == pytest.approx(hogs.mean_staleness)
    assert "4 workers, exponential times" in [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert figure.axes[0].lines[1].get_ydata()[0] == pytest.approx(1 / 4)


def test_theory_of_old_gradients_is_not_drawn_where_there_are_none(slow_one):
    assert len(plots.plot_staleness(slow_one).axes[0].lines) == 1  # the mean


def test_space_time_diagram_has_an_arrow_from_each_read_to_its_apply(hogs):
    figure = plots.plot_versions(hogs)
    arrows = figure.axes[0].collections[0]
    who, rows = hogs.trace.who, hogs.applies
    assert len(arrows.get_segments()) == len(rows) == 200
    (start_s, reader), (end_s, applier) = arrows.get_segments()[7].tolist()
    assert (who[int(reader)], who[int(applier)]) == (f"worker {rows['worker'][7]}", "server 0")
    begun = hogs.trace.select("compute", worker=int(rows["worker"][7]))
    assert start_s in begun["start_s"]
    assert end_s == rows["end_s"][7]
    assert arrows.get_array().tolist() == (rows["version"] - 1 - rows["read"]).tolist()


@pytest.fixture(scope="module")
def crowd() -> dl.Run:
    return short(dl.SyncPS(), 130, 3)


@pytest.mark.parametrize("name", ["utilization", "versions", "traffic", "ledger"])
def test_a_crowd_has_low_rows_of_which_some_are_named(crowd, name):
    figure = PICTURES[name](crowd)
    axes = figure.axes[0]
    who = [who for who in crowd.trace.who if name != "ledger" or "worker" in who]
    assert figure.get_size_inches()[1] < 30
    assert axes.get_ylabel() == f"a name for each 3 of {len(who)}"
    named = {int(place): text.get_text() for place, text in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)}
    assert named == {place: who[place] for place in range(0, len(who), 3)}
    low, high = sorted(axes.get_ylim())
    assert low < -0.5 < len(who) - 0.5 < high
    assert marks(figure) >= len(who)
    assert not PICTURES[name](short(dl.AsyncPS(), 3, 9)).axes[0].get_ylabel()


def test_speedup_begins_at_its_base_and_counts_runs_of_each_size():
    runs = [
        dl.train(regression(), dl.AllReduce(), dl.SimulatedCluster(n, compute=0.1), num_updates=5, progress=False)
        for n in (2, 4)
    ]
    figure = plots.plot_speedup({"runs": runs, "rates": {1: 10.0, 3: 25.0}}, theory={"half": lambda n: n / 2})
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    assert lines["rates"].get_xydata().tolist() == [[1, 1], [3, 2.5]]
    assert lines["runs"].get_xydata()[0].tolist() == [2, 2]
    assert lines["runs"].get_xydata()[1][1] == pytest.approx(4, rel=0.01)
    assert lines["half"].get_ydata().tolist() == [0.5, 1.0, 1.5, 2.0]


def many(count: int) -> Trace:
    """A trace of so many events of eight servers."""
    rows, rng = np.zeros(count, EVENT), np.random.default_rng(0)
    rows["kind"] = rng.choice([KINDS.index(kind) for kind in ("compute", "push", "wait", "apply")], count)
    rows["index"], rows["step"] = rng.integers(0, 8, count), np.arange(count)
    rows["worker"], rows["start_s"] = rows["index"], np.sort(rng.uniform(0, 100, count))
    rows["end_s"] = np.minimum(rows["start_s"] + 1e-4, 100.0)
    rows["version"], rows["bytes"] = np.arange(count) + 1, 100
    return Trace(rows)


def test_a_long_stretch_is_put_together_and_says_so():
    trace = many(40_000)
    figure = plots.plot_timeline(trace, to_s=100.0)
    boxes = sum(len(bars.get_paths()) for bars in figure.axes[0].collections)
    assert 1000 < boxes < 40_000 / 2
    compute = figure.axes[0].collections[0].get_paths()
    spent = sum(np.ptp(box.vertices[:, 0]) * np.ptp(box.vertices[:, 1]) / 0.72 for box in compute)
    assert spent == pytest.approx(len(trace.where("compute")) * 1e-4, rel=0.01)
    assert "40,000 events, put together" in figure.axes[0].get_title(loc="right")
    assert "put together" not in plots.plot_timeline(many(500), to_s=100.0).axes[0].get_title(loc="right")
    assert "the first 400 of" in plots.plot_versions(hogs_twice()).axes[0].get_title(loc="left")


def test_boxes_too_narrow_for_a_hatch_have_none():
    run = dl.train(countdown(), dl.SyncPS(), dl.SimulatedCluster(2, compute=0.1, apply_time=0.1), num_updates=60)

    def apply_of(figure):
        return next(b for b in figure.axes[0].collections if to_rgba(plots.GREEN) in map(tuple, b.get_facecolor()))

    assert apply_of(plots.plot_timeline(run)).get_hatch() == plots.ACTIVITIES["apply"][1]
    assert not apply_of(plots.plot_timeline(run, to_s=run.seconds)).get_hatch()


def who_waits(num_workers: int):
    """The part of an overview that shows the cluster."""
    cluster = dl.SimulatedCluster(num_workers, compute=0.1)
    run = dl.train(countdown(), dl.AsyncPS(), cluster, num_updates=20, progress=False)
    return next(axes for axes in plots.plot_overview(run).axes if "waits for" in axes.get_title(loc="left"))


def test_overview_shows_a_server_that_does_nothing_as_waiting():
    nodes = next(dots for dots in who_waits(2).collections if len(dots.get_offsets()) == 3)
    colours = [tuple(colour) for colour in nodes.get_facecolor()]
    assert colours == [to_rgba(plots.ACTIVITIES[kind][0]) for kind in ("wait", "compute", "compute")]


def test_overview_has_short_names_for_a_crowd():
    assert [text.get_text() for text in who_waits(2).texts] == ["server 0", "worker 0", "worker 1"]
    assert [text.get_text() for text in who_waits(6).texts] == ["s0", *(f"w{i}" for i in range(6))]


PICTURES = {
    "loss": plots.plot_loss,
    "speedup": lambda run: plots.plot_speedup({"runs": [run]}),
    "timeline": plots.plot_timeline,
    "utilization": plots.plot_utilization,
    "staleness": plots.plot_staleness,
    "versions": plots.plot_versions,
    "traffic": plots.plot_traffic,
    "ledger": plots.plot_ledger,
    "comparison": plots.plot_comparison,
    "overview": plots.plot_overview,
}


def told(figure) -> str:
    """All text in a picture."""
    titles = [axes.get_title(loc=place) for axes in figure.axes for place in ("left", "right")]
    return " ".join([*titles, *(text.get_text() for axes in figure.axes for text in axes.texts)])


@pytest.fixture(scope="module")
def long_run() -> dl.Run:
    """Of a million events, at virtual times, with drops."""
    return benchmark().long_run(dl.SyncPS(num_backup_workers=1))


def benchmark():
    spec = importlib.util.spec_from_file_location("plots_benchmark", ROOT / "benchmarks" / "plots.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def marks(figure) -> int:
    """Points, boxes, bars and words that there are to draw."""
    return sum(
        sum(len(line.get_xdata()) for line in axes.lines)
        + sum(len(boxes.get_paths()) for boxes in axes.collections)
        + len(axes.patches)
        + len(axes.texts)
        for axes in figure.axes
    )


@pytest.mark.parametrize(
    ("name", "remark"),
    [
        ("loss", "a point for each 7 of 25,"),
        ("speedup", ""),
        ("timeline", "1,000,000 events, put together"),
        ("utilization", "1,000,000 events, in 2,000 parts of the time"),
        ("staleness", ""),
        ("versions", "the first 400 of 18"),
        ("traffic", ""),
        ("ledger", ""),
        ("comparison", "a point for each 7 of 25,"),
        ("overview", "a point for each 128 updates"),
    ],
)
def test_a_million_events_are_few_marks_and_the_picture_says_so(long_run, name, remark):
    figure = benchmark().pictures(long_run)[f"plot_{name}"]()
    assert len(long_run.trace) == 1_000_000
    assert 1 <= marks(figure) < 25_000
    assert remark in told(figure)


def test_a_long_ledger_balances_and_has_every_gradient(long_run):
    found = widths(plots.plot_ledger(long_run))
    assert long_run.ledger.balances
    assert sum(found.values()) == len(long_run.trace.where("compute").rows)
    assert found["dropped"] == len(long_run.trace.select("drop")) > 1000


def test_many_ages_share_bars_and_still_add_up(hogs):
    rows = hogs.trace.rows.copy()
    rows["version"][rows["kind"] == KINDS.index("apply")] *= 17
    old = replace(hogs, trace=Trace(rows))
    figure = plots.plot_staleness(old)
    bars = figure.axes[0].containers[0]
    assert len(bars) <= 200
    assert "a bar for each 17 ages" in told(figure)
    assert sum(bar.get_height() for bar in bars) == pytest.approx(1)
    mean = sum(bar.get_height() * (bar.get_x() + bar.get_width() / 2) for bar in bars)
    assert mean == pytest.approx(old.mean_staleness, abs=17)


def short(strategy: dl.Strategy, num_workers: int, num_updates: int) -> dl.Run:
    cluster = dl.SimulatedCluster(num_workers, compute=0.1)
    return dl.train(regression(), strategy, cluster, num_updates=num_updates, progress=False)


def cut(*kinds: str, last_s: float = np.inf) -> dl.Run:
    """What is left of a run when it ends early."""
    run = short(dl.AsyncPS(), 3, 9)
    rows = run.trace.rows[np.isin(run.trace.rows["kind"], [KINDS.index(kind) for kind in kinds])].copy()
    rows["end_s"] = np.minimum(rows["end_s"], last_s)
    rows["start_s"] = np.minimum(rows["start_s"], rows["end_s"])
    return replace(run, trace=Trace(rows))


SHORT = {
    "one update": lambda: short(dl.AsyncPS(), 1, 1),
    "one update of three": lambda: short(dl.SyncPS(), 3, 1),
    "nothing sent": lambda: short(dl.SingleWorker(), 1, 5),
    "no push": lambda: short(dl.AllReduce(), 3, 3),
    "no push and no server": lambda: short(dl.Hogwild(), 3, 9),
    "replicas": lambda: short(dl.InGraph(), 3, 2),
    "nothing applied": lambda: cut("compute", "wait"),
    "nothing computed": lambda: cut("wait"),
    "no time": lambda: cut("compute", "push", "apply", last_s=0.0),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("picture", PICTURES)
@pytest.mark.parametrize("case", SHORT)
def test_short_and_empty_runs_are_drawn(case, picture):
    figure = PICTURES[picture](SHORT[case]())
    figure.canvas.draw()
    assert marks(figure) >= 1


@pytest.mark.parametrize(
    ("picture", "case", "why"),
    [
        ("loss", "nothing applied", "no update was applied"),
        ("speedup", "no time", "no run is long enough to have a rate"),
        ("utilization", "no time", "nothing took any time"),
        ("staleness", "nothing applied", "nothing was applied"),
        ("versions", "nothing applied", "nothing was applied from 0 s on"),
        ("traffic", "nothing sent", "no message was sent"),
        ("ledger", "nothing computed", "no gradient was computed"),
        ("comparison", "nothing applied", "no update was applied"),
    ],
)
def test_empty_picture_says_why(picture, case, why):
    assert why in told(PICTURES[picture](SHORT[case]()))


def hogs_twice() -> dl.Run:
    """More gradients than arrows that can be told apart."""
    return dl.train(countdown(), dl.AsyncPS(), dl.SimulatedCluster(2), num_updates=500, progress=False)


@pytest.mark.parametrize("plot", [PICTURES[name] for name in PICTURES if name not in ("loss", "speedup", "comparison")])
def test_nothing_to_draw_is_said(plot):
    with pytest.raises(ValueError, match="nothing to draw"):
        plot(Trace(np.zeros(0, EVENT)))
    with pytest.raises(TypeError, match="this takes a run or a trace"):
        plot([1, 2])


def with_losses(losses: list[float]) -> dl.Run:
    run = short(dl.AsyncPS(), 2, len(losses))
    rows = run.trace.rows.copy()
    rows["loss"][rows["kind"] == KINDS.index("apply")] = losses
    return replace(run, trace=Trace(rows))


LOSSES = {
    "diverging": ([1.0, 1e22, 1e40, 1e300], "log"),
    "infinite": ([1.0, 1e20, np.inf, np.nan], "log"),
    "no number": ([np.nan] * 4, "log"),
    "negative": ([1.0, 0.5, -0.5, -2.0], "linear"),
    "zero": ([0.0] * 4, "linear"),
    "far below": ([-1.0, -1e22, -1e40, -1e300], "linear"),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("picture", ["overview", "loss", "comparison"])
@pytest.mark.parametrize("case", LOSSES)
def test_losses_of_every_size_are_drawn(case, picture):
    losses, scale = LOSSES[case]
    figure = PICTURES[picture](with_losses(losses))
    figure.canvas.draw()
    axes = figure.axes[0]
    low, high = axes.get_ylim()
    drawn = np.asarray(axes.lines[0].get_ydata(), float)
    drawn = drawn[np.isfinite(drawn)]
    assert axes.get_yscale() == scale
    assert len(drawn) == np.isfinite(losses).sum() or picture != "overview"
    assert np.all((low <= drawn) & (drawn <= high))


def test_overview_of_one_update_has_a_mark():
    assert plots.plot_overview(short(dl.AsyncPS(), 1, 1)).axes[0].lines[0].get_marker() == "o"


def test_overview_has_all_ages_below_its_axis():
    rows = short(dl.AsyncPS(), 4, 100).trace.rows.copy()
    applied = rows["kind"] == KINDS.index("apply")
    rows["read"][applied] = rows["version"][applied] - 1 - np.arange(applied.sum()) * 5
    axes = next(axes for axes in plots.plot_overview(Trace(rows)).axes if "share of" in axes.get_ylabel())
    bars = axes.collections[0].get_paths()[0].vertices
    assert bars[:, 0].max() == pytest.approx(495, abs=4)
    assert bars[:, 1].max() < axes.get_ylim()[1] < 5 * bars[:, 1].max()
    assert axes.get_xlim()[1] > 495


def scored(scores: list[float]) -> list:
    """The axes of an overview that have these values of a metric."""
    rows = np.concatenate([short(dl.AsyncPS(), 2, 9).trace.rows, np.zeros(len(scores), EVENT)])
    new = rows[-len(scores) :]
    new["kind"], new["version"], new["loss"] = KINDS.index("metric"), np.arange(len(scores)) + 1, scores
    new["role"], new["end_s"] = rows["role"][0], new["version"] / 10
    figure = plots.plot_overview(Trace(rows))
    return [axes for axes in figure.axes for line in axes.lines if line.get_marker() == "s"]


@pytest.mark.parametrize(("scores", "low", "high"), [([0.1, 0.9], 0.0, 1.02), ([-3.0, 40.0], -10.0, 41.0)])
def test_metric_is_drawn_against_updates_and_time_on_an_axis_it_fits(scores, low, high):
    by_version, by_time = scored(scores)
    assert by_version.lines[0].get_xdata().tolist() == [1, 2]
    assert by_time.lines[0].get_xdata().tolist() != [1, 2]
    for axes in (by_version, by_time):
        assert axes.lines[0].get_ydata().tolist() == scores
        assert axes.get_ylim() == (pytest.approx(low), pytest.approx(high))


def test_overview_counts_in_units_of_which_there_are_neither_many_nor_few():
    figure = plots.plot_overview(short(dl.AsyncPS(), 2, 3))
    labels = [axes.get_xlabel() for axes in figure.axes]
    assert "time (ms)" in labels
    assert any(label.endswith("B sent by link") and not label.startswith("MB") for label in labels)


def test_overview_says_which_links_it_shows():
    figure = plots.plot_overview(short(dl.AsyncPS(), 12, 30))
    axes = next(axes for axes in figure.axes if "sent by link" in axes.get_xlabel())
    assert "(the 10 busiest of 24)" in axes.get_xlabel()
    named = [tick.get_text().split(" → ") for tick in axes.get_yticklabels()]
    assert len(named) == 10
    assert sorted(named) == sorted([receiver, sender] for sender, receiver in named), "there and back"


@pytest.mark.parametrize("num_workers", [3, 8, 9, 20, 64, 300])
def test_circles_of_a_cluster_of_any_size_do_not_lie_on_one_another(num_workers):
    view = overview.Overview(1)
    view._put_names(["server 0", *(f"worker {i}" for i in range(num_workers))])
    view.figure.draw_without_rendering()
    at = view._cluster.transData.transform(view._nodes.get_offsets())
    apart = np.hypot(*(at[:, None] - at[None]).T) + 1e9 * np.eye(len(at))
    diameter = np.sqrt(view._nodes.get_sizes()[0]) * view.figure.dpi / 72
    assert diameter <= apart.min()
    assert diameter >= min(20, 0.4 * apart.min()), "they can be seen"


def test_timeline_of_a_crowd_has_64_rows_and_says_so():
    figure = plots.plot_timeline(short(dl.AsyncPS(), 100, 120))
    assert len(figure.axes[0].get_yticks()) == 64
    assert figure.get_size_inches()[1] < 30
    assert "64 of 101 processes" in told(figure)


def test_idle_time_is_drawn(slow_one):
    figure = plots.plot_utilization(slow_one)
    assert legend(figure)[-1] == "idle"
    for place in range(len(slow_one.trace.who)):
        assert sum(bars.patches[place].get_width() for bars in figure.axes[0].containers) == pytest.approx(1)
