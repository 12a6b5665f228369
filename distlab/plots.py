"""Pictures of runs. Each function takes what it draws and returns a matplotlib Figure; none of them needs pyplot.

Colours follow Okabe & Ito (2008), which stay apart for colour-blind readers; every colour has a hatch or a line
style of its own as well, for grey print. The same thing has the same colour everywhere.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from distlab.options import options
from distlab.run import Run
from distlab.trace import KINDS, Trace

ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PINK, GREY = (
    "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#999999",
)  # fmt: skip

#: What a stretch of time is, its colour and its hatch.
ACTIVITIES = {
    "compute": (BLUE, ""),
    "cancel": (GREY, "xx"),
    "push": (ORANGE, "///"),
    "pull": (SKY, "\\\\\\"),
    "wait": ("#E6E6E6", ""),
    "apply": (GREEN, "xxx"),
    "store": (RED, "xxx"),
    "reduce": (PINK, "..."),
    "send": (ORANGE, "///"),
    "dispatch": (YELLOW, ""),
    "loss": (PINK, "..."),
    "evaluate": (GREY, "|||"),
    "unplaced": (BLUE, "..."),
}
LINES = [
    (BLUE, "-"),
    (ORANGE, "--"),
    (GREEN, "-."),
    (RED, ":"),
    (PINK, (0, (5, 1))),
    (SKY, (0, (1, 1))),
    (GREY, "-"),
    ("black", (0, (3, 1, 1, 1))),
    ("#8C6D31", (0, (8, 2))),
]


def blank(width: float = 8.0, height: float = 3.5) -> tuple[Figure, Axes]:
    """An empty figure of the house, and its one pair of axes."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def shown(figure: Figure) -> Figure:
    """`figure`, ready to be the last line of a cell: a Figure made without pyplot has no picture of its own."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    return figure


@options
def plot_loss(runs: Run | Sequence[Run] | Mapping[str, Run], *, against: str = "update", window: int = 20) -> Figure:
    """Training loss, a line per run: the mean over the last `window` updates.

    Args:
        runs: one run, several, or several by the name that the legend shall show.
        against: "update" or "time_s", the horizontal axis.
        window: updates that the mean is over; 1 draws what was recorded.

    >>> import distlab as dl
    >>> plot_loss([], against="updates")
    Traceback (most recent call last):
    ValueError: against='updates': did you mean 'update'?
    """
    labels = {"update": "updates applied (version)", "time_s": "time (s)"}
    if against not in labels:
        from distlab.options import nearest

        raise ValueError(f"against={against!r}: {nearest(against, labels)}")
    figure, axes = blank()
    _losses(axes, named(runs), against, window)
    axes.set_xlabel(labels[against])
    return shown(figure)


def _losses(axes: Axes, runs: Mapping[str, Run], against: str, window: int) -> None:
    for (label, run), (colour, style) in zip(runs.items(), LINES * 9, strict=False):
        history = run.history
        smooth = history["loss"].rolling(window, min_periods=1).mean()
        axes.plot(history[against], smooth, color=colour, linestyle=style, label=label)
    axes.set(ylabel=f"training loss (mean of {window})", yscale="log")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False, fontsize="small")


@options
def plot_timeline(trace: Trace | Run, *, from_s: float = 0.0, to_s: float | None = None, title: str = "") -> Figure:
    """Who did what when: a row per process; a vertical line where an update made a new version.

    Args:
        trace: a trace, or a run for its trace.
        from_s, to_s: which stretch of it; by default the first 12 updates.
        title: above the picture.
    """
    trace = trace.trace if isinstance(trace, Run) else trace
    if not len(trace):
        raise ValueError("this trace is empty: there is nothing to draw")
    to_s = to_s if to_s is not None else _first_updates(trace, 12, from_s)
    if not to_s > from_s:
        raise ValueError(f"to_s must be after from_s, got {from_s} to {to_s}")
    figure, axes = blank(8.0, 1.2 + 0.42 * len(trace.who))
    drawn = _timeline(axes, trace, from_s, to_s)
    axes.set_xlabel("time (s)")
    axes.set_title(title, loc="left", fontsize="medium", pad=14)
    _activities(figure, drawn)
    return shown(figure)


@options
def plot_comparison(runs: Run | Sequence[Run] | Mapping[str, Run], *, span_s: float = 0.06) -> Figure:
    """Several runs in one picture: loss against time on top, below it the same stretch of time of each.

    Args:
        runs: as for `plot_loss`.
        span_s: how long a stretch, taken from the middle of each run.
    """
    by_name = named(runs)
    lines = -(-len(by_name) // 2)
    figure = Figure(figsize=(11, 3.4 + 2.0 * lines), layout="constrained")
    axes = figure.subplot_mosaic(
        [["loss", "loss"], *([f"run {2 * i}", f"run {2 * i + 1}"] for i in range(lines))],  # type: ignore[list-item]
        height_ratios=[3.4] + [2.0] * lines,
    )
    for pair in axes.values():
        pair.spines[["top", "right"]].set_visible(False)
    _losses(axes["loss"], by_name, "time_s", 20)
    axes["loss"].set_xlabel("time (s)")
    drawn: set[str] = set()
    for i, (name, run) in enumerate(by_name.items()):
        middle = run.seconds / 2
        drawn |= set(_timeline(axes[f"run {i}"], run.trace, middle, min(middle + span_s, run.seconds)))
        axes[f"run {i}"].set_title(name, loc="left", fontsize="medium", pad=10)
        axes[f"run {i}"].set_xlabel("time (s)")
    for i in range(len(by_name), 2 * lines):
        axes[f"run {i}"].set_visible(False)
    _activities(figure, [kind for kind in (*ACTIVITIES, "drop") if kind in drawn])
    return shown(figure)


def _timeline(axes: Axes, trace: Trace, from_s: float, to_s: float) -> list[str]:
    """Draw a stretch of a trace; returns the kinds of activity in it."""
    rows = trace.rows[(trace.rows["end_s"] >= from_s) & (trace.rows["start_s"] <= to_s)]
    thin_s = (to_s - from_s) / 400  # what is shorter is drawn this wide, or nobody would see it
    drawn = [kind for kind in ACTIVITIES if _bars(axes, rows, trace.who, kind, thin_s)]
    if _drops(axes, rows, trace.who):
        drawn.append("drop")
    _versions(axes, rows[(rows["end_s"] >= from_s) & (rows["end_s"] <= to_s)], to_s - from_s)
    axes.set(xlim=(from_s, to_s), ylim=(max(len(trace.who), 3) - 0.4, -0.6))
    axes.set_yticks(range(len(trace.who)), trace.who, fontsize="small")
    return drawn


def _activities(figure: Figure, drawn: Sequence[str]) -> None:
    handles = [_patch(kind) for kind in drawn]
    figure.legend(handles=handles, ncols=len(drawn), frameon=False, fontsize="small", loc="outside lower center")


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
    boxes = []
    for event in Trace(mine):
        left, right, y = event.start_s, max(event.end_s, event.start_s + thin_s), who.index(event.who)
        boxes.append([(left, y - half), (right, y - half), (right, y + half), (left, y + half)])
    colour, hatch = ACTIVITIES[kind]
    bars = PolyCollection(boxes, zorder=1 if kind == "wait" else 2, facecolors=colour, linewidths=0.3)
    bars.set(edgecolor="white" if hatch else colour, hatch=hatch)
    axes.add_collection(bars)
    return True


def _drops(axes: Axes, rows: np.ndarray, who: Sequence[str]) -> bool:
    """A cross where a worker's gradient was refused; False if none was."""
    mine = rows[rows["kind"] == KINDS.index("drop")]
    places = [who.index(f"worker {worker}") for worker in mine["worker"]]
    axes.plot(mine["end_s"], places, "x", color=RED, markersize=7, markeredgewidth=2)
    return bool(len(mine))


