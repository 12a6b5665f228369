"""Counts: how old gradients are, what became of them, and how many bytes went where."""

from collections.abc import Mapping
from functools import cache

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from distlab.options import options
from distlab.plots.paper import (
    BLUE,
    FATES,
    GREY,
    ORANGE,
    PINK,
    RED,
    SKY,
    blank,
    nothing,
    remark,
    shown,
    trace_of,
    with_rows,
)
from distlab.reports.ledger import ledger
from distlab.run import Run
from distlab.theory import staleness_probability
from distlab.trace import ROLES, Trace, links

AGES = ListedColormap(colormaps["cividis_r"](np.linspace(0.2, 1, 256)))  # without what is pale on white
MOST_BARS = 200  # of ages: more are put together
MOST_ARROWS = 400  # of a space-time diagram: among more nobody finds one
WHERE = {
    "server": (ORANGE, "///"),
    "worker": (BLUE, ""),
    "client": (PINK, "..."),
    "replica": (SKY, "\\\\"),
    "": (GREY, "xx"),
}


@options
def plot_staleness(of: Trace | Run, *, num_workers: int | None = None) -> Figure:
    """How old the applied gradients were: the share of each staleness, and their mean.

    Args:
        of: a run, or a trace.
        num_workers: draw beside it what so many workers with exponential compute times come to (see
            `theory.staleness_probability`); None: of a run that has any, its own number.

    >>> import distlab as dl
    >>> run = dl.train(dl.tasks.digits(), dl.AsyncPS(), dl.SimulatedCluster(4), num_updates=40, progress=False)
    >>> plot_staleness(run).axes[0].get_xlabel()
    'staleness (updates between read and apply)'
    """
    trace = trace_of(of)
    rows = of.applies if isinstance(of, Run) else trace.applies
    figure, axes = blank(6.5, 3.2)
    axes.set(xlabel="staleness (updates between read and apply)", ylabel="share of gradients")
    if not len(rows):
        nothing(axes, "nothing was applied")
        return shown(figure)
    ages = rows["version"] - 1 - rows["read"]
    if num_workers is None and isinstance(of, Run) and ages.any():
        num_workers = of.num_workers
    oldest = int(ages.max())
    wide, middles, shares, expected = by_age(np.bincount(ages), oldest, num_workers or 0)
    some = shares > 0
    axes.bar(middles[some], shares[some], width=0.8 * wide, color=BLUE, label=f"measured, {len(ages):,} gradients")
    if wide > 1:
        remark(axes, f"a bar for each {wide} ages")
    axes.axvline(ages.mean(), color=RED, linestyle="--", linewidth=1.2, label=f"mean {ages.mean():.2f}")
    last = max(oldest, 4)
    if len(expected):
        last = max(last, 2 * (num_workers or 0))
        told = f"{num_workers} workers, exponential times"
        axes.plot(middles, expected, "o-", color=ORANGE, markersize=3, linewidth=1, label=told)
    axes.set_xlim(-0.9, last + 0.9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, fontsize="small")
    return shown(figure)


