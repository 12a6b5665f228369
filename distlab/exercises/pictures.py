"""Pictures that several lessons share: sketches, and a guess drawn beside measurement and closed form."""

from collections.abc import Callable, Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from distlab.plots import BLUE, LINES, ORANGE, RED, SKY, blank, shown

Curve = Callable[[float], float]


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


def by_workers(
    measured: Mapping[str, Mapping[int, float]],
    closed: Mapping[str, Curve],
    *,
    ylabel: str,
    guess: float | None = None,
    guess_at: int = 4,
) -> Figure:
    """A quantity against the number of workers: markers measured, lines closed forms, the star a guess.

    Args:
        measured: by name, number of workers -> value.
        closed: by formula, number of workers -> value, in the order of `measured`.
        ylabel: what is measured, with its unit.
        guess: the reader's, for `guess_at` workers; None draws none.

    Raises:
        TypeError: the guess is no number.
    """
    if guess is not None and not isinstance(guess, (int, float)):
        raise TypeError(f"a guess is a number, or None for no guess; got {guess!r}")
    figure, axes = blank(7.0, 3.4)
    counts = sorted({p for values in measured.values() for p in values})
    for (name, values), (colour, _), marker in zip(measured.items(), LINES, "osD^v", strict=False):
        points = list(values), list(values.values())
        axes.plot(*points, marker, color=colour, markersize=8, label=f"{name}, measured")
    fine = np.linspace(min(counts), max(counts), 200)
    for (formula, curve), (colour, style) in zip(closed.items(), LINES, strict=False):
        axes.plot(fine, [curve(p) for p in fine], color=colour, linestyle=style, label=formula, zorder=1)
    if guess is not None:
        axes.plot(guess_at, guess, "*", color=RED, markersize=16, mec="black", label="your guess", zorder=4)
    axes.set_xticks(counts)
    axes.set(xlabel="number of workers P", ylabel=ylabel, ylim=(0, None))
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False, fontsize="small")
    return shown(figure)
