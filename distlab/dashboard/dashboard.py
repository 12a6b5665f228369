"""The picture of a live run, with buttons to do something to it.

One thread takes in what the run says and draws, so that matplotlib is never used by two at once. A button gives its
order in a thread of its own: neither the kernel nor the picture waits for a step that does not come to its end. When
the run ends, the widgets are replaced by an ordinary picture, which a static page shows too.

A dashboard holds its run, and so its processes, as long as it is shown: until the cell that showed it is run again.
"""

import base64
import contextlib
import html
import math
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets
import numpy as np
from IPython import get_ipython
from IPython.display import HTML, Image, display

from distlab.dashboard.explorer import headless
from distlab.plots.overview import Overview

if TYPE_CHECKING:
    from distlab.live import LiveRun

SHARE = 0.08  # of one core, at most, for drawing
FRAME_S = (0.25, 0.9)  # from one picture to the next, if drawing is quick and if it is slow
HEADLESS_S = 2.0  # ... where nobody looks before the end
REST_S = 0.05  # at least, however busy the machine
SOON_S = 0.1  # from a button to the next picture
LOG_CHARACTERS = 4000
LOG = '<pre style="white-space: pre-wrap; word-break: normal">{}</pre>'
SPEEDS = [
    ("as fast as it can", math.inf),
    *((f"{speed:g} s a second", speed) for speed in (0.01, 0.1, 1.0, 10.0, 100.0)),
]
RATES = [1.0, 10.0, 3.0, 2.0, 0.5, 0.3, 0.1, 0.01]
OF_A_WORKER = ("Kill", "Revive", "Remove", "Slow", "Throttle")
SHOWN: dict[str, tuple[str, list["Dashboard"]]] = {}  # by cell: when it was run, and what it showed
FACTORS, LENGTHS = [2.0, 3.0, 5.0, 10.0], [("for 2 s", 2.0), ("for 10 s", 10.0), ("to the end", math.inf)]


