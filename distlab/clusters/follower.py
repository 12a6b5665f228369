"""Another rank's side of a run under torchrun: it does what rank 0 says, and in the end has the same run."""

import json
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from distlab.checkpoint import Checkpoint
from distlab.clusters.base import Ending, Launched, Sink
from distlab.clusters.crew import NUMBER, Crew, here
from distlab.clusters.member import Member, remade
from distlab.clusters.process import place_of
from distlab.errors import DistlabError, ProcessLost, RemoteTraceback
from distlab.fabric import Peer
from distlab.fabric.network import Change
from distlab.packing import from_bytes
from distlab.strategies.base import Job, Outcome, Strategy
from distlab.trace import EVENT


class Follower(Launched):
    """A run that rank 0 leads, on another rank."""

    def __init__(self, crew: Crew, strategy: Strategy, job: Job, sink: Sink, said: Mapping[str, Any]) -> None:
        self._crew, self._strategy, self._job, self._sink = crew, strategy, job, sink
        self._line, self._here = crew.lines[0], here(crew)
        self._members: dict[int, Member] = {}
        self._ending, self._over = Ending(), threading.Event()
        self._line.obey, self._line.on_end = self._obey, self._lose
        try:
            self._line.say("call", 0, json.dumps(said).encode())
        except DistlabError:
            self._lose()

    def stop(self) -> None:
        """Rank 0 asks for it."""

    def change(self, change: Change) -> None:
        """Rank 0 sees to it."""

    def scale_lr(self, factor: float) -> None:
        """Rank 0 tells everybody."""

    def kill(self, why: str = "LiveRun.kill()") -> None:
        for member in list(self._members.values()):
            member.kill()
        if not self._over.is_set():
            self._end(Ending(error=ProcessLost(f"the run was ended on rank {self._crew.rank} by {why}")))

    def wait(self, timeout_s: float | None = None) -> Ending | None:
        return self._ending if self._over.wait(timeout_s) else None

    def _obey(self, word: str, number: int, body: bytes) -> None:
        if word == "o":
            said = from_bytes(body)
            begin = None if said["begin"] is None else Checkpoint(**said["begin"])
            self.ahead_s = said["ahead_s"]
            self._here.open(self._strategy, replace(self._job, begin=begin))
        elif word == "s":
            self._start(number, json.loads(body))
        elif word == "k":
            if number in self._members:
                self._members[number].signal(body[0])
        elif word == "v":
            self._sink.progress(number, NUMBER.unpack(body)[0])
        elif word == "r":
            self._end(Ending(error=remade(json.loads(body))))
        elif word == "f":
            self._finish(from_bytes(body))
        else:
            self._crew.hear(0, word, body)

    def _start(self, number: int, said: dict[str, Any]) -> None:
        member = self._members[number] = self._here.start(replace(place_of(said), ahead_s=self.ahead_s))
        self._line.carry(2 * number, member.control)
        self._line.carry(2 * number + 1, member.out, plain=True)
        threading.Thread(target=self._await_end, args=(number, member), daemon=True).start()

    def _await_end(self, number: int, member: Member) -> None:
        member.process.join()
        with suppress(DistlabError):
            self._line.say("gone", number, str(member.process.exitcode).encode())

    def _finish(self, said: dict[str, Any]) -> None:
        self._line.drop(*(channel for number in self._members for channel in (2 * number, 2 * number + 1)))
        rows = np.frombuffer(said["rows"].numpy().tobytes(), EVENT)
        self._sink.events(rows)
        self._sink.began_at(None if said["begin"] is None else Checkpoint(**said["begin"]))
        outcomes = {Peer(*peer): Outcome(**left) for peer, left in said["outcomes"].items()}
        error = None
        if said["error"] is not None:
            error = remade(said["error"])
            for note in said["error"]["notes"]:
                error.add_note(note)
            error.__cause__ = RemoteTraceback(said["cause"]) if said["cause"] else None
        self._end(Ending(outcomes, error, said["clocks"]))

    def _lose(self) -> None:
        for member in list(self._members.values()):
            member.kill()
        why = f"rank 0, which leads the run, is gone: {self._line.ended}"
        self._end(Ending(error=ProcessLost(why)))

    def _end(self, ending: Ending) -> None:
        if not self._over.is_set():
            self._ending = ending
            self._here.close(ending)
            self._over.set()
