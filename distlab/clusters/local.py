"""`LocalCluster`: real processes on this machine.

New processes come from a fork server that has torch loaded, so that one costs milliseconds; they are made anew
for every run, so that nothing is left over from the last one. The caller's own process computes nothing: it
watches, in one thread, and can always be interrupted.
"""

import atexit
import os
import pickle
import secrets
import tempfile
import threading
import time
import weakref
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any, Literal

import numpy as np

from distlab.clusters import process
from distlab.clusters.base import ONLY_SIMULATED, Cluster, Ending, Launched, Sink
from distlab.clusters.member import Member, death, lost, rebuild, start, warm
from distlab.clusters.process import Place
from distlab.errors import PeerLost, ProcessLost
from distlab.fabric import Peer
from distlab.options import check_count, check_seconds, check_word
from distlab.strategies.base import Job, Strategy
from distlab.trace import EVENT

ROOT_CAUSE_S = 1.0  # how long a lost link waits for the news of what became of its other end
LAST_WORDS_S = 0.5  # how long the others may take, after a failure, to hand over what they measured
LONGEST_S = 1e6  # no operating system sleeps for much longer
LEAVE_S = 2.0  # how long a process may take to leave after its last word


class LocalCluster(Cluster):
    """`num_workers` real worker processes on this machine (and the servers or client that a strategy adds).

    Reusable for many runs, one at a time: a new run ends the one before it, so that a notebook cell can be run again.
    A context manager; closed at exit. Everything listens on loopback only.

    Args:
        num_workers: at least 1.
        compute_time_s: every gradient takes at least so long; the rest is slept. With it sixteen workers act
            on two cores as if each had a device of its own.
        links: messages travel through "memory" that both ends have mapped, or over torch.distributed's "gloo", as
            they would between hosts.

    >>> LocalCluster(num_workers=4)
    LocalCluster(num_workers=4)
    """

    def __init__(
        self, num_workers: int, *, compute_time_s: float = 0.0, links: Literal["memory", "gloo"] = "memory"
    ) -> None:
        self.num_workers = check_count("num_workers", num_workers)
        self.compute_time_s = check_seconds("compute_time_s", compute_time_s)
        if compute_time_s > LONGEST_S:
            raise ValueError(f"compute_time_s must be at most {LONGEST_S:g} s, got {compute_time_s:g}")
        self.links = check_word("links", links, ("memory", "gloo"))
        self._runs: weakref.WeakSet[Processes] = weakref.WeakSet()
        warm()
        atexit.register(_close, weakref.ref(self))

    def __repr__(self) -> str:
        padded = f", compute_time_s={self.compute_time_s:g}" if self.compute_time_s else ""
        links = f", links={self.links!r}" if self.links != "memory" else ""
        return f"LocalCluster(num_workers={self.num_workers}{padded}{links})" + (" (closed)" if self._closed else "")

    def launch(self, strategy: Strategy, job: Job, sink: Sink, *, paused: bool = False) -> "Processes":
        if paused:
            raise ValueError(ONLY_SIMULATED)
        if strategy.simulated_only:
            raise ValueError(f"on real processes this cannot be had: {strategy.simulated_only}")
        self.check_open()
        payload = process.pack(strategy, job)
        for older in list(self._runs):
            older.kill("a newer run on the same cluster")
        run = Processes(payload, strategy, self, sink)
        self._runs.add(run)
        return run

    def close(self) -> None:
        super().close()
        for run in list(self._runs):
            run.kill()


def _close(cluster: "weakref.ref[LocalCluster]") -> None:
    if (alive := cluster()) is not None:
        alive.close()


