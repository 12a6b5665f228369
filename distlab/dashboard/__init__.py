"""What a notebook shows and a reader moves: a run under way, and controls in front of functions that draw."""

from distlab.dashboard.dashboard import Dashboard, can_show
from distlab.dashboard.explorer import Explorer, headless

__all__ = ["Dashboard", "Explorer", "can_show", "headless"]
