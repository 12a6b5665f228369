"""The processes of one real run, and the thread that watches them: deaths, faults, and how all of it ends."""

import json
import math
import os
import queue
import secrets
import signal
import threading
import time
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any, Protocol

import numpy as np
import torch

from distlab.clusters.base import NOT_HERE, Ending, Launched, Sink
from distlab.clusters.faults import Faults
from distlab.clusters.home import Home
from distlab.clusters.member import Member, lost, notice, rebuild
from distlab.clusters.process import Place
from distlab.clusters.scenario import peer_of
from distlab.errors import DistlabError, PeerLost, ProcessLost
from distlab.fabric import Peer
from distlab.fabric.network import Change
from distlab.options import check_count
from distlab.packing import from_bytes
from distlab.strategies.base import Job, Outcome, Strategy
from distlab.trace import EVENT, KIND_CODES

ROOT_CAUSE_S = 1.0  # how long a lost link waits for the news of what became of its other end
LAST_WORDS_S = 0.5  # how long the others may take, after a failure, to hand over what they measured
TICK_S = 0.05  # how often to look at the clock
TRIALS = 3  # so often a run goes back to the same checkpoint
LEAVE_S = 2.0  # how long a process may take to leave after its last word


class Settings(Protocol):
    """What a run's processes are told of their cluster."""

    @property
    def num_workers(self) -> int: ...

    @property
    def changes(self) -> tuple[Change, ...]: ...

    @property
    def compute_time_s(self) -> float: ...

    @property
    def failure_timeout_s(self) -> float: ...