def _patch(kind: str) -> Artist:
    if kind == "drop":
        return Line2D([], [], color=RED, marker="x", linestyle="", markeredgewidth=2, label="dropped")
    colour, hatch = ACTIVITIES[kind]
    return Patch(facecolor=colour, hatch=hatch, edgecolor="white" if hatch else colour, label=kind)


def _versions(axes: Axes, rows: np.ndarray, span_s: float) -> None:
    """A line where an update made a version, with its number above where there is room."""
    applies = rows[rows["kind"] == KINDS.index("apply")]
    _, first = np.unique(applies["version"], return_index=True)
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
            free_from = event.end_s + span_s / 16


def named(runs: Run | Sequence[Run] | Mapping[str, Run]) -> dict[str, Run]:
    """Runs by name: their own strategy's, with a number where two are the same."""
    if isinstance(runs, Run):
        runs = [runs]
    if isinstance(runs, Mapping):
        return dict(runs)
    result: dict[str, Run] = {}
    for run in runs:
        label, n = run.strategy, 2
        while label in result:
            label, n = f"{run.strategy} ({n})", n + 1
        result[label] = run
    return result


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of equal keys as aligned plain text.

    >>> print(table([{"who": "server 0", "updates": 400}]))
    who       updates
    server 0      400
    """
    names = list(rows[0])
    cells = [[f"{row[n]:,}" if isinstance(row[n], int) else str(row[n]) for n in names] for row in rows]
    widths = [max(len(n), *(len(line[i]) for line in cells)) for i, n in enumerate(names)]
    right = [not isinstance(rows[0][n], str) for n in names]
    lines = [names, *cells]
    return "\n".join(
        "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True)).rstrip()
        for line in lines
    )
