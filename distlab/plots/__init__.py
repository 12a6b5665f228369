"""Pictures of runs. Each function takes what it draws and returns a matplotlib Figure; none of them needs pyplot."""

from distlab.plots.comparison import plot_comparison
from distlab.plots.counts import plot_ledger, plot_staleness, plot_traffic, plot_versions
from distlab.plots.curves import plot_loss, plot_speedup
from distlab.plots.overview import plot_overview
from distlab.plots.paper import (
    ACTIVITIES,
    BLUE,
    FATES,
    GREEN,
    GREY,
    LINES,
    ORANGE,
    PINK,
    RED,
    SKY,
    YELLOW,
    blank,
    named,
    shown,
    table,
)
from distlab.plots.timeline import plot_timeline, plot_utilization

__all__ = [
    "ACTIVITIES",
    "BLUE",
    "FATES",
    "GREEN",
    "GREY",
    "LINES",
    "ORANGE",
    "PINK",
    "RED",
    "SKY",
    "YELLOW",
    "blank",
    "named",
    "plot_comparison",
    "plot_ledger",
    "plot_loss",
    "plot_overview",
    "plot_speedup",
    "plot_staleness",
    "plot_timeline",
    "plot_traffic",
    "plot_utilization",
    "plot_versions",
    "shown",
    "table",
]
