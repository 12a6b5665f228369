"""Rank 0's side of a run under torchrun: processes on other ranks' hosts, and what those ranks are told."""

import itertools
import json
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from distlab.checkpoint import Checkpoint
from distlab.clusters.base import Ending, Sink
from distlab.clusters.crew import NUMBER, Crew, here
from distlab.clusters.line import Line
from distlab.clusters.member import CONTEXT, Member
from distlab.clusters.process import Place, told_of
from distlab.errors import DistlabError, RemoteTraceback
from distlab.fabric import Peer
from distlab.packing import to_bytes
from distlab.strategies.base import Job, Outcome, Strategy
from distlab.trace import EVENT

_numbers = itertools.count()  # of processes, and none is used again: there may still be news of an older one
REPORT_S = 0.25  # how often those who follow hear how far the run is


class Far:
    """A process on another rank's host."""

    def __init__(self, line: Line, number: int) -> None:
        self._line, self._number, self._ended = line, number, threading.Event()
        self.exitcode: int | None = None

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def signal(self, number: int) -> None:
        """Send it a signal; harmless when it has ended, or its host has."""
        with suppress(DistlabError):
            self._line.say("kill", self._number, bytes([number]))

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)

    def close(self) -> None:
        """Nothing is held."""

    def has_ended(self, exitcode: int | None) -> None:
        """There is news of it."""
        self.exitcode = exitcode
        self._ended.set()


class FarMember(Member):
    """Such a process, as the one who leads the run sees it."""

    is_here: ClassVar[bool] = False
    process: Far
    rank: int

    def signal(self, number: int) -> None:
        self.process.signal(number)

    def __str__(self) -> str:
        return f"{self.me} (rank {self.rank})"


class Everywhere:
    """All ranks' hosts, as rank 0 uses them."""

    can_pause = False  # the kernel ends a connection whose other end has been silent for too long

    def __init__(self, crew: Crew, reports: "Reports") -> None:
        self._crew, self._reports = crew, reports
        self._here, self._members = here(crew), dict[int, FarMember]()
        for rank, line in crew.lines.items():
            line.obey = lambda word, number, body, rank=rank: self._hear(rank, word, number, body)  # type: ignore[misc]
            line.on_end = lambda rank=rank: self._lose(rank)  # type: ignore[misc]

    def open(self, strategy: Strategy, job: Job) -> None:
        self._here.open(strategy, job)
        begin = None if job.begin is None else contents(job.begin)
        for rank, line in self._crew.lines.items():
            said = {"ahead_s": self._crew.clocks[rank][0], "begin": begin}
            with suppress(DistlabError):
                line.say("open", 0, to_bytes(said))

    def start(self, place: Place) -> Member:
        rank = 0 if place.me.role == "client" else place.me.index % self._crew.size
        place = replace(place, folder=self._here.folder if self._crew.on_one_host else None)
        return self._start_far(rank, place) if rank else self._here.start(place)

    def _start_far(self, rank: int, place: Place) -> Member:
        line, number = self._crew.lines[rank], next(_numbers)
        control, its_control = CONTEXT.Pipe()
        out, its_out = CONTEXT.Pipe(duplex=False)
        member = self._members[number] = FarMember(place.me, Far(line, number), control, out, pid=-1)
        member.rank = rank
        line.carry(2 * number, its_control)
        line.carry(2 * number + 1, its_out)
        with suppress(DistlabError):
            line.say("start", number, json.dumps(asdict(place)).encode())
        if line.ended:
            self._lose(rank)
        return member

    def close(self, ending: Ending) -> None:
        self._here.close(ending)
        ending.clocks = {f"rank {rank}": clock for rank, clock in self._crew.clocks.items()}
        self._crew.listen()  # for the next call
        self._crew.tell("finish", body=to_bytes(self._reports.all_of(ending)))

    def _hear(self, rank: int, word: str, number: int, body: bytes) -> None:
        if word != "g":
            self._crew.hear(rank, word, body)
        elif number in self._members:
            self._members[number].process.has_ended(int(body))

    def _lose(self, rank: int) -> None:
        line = self._crew.lines[rank]
        for number, member in [(n, m) for n, m in self._members.items() if m.rank == rank]:
            member.gave_up = member.gave_up or f"rank {rank} is gone: {line.ended}"
            line.drop(2 * number, 2 * number + 1)
            member.process.has_ended(None)


def contents(begin: Checkpoint) -> dict[str, Any]:
    """A checkpoint, for `packed`."""
    return {"facts": begin.facts, "common": begin.common, "own": begin.own, "path": begin.path}


def without_repetitions(outcomes: Mapping[Peer, Outcome]) -> dict[Peer, Outcome]:
    """The same, with one memory for replicas that are equal, and so one place in what is sent."""
    made: dict[Peer, Outcome] = {}
    for peer, left in outcomes.items():
        params = left.params
        same = [other.params for other in made.values() if params is not None and equal(other.params, params)]
        made[peer] = replace(left, params=same[0] if same else params)
    return made


def equal(one: Tensor | None, two: Tensor) -> bool:
    """The same bits, as far as that can be told."""
    return one is not None and one.dtype == two.dtype and torch.equal(one, two)


class Reports:
    """Rank 0's listener, whose news the other ranks hear too."""

    def __init__(self, sink: Sink, crew: Crew, begin: Checkpoint | None) -> None:
        self._sink, self._crew, self._begin, self._said_s = sink, crew, begin, 0.0
        self._parts: list[np.ndarray] = []

    @property
    def version(self) -> int:
        return self._sink.version

    @property
    def loss(self) -> float:
        return self._sink.loss

    def events(self, rows: np.ndarray) -> None:
        self._sink.events(rows)
        self._parts.append(rows)
        if time.monotonic() - self._said_s > REPORT_S:
            self._said_s = time.monotonic()
            self._crew.tell("version", self.version, NUMBER.pack(self.loss))

    def output(self, who: Peer, text: str) -> None:
        self._sink.output(who, text)

    def part(self, who: Peer, data: Tensor) -> None:
        self._sink.part(who, data)

    def go_back(self) -> Checkpoint | None:
        kept = self._sink.go_back()
        self._begin = kept or self._begin
        return kept

    def progress(self, version: int, loss: float) -> None:
        self._sink.progress(version, loss)

    def began_at(self, begin: Checkpoint | None) -> None:
        self._sink.began_at(begin)

    def all_of(self, ending: Ending) -> dict[str, Any]:
        """Everything that the others need to have the same run."""
        rows = np.concatenate(self._parts) if self._parts else np.zeros(0, EVENT)
        error = ending.error
        said = None if error is None else told_of(error, -1) | {"notes": getattr(error, "__notes__", [])}
        return {
            "outcomes": {tuple(peer): vars(left) for peer, left in without_repetitions(ending.outcomes).items()},
            "error": said,
            "cause": str(error.__cause__.args[0]) if error and isinstance(error.__cause__, RemoteTraceback) else "",
            "clocks": ending.clocks,
            "rows": torch.from_numpy(np.frombuffer(bytearray(rows.tobytes()), np.uint8)),
            "begin": None if self._begin is None else contents(self._begin),
        }
