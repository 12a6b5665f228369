"""What every picture has in common: colours, paper, names.

Colours follow Okabe & Ito (2008), which stay apart for colour-blind readers; every colour has a hatch or a line
style of its own as well, for grey print. The same thing has the same colour everywhere.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from distlab.run import Run
from distlab.trace import Trace

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
MOST_NAMED = 60  # rows of a picture that have their full height and a name each
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
#: What became of a gradient, its colour and its hatch.
FATES = {
    "applied": (GREEN, ""),
    "split": (PINK, "..."),
    "dropped": (RED, "///"),
    "cancelled": (GREY, "xx"),
    "unused": (SKY, "\\\\"),
    "lost": ("black", ""),
}


def blank(width: float = 8.0, height: float = 3.5) -> tuple[Figure, Axes]:
    """An empty figure of the house, and its one pair of axes."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def with_rows(names: Sequence[str], width: float, above: float, each: float) -> tuple[Figure, Axes]:
    """An empty figure with a row of height `each` for every name; of a crowd rows are lower, and not all are named."""
    every = -(-len(names) // MOST_NAMED) or 1
    figure, axes = blank(width, above + each * max(min(len(names), MOST_NAMED), 1))
    axes.set_yticks(range(0, len(names), every), names[::every], fontsize="small")
    if every > 1:
        axes.set_ylabel(f"a name for each {every} of {len(names):,}", fontsize=7, color=GREY, loc="top")
    axes.set_ylim(max(len(names), 1) - 0.4, -0.6)
    return figure, axes


def shown(figure: Figure) -> Figure:
    """`figure`, ready to be the last line of a cell: a Figure made without pyplot has no picture of its own."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    return figure


def remark(axes: Axes, told: str, pad: float = 4.0) -> None:
    """Say in a small grey line above the picture what it leaves out or puts together."""
    axes.set_title(told, loc="right", fontsize=7, color=GREY, pad=pad)


def nothing(axes: Axes, told: str) -> None:
    """Say in the middle of an empty picture why it is empty."""
    axes.text(0.5, 0.5, told, transform=axes.transAxes, ha="center", va="center", color=GREY)


def trace_of(of: Trace | Run) -> Trace:
    """A trace, or a run's; ValueError if there is nothing in it."""
    trace = of.trace if isinstance(of, Run) else of
    if not isinstance(trace, Trace):
        raise TypeError(f"this takes a run or a trace, got {of!r}")
    if not len(trace):
        raise ValueError("this trace is empty: there is nothing to draw")
    return trace


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
