"""The picture of a live run, with buttons to do something to it.

One thread takes in what the run says and draws, so that matplotlib is never used by two at once. A button gives its
order in a thread of its own: neither the kernel nor the picture waits for a step that does not come to its end. When
the run ends, the widgets are replaced by an ordinary picture, which a static page shows too.
"""

import contextlib
import html
import math
import os
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets
import numpy as np
from IPython import get_ipython
from IPython.display import HTML, Image, display

from distlab.plots.overview import Overview

if TYPE_CHECKING:
    from distlab.live import LiveRun

SHARE = 0.08  # of one core, at most, for drawing
FRAME_S = (0.25, 0.8)  # from one picture to the next, if drawing is quick and if it is slow
REST_S = 0.05  # at least, however busy the machine
SOON_S = 0.1  # from a button to the next picture
LOG_CHARACTERS = 4000
LOG = '<pre style="white-space: pre-wrap; word-break: normal">{}</pre>'
SPEEDS = [("as fast as it can", None), *((f"{speed:g} s a second", speed) for speed in (0.01, 0.1, 1.0, 10.0, 100.0))]
RATES = [("learning rate × 1", 1.0), *((f"× {rate:g}", rate) for rate in (10.0, 3.0, 2.0, 0.5, 0.3, 0.1, 0.01))]
OF_A_WORKER = ("Kill", "Revive", "Remove", "Slow", "Throttle")
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
        self._live, self._pressed, self._refused = live, threading.Event(), list[str]()
        self.view = Overview(
            live.num_updates, live.num_workers, f"{live.strategy} on {live.cluster}", next(iter(live.task.metrics), "")
        )
        self._heard, self._read, self.log, self.drawn = 0, 0, "", 0
        self._headless = bool(os.environ.get("DISTLAB_HEADLESS"))
        self._box_shown = self._log_shown = None  # type: Any
        self._build()
        self._thread = threading.Thread(target=self._run, name="distlab-dashboard", daemon=True)

    def show(self) -> None:
        """Put it below the cell that runs, and begin."""
        if get_ipython() is not None:
            self._box_shown = display(HTML("") if self._headless else self.box, display_id=True)
            self._log_shown = display(HTML(""), display_id=True)
        self.start()

    def start(self) -> None:
        """Listen and draw, whoever looks."""
        self._thread.start()

    def finish(self, timeout_s: float = 10.0) -> None:
        """Wait until the last picture is there. The run has ended."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    @property
    def png(self) -> bytes:
        """The newest picture."""
        return self._image.value

    def _build(self) -> None:
        width, _ = self.view.canvas.get_width_height()
        self._image = widgets.Image(format="png", layout=widgets.Layout(max_width=f"min(100%, {width}px)"))
        self._status = widgets.HTML("starting")
        self._worker = widgets.Dropdown(options=self._workers(), layout=widgets.Layout(width="110px"))
        self._factor = widgets.Dropdown(
            options=[(f"{f:g} times", f) for f in FACTORS], layout=widgets.Layout(width="90px")
        )
        self._length = widgets.Dropdown(options=LENGTHS, layout=widgets.Layout(width="100px"))
        self._speed = widgets.Dropdown(options=SPEEDS, layout=widgets.Layout(width="140px"))
        self._rate = widgets.Dropdown(options=RATES, layout=widgets.Layout(width="150px"))
        self._rate.observe(lambda said: self.order("Learning rate", lambda: live.scale_lr(said["new"])), "value")
        live, which = self._live, self._which
        self.buttons: dict[str, Callable[[], Any]] = {
            "Kill": lambda: live.kill(**which()),
            "Revive": lambda: live.revive(**which()),
            "Remove": lambda: live.remove_worker(**which()),
            "Slow": lambda: live.slow(**which(), factor=self._factor.value, for_s=self._length.value),
            "Throttle": lambda: live.throttle(**which(), factor=1 / self._factor.value, for_s=self._length.value),
            "Add a worker": live.add_worker,
            "Pause": live.pause,
            "Step": live.step,
            "Play": lambda: live.resume(self._speed.value),
            "Stop": live.stop,
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

    def _button(self, name: str, does: Callable[[], Any]) -> widgets.Button:
        def press(_: widgets.Button) -> None:
            self.order(f"{name} {self._worker.label}" if name in OF_A_WORKER else name, does)
            if self._live.awaited:  # ipykernel 7 sends no "idle" for a widget's message while a cell awaits
                with contextlib.suppress(Exception):
                    get_ipython().kernel._publish_status("idle", "shell")

        button = widgets.Button(description=name, layout=widgets.Layout(width="auto"))
        button.on_click(press)
        return button

    def _change_speed(self, _: Any) -> None:
        if not self._live.paused:
            self.order("Play", self.buttons["Play"])

    def order(self, name: str, does: Callable[[], Any]) -> None:
        """Do something to the run, as a button does; why it cannot be done is told below the picture."""

        def obey() -> None:
            self._pressed.set()
            try:
                does()
            except Exception as error:
                self._refused.append(f"{name}: {error}")
            self._pressed.set()

        threading.Thread(target=obey, name="distlab-order", daemon=True).start()

    def _workers(self) -> list[tuple[str, int]]:
        said = {int(who.split()[1]) for who in self.view.tally.who if who.startswith(("worker", "replica"))}
        role = "worker" if "worker" in self._live.strategy.layout(self._live.num_workers).counts else "replica"
        return [(f"{role} {n}", n) for n in sorted(said | set(range(self._live.num_workers)))]

    def _which(self) -> dict[str, int]:
        return {"worker": self._worker.value}

    def _run(self) -> None:
        try:
            while not self._look():
                self._draw()
                self._rest()
            self._close()
        except Exception:  # nobody would ever see it
            self._say(traceback.format_exc())

    def _look(self) -> bool:
        """Take in what is new. True if the run has ended: then nothing more will come."""
        ending = self._live.launched.wait(0)
        parts, lines = self._live.heard(self._heard)
        self._heard += len(parts)
        if parts:  # each process sends a few rows, many times a second
            self.view.add(np.concatenate(parts))
        for line in lines[self._read :]:
            self._say(line)
        self._read = len(lines)
        while self._refused:
            self._say(self._refused.pop(0))
        if ending is not None and ending.error is not None:
            self._say("".join(traceback.format_exception(ending.error)))
        return ending is not None

    def _draw(self) -> None:
        began, cost_s = time.monotonic(), -time.thread_time()
        if not self._headless:
            self._image.value = self.view.png()
            self.drawn += 1
            if (workers := self._workers()) != list(self._worker.options):
                kept = self._worker.value
                self._worker.options = workers
                self._worker.value = kept
            self._status.value = (
                f"<b>{self._live.state}</b>, version {self.view.tally.version:,} of {self._live.num_updates:,}"
            )
        cost_s += time.thread_time()
        self._due = began + min(max(cost_s / SHARE, FRAME_S[0]), FRAME_S[1])

    def _rest(self) -> None:
        """Wait until the next picture is due, which is soon once a button was pressed or the run has ended."""
        due = max(self._due, time.monotonic() + REST_S)
        while (left_s := due - time.monotonic()) > 0 and self._live.launched.wait(0) is None:
            if self._pressed.wait(min(left_s, SOON_S)):
                self._pressed.clear()
                due = min(due, time.monotonic() + SOON_S)

    def _say(self, line: str) -> None:
        self.log = f"{self.log}{line.rstrip()}\n"[-LOG_CHARACTERS:]
        if self._log_shown is not None:
            self._log_shown.update(HTML(LOG.format(html.escape(self.log))))

    def _close(self) -> None:
        self._image.value = self.view.still()
        self.drawn += 1
        self._status.value = f"<b>{self._live.state}</b>"
        if self._box_shown is not None:
            self._box_shown.update(Image(self._image.value))
