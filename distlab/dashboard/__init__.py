"""A run under way, to watch and to poke, in a notebook."""

from distlab.dashboard.dashboard import Dashboard

__all__ = ["Dashboard"]
