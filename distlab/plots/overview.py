"""A whole run in one picture, which can be drawn again several times a second while the run goes on."""

import io
import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure, FigureBase
from matplotlib.font_manager import findfont
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator, NullLocator

from distlab.options import options
from distlab.plots.paper import ACTIVITIES, BLUE, GREEN, GREY, ORANGE, RED, trace_of
from distlab.plots.tally import Tally, waiting
from distlab.plots.timeline import places, thin
from distlab.run import Run
from distlab.theory import staleness_probability
from distlab.trace import KIND_CODES, KINDS, Trace

SIZE, DPI = (12.0, 8.2), 80
ROWS, COLUMNS = (26, 218, 244, 168), (330, 300, 330)  # pixels; the first row is the title's
MOST_NAMES = 20  # of processes beside a row: of more, every second, third...
FEW_NAMES = 5  # among more there is room for "w2" only
MOST_LINKS = 10
MOST_BARS = 200  # of ages: more are put together
TINY, HUGE = 1e-200, 1e200  # losses beyond are drawn there


@options
def plot_overview(of: Trace | Run, *, num_workers: int | None = None) -> Figure:
    """All about a run in one picture: losses, staleness, the newest stretch of the timeline, who waits for whom, bytes
    per link, and the last updates in words. `LiveRun.dashboard` shows the same while the run goes on.

    Args:
        of: a run, or a trace.
        num_workers: draw beside the staleness what so many workers with exponential compute times come to (see
            `theory.staleness_probability`); None: of a run that has any staleness, its own number.

    >>> import distlab as dl
    >>> run = dl.train(dl.tasks.digits(), dl.AsyncPS(), dl.SimulatedCluster(3), num_updates=40, progress=False)
    >>> [axes.get_xlabel() for axes in plot_overview(run).axes][:3]
    ['updates applied (version)', 'staleness (updates between read and apply)', 'time (s)']
    """
    rows = trace_of(of).rows
    num_workers = of.num_workers if num_workers is None and isinstance(of, Run) else num_workers
    metrics = of.task.metrics if isinstance(of, Run) and of.task is not None else ()
    newest = int(rows["version"][rows["kind"] == KIND_CODES["apply"]].max(initial=1))
    view = Overview(max(newest, 1), num_workers or 1, metric=next(iter(metrics), ""))
    view.add(rows)
    view.still()
    return view.figure