class Processes(Launched):
    """The processes of one run, and the thread that watches them.

    Args:
        home: where they live.
    """

    def __init__(self, job: Job, strategy: Strategy, cluster: Settings, sink: Sink, home: Home) -> None:
        self._job, self._strategy, self._cluster, self._sink, self._home = job, strategy, cluster, sink, home
        self._ending, self._failures = Ending(), list[tuple[Member, BaseException]]()
        self._over, self._killed, self._stopping = threading.Event(), "", False
        self._missed: list[BaseException] = []  # deaths that the strategy survives
        self._told: list[tuple[str, Peer]] = []  # changes of the membership, in the order in which all hear of them
        self._layout = strategy.layout(cluster.num_workers)
        self._counts = dict(self._layout.counts)  # with those that have joined
        self._faults, self._began_s, self._rate = Faults(cluster.changes, self._layout), math.inf, 1.0
        self._new_changes: queue.SimpleQueue[Change] = queue.SimpleQueue()
        self._end_by_s = math.inf  # when all must have come to their end
        self._open_ends: dict[Any, tuple[Member, bool]] = {}
        self._members: dict[Peer, Member] = {}
        self._ended: list[Member] = []  # those whose place another has taken
        self._awaited: list[Peer] = []  # whose place another takes as soon as they are dead
        self._went_back: list[int] = []  # to the checkpoints of which versions
        self._deadline = math.inf  # after a failure, for what is still to be heard
        self._turn = threading.Condition()
        self._until = math.inf  # the version at which all stand still; -1: they shall now
        self._held_s = math.inf  # since when they do
        self._over_s = math.inf
        try:
            self._begin_all()
        except BaseException as error:  # an interrupt, say: nobody would watch those that have started
            self._ending.error = error
            self._end()
            raise
        self._watcher = threading.Thread(target=self._watch, name="distlab-watch", daemon=True)
        self._watcher.start()

    def _begin_all(self) -> None:
        self._token = secrets.randbits(63)
        self._home.open(self._strategy, self._job)
        for role, count in self._layout.counts.items():
            for i in range(count):
                self._begin(Peer(role, i))

    def _begin(self, me: Peer) -> None:
        """Start one process: the first under this name, or one that takes its place."""
        before = self._members.get(me)
        dies_at = [c.at_step for c in self._cluster.changes if c.at_step >= 0 and peer_of(c, self._layout) == me]
        place = Place(
            me, dict(self._counts), tuple(self._layout.links), self._token, self._cluster.compute_time_s,
            tuple(self._told), before.computed if before and self._told else -1, tuple(self._faults.weather(me).said),
            math.inf if self._told or self._went_back or not dies_at else min(dies_at), rate=self._rate,
        )  # fmt: skip
        member = self._members[me] = self._home.start(place)
        member.computed = place.step
        self._open_ends |= {member.control: (member, True), member.out: (member, False)}

    @property
    def pids(self) -> dict[str, int]:
        """Process ids, by name."""
        return {str(m.me): m.pid for m in self._members.values()}

    def stop(self) -> None:
        self._stopping, self._until = True, math.inf
        self._order("stop")
        self._end_by_s = min(self._end_by_s, time.monotonic() + self._cluster.failure_timeout_s)

    def change(self, change: Change) -> None:
        self._new_changes.put(change)

    def scale_lr(self, factor: float) -> None:
        self._rate = factor
        self._order("rate", repr(factor))

    def kill(self, why: str = "LiveRun.kill()") -> None:
        self._killed = self._killed or why
        self._kill_all()
        self._over.wait()

    def pause(self) -> None:
        self._run_until(-1)

    def resume(self, speed: float | None = None) -> None:
        super().resume(speed)
        with self._turn:
            self._until = math.inf
            self._turn.notify_all()

    def step(self, events: int = 1) -> float:
        self._run_until(self._sink.version + check_count("events", events))
        return self.now_s

    @property
    def paused(self) -> bool:
        return self._until < 0 and not self._over.is_set()

    @property
    def now_s(self) -> float:
        with self._turn:
            return max(0.0, min(time.monotonic(), self._held_s, self._over_s) - self._began_s)

    def _run_until(self, version: float) -> None:
        """Return when all stand still, at that version, or when somebody lets them go on."""
        if not self._home.can_pause:
            raise DistlabError(NOT_HERE)
        with self._turn:
            self._until = version
            self._turn.wait_for(lambda: self._until == math.inf or self._over.is_set() or self._holds)

    @property
    def _holds(self) -> bool:
        return self._until < 0 and self._held_s < math.inf

    def _stand_or_go(self) -> None:
        """Stop all, or let them go on, as is wanted. The time between does not count."""
        with self._turn:
            wanted = self._until <= self._sink.version and self._deadline == math.inf
            if wanted and self._held_s == math.inf and self._began_s < math.inf and self._all_linked:
                self._until, self._held_s = -1, time.monotonic()
                for member in self._running():
                    member.signal(signal.SIGSTOP)
            elif not wanted and self._held_s < math.inf:
                self._go_on()
            self._turn.notify_all()

    def _go_on(self) -> None:
        now = time.monotonic()
        self._began_s += now - self._held_s
        self._end_by_s += now - self._held_s
        self._held_s = math.inf
        for member in self._running():
            member.heard_s = now
            if not member.stopped:
                member.signal(signal.SIGCONT)

    def _running(self) -> list[Member]:
        return [m for m in self._members.values() if m.control in self._open_ends and not (m.said or m.gave_up)]

    def _kill_all(self) -> None:
        for member in list(self._members.values()):
            member.kill()

    def wait(self, timeout_s: float | None = None) -> Ending | None:
        return self._ending if self._over.wait(timeout_s) else None

    def _watch(self) -> None:
        try:
            self._pump()
        except BaseException as error:
            self._ending.error = error
        if self._ending.error is not None and self._killed:
            self._ending.error = ProcessLost(f"the run was ended by {self._killed}")
        try:
            self._end()
        finally:
            with self._turn:
                self._over_s = time.monotonic()
                self._over.set()
                self._turn.notify_all()

    def _end(self) -> None:
        for member in [*self._members.values(), *self._ended]:
            member.end()
        self._home.close(self._ending)

    def _pump(self) -> None:
        """Turn pipes, deaths and the scenario into events, until every process has ended or one has failed."""
        while self._open_ends and time.monotonic() < self._deadline:
            self._stand_or_go()
            if self._held_s == math.inf:
                self._let_come_true()
            for end in wait(list(self._open_ends), timeout=self._pause_s()):
                if end not in self._open_ends:  # all have begun anew
                    continue
                member, is_control = self._open_ends[end]
                if not (self._hear(member) if is_control else self._print(member)):
                    del self._open_ends[end]
                    if is_control:
                        self._bury(member)
            if self._held_s == math.inf:
                self._look_for_silence()
            if self._killed:  # and some had not begun then
                self._kill_all()
            if self._failures and self._deadline == math.inf:
                self._deadline = time.monotonic() + self._patience()
        if self._failures:
            self._ending.error = self._cause()
            self._drain()
        elif all(left.parted for left in self._ending.outcomes.values()):  # a strategy survives any death, not all
            self._ending.error = self._missed[-1]

    def _pause_s(self) -> float:
        if self._held_s < math.inf:
            return TICK_S
        return min(TICK_S, max(0.0, self._faults.next_s - (time.monotonic() - self._began_s)))

    def _let_come_true(self) -> None:
        """What the scenario has for this moment. It begins when all have found each other."""
        now = time.monotonic()
        if self._began_s == math.inf and all(member.linked for member in self._members.values()):
            self._began_s = now
        since_s = now - self._began_s
        while self._began_s < math.inf and not self._new_changes.empty():
            change = self._new_changes.get()
            self._faults.add(replace(change, from_s=change.from_s + since_s, to_s=change.to_s + since_s))
        for peer, change, begins in self._faults.due(since_s):
            if change.kind == "add_worker":
                self._add_worker()
            elif change.kind == "remove_worker":
                self._remove_worker(change.worker)
            elif (member := self._members.get(peer)) is not None:
                self._strike(member, change, begins)
        for peer in list(self._awaited):
            self._take_place(peer)

    def _strike(self, member: Member, change: Change, begins: bool) -> None:
        if change.kind == "kill":
            self._end_one(member)
        elif change.kind == "revive":
            self._revive(member)
        elif change.kind == "pause":
            member.stopped = begins
            member.signal(signal.SIGSTOP if begins else signal.SIGCONT)
        else:
            member.order("weather", *self._faults.weather(member.me).said)

    def _end_one(self, member: Member) -> None:
        if member.said or member.killed or member.control not in self._open_ends:
            gone = "has ended" if member.said else "is dead"
            self._sink.output(member.me, f"{member.me} {gone} already: nothing was killed")
        member.killed = True
        member.kill()

    def _revive(self, member: Member) -> None:
        """A new process, in the place of one that has died, or that will."""
        me = member.me
        if me in self._awaited:
            self._sink.output(me, f"another takes the place of {me} already, as soon as it is dead")
            return
        if member.control in self._open_ends and not (member.said or member.killed):
            state = "lives" if member.linked else "is on its way"
            self._sink.output(me, f"{me} {state}: another takes its place as soon as it is dead")
        self._awaited.append(me)

    def _take_place(self, me: Peer) -> None:
        member = self._members[me]
        if member.control in self._open_ends or not self._all_linked:  # it is still there, or its death not yet noticed
            return
        self._awaited.remove(me)
        if member.said or self._failures or self._end_by_s < math.inf:
            why = f"{me} has ended" if member.said else "the run comes to its end"
            self._sink.output(me, f"{why}: nobody takes its place")
        else:
            self._come(me, "revive", "takes the place of the one that was lost")

    def _come(self, me: Peer, kind: str, does: str) -> None:
        """Start a process that was not there."""
        if me in self._members:
            self._ended.append(self._members[me])
        self._counts[me.role] = max(self._counts[me.role], me.index + 1)
        self._tell("came", me)
        self._begin(me)
        self._sink.events(notice(kind, self._members[me]))
        self._sink.output(me, f"{self._members[me]} {does}")

    @property
    def _all_linked(self) -> bool:
        """Have all found each other that are there? Who comes before would be waited for as one of the first."""
        return all(m.linked or m.said for m in self._members.values() if m.control in self._open_ends)

    def _staying(self) -> list[int]:
        """The workers that are there and have not been asked to leave."""
        there = [m for m in self._members.values() if m.control in self._open_ends and not (m.said or m.leaves)]
        return sorted(m.me.index for m in there if m.me.role == "worker")

    def _keep_one(self) -> None:
        """If all others have died, the next that was to leave stays."""
        for member in [] if self._staying() else [m for m in self._members.values() if m.leaves and not m.said][:1]:
            member.leaves = False
            member.order("stay")

    def _add_worker(self) -> None:
        """A new process with the lowest number that is free."""
        if self._failures or self._end_by_s < math.inf:
            return
        staying = self._staying()
        me = Peer("worker", next(i for i in range(len(staying) + 1) if i not in staying))
        about_to_leave = me in self._members and self._members[me].control in self._open_ends
        if about_to_leave or not self._all_linked:
            self.change(Change("add_worker", -1, 0.0))
        else:
            self._come(me, "join", "joins")

    def _remove_worker(self, number: int) -> None:
        """Ask one to leave: the last, if `number` is negative."""
        staying = self._staying()
        number = max(staying, default=0) if number < 0 else number
        if staying == [number]:
            self._sink.output(Peer("worker", number), f"worker {number} is the only one, and stays")
        elif number in staying:
            member = self._members[Peer("worker", number)]
            member.leaves = True
            member.order("leave")
        else:
            self._sink.output(Peer("worker", number), f"worker {number} is not there: nobody was asked to leave")

    def _look_for_silence(self) -> None:
        """End whoever gives no sign of life, or does not come to an end."""
        now, limit = time.monotonic(), self._cluster.failure_timeout_s
        running = self._running()
        for member in running:
            if now - member.heard_s > limit and not member.stopped:
                member.give_up(f"silent for {limit:g} s, and ended")
        if now > self._end_by_s:
            cut_off = [m for m in running if self._faults.weather(m.me).cut]
            held_up = [m for m in running if self._strategy.survives(m.me)]  # a server only waits for its workers
            for member in cut_off or held_up or running:
                member.give_up(f"not at its end {limit:g} s after the run's, and ended")
            self._end_by_s = now + limit

    def _patience(self) -> float:
        """A lost link is a consequence: its cause may still be on the way. So may the last events of the others."""
        return ROOT_CAUSE_S if self._cause_is_unknown() else LAST_WORDS_S

    def _cause_is_unknown(self) -> bool:
        return all(isinstance(error, PeerLost) for _, error in self._failures)

    def _cause(self) -> BaseException:
        known = [error for _, error in self._failures if not isinstance(error, PeerLost)]
        return [*known, *self._missed[::-1], self._failures[0][1]][0]

    def _drain(self) -> None:
        """Keep what was measured before the failure: events that still lie in the pipes."""
        for member in self._members.values():
            member.kill()
        for member, is_control in self._open_ends.values():
            while self._hear(member) if is_control else self._print(member):
                pass

    def _hear(self, member: Member) -> bool:
        """One message from a process; False if there will be no more."""
        try:
            data = member.control.recv_bytes()
        except (EOFError, OSError):
            return False
        kind, body = chr(data[0]), data[1:]
        member.heard_s = time.monotonic()
        if kind == "e":
            rows = np.frombuffer(body, EVENT)
            member.step = max(member.step, int(rows["step"].max()))
            computed = rows["step"][rows["kind"] == KIND_CODES["compute"]]
            member.computed = int(computed.max(initial=member.computed))
            self._sink.events(rows)
            return True
        if kind == "k":
            self._sink.part(member.me, torch.frombuffer(bytearray(body), dtype=torch.uint8))
            return True
        if kind == "l":
            member.linked = True
        elif kind == "o":
            self._end_by_s = min(self._end_by_s, member.heard_s + self._cluster.failure_timeout_s)
        if kind in "loh":
            return True
        member.said = kind
        if kind == "r":
            self._ending.outcomes[member.me] = Outcome(**from_bytes(body))
        else:
            self._failures.append((member, rebuild(str(member), json.loads(body), trusted=member.is_here)))
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
            if member.said == "r":
                parted = self._ending.outcomes[member.me].parted
                self._sink.output(member.me, f"{member} has left, as it was asked to") if parted else None
                self._tell("parted" if parted else "left", member.me)
            return
        self._sink.events(notice("death", member))
        has_met = member.linked or not self._layout.links or any(m.me == member.me for m in self._ended)
        if has_met and self._strategy.survives(member.me) and not self._killed:
            self._missed.append(lost(member))
            self._sink.output(member.me, f"{self._missed[-1]}; the others go on")
            self._tell("lost", member.me)
            self._keep_one()
        elif not (has_met and not self._killed and self._go_back(member)):
            self._failures.append((member, lost(member)))

    def _go_back(self, member: Member) -> bool:
        """`member` may have held what nobody else has: let all begin anew at the last checkpoint, if there is one and
        it is of any use."""
        if not self._cause_is_unknown() or not self._strategy.comes_back(member.me):
            return False
        self._drain()
        kept = self._sink.go_back()
        if kept is None or self._went_back[-TRIALS:] == [kept.version] * TRIALS:
            return False
        with self._turn:
            if self._held_s < math.inf:  # all stand still again once they have found each other
                self._go_on()
        self._went_back.append(kept.version)
        self._sink.events(notice("restore", member, version=kept.version))
        self._sink.output(member.me, f"{lost(member)}; all begin anew at the checkpoint of version {kept.version}")
        self._ended += self._members.values()
        for left in (self._open_ends, self._failures, self._told, self._missed, self._ending.outcomes):
            left.clear()
        self._deadline = self._end_by_s = math.inf
        self._counts = dict(self._layout.counts)
        self._job = replace(self._job, begin=kept)
        self._begin_all()
        if self._stopping:
            self.stop()
        return True

    def _tell(self, what: str, peer: Peer) -> None:
        """Let all processes know of a change."""
        self._told.append((what, peer))
        self._order(what, str(peer))

    def _order(self, *words: str) -> None:
        for member in list(self._members.values()):
            member.order(*words)