def by_age(counts: np.ndarray, last: int, num_workers: int) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
    """How many ages share a bar, the bars' middles up to age `last` at least, the shares of the gradients of each age
    counted, and the shares to expect of more than one worker.

    >>> by_age(np.array([1, 2, 1]), last=2, num_workers=1)
    (1, array([0., 1., 2., 3., 4.]), array([0.25, 0.5 , 0.25, 0.  , 0.  ]), array([], dtype=float64))
    """
    last = max(last, 4, 2 * num_workers if num_workers > 1 else 0)
    wide = -(-(last + 1) // MOST_BARS)
    firsts = np.arange(0, last + 1, wide)
    few = np.zeros(len(firsts) * wide)
    few[: len(counts)] = counts[: len(few)]
    expected = expected_by_age(len(few), num_workers) if num_workers > 1 else np.zeros(0)
    shares, expected = few.reshape(-1, wide).sum(1) / max(counts.sum(), 1), expected.reshape(-1, wide).sum(1)
    return wide, firsts + (wide - 1) / 2, shares, expected


@cache
def expected_by_age(count: int, num_workers: int) -> np.ndarray:
    return np.array([staleness_probability(age, num_workers) for age in range(count)])


@options
def plot_versions(of: Trace | Run, *, from_s: float = 0.0, to_s: float | None = None) -> Figure:
    """A space-time diagram: a line per process, and for each gradient an arrow from where its parameters were read to
    where it was applied, darker the older it was.

    Args:
        of: a run, or a trace.
        from_s, to_s: which stretch of it, by the time of the apply; by default from the first apply on, for so many
            arrows as can be told apart.

    >>> import distlab as dl
    >>> run = dl.train(dl.tasks.digits(), dl.SyncPS(), dl.SimulatedCluster(3), num_updates=4, progress=False)
    >>> len(plot_versions(run).axes[0].collections[0].get_segments())
    12
    """
    trace = trace_of(of)
    who = trace.who
    rows = of.applies if isinstance(of, Run) else trace.applies
    rows = rows[(rows["end_s"] >= from_s) & (rows["end_s"] <= (np.inf if to_s is None else to_s))]
    left_out = max(len(rows) - MOST_ARROWS, 0)
    rows = rows[:MOST_ARROWS]
    begun = {(w, s): start for w, s, start in trace.select("compute")[["worker", "step", "start_s"]].tolist()}
    segments, ages = [], []
    for role, index, worker, step, end_s, version, read in rows[
        ["role", "index", "worker", "step", "end_s", "version", "read"]
    ].tolist():
        reader = next((who.index(f"{r} {worker}") for r in ("worker", "replica") if f"{r} {worker}" in who), None)
        if reader is not None and (worker, step) in begun:
            segments.append([(begun[worker, step], reader), (end_s, who.index(f"{ROLES[role]} {index}"))])
            ages.append(version - 1 - read)
    figure, axes = with_rows(who, 8.0, 1.2, 0.42)
    shade = Normalize(0, max([1, *ages]))
    arrows = LineCollection(segments, array=np.array(ages), cmap=AGES, norm=shade, linewidths=1.2)
    axes.add_collection(arrows)
    lines = [[(0, y), (1, y)] for y in range(len(who))]
    across = LineCollection(lines, colors=GREY, linewidths=0.6, zorder=0, transform=axes.get_yaxis_transform())
    axes.add_collection(across, autolim=False)
    ends = np.array([segment[1] for segment in segments]).reshape(-1, 2)
    axes.scatter(ends[:, 0], ends[:, 1], c=ages, cmap=AGES, norm=shade, marker="v", s=14, zorder=3)
    axes.set(xlabel="time (s)", ylim=(max(len(who), 3) - 0.4, -0.6))
    axes.autoscale_view(scaley=False)
    if not len(rows):
        nothing(axes, f"nothing was applied from {from_s:g} s on")
    figure.colorbar(arrows, ax=axes, label="staleness", pad=0.01, ticks=MaxNLocator(6, integer=True))
    if left_out:
        axes.set_title(f"the first {MOST_ARROWS} of {MOST_ARROWS + left_out:,} gradients", loc="left", fontsize="small")
    return shown(figure)


@options
def plot_traffic(of: Trace | Run) -> Figure:
    """Bytes that each process sent, by the role of who received them: a server's bar says what a hub has to carry.

    >>> import distlab as dl
    >>> run = dl.train(dl.tasks.digits(), dl.AsyncPS(), dl.SimulatedCluster(3), num_updates=9, progress=False)
    >>> plot_traffic(run).axes[0].get_xlabel()
    'MB sent'
    """
    trace = trace_of(of)
    sent: dict[str, dict[str, float]] = {who: {} for who in trace.who}
    rows = trace.rows[trace.rows["bytes"] > 0]
    pairs, which = links(rows)
    for (who, receiver), num_bytes in zip(pairs, np.bincount(which, rows["bytes"]).tolist(), strict=True):
        to = receiver.split(" ")[0]
        sent.setdefault(who, {})[to] = sent.get(who, {}).get(to, 0) + num_bytes
    figure, axes = with_rows(list(sent), 7.0, 1.0, 0.36)
    if not any(sent.values()):
        nothing(axes, "no message was sent")
    left = np.zeros(len(sent))
    for to, (colour, hatch) in WHERE.items():
        widths = np.array([by_role.get(to, 0) / 1e6 for by_role in sent.values()])
        if widths.any():
            label = f"to a {to}" if to else "to the other ranks"
            bars(axes, widths, left, colour, hatch, label)
    axes.set_xlabel("MB sent")
    explain(figure)
    return shown(figure)


def explain(figure: Figure) -> None:
    """Say below the picture what its bars are, if there are any."""
    if kinds := len(figure.axes[0].containers):
        figure.legend(ncols=kinds, frameon=False, fontsize="small", loc="outside lower center")


def bars(axes: Axes, widths: np.ndarray, left: np.ndarray, colour: str, hatch: str, label: str) -> None:
    """Bars to the right of those that end at `left`, which then end there."""
    some = np.flatnonzero(widths)
    edge = "white" if hatch else colour
    axes.barh(some, widths[some], left=left[some], color=colour, hatch=hatch, edgecolor=edge, label=label)
    left += widths


@options
def plot_ledger(of: Trace | Run) -> Figure:
    """What became of every gradient: a bar per worker, in the words of `reports.ledger`.

    >>> import distlab as dl
    >>> strategy = dl.SyncPS(num_backup_workers=1)
    >>> run = dl.train(dl.tasks.digits(), strategy, dl.SimulatedCluster(3), num_updates=9, progress=False)
    >>> [text.get_text() for text in plot_ledger(run).legends[0].get_texts()][0]
    'applied'
    """
    book = ledger(trace_of(of))
    counts: Mapping[str, Mapping[int, int]] = (table := book.table()).to_dict()
    workers = table.index.tolist()
    figure, axes = with_rows([f"worker {worker}" for worker in workers], 7.0, 1.0, 0.36)
    if not workers:
        nothing(axes, "no gradient was computed")
    left = np.zeros(len(workers))
    for fate, (colour, hatch) in FATES.items():
        widths = np.array([counts[fate].get(worker, 0) for worker in workers])
        if widths.any():
            bars(axes, widths, left, colour, hatch, fate)
    axes.set_xlabel("gradients")
    explain(figure)
    if not book.balances:
        axes.set_title("does not balance: see run.ledger.problems", loc="left", fontsize="small", color=RED)
    return shown(figure)
