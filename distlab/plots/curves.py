"""Curves: the loss, and how much faster more workers are."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from distlab.options import nearest, options
from distlab.plots.paper import GREY, LINES, blank, named, nothing, remark, shown
from distlab.plots.tally import FAR
from distlab.run import Run

MOST_POINTS = 4000  # of a line: more would be drawn over each other


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
        raise ValueError(f"against={against!r}: {nearest(against, labels)}")
    figure, axes = blank()
    draw_losses(axes, named(runs), against, window)
    axes.set_xlabel(labels[against])
    return shown(figure)


def draw_losses(axes: Axes, runs: Mapping[str, Run], against: str, window: int) -> None:
    for (label, run), (colour, style) in zip(runs.items(), LINES * 9, strict=False):
        history = run.history
        smooth = history["loss"].rolling(window, min_periods=1).mean().clip(-FAR, FAR)
        every = -(-len(history) // MOST_POINTS) or 1
        if every > 1:
            remark(axes, f"a point for each {every} of {len(history):,} updates")
        mark = "o" if len(history) == 1 else None  # one point is no line
        few = slice(None, None, every)
        axes.plot(history[against][few], smooth[few], color=colour, linestyle=style, marker=mark, label=label)
    if not any(len(run.applies) for run in runs.values()):
        nothing(axes, "no update was applied")
    has_log = all(np.all(~(np.asarray(line.get_ydata(), float) <= 0)) for line in axes.lines)
    axes.set(ylabel=f"training loss (mean of {window})", yscale="log" if has_log else "linear")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False, fontsize="small")


@options
def plot_speedup(
    measured: Mapping[str, Mapping[int, float] | Sequence[Run]],
    *,
    theory: Mapping[str, Callable[[int], float]] | None = None,
    per: str = "samples",
) -> Figure:
    """How many times as fast so many workers are as one; dotted, as many times as there are.

    Args:
        measured: by name, runs of different numbers of workers, or rates by number of workers (in any unit). Of each,
            the fewest workers are the base, taken to be as fast as their number says.
        theory: by name, the speed-up of a number of workers; drawn as a line without marks.
        per: "samples" or "updates", of which the rate of a run is.

    >>> figure = plot_speedup({"all-reduce": {1: 100.0, 2: 190.0, 4: 340.0}}, theory={"perfect": float})
    >>> [line.get_ydata().tolist() for line in figure.axes[0].lines][:1]
    [[1.0, 1.9, 3.4]]
    """
    figure, axes = blank(6.0, 4.0)
    rates = {name: rates_of(values, per) for name, values in measured.items()}
    if not any(rates.values()):
        raise ValueError("nothing was measured: there is nothing to draw")
    most = max(max(by_number) for by_number in rates.values())
    styles = iter(LINES * 9)
    for name, by_number in rates.items():
        numbers, (colour, style) = sorted(by_number), next(styles)
        base = by_number[numbers[0]] / numbers[0] or float("nan")  # of one update there is no rate
        speedups = [by_number[n] / base for n in numbers]
        axes.plot(numbers, speedups, "o", color=colour, linestyle=style, label=name)
    counts = np.arange(1, most + 1)
    for name, speedup in (theory or {}).items():
        colour, style = next(styles)
        axes.plot(counts, [speedup(int(n)) for n in counts], color=colour, linestyle=style, linewidth=1, label=name)
    if all(np.isnan(np.asarray(line.get_ydata(), float)).all() for line in axes.lines):
        nothing(axes, "no run is long enough to have a rate")
    axes.plot([1, most], [1, most], color=GREY, linestyle=":", linewidth=1)
    axes.set(xlabel="workers", ylabel="times as fast as one")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, fontsize="small")
    return shown(figure)


def rates_of(values: Mapping[int, float] | Sequence[Run], per: str) -> dict[int, float]:
    """How many samples or updates a second, by number of workers."""
    if per not in ("samples", "updates"):
        raise ValueError(f"per must be 'samples' or 'updates', got {per!r}")
    if isinstance(values, Mapping):
        return dict(values)
    rate = {
        "samples": lambda run: run.applies["samples"].sum() / (run.seconds or np.inf),
        "updates": lambda run: run.updates_per_s,
    }
    return {run.num_workers: float(rate[per](run)) for run in values}
