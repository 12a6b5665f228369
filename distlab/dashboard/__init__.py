"""What a notebook shows and a reader moves: a run under way, and controls in front of functions that draw."""

from distlab.dashboard.dashboard import Dashboard
from distlab.dashboard.explorer import Explorer

__all__ = ["Dashboard", "Explorer"]
