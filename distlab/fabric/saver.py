"""What one process hands over for checkpoints, and what it goes on from.

Whoever holds state says so once, with `common` or `own`, and is given back there what it held when the checkpoint was
made. Whoever knows that a version has been `reached` says that. The hard idea is the moment: a process hands its part
over when it holds a version, and has not begun with the next. Where all go in step these are one moment of the run.
"""

import math
import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from distlab.checkpoint import Checkpoint
from distlab.flat import Ranges
from distlab.packing import packed

AT_END = 1 << 62  # instead of a number: there will be no further part


class Saver:
    """One process's. By itself it does nothing.

    Args:
        me: its name.
        every: hand over at the first version from each multiple of this on; None: at the end only.
        begin: what the run goes on from.
        hand_over: called with each part, as bytes.
        life: a number that no other process of that name has had.

    Attributes:
        speaks: is it for this process to hand over what others hold too?
    """

    def __init__(
        self,
        me: str = "",
        every: int | None = None,
        begin: Checkpoint | None = None,
        hand_over: Callable[[Tensor], None] | None = None,
        life: int = 0,
    ) -> None:
        self.begin, self.speaks = begin, lambda: True  # type: Checkpoint | None, Callable[[], bool]
        self._me, self._every, self._hand_over, self._life = me, every or math.inf, hand_over, life
        self._common: list[tuple[Ranges, Callable[[], dict[str, Any]]]] = []
        self._own: dict[str, Callable[[], Any]] = {}
        self._said = begin.version if begin is not None else 0  # the newest version that was handed over
        self._lock = threading.Lock()

    def common(self, ranges: Ranges, state: Callable[[], dict[str, Any]], restore: Callable[[Any], None]) -> None:
        """This process holds `ranges` of what there is once in a run: parameters, version, optimizer."""
        self._common.append((ranges, state))
        if self.begin is not None:
            restore(self.begin.portion(ranges))

    def own(self, name: str, state: Callable[[], Any], restore: Callable[[Any], None]) -> None:
        """This process holds what no other has, such as random states."""
        self._own[name] = state
        kept = self.begin.own.get(self._me, {}) if self.begin is not None else {}
        if name in kept:
            restore(kept[name])

    def reached(self, version: int) -> None:
        """This process holds `version`: hand over its part, if it is time to."""
        if self._hand_over is not None and version // self._every > self._said // self._every:
            self._say(int(version // self._every), version)

    def finish(self) -> None:
        """This process has come to its end."""
        if self._hand_over is not None:
            self._say(AT_END, AT_END)

    def _say(self, number: int, version: int) -> None:
        with self._lock:  # tasks of several workers may apply at once
            if version <= self._said:
                return
            self._said = version
        common = [(ranges, state()) for ranges, state in self._common] if self.speaks() else []
        own = {name: state() for name, state in self._own.items()}
        assert self._hand_over is not None, "nobody asked"
        self._hand_over(packed({"number": number, "common": common, "own": own, "life": self._life}))