class Processes(Launched):
    """The processes of one run, and the thread that watches them."""

    def __init__(self, payload: bytes, strategy: Strategy, cluster: LocalCluster, sink: Sink) -> None:
        self._strategy, self._sink = strategy, sink
        self._ending, self._failures = Ending(), list[tuple[Member, BaseException]]()
        self._over, self._killed = threading.Event(), ""
        self._missed: list[BaseException] = []  # deaths that the strategy survives
        self._folder = tempfile.TemporaryDirectory(prefix="distlab-")
        layout = strategy.layout(cluster.num_workers)
        pairs, token = tuple(layout.links), secrets.randbits(63)
        peers = [Peer(role, i) for role, count in layout.counts.items() for i in range(count)]
        self._members: list[Member] = []
        try:
            for me in peers:
                place = Place(me, layout.counts, pairs, cluster.links, self._folder.name, token, cluster.compute_time_s)
                self._members.append(start(payload, place))
        except BaseException:  # an interrupt, say: nobody would watch those that have started
            self._end()
            raise
        self._watcher = threading.Thread(target=self._watch, name="distlab-watch", daemon=True)
        self._watcher.start()

    @property
    def pids(self) -> dict[str, int]:
        """Process ids, by name."""
        return {str(m.me): m.pid for m in self._members}

    def stop(self) -> None:
        for member in self._members:
            with suppress(OSError):  # it may just have ended: the watcher knows
                member.control.send_bytes(b"stop")

    def kill(self, why: str = "LiveRun.kill()") -> None:
        self._killed = self._killed or why
        for member in self._members:
            member.kill()
        self._over.wait()

    def wait(self, timeout_s: float | None = None) -> Ending | None:
        return self._ending if self._over.wait(timeout_s) else None

    def _watch(self) -> None:
        try:
            self._pump()
        except BaseException as error:
            self._ending.error = error
        if self._ending.error is not None and self._killed:
            self._ending.error = ProcessLost(f"the run was ended by {self._killed}")
        self._end()
        self._over.set()

    def _end(self) -> None:
        for member in self._members:
            member.end()
        self._folder.cleanup()

    def _pump(self) -> None:
        """Turn pipes and deaths into events, until every process has ended or one has failed."""
        open_ends: dict[Any, tuple[Member, bool]] = {}
        for member in self._members:
            open_ends |= {member.control: (member, True), member.out: (member, False)}
        deadline = float("inf")
        while open_ends and time.monotonic() < deadline:
            for end in wait(list(open_ends), timeout=0.05):
                member, is_control = open_ends[end]
                if not (self._hear(member) if is_control else self._print(member)):
                    del open_ends[end]
                    if is_control:
                        self._bury(member)
            if self._failures and deadline == float("inf"):
                deadline = time.monotonic() + self._patience()
        if self._failures:
            self._ending.error = self._cause()
            self._drain(open_ends)
        elif not self._ending.outcomes:  # a strategy survives any death, but not all of them
            self._ending.error = self._missed[-1]

    def _patience(self) -> float:
        """A lost link is a consequence: its cause may still be on the way. So may the last events of the others."""
        return ROOT_CAUSE_S if self._cause_is_unknown() else LAST_WORDS_S

    def _cause_is_unknown(self) -> bool:
        return all(isinstance(error, PeerLost) for _, error in self._failures)

    def _cause(self) -> BaseException:
        known = [error for _, error in self._failures if not isinstance(error, PeerLost)]
        return [*known, *self._missed[::-1], self._failures[0][1]][0]

    def _drain(self, open_ends: dict[Any, tuple[Member, bool]]) -> None:
        """Keep what was measured before the failure: events that still lie in the pipes."""
        for member in self._members:
            member.kill()
        for member, is_control in open_ends.values():
            while self._hear(member) if is_control else self._print(member):
                pass

    def _hear(self, member: Member) -> bool:
        """One message from a process; False if there will be no more."""
        try:
            data = member.control.recv_bytes()
        except (EOFError, OSError):
            return False
        kind, body = chr(data[0]), data[1:]
        if kind == "e":
            rows = np.frombuffer(body, EVENT)
            member.step = max(member.step, int(rows["step"].max()))
            self._sink.events(rows)
            return True
        if kind == "l":
            member.linked = True
            return True
        member.said = kind
        if kind == "r":
            self._ending.outcomes[member.me] = process.from_bytes(pickle.loads(body))
        else:
            self._failures.append((member, rebuild(member, *pickle.loads(body))))
        return True

    def _print(self, member: Member) -> bool:
        try:
            data = os.read(member.out.fileno(), 1 << 16)
        except OSError:
            data = b""
        for part in member.decode(data, not data).splitlines(keepends=True):
            member.line.append(part)
            if part.endswith("\n"):
                self._say(member)
        if not data and member.line:
            self._say(member)
        return bool(data)

    def _say(self, member: Member) -> None:
        self._sink.output(member.me, "".join(member.line).removesuffix("\n"))
        member.line.clear()

    def _bury(self, member: Member) -> None:
        member.process.join(LEAVE_S)
        if member.said:
            return
        self._sink.events(death(member))
        if member.linked and self._strategy.survives(member.me) and not self._killed:
            self._missed.append(lost(member))
        else:
            self._failures.append((member, lost(member)))
