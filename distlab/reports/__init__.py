"""Reports: pure functions of a trace, a frozen dataclass of plain numbers each."""

from distlab.reports.curvature import curvature
from distlab.reports.ledger import Entry, Ledger, ledger, sample_counts
from distlab.reports.lineage import Survivors, survivors
from distlab.reports.replay import Replay, replay
from distlab.reports.stability import Stability, stability
from distlab.reports.tables import compare, evaluations, history, summary
from distlab.reports.timing import Timing, timing

__all__ = [
    "Entry",
    "Ledger",
    "Replay",
    "Stability",
    "Survivors",
    "Timing",
    "compare",
    "curvature",
    "evaluations",
    "history",
    "ledger",
    "replay",
    "sample_counts",
    "stability",
    "summary",
    "survivors",
    "timing",
]
