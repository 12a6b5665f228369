"""Time: who did what when, and how much of it."""

from collections.abc import Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from distlab.options import options
from distlab.plots.paper import ACTIVITIES, GREEN, GREY, RED, blank, nothing, remark, shown, trace_of, with_rows
from distlab.run import Run
from distlab.trace import KINDS, ROLE_CODES, Trace

MOST_BOXES = 4000  # of a kind: more would be drawn over each other
STRETCHES = 200  # of the time, of which shares are drawn where there are too many boxes
MOST_LINES = 400  # of versions
MOST_ROWS = 64  # of processes: of more, as many from first to last
MOST_CROSSES = 60  # side by side on a line: drops between two of them are one
BINS = 2000
SHORTEST_S = 1e-6  # stretch of time that is drawn


@options
def plot_timeline(trace: Trace | Run, *, from_s: float = 0.0, to_s: float | None = None, title: str = "") -> Figure:
    """Who did what when: a row per process; a vertical line where an update made a new version.

    Args:
        trace: a trace, or a run for its trace.
        from_s, to_s: which stretch of it; by default the first 12 updates.
        title: above the picture.

    >>> import distlab as dl
    >>> run = dl.train(dl.tasks.digits(), dl.AsyncPS(), dl.SimulatedCluster(2), num_updates=3, progress=False)
    >>> [text.get_text() for text in plot_timeline(run).axes[0].get_yticklabels()]
    ['server 0', 'worker 0', 'worker 1']
    """
    trace = trace_of(trace)
    to_s = to_s if to_s is not None else _first_updates(trace, 12, from_s) or SHORTEST_S
    if not to_s > from_s:
        raise ValueError(f"to_s must be after from_s, got {from_s} to {to_s}")
    figure, axes = blank(8.0, 1.2 + 0.42 * min(len(trace.who), MOST_ROWS))
    drawn = draw_timeline(axes, trace, from_s, to_s)
    axes.set_xlabel("time (s)")
    axes.set_title(title, loc="left", fontsize="medium", pad=14)
    draw_activities(figure, drawn)
    return shown(figure)


@options
def plot_utilization(of: Trace | Run) -> Figure:
    """What each process did with its time: a bar per process, of the whole run.

    Where two things went on at once (a rank that sums while it computes), it is the one that the legend names first.

    >>> import distlab as dl
    >>> run = dl.train(dl.tasks.digits(), dl.InGraph(), dl.SimulatedCluster(2), num_updates=3, progress=False)
    >>> plot_utilization(run).axes[0].get_xlabel()
    'share of the time'
    """
    trace = trace_of(of)
    who, span_s = trace.who, float(trace.rows["end_s"].max()) or 1.0
    figure, axes = with_rows(who, 7.0, 1.2, 0.36)
    free, left = np.ones((len(who), BINS), bool), np.zeros(len(who))
    drawn = []
    for kind in sorted(ACTIVITIES, key=lambda kind: kind == "wait"):
        busy = covered(trace.rows[trace.rows["kind"] == KINDS.index(kind)], who, span_s) & free
        free &= ~busy
        widths = busy.mean(1)
        if widths.any():
            drawn.append(kind)
            colour, hatch = ACTIVITIES[kind]
            edge = "white" if hatch else colour
            axes.barh(range(len(who)), widths, left=left, color=colour, hatch=hatch, edgecolor=edge)
            left += widths
    axes.set(xlabel="share of the time", xlim=(0, 1))
    if not drawn:
        nothing(axes, "nothing took any time")
    elif free.any():
        drawn.append("idle")
        axes.barh(range(len(who)), free.mean(1), left=left, color="white", edgecolor=GREY, linewidth=0.6)
    if len(trace) > BINS:
        remark(axes, f"{len(trace):,} events, in {BINS:,} parts of the time")
    draw_activities(figure, drawn)
    return shown(figure)


