"""Reports: pure functions of a trace, a frozen dataclass of plain numbers each."""

from distlab.reports.lineage import Survivors, survivors

__all__ = ["Survivors", "survivors"]
