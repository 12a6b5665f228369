"""A whole run in one picture, which can be drawn again several times a second while the run goes on."""

import io
import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure, FigureBase
from matplotlib.font_manager import findfont
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.path import Path
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator, NullLocator

from distlab.options import options
from distlab.plots.counts import by_age
from distlab.plots.paper import ACTIVITIES, BLUE, GREEN, GREY, ORANGE, RED, trace_of
from distlab.plots.tally import FAR, Tally, waiting
from distlab.plots.timeline import places, thin
from distlab.run import Run
from distlab.trace import KIND_CODES, KINDS, Trace

SIZE, DPI = (12.0, 8.2), 80
ROWS, COLUMNS = (26, 218, 244, 168), (330, 300, 330)  # pixels; the first row is the title's
MOST_NAMES = 20  # of processes beside a row: of more, every second, third...
FEW_NAMES = 5  # among more there is room for "w2" only
MOST_LINKS = 10
STEPS = (1, 2, 5, 10)  # of ticks
SECONDS = {1.0: "s", 1e-3: "ms", 1e-6: "µs"}
BYTES = {1e9: "GB", 1e6: "MB", 1e3: "kB", 1.0: "B"}


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
        self._span_s = 0.0
        self._is_still = False
        self._ends: dict[str, float] = {}
        self._ticks: dict[Axes, list[float]] = {}
        self._widths: dict[str, np.ndarray] = {}
        self._legend_kinds: list[str] = []
        self._set_up(title)

    def add(self, rows: np.ndarray) -> None:
        """Add events; the array is left as it is."""
        self.tally.add(rows.copy())

    def png(self) -> bytes:
        """The picture as it is now."""
        from PIL import Image, ImageDraw

        self._refresh()
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
            if artist.axes is not None and not isinstance(artist, Text) and is_there(artist):
                artist.axes.draw_artist(artist)
        told = io.BytesIO()
        picture = Image.frombuffer(
            "RGBA", self.canvas.get_width_height(), self.canvas.buffer_rgba(), "raw", "RGBA", 0, 1
        ).convert("RGB")
        draw = ImageDraw.Draw(picture)
        for artist in self._moving:
            if isinstance(artist, Text) and artist.get_text():
                write(draw, artist, picture.height)
        picture.quantize(64, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(told, "PNG", compress_level=1)
        return told.getvalue()

    def still(self) -> bytes:
        """The last picture, with the hatches that grey print needs (they cost too much while it moves); from now on the
        figure is an ordinary one."""
        self._is_still = True  # and so its limits need leave no room
        self._refresh()
        for kind, bars in self._activities.items():
            if not thin(self._widths[kind], self._span_s):
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
        by_version, ages = self._pane(grid[1, 0]), self._pane(grid[1, 2], top=32)
        by_time = self._pane(grid[1, 1], left=30, right=44)
        self._timeline, self._cluster = (
            self._pane(grid[2, :2], left=62, right=44),
            self._pane(grid[2, 2], 10, 10, 20, 4),
        )
        self._words, self._traffic = self._pane(grid[3, :2], top=4, bottom=4), self._pane(grid[3, 2], left=90, top=8)
        self._curves = (by_version, by_time)
        self._losses = [self._line(axes, color=BLUE, linewidth=1.4) for axes in self._curves]
        self._judged = [
            self._line(axes, color=ORANGE, marker="o", markersize=4, linestyle="--") for axes in self._curves
        ]
        by_version.set(xlabel="updates applied (version)", ylabel="loss")
        self._by_score = [axes.twinx() for axes in self._curves]
        self._scores = [
            self._line(axes, color=GREEN, marker="s", markersize=3, linestyle="-.") for axes in self._by_score
        ]
        by_version.yaxis.set_label_coords(-0.17, 0.5)  # whatever the ticks' names
        for axes in self._by_score:
            axes.set_axis_off()
            axes.tick_params(labelsize=8, right=axes is self._by_score[1], labelright=axes is self._by_score[1])
        self._keys: list[str] = []
        self._point_told = self._text(by_time, 1.0, 1.01, "", ha="right", va="bottom", fontsize=7, color=GREY)
        self._ages = ages
        self._bars = self._boxes(ages, BLUE)
        self._theory = self._line(ages, color=ORANGE, marker="o", markersize=3, linewidth=1)
        self._mean = self._line(ages, color=RED, linestyle="--", linewidth=1.2)
        self._mean_told = self._text(ages, 1.0, 1.01, "", ha="right", va="bottom", fontsize=8)
        ages.set(xlabel="staleness (updates between read and apply)", ylabel="share of gradients", ylim=(0, 1.05))
        ages.set_xlim(-0.9, 8.9)
        for axes, most in ((by_version, 4), (ages, 8)):
            axes.xaxis.set_major_locator(MaxNLocator(most, integer=True, steps=STEPS))
        for axes, most in ((by_time, 4), (self._timeline, 8), (self._traffic, 4)):
            axes.xaxis.set_major_locator(MaxNLocator(most, steps=STEPS))
        by_version.xaxis.set_major_formatter("{x:,.0f}")
        kinds = sorted(ACTIVITIES, key=lambda kind: kind != "wait")
        self._activities = {kind: self._boxes(self._timeline, ACTIVITIES[kind][0]) for kind in kinds}
        self._crosses = self._line(self._timeline, color=RED, marker="x", linestyle="", markersize=7, markeredgewidth=2)
        self._timeline.set(xlim=(-1, 0), yticks=[])
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
        self._traffic.set(xlabel="bytes sent by link", xlim=(0, 1), yticks=[])
        self._nothing = self._text(self._traffic, 0.5, 0.5, "nothing so far", ha="center", fontsize=8, color=GREY)
        self._num_links = 0
        for axes in (by_version, by_time, ages, self._timeline, self._traffic):
            axes.spines[["top", "right"]].set_visible(False)
        for axes in self._by_score:
            axes.spines[["top", "right"]].set_visible(axes is self._by_score[1])
            axes.spines["top"].set_visible(False)

    def _pane(self, where: Any, left: int = 62, right: int = 26, top: int = 20, bottom: int = 42) -> Axes:
        """Axes in a part of the picture that is drawn by itself; margins in pixels."""
        pane = self.figure.add_subfigure(where, facecolor="white")
        width, height = pane.bbox.size
        place = (left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height)
        axes = pane.add_axes(place)
        axes.tick_params(labelsize=8)
        return axes

    def _line(self, axes: Axes, **how: Any) -> Line2D:
        (line,) = axes.plot([], [], **how)
        self._moving.append(line)
        return line

    def _boxes(self, axes: Axes, colour: str) -> PathCollection:
        bars = PathCollection([], facecolors=colour, edgecolors=colour, linewidths=0.3)
        axes.add_collection(bars, autolim=False)
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

    def _room(self, what: str, value: float) -> float:
        """Up to where an axis goes: some way beyond `value`, so that it need not grow with each picture."""
        if self._is_still:
            return 1.03 * value
        if not 0.3 * (end := self._ends.get(what, 0.0)) < value <= end:
            self._ends[what] = rounded(value)
        return self._ends[what]

    def _count_in(self, axes: Axes, most: float, units: Mapping[float, str], label: str) -> None:
        """Label the horizontal axis in a unit of which there are neither very many nor very few."""
        scale = next((scale for scale in sorted(units, reverse=True) if scale <= most), min(units))
        if axes.get_xlabel() != (label := label.format(units[scale])):
            axes.set_xlabel(label)
            axes.xaxis.set_major_formatter(lambda x, _: f"{x / scale:.4g}")
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
        apart = np.hypot(*np.diff(np.array(self._at), axis=0).T)  # neighbours
        self._nodes.set_sizes([min(420.0, 4200.0 * float(apart.min(initial=1.0)) ** 2)])

    def _put_keys(self, seen: Mapping[str, bool]) -> None:
        """The legend of the curves: only what is there."""
        if (keys := [key for key, is_there in seen.items() if is_there]) == self._keys:
            return
        self._keys = keys
        lines = dict(zip(seen, (self._losses[0], self._judged[0], self._scores[0]), strict=True))
        handles = [lines[key] for key in keys]
        self._curves[0].legend(
            handles=handles, labels=keys, ncols=3, frameon=False, fontsize=8, loc="lower left", handlelength=1.5,
            bbox_to_anchor=(-0.02, 1.0), borderaxespad=0.0, columnspacing=0.8, handletextpad=0.5,
        )  # fmt: skip
        if self._metric in keys:
            for axes in self._by_score:
                axes.set_axis_on()
        self._stale |= {axes.figure for axes in self._curves}

    def _draw_curves(self) -> None:
        tally = self.tally
        versions, times, losses = tally.curve
        judged = np.array(sorted((version, *seen) for version, seen in tally.judged.items())).reshape(-1, 3).T
        scores = (
            np.array(sorted((version, *seen) for version, seen in tally.scores.get(0, {}).items())).reshape(-1, 3).T
        )
        judged[2], scores[2] = finite(judged[2]), finite(scores[2])
        for i, xs in enumerate((versions, times)):
            self._losses[i].set(data=(xs, losses), marker="o" if len(xs) == 1 else "")
            self._judged[i].set_data(judged[i], judged[2])
            self._scores[i].set_data(scores[i], scores[2])
        self._put_keys({"training": True, "validation": judged.size > 0, self._metric: scores.size > 0})
        self._point_told.set_text(f"a point for each {tally.per_point:,} updates" if tally.per_point > 1 else "")
        ticks = loss_ticks(np.append(losses, judged[2]))
        score_ticks = around(np.append(scores[2], [0.0, 1.0]) if inside(scores[2]) else scores[2])
        ends = (
            min(self._room("versions", max(tally.version, 1)), 1.02 * max(tally.num_updates, 1)),
            self._room("time", tally.now_s) if tally.now_s > 0 else 1.0,
        )
        self._count_in(self._curves[1], ends[1], SECONDS, "time ({})")
        for axes, by_score, end in zip(self._curves, self._by_score, ends, strict=True):
            if self._ticks.get(axes) != ticks:
                self._ticks[axes] = ticks
                axes.set_yscale("log" if ticks[0] > 0 else "linear")
                axes.set_yticks(ticks[1:-1], [brief(tick) if axes is self._curves[0] else "" for tick in ticks[1:-1]])
                axes.yaxis.set_minor_locator(NullLocator())
            self._limit(axes, 0, end, ticks[0], ticks[-1])
            self._limit(by_score, 0, end, score_ticks[0], score_ticks[-1] + 0.02 * (score_ticks[-1] - score_ticks[0]))

    def _draw_ages(self) -> None:
        counts = self.tally.ages
        total = counts.sum()
        if not total:
            return
        usual = int(np.searchsorted(counts.cumsum(), 0.999 * total))
        mean = float((np.arange(len(counts)) * counts).sum() / total)
        num_workers = self.num_workers if mean > 0 else 0
        wide, middles, shares, expected = by_age(counts, usual, num_workers)
        some = shares > 0
        left, right = middles[some] - 0.4 * wide, middles[some] + 0.4 * wide
        self._bars.set_paths(boxes(left, right, np.zeros(some.sum()), shares[some]))
        self._mean.set_data([mean, mean], [0, 2])
        self._theory.set(data=(middles[: len(expected)], expected), marker="o" if len(expected) <= 50 else "")
        told = f"{total:,} gradient{'s' if total > 1 else ''}, mean {mean:.2f}"
        told += f", a bar for each {wide} ages" if wide > 1 else ""
        told += (
            f"\n{'o' if len(expected) <= 50 else 'line'}: {num_workers} workers, exponential times"
            if len(expected)
            else ""
        )
        self._mean_told.set_text(told)
        last = max(usual, 4, 2 * num_workers if len(expected) else 0)
        top = min(self._room("share", 1.05 * max([*shares, *expected])), 1.05)
        self._limit(self._ages, -0.9, (-(-last // 4) * 4) + 0.9, 0, top)

    def _draw_timeline(self, rows: np.ndarray, span_s: float) -> None:
        self._span_s = self._room("span", span_s)
        span_s, now_s = self._span_s, self.tally.now_s
        rows = rows[rows["end_s"] > now_s - span_s]
        for kind, bars in self._activities.items():
            mine = rows[rows["kind"] == KIND_CODES[kind]]
            half = 0.12 if kind == "wait" else 0.36
            y = places(mine, self._names)
            left = np.maximum(mine["start_s"] - now_s, -span_s)
            right = np.minimum(np.maximum(mine["end_s"] - now_s, left + span_s / 400), 0)
            self._widths[kind] = right - left
            bars.set_paths(boxes(left, right, y - half, y + half))
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
        self._timeline_told.set_text(f"which was at {now_s:.2f} s" if now_s >= 0.1 else "")
        self._count_in(self._timeline, span_s, SECONDS, "{} before the newest event")
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
        self._heads.set_paths([Path(head) for head in heads])

    def _draw_traffic(self) -> None:
        links = self.tally.links
        if not links:
            return
        self._nothing.set_text("")
        stay = 1.0 if self._is_still else 1.3  # times as busy is another that takes a place here
        busy: dict[
            tuple[str, str], float
        ] = {}  # there and back together, so that a link is not shown without its other
        for pair, sent in links.items():
            busy[both(pair)] = busy.get(both(pair), 0.0) - sent * (stay if pair in self._shown else 1.0)
        order = sorted(links, key=lambda pair: (busy[both(pair)], by_number(both(pair)), by_number(pair)))
        shown = sorted(order[:MOST_LINKS], key=by_number)
        if shown != self._shown or len(links) != self._num_links:
            self._shown, self._num_links = shown, len(links)
            told = [f"{short(sender)} → {short(receiver) or 'other ranks'}" for sender, receiver in shown]
            self._traffic.set_yticks(range(len(told)), told, fontsize=8)
            self._stale.add(self._traffic.figure)
        carried = np.array([links[pair] for pair in shown], float)
        y = np.arange(len(carried))
        self._carried.set_paths(boxes(np.zeros(len(carried)), carried, y - 0.38, y + 0.38))
        left_out = f" (the {MOST_LINKS} busiest of {len(links)})" if len(links) > MOST_LINKS else ""
        end = self._room("bytes", max(float(carried.max()), 1.0))
        self._count_in(self._traffic, end, BYTES, "{} sent by link" + left_out)
        self._limit(self._traffic, 0, end, max(len(carried), 2) - 0.4, -0.6)


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


def boxes(left: np.ndarray, right: np.ndarray, low: np.ndarray, high: np.ndarray) -> list[Path]:
    """Rectangles, as the one path that is drawn fastest."""
    if not len(left):
        return []
    corners = np.stack([np.stack([left, right, right, left, left], 1), np.stack([low, low, high, high, low], 1)], 2)
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    return [Path(corners.reshape(-1, 2), np.tile(codes, len(left)))]


def is_there(artist: Artist) -> bool:
    """Is there anything of it to draw?"""
    if isinstance(artist, Line2D):
        return len(np.asarray(artist.get_xdata())) > 0
    return not isinstance(artist, (PathCollection, LineCollection)) or len(artist.get_paths()) > 0


def write(draw: Any, text: Text, height: int) -> None:
    """Write a text as matplotlib would, in a small part of the time."""
    x, y = text.get_transform().transform(text.get_position())
    size = float(text.get_fontsize()) * DPI / 72
    anchor = {"left": "l", "center": "m", "right": "r"}[text.get_horizontalalignment()]
    anchor += {"top": "a", "center": "m", "bottom": "d", "baseline": "s"}[text.get_verticalalignment()]
    align = text.get_horizontalalignment()
    spacing = 0.35 * size
    draw.multiline_text(
        (round(x), round(height - y)), text.get_text(), to_hex(text.get_color()), font(size), anchor, spacing, align
    )


@cache
def font(size: float) -> Any:
    """Matplotlib's own, for Pillow."""
    from PIL import ImageFont

    return ImageFont.truetype(findfont("DejaVu Sans"), size)


def positions(who: Sequence[str]) -> list[tuple[float, float]]:
    """Where to draw each process: servers and clients in a row above the others, or equals in a circle."""
    hubs = [w for w in who if w.startswith(("server", "client"))]
    others = [w for w in who if w not in hubs]
    if hubs:
        wide = max(8, math.ceil(math.sqrt(2 * len(others))))
        rows = -(-len(others) // wide)
        result = [(x, 0.9) for x in spread(len(hubs))]
        for i in range(len(others)):
            line, column = divmod(i, wide)
            x = spread(wide if rows > 1 else len(others))[column]
            result.append((x, (0.4 - 1.3 * line / (rows - 1)) if rows > 1 else -0.9))
        return result
    turns = np.linspace(0, 2 * np.pi, len(others), endpoint=False)
    far = 0.0 if len(others) == 1 else 0.9
    return [(far * float(np.sin(turn)), far * float(np.cos(turn))) for turn in turns]


def beside(x: float, y: float, is_hub: bool, in_circle: bool) -> tuple[float, float]:
    """Where the name of a process at this place stands, away from the arrows."""
    if in_circle and (x or y):
        return 1.65 * x, 1.35 * y
    return x, y + (0.3 if is_hub else -0.37)


def spread(count: int) -> list[float]:
    """So many places from left to right."""
    return [0.0] if count == 1 else np.linspace(-1.1, 1.1, count).tolist()


def rounded(value: float) -> float:
    """The next number of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next((step * power for step in (1, 2, 5) if step * power >= value * (1 - 1e-9)), 10 * power)


def finite(values: np.ndarray) -> np.ndarray:
    """These values where an axis can go; nan where there is none."""
    return np.clip(np.where(np.isfinite(values), values, np.nan), -FAR, FAR)


def inside(values: np.ndarray) -> bool:
    return not np.any((values < 0) | (values > 1))


def loss_ticks(values: np.ndarray) -> list[float]:
    """The ends of an axis for these losses and the ticks between them: logarithmic, if none is 0 or less."""
    values = values[np.isfinite(values)]
    if np.any(values <= 0):
        return around(values)
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.1, 1.0)
    bottom, top = 4.0 ** math.floor(math.log(low, 4) - 0.1), 2.0 ** math.ceil(math.log2(high) + 0.2)
    return [bottom, *log_ticks(bottom, top), top]


def around(values: np.ndarray) -> list[float]:
    """Few round numbers, of which the first and the last have all of these values between them."""
    values = values[np.isfinite(values)]
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    return [float(tick) for tick in MaxNLocator(5, steps=STEPS).tick_values(low, high)]


def log_ticks(bottom: float, top: float) -> list[float]:
    """Few round numbers in between: 1, 2, 5, 10 ... or, over many powers of ten, some of those alone."""
    low, high = math.floor(math.log10(bottom)), math.ceil(math.log10(top))
    steps = (1, 2, 5) if high - low <= 3 else (1,)
    ticks = [step * 10.0**power for power in range(low, high + 1, max((high - low) // 6, 1)) for step in steps]
    return [tick for tick in ticks if bottom <= tick <= top]


def brief(tick: float) -> str:
    """ "1e209" for 1e+209."""
    return f"{tick:.4g}".replace("e+", "e")


def by_number(who: Sequence[str]) -> list[tuple[int, str]]:
    """In this order "worker 2" comes before "worker 10"."""
    return [(len(name), name) for name in who]


def both(pair: tuple[str, str]) -> tuple[str, str]:
    """The same for a link and its other direction."""
    first, second = sorted(pair, key=lambda name: (len(name), name))
    return first, second


def short(who: str) -> str:
    """ "w2" for "worker 2"."""
    return who[:1] + who.partition(" ")[2]