def covered(rows: np.ndarray, who: Sequence[str], span_s: float) -> np.ndarray:
    """(processes, BINS): in which parts of the time did this go on?"""
    edges = np.zeros((len(who), BINS + 1))
    if len(rows):
        y = places(rows, who).astype(int)
        start = np.clip((rows["start_s"] / span_s * BINS).round().astype(int), 0, BINS)
        stop = np.clip((rows["end_s"] / span_s * BINS).round().astype(int), 0, BINS)
        np.add.at(edges, (y, start), 1)
        np.add.at(edges, (y, stop), -1)
    return edges.cumsum(1)[:, :BINS] > 0


def draw_timeline(axes: Axes, trace: Trace, from_s: float, to_s: float) -> list[str]:
    """Draw a stretch of a trace; returns the kinds of activity in it."""
    if not len(trace):
        return []
    to_s = max(to_s, from_s + SHORTEST_S)
    rows = trace.rows[(trace.rows["end_s"] >= from_s) & (trace.rows["start_s"] <= to_s)]
    applies = rows[rows["end_s"] <= to_s]
    who, said = trace.who, []
    if len(who) > MOST_ROWS:
        some = np.linspace(0, len(who) - 1, MOST_ROWS).round().astype(int)
        rows = rows[np.isin(places(rows, who), some)]
        said.append(f"{MOST_ROWS} of {len(who)} processes")
        who = [who[i] for i in some]
    thin_s = (to_s - from_s) / 400  # what is shorter is drawn this wide, or nobody would see it
    if np.bincount(rows["kind"], minlength=1).max() > MOST_BOXES:
        drawn = _shares(axes, rows, who, np.linspace(from_s, to_s, STRETCHES + 1))
        said.append(f"{len(rows):,} events, put together: heights are shares of the time")
    else:
        drawn = [kind for kind in ACTIVITIES if _bars(axes, rows, who, kind, thin_s)]
    if said:
        remark(axes, "; ".join(said), 14)
    if _drops(axes, rows, who, (to_s - from_s) / MOST_CROSSES):
        drawn.append("drop")
    _versions(axes, applies, to_s - from_s)
    axes.set(xlim=(from_s, to_s), ylim=(max(len(who), 3) - 0.4, -0.6))
    axes.set_yticks(range(len(who)), who, fontsize="small")
    return drawn


def draw_activities(figure: Figure, drawn: Sequence[str]) -> None:
    handles = [_patch(kind) for kind in drawn]
    figure.legend(
        handles=handles, ncols=max(len(drawn), 1), frameon=False, fontsize="small", loc="outside lower center"
    )


def _first_updates(trace: Trace, count: int, from_s: float) -> float:
    ends = np.unique(trace.select("apply")["end_s"])
    ends = ends[ends > from_s]
    return float(ends[:count][-1]) if len(ends) else float(trace.rows["end_s"].max())


def _bars(axes: Axes, rows: np.ndarray, who: Sequence[str], kind: str, thin_s: float) -> bool:
    """One collection of rectangles for all events of a kind; False if there are none."""
    mine = rows[rows["kind"] == KINDS.index(kind)]
    if not len(mine):
        return False
    half = 0.12 if kind == "wait" else 0.36
    left, right, y = mine["start_s"], np.maximum(mine["end_s"], mine["start_s"] + thin_s), places(mine, who)
    colour, hatch = ACTIVITIES[kind]
    low, high = y - half, y + half
    boxes = np.stack([np.stack([left, right, right, left], 1), np.stack([low, low, high, high], 1)], 2)
    bars = PolyCollection(list(boxes), zorder=1 if kind == "wait" else 2, facecolors=colour, linewidths=0.3)
    hatch = "" if thin(right - left, 400 * thin_s) else hatch
    bars.set(edgecolor="white" if hatch else colour, hatch=hatch)
    axes.add_collection(bars)
    return True


