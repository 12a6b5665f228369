"""Pictures that several lessons share: sketches, and a guess drawn beside measurement and closed form."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from distlab.plots import ACTIVITIES, BLUE, LINES, ORANGE, RED, SKY, blank, shown

Curve = Callable[[float], float]
MOST_TICKS = 8


def space_time() -> Figure:
    """Three workers, one server, and the five events of a gradient's life; two places are open for one.

    A line per process, time to the right, an arrow per message.
    """
    figure, axes = blank(8.0, 3.3)
    for worker, start, strong in ((0, 0.0, False), (1, 1.3, True), (2, 2.6, False)):
        _life(axes, y=2.0 - worker, start=start, strong=strong)
    axes.hlines([3, 2, 1, 0], -0.3, 9.3, color="black", linewidth=0.8, zorder=0)
    axes.set_yticks([3, 2, 1, 0], ["server 0", "worker 0", "worker 1", "worker 2"])
    axes.set(xlim=(-0.3, 9.3), ylim=(-0.5, 3.75), xticks=[], xlabel="time →")
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(left=False)
    return shown(figure)


def _life(axes: Axes, *, y: float, start: float, strong: bool) -> None:
    """One worker's pull, compute, push and next pull; numbered, if it is the one that the text follows."""
    server, ends = 3.0, start + 4.2
    alpha = 1.0 if strong else 0.35
    for (x0, y0), (x1, y1), colour in (
        ((start, server), (start + 0.7, y), SKY),
        ((ends, y), (ends + 0.7, server), ORANGE),
        ((ends + 1.3, server), (ends + 2.0, y), SKY),
    ):
        look = {"arrowstyle": "-|>", "color": colour, "alpha": alpha, "linewidth": 1.6}
        axes.annotate("", (x1, y1), (x0, y0), arrowprops=look)
    axes.barh(y, ends - start - 0.9, left=start + 0.8, height=0.3, color=BLUE, alpha=alpha)
    if not strong:
        return
    notes = [
        (start + 0.75, y - 0.33, "① pull", SKY), (start + 2.4, y - 0.33, "② compute", BLUE),
        (ends + 0.1, y - 0.33, "③ push", ORANGE), (ends + 2.05, y - 0.33, "⑤ pull", SKY),
        (ends + 0.95, server + 0.33, "④ apply: here?", RED), (ends + 0.1, y + 0.33, "④ or here?", RED),
    ]  # fmt: skip
    for x, height, text, colour in notes:
        axes.text(x, height, text, ha="center", va="center", fontsize=10, color="black",
                  bbox={"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": colour})  # fmt: skip
    axes.plot([ends + 0.95, ends - 0.05], [server, y], "o", color=RED, markersize=9, zorder=3)


def against(
    measured: Mapping[str, Mapping[float, float]],
    closed: Mapping[str, Curve],
    *,
    ylabel: str,
    xlabel: str = "number of workers P",
    guess: float | None = None,
    guess_at: float = 4,
    log: str = "",
) -> Figure:
    """A quantity against another, often the number of workers: markers measured, lines closed forms, a star the guess.

    Args:
        measured: by name, x -> value.
        closed: by formula, x -> value, in the order of `measured`: a pair shares its colour.
        ylabel, xlabel: what is drawn, with its unit.
        guess: the reader's; None draws none.
        guess_at: the x that was asked for.
        log: which axes are logarithmic, "", "x", "y" or "xy".

    Raises:
        TypeError: the guess is no number.
    """
    figure, axes = blank(8.5, 3.4)
    xs = sorted({x for values in measured.values() for x in values})
    for (name, values), (colour, _), marker in zip(measured.items(), LINES, "osD^v", strict=False):
        points = list(values), list(values.values())
        axes.plot(*points, marker, color=colour, markersize=8, label=f"{name}, measured")
    fine = (np.geomspace if "x" in log else np.linspace)(min(xs), max(xs), 200)
    for (formula, curve), (colour, style) in zip(closed.items(), LINES, strict=False):
        axes.plot(fine, [curve(x) for x in fine], color=colour, linestyle=style, label=formula, zorder=1)
    star(axes, guess, guess_at)
    axes.set(xscale="log" if "x" in log else "linear", yscale="log" if "y" in log else "linear")
    if len(xs) <= MOST_TICKS:
        axes.set_xticks(xs, [f"{x:g}" for x in xs], minor=False)
        axes.set_xticks([], minor=True)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    if "y" not in log:
        axes.set_ylim(0, None)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return shown(figure)


