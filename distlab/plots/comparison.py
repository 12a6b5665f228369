"""Several runs in one picture."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from distlab.options import options
from distlab.plots.curves import draw_losses
from distlab.plots.paper import ACTIVITIES, named, shown
from distlab.plots.timeline import draw_activities, draw_timeline
from distlab.run import Run


@options
def plot_comparison(runs: Run | Sequence[Run] | Mapping[str, Run], *, span_s: float = 0.06) -> Figure:
    """Several runs in one picture: loss against time on top, below it the same stretch of time of each.

    Args:
        runs: as for `plot_loss`.
        span_s: how long a stretch, taken from the middle of each run.

    >>> import distlab as dl
    >>> cluster = dl.SimulatedCluster(2, compute=0.1)
    >>> kinds = dl.AsyncPS(), dl.SyncPS()
    >>> runs = [dl.train(dl.tasks.digits(), kind, cluster, num_updates=3, progress=False) for kind in kinds]
    >>> [axes.get_title(loc="left") for axes in plot_comparison(runs).axes]
    ['', 'AsyncPS()', 'SyncPS()']
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
    draw_losses(axes["loss"], by_name, "time_s", 20)
    axes["loss"].set_xlabel("time (s)")
    drawn: set[str] = set()
    for i, (name, run) in enumerate(by_name.items()):
        middle = run.seconds / 2
        drawn |= set(draw_timeline(axes[f"run {i}"], run.trace, middle, min(middle + span_s, run.seconds)))
        title = name + "\n" * bool(axes[f"run {i}"].get_title(loc="right"))  # above the remark
        axes[f"run {i}"].set_title(title, loc="left", fontsize="medium", pad=10)
        axes[f"run {i}"].set_xlabel("time (s)")
    for i in range(len(by_name), 2 * lines):
        axes[f"run {i}"].set_visible(False)
    draw_activities(figure, [kind for kind in (*ACTIVITIES, "drop") if kind in drawn])
    return shown(figure)
