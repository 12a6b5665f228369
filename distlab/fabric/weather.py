"""What a scenario does to a real process from inside: it computes more slowly, its messages take longer."""

import threading
import time
from dataclasses import dataclass, field

from distlab.fabric.network import Network

NIC_BYTES_PER_S = Network().bandwidth_bytes_per_s  # what a share of the bandwidth is a share of


@dataclass
class Weather:
    """How things stand now.

    Attributes:
        slow: a gradient takes so many times as long.
        share: of the bandwidth that is left.
        delay_s: what a message takes longer.
        cut: does nothing leave or arrive?
    """

    slow: float = 1.0
    share: float = 1.0
    delay_s: float = 0.0
    cut: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition, repr=False, compare=False)

    def change(self, words: list[str]) -> None:
        """Let it be as `words` say; see `said`."""
        slow, share, delay_s, cut = map(float, words)
        with self._changed:
            self.slow, self.share, self.delay_s, self.cut = slow, share, delay_s, bool(cut)
            self._changed.notify_all()

    @property
    def said(self) -> list[str]:
        """The four numbers as words."""
        return [repr(float(value)) for value in (self.slow, self.share, self.delay_s, self.cut)]

    def hold_up(self, num_bytes: int) -> None:
        """Let the time pass that a message of so many bytes takes longer, in one direction."""
        if self.share == 1.0 and not self.delay_s and not self.cut:
            return
        with self._changed:
            self._changed.wait_for(lambda: not self.cut)
        time.sleep(self.delay_s + num_bytes / NIC_BYTES_PER_S * (1 / self.share - 1))
