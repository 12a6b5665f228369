"""Where a run's processes live: on this host, or (`torchrun.py`) on several."""

import tempfile
from dataclasses import replace
from typing import Any, Protocol

from distlab.clusters import process
from distlab.clusters.base import Ending
from distlab.clusters.member import Member, start
from distlab.clusters.process import Place
from distlab.fabric.meeting import Where
from distlab.strategies.base import Job, Strategy


class Home(Protocol):
    """What `Processes` asks of the place where they live.

    Attributes:
        can_pause: do connections outlive the silence of processes that stand still?
    """

    can_pause: bool

    def open(self, strategy: Strategy, job: Job) -> None:
        """All processes are about to begin, for the first time or anew."""

    def start(self, place: Place) -> Member:
        """Start one process."""

    def close(self, ending: Ending) -> None:
        """All processes have ended, and so has the run."""


class Here:
    """This host. The run has a folder of its own, which only this user can enter.

    Args:
        where: how its processes find those of other hosts.
    """

    can_pause = True

    def __init__(self, links: str, *, where: Where | None = None) -> None:
        self._links, self._where = links, where
        self._made: tempfile.TemporaryDirectory[str] | None = None

    def open(self, strategy: Strategy, job: Job) -> None:
        self._clean_up()
        self._made, self._payload = tempfile.TemporaryDirectory(prefix="distlab-"), process.pack(strategy, job)

    @property
    def folder(self) -> str:
        """The run's."""
        assert self._made is not None, "nothing is there before it is open"
        return self._made.name

    def start(self, place: Place) -> Member:
        lives: dict[str, Any] = {"links": self._links, "folder": place.folder or self.folder, "where": self._where}
        return start(self._payload, replace(place, **lives))

    def close(self, ending: Ending) -> None:
        self._clean_up()

    def _clean_up(self) -> None:
        if self._made is not None:
            self._made.cleanup()