class Dashboard:
    """What `LiveRun.dashboard` shows.

    Args:
        live: a run under way, or one that has ended, of which it shows the last picture.

    Attributes:
        box: the widgets.
        log: what the processes printed and what went wrong.
        drawn: pictures so far.
    """

    def __init__(self, live: "LiveRun") -> None:
        self._live: LiveRun | None = live
        self._pressed, self._refused = threading.Event(), list[str]()
        title, metric = f"{live.strategy} on {live.cluster}", next(iter(live.task.metrics), "")
        self.view = Overview(live.num_updates, live.num_workers, title, metric)
        self._heard, self._read, self.log, self.drawn = 0, 0, "", 0
        self._box_shown = self._log_shown = None  # type: Any
        self._follows, self._rate_seen = False, 1.0
        self._build(live)
        self._thread = threading.Thread(target=self._run, name="distlab-dashboard", daemon=True)

    def show(self) -> None:
        """Put it below the cell that runs, and begin."""
        self._take_cell()
        has_ended = self._live is not None and self._look(self._live)
        self._image.value = self.view.still() if has_ended else self.view.png()
        bundle = {"text/plain": self.view.title, "image/png": base64.b64encode(self._image.value).decode()}
        if not (has_ended or headless()):
            bundle |= self.box._repr_mimebundle_()
        self._box_shown = display(bundle, raw=True, display_id=True)
        self._log_shown = display(HTML(self._log_html), display_id=True)
        if has_ended:
            self._live = None
        else:
            self.start()

    def start(self) -> None:
        """Listen and draw, whoever looks."""
        self._thread.start()

    def let_go(self) -> None:
        """Listen no more, and hold the run no longer."""
        self._live = None
        self._pressed.set()
        self.box.close()

    def _take_cell(self) -> None:
        """Of the cell that runs now, let go what it showed when it was run before."""
        parent = get_ipython().get_parent() if get_ipython() is not None else {}
        cell, when = parent.get("metadata", {}).get("cellId"), parent.get("header", {}).get("msg_id", "")
        if cell is None:
            return
        before, shown = SHOWN.get(cell, ("", []))
        if before != when:
            for board in shown:
                board.let_go()
            shown = []
        SHOWN[cell] = when, [*shown, self]

    def finish(self, timeout_s: float = 10.0) -> None:
        """Wait until the last picture is there. The run has ended."""
        if threading.current_thread() is not self._thread and self._thread.is_alive():
            self._thread.join(timeout_s)

    @property
    def png(self) -> bytes:
        """The newest picture."""
        return self._image.value

    def _build(self, live: "LiveRun") -> None:
        width, _ = self.view.canvas.get_width_height()
        self._image = widgets.Image(format="png", layout=widgets.Layout(max_width=f"min(100%, {width}px)"))
        self._status = widgets.HTML("starting")
        self._worker = widgets.Dropdown(options=self._workers(live), layout=widgets.Layout(width="110px"))
        self._factor = widgets.Dropdown(
            options=[(f"{f:g} times", f) for f in FACTORS], layout=widgets.Layout(width="90px")
        )
        self._length = widgets.Dropdown(options=LENGTHS, layout=widgets.Layout(width="100px"))
        self._speed = widgets.Dropdown(options=SPEEDS, layout=widgets.Layout(width="140px"))
        self._rate = widgets.Dropdown(options=rates(*RATES), value=1.0, layout=widgets.Layout(width="150px"))
        self._rate.observe(self._change_rate, "value")
        which = lambda: {"worker": self._worker.value}  # noqa: E731
        how = lambda: {"factor": self._factor.value, "for_s": self._length.value}  # noqa: E731
        self.buttons: dict[str, Callable[[LiveRun], Any]] = {
            "Kill": lambda live: live.kill(**which()),
            "Revive": lambda live: live.revive(**which()),
            "Remove": lambda live: live.remove_worker(**which()),
            "Slow": lambda live: live.slow(**which(), **how()),
            "Throttle": lambda live: live.throttle(**which(), **how() | {"factor": 1 / self._factor.value}),
            "Add a worker": lambda live: live.add_worker(),
            "Pause": lambda live: live.pause(),
            "Step": lambda live: live.step(),
            "Play": lambda live: live.resume(None if math.isinf(self._speed.value) else self._speed.value),
            "Stop": lambda live: live.stop(),
        }
        made = {name: self._button(name, does) for name, does in self.buttons.items()}
        first, rest = [made.pop(name) for name in OF_A_WORKER], list(made.values())
        if live.is_simulated:
            rest.insert(-1, self._speed)
            self._speed.observe(self._change_speed, "value")
        row = widgets.Layout(flex_flow="row wrap")
        of_a_worker = [self._worker, *first[:3], self._factor, self._length, *first[3:]]
        rest.insert(1, self._rate)
        lines = [widgets.HBox(of_a_worker, layout=row), widgets.HBox([*rest, self._status], layout=row)]
        self.box = widgets.VBox([*lines, self._image])

    def _button(self, name: str, does: "Callable[[LiveRun], Any]") -> widgets.Button:
        def press(_: widgets.Button) -> None:
            self.order(f"{name} {self._worker.label}" if name in OF_A_WORKER else name, does)
            if (
                self._live is not None and self._live.awaited
            ):  # ipykernel 7 sends no "idle" for a widget's message while a cell awaits
                with contextlib.suppress(Exception):
                    get_ipython().kernel._publish_status("idle", "shell")

        button = widgets.Button(description=name, layout=widgets.Layout(width="auto"))
        button.on_click(press)
        return button

    def _change_speed(self, _: Any) -> None:
        if self._live is not None and not self._live.paused:
            self.order("Play", self.buttons["Play"])

    def _change_rate(self, said: Any) -> None:
        if not self._follows:
            self.order("Learning rate", lambda live: live.scale_lr(said["new"]))

    def order(self, name: str, does: "Callable[[LiveRun], Any]") -> None:
        """Do something to the run, as a button does; why it cannot be done is told below the picture."""
        live = self._live

        def obey() -> None:
            self._pressed.set()
            try:
                if live is not None:
                    does(live)
            except Exception as error:
                self._refused.append(f"{name}: {error}")
            self._pressed.set()

        threading.Thread(target=obey, name="distlab-order", daemon=True).start()

    def _workers(self, live: "LiveRun") -> list[tuple[str, int]]:
        said = {int(who.split()[1]) for who in self.view.tally.who if who.startswith(("worker", "replica"))}
        role = "worker" if "worker" in live.strategy.layout(live.num_workers).counts else "replica"
        return [(f"{role} {n}", n) for n in sorted(said | set(range(live.num_workers)))]

    def _run(self) -> None:
        try:
            while (live := self._live) is not None and not self._look(live):
                self._draw(live)
                del live  # or it would be held while nothing is done
                self._rest()
        except Exception:  # nobody would ever see it
            self._say(traceback.format_exc())
        try:
            if self._live is not None:
                self._close()
        except Exception:
            self._say(traceback.format_exc())
        self._live = None  # a picture needs no run

    def _look(self, live: "LiveRun") -> bool:
        """Take in what is new. True if the run has ended: then nothing more will come."""
        ending = live.launched.wait(0)
        parts, lines = live.heard(self._heard)
        self._heard += len(parts)
        if parts:  # each process sends a few rows, many times a second
            self.view.add(np.concatenate(parts))
        for line in lines[self._read :]:
            self._say(line)
        self._read = len(lines)
        while self._refused:
            self._say(self._refused.pop(0))
        if ending is not None and ending.error is not None:
            error = ending.error
            self._say("".join([*traceback.format_exception_only(error), "\n", *traceback.format_exception(error)]))
        return ending is not None

    def _draw(self, live: "LiveRun") -> None:
        began, cost_s = time.monotonic(), -time.thread_time()
        tally = self.view.tally
        self._image.value = self.view.png()
        self.drawn += 1
        if headless() and self._box_shown is not None:
            self._box_shown.update(Image(self._image.value))
        if (workers := self._workers(live)) != list(self._worker.options):
            kept = self._worker.value
            self._worker.options = workers
            self._worker.value = kept
        if tally.rate != self._rate_seen:
            self._follow(tally.rate)
        now = f"{tally.now_s:.4g} s" if live.is_simulated else f"{live.now_s:.1f} s"
        self._status.value = f"<b>{live.state}</b>, version {tally.version:,} of {live.num_updates:,}, {now}"
        cost_s += time.thread_time()
        frame_s = min(max(cost_s / SHARE, FRAME_S[0]), FRAME_S[1])
        self._due = began + (HEADLESS_S if headless() else frame_s)

    def _follow(self, rate: float) -> None:
        """Let the menu say what the learning rate has become, whoever said so."""
        self._follows, self._rate_seen = True, rate
        if rate not in [value for _, value in self._rate.options]:
            self._rate.options = rates(*RATES, rate)
        self._rate.value = rate
        self._follows = False

    def _rest(self) -> None:
        """Wait until the next picture is due, which is soon once a button was pressed or the run has ended."""
        due = max(self._due, time.monotonic() + REST_S)
        while (left_s := due - time.monotonic()) > 0 and self._goes_on():
            if self._pressed.wait(min(left_s, SOON_S)):
                self._pressed.clear()
                due = min(due, time.monotonic() + SOON_S)

    def _goes_on(self) -> bool:
        live = self._live
        return live is not None and live.launched.wait(0) is None

    def _say(self, line: str) -> None:
        self.log = f"{self.log}{line.rstrip()}\n"[-LOG_CHARACTERS:]
        if self._log_shown is not None:
            self._log_shown.update(HTML(self._log_html))

    @property
    def _log_html(self) -> str:
        return LOG.format(html.escape(self.log)) if self.log else ""

    def _close(self) -> None:
        self._image.value = self.view.still()
        self.drawn += 1
        self._status.value = "<b>ended</b>"
        if self._box_shown is not None:
            self._box_shown.update(Image(self._image.value))


def rates(*factors: float) -> list[tuple[str, float]]:
    """A menu of factors of the learning rate."""
    return [(f"learning rate × {factor:g}", factor) for factor in factors]


def can_show() -> bool:
    """Is this a notebook's kernel?"""
    return hasattr(get_ipython(), "kernel")