class Overview:
    """The picture of a run of which more and more is known: `add` what has happened, and take its `png`.

    What moves is drawn over a background that is kept; a pane of it is drawn anew only when its limits or names change,
    and limits grow in jumps, so that this is seldom. Not for several threads at once.

    Args:
        num_updates: the version at which the run will be over.
        num_workers: for the theory's line beside the staleness.
        title: above the picture.
        metric: the name of the task's first metric.

    Attributes:
        tally: what is known.
    """

    def __init__(self, num_updates: int, num_workers: int = 1, title: str = "", metric: str = "") -> None:
        self.tally, self.num_workers = Tally(num_updates), num_workers
        self.title = title or "distlab run"
        self._metric = f"{metric or 'first metric'} (right)"
        self.figure = Figure(figsize=SIZE, dpi=DPI)
        self.canvas = FigureCanvasAgg(self.figure)
        self._moving: list[Artist] = []
        self._names: list[str] = []
        self._limits: dict[Axes, tuple[float, ...]] = {}
        self._background: Any = None
        self._stale: set[FigureBase] = {self.figure}  # of the background
        self._at: list[tuple[float, float]] = []
        self._shown: list[tuple[str, str]] = []
        self._links: list[str] = []
        self._span_s, self._final = 0.0, False
        self._legend_kinds: list[str] = []
        self._set_up(title)

    def add(self, rows: np.ndarray) -> None:
        """Add events; the array is left as it is."""
        self.tally.add(rows.copy())

    def png(self) -> bytes:
        """The picture as it is now."""
        from PIL import Image

        self._refresh()
        texts = [] if self._final else self._texts
        if self._background is not None:
            self.canvas.restore_region(self._background)
        if self._stale:
            for artist in self._moving:
                artist.set_animated(True)
            for pane in self._stale:
                pane.draw(self.canvas.get_renderer())
            self._stale = set()
            self._background = self.canvas.copy_from_bbox(self.figure.bbox)
        for artist in self._moving:
            if artist.axes is not None and artist not in texts:
                artist.axes.draw_artist(artist)
        told = io.BytesIO()
        size = self.canvas.get_width_height()
        picture = Image.frombuffer("RGBA", size, self.canvas.buffer_rgba(), "raw", "RGBA", 0, 1).convert("RGB")
        for text in texts:
            write(text, picture)
        picture.quantize(64, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(told, "PNG", compress_level=1)
        return told.getvalue()

    @property
    def _texts(self) -> list[Text]:
        return [artist for artist in self._moving if isinstance(artist, Text)]

    def still(self) -> bytes:
        """The last picture, with the hatches that grey print needs (they cost too much while it moves); from now on the
        figure is an ordinary one."""
        self._span_s, self._links, self._final = 0.0, [], True
        self._refresh()
        for kind, bars in self._activities.items():
            if not thin(bars, self._span_s):
                bars.set_hatch(ACTIVITIES[kind][1])
                bars.set_edgecolor("white" if ACTIVITIES[kind][1] else ACTIVITIES[kind][0])
        self._carried.set(hatch="///", edgecolor="white")
        self._stale = {self.figure}
        png = self.png()
        for artist in self._moving:
            artist.set_animated(False)
        self._stale = {self.figure}
        return png

    def _set_up(self, title: str) -> None:
        grid = self.figure.add_gridspec(4, 3, height_ratios=ROWS, width_ratios=COLUMNS)
        self.figure.suptitle(title, x=0.01, y=0.99, ha="left", fontsize="medium")
        by_version, ages = self._pane(grid[1, 0], right=26, top=26), self._pane(grid[1, 2], right=20, top=26)
        by_time = self._pane(grid[1, 1], left=30, right=44, top=26)
        self._timeline, self._cluster = self._pane(grid[2, :2], right=44), self._pane(grid[2, 2], 10, 10, 20, 4)
        self._words, self._traffic = (
            self._pane(grid[3, :2], top=4, bottom=4),
            self._pane(grid[3, 2], left=90, right=20, top=8),
        )
        self._curves = (by_version, by_time)
        self._losses = [self._line(axes, color=BLUE, linewidth=1.4) for axes in self._curves]
        self._judged = [
            self._line(axes, color=ORANGE, marker="o", markersize=4, linestyle="--") for axes in self._curves
        ]
        by_version.set(xlabel="updates applied (version)", ylabel="loss")
        by_version.yaxis.set_label_coords(-0.19, 0.5)
        by_time.set(xlabel="time (s)")
        by_time.tick_params(
            labelleft=False
        )  # they share no axis: or each new limit would draw all of the other at once
        self._rights = by_version.twinx(), by_time.twinx()
        self._scores = [
            self._line(axes, color=GREEN, marker="s", markersize=3, linestyle="-.") for axes in self._rights
        ]
        for axes in self._rights:
            axes.set_axis_off()
        self._keys: list[str] = []
        self._point_told = self._text(by_time, 1.0, 1.01, "", ha="right", va="bottom", fontsize=7, color=GREY)
        self._ages = ages
        self._bars = self._boxes(ages, BLUE)
        self._theory = self._line(ages, color=ORANGE, marker="o", markersize=3, linewidth=1)
        self._mean = self._line(ages, color=RED, linestyle="--", linewidth=1.2)
        self._mean_told = self._text(ages, 1.0, 1.02, "", ha="right", va="bottom", fontsize=8)
        ages.set(xlabel="staleness (updates between read and apply)", ylabel="share of gradients", ylim=(0, 1.05))
        ages.set_xlim(-0.9, 8.9)
        for axes, most in ((by_version, 4), (by_time, 4), (ages, 8), (self._timeline, 6), (self._traffic, 4)):
            axes.xaxis.set_major_locator(MaxNLocator(most, integer=axes in (by_version, ages)))
        by_version.xaxis.set_major_formatter("{x:,.0f}")
        kinds = sorted(ACTIVITIES, key=lambda kind: kind != "wait")
        self._activities = {kind: self._boxes(self._timeline, ACTIVITIES[kind][0]) for kind in kinds}
        self._crosses = self._line(self._timeline, color=RED, marker="x", linestyle="", markersize=7, markeredgewidth=2)
        self._timeline.set(xlabel="seconds before the newest event", xlim=(-1, 0), yticks=[])
        self._timeline_told = self._text(self._timeline, 1.0, -0.13, "", ha="right", va="top", fontsize=8, color=GREY)
        self._arrows = LineCollection([], colors="black", animated=True)
        self._heads = self._boxes(self._cluster, "black")
        self._cluster.add_collection(self._arrows)
        self._moving.append(self._arrows)
        self._nodes = self._cluster.scatter([], [], s=420, edgecolors="black", linewidths=0.8, zorder=3)
        self._moving.append(self._nodes)
        self._dead = self._line(self._cluster, color=RED, marker="x", linestyle="", markersize=20, markeredgewidth=3)
        self._shares: list[Text] = []
        self._cluster.set(xlim=(-1.35, 1.35), ylim=(-1.45, 1.35), aspect="equal")
        self._cluster.set_axis_off()
        self._cluster.set_title("what each does most; arrow and %: waits for", fontsize=8, loc="left")
        self._said = self._text(self._words, 0.0, 0.95, "", va="top", fontsize=8.5, linespacing=1.5)
        self._words.set_axis_off()
        self._carried = self._boxes(self._traffic, ORANGE)
        self._traffic.set(xlabel="MB sent by link", xlim=(0, 1), yticks=[])
        self._nothing = self._text(self._traffic, 0.5, 0.5, "nothing so far", ha="center", fontsize=8, color=GREY)
        for axes in (by_version, by_time, ages, self._timeline, self._traffic):
            axes.spines[["top", "right"]].set_visible(False)
        for axes in self._rights:
            axes.spines[["top", "right"]].set_visible(False)

    def _pane(self, where: Any, left: int = 62, right: int = 14, top: int = 20, bottom: int = 42) -> Axes:
        """Axes in a part of the picture that is drawn by itself; margins in pixels."""
        pane = self.figure.add_subfigure(where, facecolor="white")
        width, height = pane.bbox.size
        place = (left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height)
        return pane.add_axes(place)

    def _line(self, axes: Axes, **how: Any) -> Line2D:
        (line,) = axes.plot([], [], **how)
        self._moving.append(line)
        return line

    def _boxes(self, axes: Axes, colour: str) -> PolyCollection:
        bars = PolyCollection([], facecolors=colour, edgecolors=colour, linewidths=0.3)
        axes.add_collection(bars)
        self._moving.append(bars)
        return bars

    def _text(self, axes: Axes, x: float, y: float, words: str, **how: Any) -> Text:
        text = axes.text(x, y, words, transform=axes.transAxes, **how)
        self._moving.append(text)
        return text

    def _refresh(self) -> None:
        tally = self.tally
        rows, span_s = tally.window()
        self._put_names(tally.who)
        self._draw_curves()
        self._draw_ages()
        self._draw_timeline(rows, span_s)
        self._draw_cluster(rows, span_s)
        self._draw_traffic()
        said = [f"{'• ' if i == 0 else '  '}{line}" for i, line in enumerate(reversed(tally.applied))]
        self._said.set_text("\n".join([*said, *(f"▸ {note}" for note in reversed(tally.notes))]))

    def _limit(self, axes: Axes, *limits: float) -> None:
        """Set what is in view, (x0, x1) or (x0, x1, y0, y1); the pane is drawn anew if that is news."""
        if self._limits.get(axes) != limits:
            self._limits[axes] = limits
            axes.set_xlim(*limits[:2])
            if limits[2:]:
                axes.set_ylim(*limits[2:])
            self._stale.add(axes.figure)

    def _put_names(self, who: Sequence[str]) -> None:
        if who == self._names:
            return
        self._names = list(who)
        self._stale |= {self._timeline.figure, self._cluster.figure}
        every = -(-len(who) // MOST_NAMES)
        self._timeline.set_yticks(range(0, len(who), every), who[::every], fontsize="small")
        self._at = positions(who)
        for text in self._shares:
            text.remove()
            self._moving.remove(text)
        self._shares = []
        hubs = [label.startswith(("server", "client")) for label in who]
        for label, (x, y), is_hub in zip(who, self._at, hubs, strict=True):
            if len(who) <= MOST_NAMES:
                at = beside(x, y, is_hub, not any(hubs))
                told = self._cluster.text(*at, label, ha="center", va="center", fontsize=8, zorder=4)
                self._shares.append(told)
                self._moving.append(told)
        self._nodes.set_offsets(self._at)
        self._nodes.set_sizes([min(420.0, 2400.0 / max(len(who), 1))])

    def _put_keys(self, seen: Mapping[str, bool]) -> None:
        """The legend of the curves: only what is there."""
        if (keys := [key for key, is_there in seen.items() if is_there]) == self._keys:
            return
        self._keys = keys
        lines = dict(zip(seen, (self._losses[0], self._judged[0], self._scores[0]), strict=True))
        handles = [lines[key] for key in keys]
        self._curves[0].legend(
            handles=handles, labels=keys, ncols=3, frameon=False, fontsize=8, loc="lower left", handlelength=1.5,
            bbox_to_anchor=(-0.13, 1.03), borderaxespad=0.0, columnspacing=0.8, handletextpad=0.5,
        )  # fmt: skip
        if self._metric in keys:
            self._rights[1].set_axis_on()  # one is enough: both have the same limits
        self._stale |= {axes.figure for axes in self._curves}

    def _draw_curves(self) -> None:
        tally = self.tally
        versions, times, losses = tally.curve
        judged = sorted((version, *seen) for version, seen in tally.judged.items())
        for line, xs in zip(self._losses, (versions, times), strict=True):
            line.set_data(xs, losses)
        for line, place in zip(self._judged, (0, 1), strict=True):
            line.set_data([j[place] for j in judged], [j[2] for j in judged])
        scores = sorted((version, *seen) for version, seen in tally.scores.get(0, {}).items() if math.isfinite(seen[1]))
        for line, place in zip(self._scores, (0, 1), strict=True):
            line.set_data([s[place] for s in scores], [s[2] for s in scores])
        for line in self._losses:
            line.set_marker("o" if len(losses) == 1 else "")
        self._put_keys({"training": True, "validation": bool(judged), self._metric: bool(scores)})
        self._point_told.set_text(f"a point for each {tally.per_point:,} updates" if tally.per_point > 1 else "")
        ends = (
            min(rounded(max(tally.version, 1)), 1.02 * max(tally.num_updates, 1)),
            rounded(tally.now_s) if tally.now_s > 0 else 1.0,
        )
        values = np.array([*losses, *(j[2] for j in judged)])
        scale, bottom, top, ticks = loss_axis(np.clip(values[np.isfinite(values)], -HUGE, HUGE))
        seen = np.array([s[2] for s in scores])
        low, high = linear_limits(seen) if ((seen < 0) | (seen > 1)).any() else (0.0, 1.02)
        for axes, right, end in zip(self._curves, self._rights, ends, strict=True):
            if axes.get_yscale() != scale:
                axes.set_yscale(scale)
                axes.yaxis.set_minor_locator(NullLocator())
            if self._limits.get(axes, ())[2:] != (bottom, top):
                axes.set_yticks(ticks, [plain(tick) for tick in ticks])
            self._limit(axes, 0, end, bottom, top)
            self._limit(right, 0, end, low, high)

    def _draw_ages(self) -> None:
        counts = self.tally.ages
        total = counts.sum()
        if not total:
            return
        last = max(int(np.searchsorted(counts.cumsum(), 0.999 * total)), 4)
        mean = float((np.arange(len(counts)) * counts).sum() / total)
        told, workers = (
            f"{total:,} gradient{'s' if total > 1 else ''}, mean {mean:.2f}",
            self.num_workers if mean > 0 else 1,
        )
        if workers > 1:
            last = max(last, 2 * workers)
            told += f"; o: {workers} workers, exponential times"
        wide = -(-(last + 1) // MOST_BARS)  # ages that share a bar
        counts = counts[: last + 1]
        shares = np.pad(counts, (0, -len(counts) % wide)).reshape(-1, wide).sum(1) / total
        bars = np.flatnonzero(shares)
        middles = bars * wide + (wide - 1) / 2
        self._bars.set_verts(boxes(middles - 0.4 * wide, middles + 0.4 * wide, np.zeros(len(bars)), shares[bars]))
        self._mean.set_data([mean, mean], [0, 2])
        top = float(shares.max())
        if workers > 1:
            at = np.arange((last + 1) // wide) * wide + (wide - 1) // 2
            expected = [wide * staleness_probability(int(age), workers) for age in at]
            self._theory.set_data(at, expected)
            top = max(top, *expected)
        self._mean_told.set_text(told if wide == 1 else f"{told}\na bar for each {wide} ages")
        self._limit(self._ages, -0.9 * wide, (-(-last // 4) * 4) + 0.9, 0, min(rounded(1.05 * top), 1.05))

    def _draw_timeline(self, rows: np.ndarray, span_s: float) -> None:
        if not 0.4 * self._span_s < span_s <= self._span_s:
            self._span_s = rounded(1.3 * span_s)
        span_s, now_s = self._span_s, self.tally.now_s
        rows = rows[rows["end_s"] > now_s - span_s]
        for kind, bars in self._activities.items():
            mine = rows[rows["kind"] == KIND_CODES[kind]]
            if not len(mine):
                bars.set_verts([])
                continue
            half = 0.12 if kind == "wait" else 0.36
            y = places(mine, self._names)
            left = np.maximum(mine["start_s"] - now_s, -span_s)
            right = np.minimum(np.maximum(mine["end_s"] - now_s, left + span_s / 400), 0)
            bars.set_verts(boxes(left, right, y - half, y + half))
        crosses = [
            (row["end_s"] - now_s, self._names.index(f"worker {row['worker']}"))
            for row in rows[rows["kind"] == KIND_CODES["drop"]]
            if f"worker {row['worker']}" in self._names
        ]
        self._crosses.set_data([x for x, _ in crosses], [y for _, y in crosses])
        seen = [kind for kind in ACTIVITIES if np.any(rows["kind"] == KIND_CODES[kind])]
        if set(seen) - set(self._legend_kinds):
            self._legend_kinds = [kind for kind in ACTIVITIES if kind in {*seen, *self._legend_kinds}]
            handles = [
                Patch(facecolor=c, hatch=h, edgecolor="white" if h else c, label=kind)
                for kind, (c, h) in ((kind, ACTIVITIES[kind]) for kind in self._legend_kinds)
            ]
            self._timeline.legend(
                handles=handles, ncols=len(handles), frameon=False, fontsize=8, loc="lower left",
                bbox_to_anchor=(-0.01, 0.98), borderaxespad=0.0, columnspacing=1.0,
            )  # fmt: skip
            self._stale.add(self._timeline.figure)
        self._timeline_told.set_text(f"which was at {now_s:.2f} s")
        self._limit(self._timeline, -span_s, 0, max(len(self._names), 3) - 0.4, -0.6)

    def _draw_cluster(self, rows: np.ndarray, span_s: float) -> None:
        tally, who = self.tally, self._names
        from_s = tally.now_s - span_s
        shares = waiting(rows, from_s, tally.now_s)
        waits = {w: min(sum(share for (a, _), share in shares.items() if a == w), 1.0) for w in who}
        colours, busy = [], busiest(rows, who, from_s, tally.now_s)
        for label in who:
            kind, share = busy.get(label, ("wait", 0.0))
            kind = "wait" if waits[label] >= share else kind
            colours.append("white" if label in tally.gone else ACTIVITIES[kind][0])
        self._nodes.set_facecolor(colours)
        gone = [at for label, at in zip(who, self._at, strict=True) if label in tally.gone]
        self._dead.set_data([x for x, _ in gone], [y for _, y in gone])
        crowd = len(who) > FEW_NAMES
        for text, label in zip(self._shares, who, strict=False):
            told = f"{'' if crowd else 'waits '}{waits[label]:.0%}" if waits[label] >= 0.005 else ""
            told = "gone" if label in tally.gone else told
            text.set_text("\n".join(filter(None, [short(label) if crowd else label, told])))
        lines, heads, widths = [], [], []
        where = dict(zip(who, self._at, strict=True))
        for (waiter, awaited), share in shares.items():
            if share < 0.02 or waiter == awaited or waiter not in where or awaited not in where:
                continue
            start, end = np.array(where[waiter]), np.array(where[awaited])
            along = (end - start) / np.hypot(*(end - start))
            across = np.array([-along[1], along[0]])
            start, end = start + along * 0.2 + across * 0.04, end - along * 0.2 + across * 0.04
            lines.append([start, end - along * 0.08])
            heads.append([end, end - along * 0.12 + across * 0.05, end - along * 0.12 - across * 0.05])
            widths.append(0.5 + 4 * min(share, 1.0))
        self._arrows.set_segments(lines)
        self._arrows.set_linewidth(widths or [1.0])
        self._heads.set_verts(heads)

    def _draw_traffic(self) -> None:
        links = self.tally.links.most_common()
        if not links:
            return
        self._nothing.set_text("")
        label = {pair: f"{short(pair[0])} → {short(pair[1]) or 'other ranks'}" for pair, _ in links}
        unit, size = ("MB", 1e6) if links[0][1] >= 1e5 else ("kB", 1e3)
        if len(self._links) < min(len(links), MOST_LINKS) or self._traffic.get_xlabel()[:2] != unit:
            self._shown = sorted(pair for pair, _ in links[:MOST_LINKS])
            self._links = [label[pair] for pair in self._shown]
            left_out = len(links) - len(self._links)
            self._traffic.set_yticks(range(len(self._links)), self._links, fontsize=8)
            self._traffic.set_xlabel(
                f"{unit} sent by link" + (f" (the {MOST_LINKS} busiest of {len(links)})" if left_out else "")
            )
            self._stale.add(self._traffic.figure)
        carried = np.array([self.tally.links[pair] / size for pair in self._shown])
        y = np.arange(len(carried))
        self._carried.set_verts(boxes(np.zeros(len(carried)), carried, y - 0.38, y + 0.38))
        self._limit(self._traffic, 0, rounded(max(float(carried.max()), 1e-6)), max(len(carried), 2) - 0.4, -0.6)


def busiest(rows: np.ndarray, who: Sequence[str], from_s: float, to_s: float) -> dict[str, tuple[str, float]]:
    """What each process did most in this stretch of time, waiting aside, and the share of it."""
    if not len(rows):
        return {}
    lengths = np.clip(np.minimum(rows["end_s"], to_s) - np.maximum(rows["start_s"], from_s), 0, None)
    kinds = [kind for kind in ACTIVITIES if kind != "wait"]
    sums = np.zeros((len(who), len(KINDS)))
    np.add.at(sums, (places(rows, who).astype(int), rows["kind"]), lengths / max(to_s - from_s, 1e-12))
    sums = sums[:, [KIND_CODES[kind] for kind in kinds]]
    return {label: (kinds[int(line.argmax())], float(line.max())) for label, line in zip(who, sums, strict=True)}


def boxes(left: np.ndarray, right: np.ndarray, low: np.ndarray, high: np.ndarray) -> list[np.ndarray]:
    """The corners of rectangles, each (4, 2)."""
    return list(np.stack([np.stack([left, right, right, left], 1), np.stack([low, low, high, high], 1)], 2))


def positions(who: Sequence[str]) -> list[tuple[float, float]]:
    """Where to draw each process: servers and clients in a row above the others, or equals in a circle."""
    hubs = [w for w in who if w.startswith(("server", "client"))]
    others = [w for w in who if w not in hubs]
    if hubs:
        rows = -(-len(others) // 8)
        result = [(x, 0.9) for x in spread(len(hubs))]
        for i in range(len(others)):
            line, column = divmod(i, 8)
            mine = min(8, len(others) - 8 * line)
            result.append((spread(mine)[column], -0.9 + (0.9 * line / max(rows - 1, 1) if rows > 1 else 0.0)))
        return result
    turns = np.linspace(0, 2 * np.pi, len(others), endpoint=False)
    far = 0.0 if len(others) == 1 else 0.9
    return [(far * float(np.sin(turn)), far * float(np.cos(turn))) for turn in turns]


def beside(x: float, y: float, is_hub: bool, in_circle: bool) -> tuple[float, float]:
    """Where the name of a process at this place stands, away from the arrows."""
    if in_circle and (x or y):
        return 1.65 * x, 1.35 * y
    return x, y + (0.3 if is_hub else -0.3)


def spread(count: int) -> list[float]:
    """So many places from left to right."""
    return [0.0] if count == 1 else np.linspace(-1.1, 1.1, count).tolist()


def rounded(value: float) -> float:
    """The next number of 1, 1.5, 2, 3, 5, 7 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 1.5, 2, 3, 5, 7, 10) if step * power >= value * (1 - 1e-9))


def log_ticks(bottom: float, top: float) -> list[float]:
    """Few round numbers in between: 1, 2, 5, 10 ... or, over many powers of ten, some of those alone."""
    low, high = math.floor(math.log10(bottom)), math.ceil(math.log10(top))
    steps = (1, 2, 5) if high - low <= 3 else (1,)
    ticks = [step * 10.0**power for power in range(low, high + 1, max((high - low) // 6, 1)) for step in steps]
    return [tick for tick in ticks if bottom <= tick <= top]


def plain(tick: float) -> str:
    """A number in few letters: "0.05", "1e20"."""
    return re.sub(r"e\+?(-?)0*", r"e\1", f"{tick:.3g}")


def short(who: str) -> str:
    """ "w2" for "worker 2"."""
    return who[:1] + who.partition(" ")[2]


def loss_axis(values: np.ndarray) -> tuple[str, float, float, list[float]]:
    """How an axis shows these losses: scale, limits and ticks. Logarithmic, if all are above 0."""
    if (values <= 0).any():
        bottom, top = linear_limits(values)
        return "linear", bottom, top, [t for t in MaxNLocator(5).tick_values(bottom, top) if bottom <= t <= top]
    low, high = (max(values.min(), TINY), max(values.max(), TINY)) if len(values) else (0.1, 1.0)
    bottom, top = 4.0 ** math.floor(math.log(low, 4) - 0.1), 2.0 ** math.ceil(math.log2(high) + 0.2)
    return "log", bottom, top, log_ticks(bottom, top)


def linear_limits(values: np.ndarray) -> tuple[float, float]:
    """Limits with all of `values` inside, which change seldom as those grow."""
    low, high = float(values.min()), float(values.max())
    step = rounded(max(high - low, 1e-3 * max(abs(low), abs(high)), 1e-12)) / 4
    return step * (math.ceil(low / step) - 1), step * (math.floor(high / step) + 1)


def write(text: Text, picture: Any) -> None:
    """Draw `text` on a PIL picture: a tenth of the time that matplotlib takes, which fits each glyph anew."""
    from PIL import ImageDraw

    if not (words := text.get_text()) or text.axes is None:
        return
    x, y = text.get_transform().transform(text.get_position())
    across, up = {"left": "l", "center": "m", "right": "r"}, {"top": "a", "center": "m", "bottom": "d", "baseline": "s"}
    pixels, align = float(text.get_fontsize()) * DPI / 72, text.get_horizontalalignment()
    how: dict[str, Any] = {"fill": to_hex(text.get_color()), "font": font(round(pixels, 1))}
    how["anchor"] = across[align] + up[text.get_verticalalignment()]
    if "\n" in words:
        how |= {"align": align, "spacing": 0.4 * pixels}
    ImageDraw.Draw(picture).text((x, picture.height - y), words, **how)


@cache
def font(pixels: float) -> Any:
    """Matplotlib's own, for PIL."""
    from PIL import ImageFont

    return ImageFont.truetype(findfont("DejaVu Sans"), pixels)