def _shares(axes: Axes, rows: np.ndarray, who: Sequence[str], edges: np.ndarray) -> list[str]:
    """For each process and stretch of time, bars on top of each other, as high as their share of it."""
    lines, base = places(rows, who), np.repeat(np.arange(len(who))[:, None] + 0.36, len(edges) - 1, 1)
    drawn = []
    for kind in sorted(ACTIVITIES, key=lambda kind: kind == "wait"):
        mine = rows["kind"] == KINDS.index(kind)
        spent = np.array([time_in(edges, rows[mine & (lines == y)]) for y in range(len(who))]) if mine.any() else 0.0
        top = np.maximum(base - 0.72 * spent / (edges[1] - edges[0]), np.arange(len(who))[:, None] - 0.36)
        y, i = np.nonzero(base - top > 1e-6)
        if len(y):
            drawn.append(kind)
            left, right, low, high = edges[i], edges[i + 1], top[y, i], base[y, i]
            boxes = np.stack([np.stack([left, right, right, left], 1), np.stack([low, low, high, high], 1)], 2)
            axes.add_collection(PolyCollection(list(boxes), color=ACTIVITIES[kind][0], linewidths=0.3))
        base = top
    return drawn


def time_in(edges: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """How much of the time between each two `edges` these events took.

    >>> rows = np.zeros(2, [("start_s", "f8"), ("end_s", "f8")])
    >>> rows["start_s"], rows["end_s"] = [0.5, 2.0], [1.5, 2.25]
    >>> time_in(np.arange(4.0), rows)
    array([0.5 , 0.5 , 0.25])
    """

    def since(times: np.ndarray) -> np.ndarray:  # all of them together, at each edge
        past = np.searchsorted(times := np.sort(times), edges)
        return past * edges - np.append(0, np.cumsum(times))[past]

    return np.diff(since(rows["start_s"]) - since(rows["end_s"]))


def thin(widths: np.ndarray, span_s: float) -> bool:
    """Are most rectangles of these widths too narrow for a hatch? It would tear them to pieces."""
    return len(widths) > 0 and float(np.median(widths)) < span_s / 100


def places(rows: np.ndarray, who: Sequence[str]) -> np.ndarray:
    """The line of each row's process."""
    lines = np.zeros((len(ROLE_CODES), max([int(w.split()[1]) for w in who], default=0) + 1))
    for y, (role, index) in enumerate(w.split() for w in who):
        lines[ROLE_CODES[role], int(index)] = y
    return lines[rows["role"], rows["index"]]


def _drops(axes: Axes, rows: np.ndarray, who: Sequence[str], apart_s: float) -> bool:
    """A cross where a worker's gradient was refused; False if none was."""
    mine = rows[rows["kind"] == KINDS.index("drop")]
    keys = mine["worker"].astype(np.int64) << 40 | np.floor(mine["end_s"] / apart_s).astype(np.int64)
    few = mine[np.sort(np.unique(keys, return_index=True)[1])] if len(mine) > MOST_CROSSES else mine
    size = 7 if len(few) == len(mine) else 4
    few = few[[f"worker {worker}" in who for worker in few["worker"]]] if len(few) else few
    places = [who.index(f"worker {worker}") for worker in few["worker"]]
    axes.plot(few["end_s"], places, "x", color=RED, markersize=size, markeredgewidth=2 * size / 7)
    return bool(len(mine))


def _patch(kind: str) -> Artist:
    if kind == "idle":
        return Patch(facecolor="white", edgecolor=GREY, label=kind)
    if kind == "drop":
        return Line2D([], [], color=RED, marker="x", linestyle="", markeredgewidth=2, label="dropped")
    colour, hatch = ACTIVITIES[kind]
    return Patch(facecolor=colour, hatch=hatch, edgecolor="white" if hatch else colour, label=kind)


def _versions(axes: Axes, rows: np.ndarray, span_s: float) -> None:
    """A line where an update made a version, with its number above where there is room."""
    applies = rows[rows["kind"] == KINDS.index("apply")]
    _, first = np.unique(applies["version"], return_index=True)
    first = first[:: -(-len(first) // MOST_LINES) or 1]
    free_from = -np.inf
    for event in Trace(applies[first]):
        axes.axvline(event.end_s, color=GREEN, linewidth=0.6, alpha=0.6, zorder=0)
        if event.end_s >= free_from:
            above = axes.get_xaxis_transform()
            axes.text(
                event.end_s,
                1.0,
                f"v{event.version}",
                transform=above,
                fontsize=7,
                ha="center",
                va="bottom",
                color=GREEN,
            )
            free_from = event.end_s + span_s / 16 * max(len(str(event.version)) / 3, 1)