def bars(
    measured: Mapping[str, float],
    *,
    ylabel: str,
    closed: Mapping[str, float] | None = None,
    guess: float | None = None,
    guess_at: str = "",
) -> Figure:
    """A quantity of several things side by side: bars measured, black lines closed forms, a star the guess.

    Args:
        measured: by name.
        ylabel: what is measured, with its unit.
        closed: by some of the same names.
        guess: the reader's; None draws none.
        guess_at: the name that was asked for.

    Raises:
        TypeError: the guess is no number.
    """
    figure, axes = blank(8.5, 3.4)
    names = list(measured)
    axes.bar(names, list(measured.values()), color=SKY, edgecolor=BLUE, label="measured")
    for i, (name, value) in enumerate((closed or {}).items()):
        at = names.index(name)
        axes.hlines(value, at - 0.45, at + 0.45, color="black", linestyle="--", label="" if i else "closed form")
    star(axes, guess, names.index(guess_at) if guess_at else 0)
    axes.set_ylabel(ylabel)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return shown(figure)


def star(axes: Axes, guess: float | None, at: float) -> None:
    """The reader's guess, where there is one."""
    if guess is None:
        return
    if not isinstance(guess, (int, float)):
        raise TypeError(f"a guess is a number, or None for no guess; got {guess!r}")
    axes.plot(at, guess, "*", color=RED, markersize=16, mec="black", label="your guess", zorder=4)


def sketch(
    rows: Sequence[str],
    boxes: Sequence[tuple[str, float, float, str]],
    arrows: Sequence[tuple[str, float, str, float, str]] = (),
    notes: Sequence[tuple[str, float, str]] = (),
    *,
    xlabel: str = "time →",
) -> Figure:
    """A picture of what nobody measured: lines of life, what is done on them, messages between them, and words.

    Args:
        rows: from top to bottom.
        boxes: (row, from, to, kind), kind as in a timeline: "compute", "push", "pull", "wait", "apply", "reduce".
        arrows: (from row, at, to row, at, kind).
        notes: (row, at, words), a little below its line.
    """
    figure, axes = blank(8.0, 0.6 + 0.68 * len(rows))
    at = {row: len(rows) - 1 - i for i, row in enumerate(rows)}
    for row, start, end, kind in boxes:
        axes.barh(at[row], end - start, left=start, height=0.34, color=ACTIVITIES[kind][0], zorder=1)
    for sender, left, receiver, came, kind in arrows:
        look = {"arrowstyle": "-|>", "color": ACTIVITIES[kind][0], "linewidth": 1.6}
        axes.annotate("", (came, at[receiver]), (left, at[sender]), arrowprops=look, zorder=3)
    for row, x, words in notes:
        axes.text(x, at[row] - 0.34, words, ha="center", va="center", fontsize=10, zorder=4,
                  bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"})  # fmt: skip
    times = [x for _, start, end, _ in boxes for x in (start, end)]
    times += [x for _, left, _, came, _ in arrows for x in (left, came)]
    room = 0.03 * (max(times) - min(times))
    axes.hlines(list(at.values()), min(times) - room, max(times) + room, color="black", linewidth=0.8, zorder=0)
    axes.set_yticks(list(at.values()), list(at))
    axes.set(xlim=(min(times) - room, max(times) + room), ylim=(-0.65, len(rows) - 0.5), xticks=[], xlabel=xlabel)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(left=False)
    return shown(figure)
