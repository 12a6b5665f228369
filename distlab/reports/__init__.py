"""Reports: pure functions of a trace, a frozen dataclass of plain numbers each."""

from distlab.reports.blame import Blame, blame, how_many_backups
from distlab.reports.curvature import curvature
from distlab.reports.event_files import event_files
from distlab.reports.export import chrome, export
from distlab.reports.ledger import Entry, Ledger, ledger, sample_counts
from distlab.reports.lineage import Survivors, survivors
from distlab.reports.replay import Replay, replay
from distlab.reports.stability import Stability, stability
from distlab.reports.tables import compare, evaluations, history, summary
from distlab.reports.timing import Timing, timing

__all__ = [
    "Blame",
    "Entry",
    "Ledger",
    "Replay",
    "Stability",
    "Survivors",
    "Timing",
    "blame",
    "chrome",
    "compare",
    "curvature",
    "evaluations",
    "event_files",
    "export",
    "history",
    "how_many_backups",
    "ledger",
    "replay",
    "sample_counts",
    "stability",
    "summary",
    "survivors",
    "timing",
]
