"""A simulated run under way: a world, a thread that lets its events happen, and who may stop it."""

import math
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from distlab.clusters.base import Ending, Launched, Sink
from distlab.clusters.scenario import ELASTIC, changes_of, peer_of
from distlab.errors import ProcessLost, RemoteError
from distlab.fabric import Peer
from distlab.fabric.network import Change
from distlab.fabric.simulated import SimulatedFabric, World
from distlab.options import check_count, check_positive
from distlab.randomness import undisturbed
from distlab.strategies.base import Job, Layout, Strategy, outcome_of

ANEW_S = 1e-3  # how long it takes to begin anew at a checkpoint
TRIALS = 3  # so often a run goes back to the same checkpoint
FLUSH_S = 0.05  # events are handed over this often, as those of real processes are
GIVE_UP_S = 2.0  # how long `kill` waits for user code that may never come back


class Builder(Protocol):
    """Who makes a world and its processes: a simulated cluster."""

    num_workers: int

    @property
    def changes(self) -> tuple[Change, ...]:
        """The lines of its scenario."""

    def build(self, strategy: Strategy, job: Job, sink: Sink, began_s: float = 0.0) -> World:
        """A world with every process at its first line."""

    def node(self, world: World, me: Peer, layout: Layout, changes: list[Change], seed: list[int]) -> SimulatedFabric:
        """One process."""


class SimulatedRun(Launched):
    """A simulated run, in a thread of its own, which can be paused and stepped."""

    def __init__(self, cluster: "Builder", strategy: Strategy, job: Job, sink: Sink, paused: bool) -> None:
        self._cluster, self._strategy, self._job, self._sink = cluster, strategy, job, sink
        self._layout = strategy.layout(cluster.num_workers)
        self._ending, self._over = Ending(), threading.Event()
        self.ahead_s = -time.monotonic()  # the virtual clock begins now
        self._turn = threading.Condition()
        self._allowed: float = 0 if paused else math.inf  # events that may still happen before the next pause
        self._flushed_s, self._stands = 0.0, False  # until it may go on?
        self._speed: float | None = None  # virtual seconds for a real one; None: as fast as it can
        self._reached = 0.0, time.monotonic()  # the virtual time, and when it was that
        self._orders: list[Callable[[], None]] = []
        self._killed, self._stopping = "", False  # by whom; has somebody asked for an early end?
        self._told: list[tuple[str, Peer]] = []  # changes of the membership
        self._awaited: dict[Peer, str] = {}  # those that come as soon as the one of that number is gone
        self._lives = 0  # processes that took another's place
        self._went_back: list[int] = []  # to the checkpoints of which versions
        self._rate = 1.0  # times the task's learning rate
        self.world: World | None = None
        self.events = 0  # that have happened
        self._thread = threading.Thread(target=self._run, name="distlab-simulation", daemon=True)
        self._thread.start()

    @property
    def ident(self) -> int:
        """The thread that simulates."""
        return self._thread.ident or 0

    def stop(self) -> None:
        self._order(self._stop)

    def scale_lr(self, factor: float) -> None:
        def tell() -> None:
            self._rate = factor
            for node in self.world.nodes.values() if self.world is not None else ():
                node.rate = factor

        self._order(tell)

    def kill(self, why: str = "LiveRun.kill()") -> None:
        self._killed = why
        self._order(lambda: None)
        if threading.current_thread() is not self._thread:
            self._over.wait(GIVE_UP_S)  # user code that never comes back cannot be ended from outside

    def wait(self, timeout_s: float | None = None) -> Ending | None:
        return self._ending if self._over.wait(timeout_s) else None

    def pause(self) -> None:
        self._allow(0)

    def resume(self, speed: float | None = None) -> None:
        self._allow(math.inf, None if speed is None else check_positive("speed", speed))

    @property
    def paused(self) -> bool:
        return self._allowed <= 0 and not self._over.is_set()

    @property
    def now_s(self) -> float:
        if self.world is None:
            return 0.0
        env = self.world.env
        return max(env.now, min(env.peek(), self._due_s()))

    def _due_s(self) -> float:
        """How far the virtual clock may be by now, if it keeps its pace."""
        (virtual_s, since_s), speed = self._reached, self._speed
        return virtual_s + (time.monotonic() - since_s) * (speed or 0.0)

    def params(self) -> dict[str, Tensor]:
        nodes = self.world.nodes if self.world is not None else {}
        return {str(me): node.flat.params.clone() for me, node in nodes.items() if node.flat is not None}

    def step(self, events: int = 1) -> float:
        self._allow(check_count("events", events))
        with self._turn:
            self._turn.wait_for(lambda: (self._allowed <= 0 and self._stands) or self._over.is_set())
        return self.now_s

    def _allow(self, events: float, speed: float | None = None) -> None:
        with self._turn:
            self._reached = self.now_s, time.monotonic()
            self._allowed, self._speed = events, speed
            self._turn.notify_all()

    def _order(self, order: Callable[[], None]) -> None:
        with self._turn:
            self._orders.append(order)
            self._turn.notify_all()

    def _stop(self) -> None:
        assert self.world is not None
        self._stopping = True
        self._allow(math.inf)
        for node in self.world.nodes.values():
            node.stopping = True
            node.wake()

    def _run(self) -> None:
        try:
            with undisturbed():
                try:
                    self._simulate()
                finally:
                    self._close_logs()
        except BaseException as error:
            self._ending.error = error
        with self._turn:
            self._over.set()
            self._turn.notify_all()

    def _simulate(self) -> None:
        world = self._begin()
        self._let_happen(world)
        while self._went_back_from(world):
            world = self._begin()
            self._let_happen(world)
        if self._killed:
            raise ProcessLost(f"the run was ended at {world.env.now:.6g} s by {self._killed}")
        if world.failure is not None:
            me, error = world.failure
            if not isinstance(error, Exception):  # SystemExit in user code must not end the caller
                error = RemoteError("".join(traceback.format_exception_only(error)).strip())
            error.add_note(f"raised on {me} at {world.env.now:.6g} s of virtual time")
            raise error

    def _begin(self) -> World:
        """Every process at its first line, at this moment."""
        began_s = 0.0 if self.world is None else self.world.env.now + ANEW_S
        world = self.world = self._cluster.build(self._strategy, self._job, self._sink, began_s)
        world.kill = self._kill
        for me, node in world.nodes.items():
            if began_s:  # what has struck does not strike again
                node.changes = [c for c in node.changes if c.from_s > began_s or c.kind not in ("kill", "revive")]
            node.stopping, node.rate = self._stopping, self._rate
            node.spawn(self._program, me, node)
        for node in list(world.nodes.values()):
            for change in node.changes:
                self._schedule(change)
        for change in self._cluster.changes:
            if change.kind in ELASTIC and change.from_s >= began_s:
                self._schedule(change)
        return world

    def _went_back_from(self, world: World) -> bool:
        """Has it lost a process that held what nobody else has, and is there a checkpoint to begin anew at?"""
        who, error = world.failure or (None, None)
        if self._killed or who is None or not (world.nodes[who].dead and self._strategy.comes_back(who)):
            return False
        kept = self._sink.go_back()
        if kept is None or self._went_back[-TRIALS:] == [kept.version] * TRIALS:
            return False
        self._went_back.append(kept.version)
        world.nodes[who].record("restore", world.env.now, world.env.now, version=kept.version)
        self._flush()
        self._sink.output(who, f"{error}; all begin anew at the checkpoint of version {kept.version}")
        self._job = replace(self._job, begin=kept)
        self._told, self._ending.outcomes = [], {}
        self._close_logs()
        return True

    def change(self, change: Change) -> None:
        self._order(lambda: self._change(change))

    def _change(self, change: Change) -> None:
        """A line that is said while the run is on."""
        world = self.world
        assert world is not None, "nothing is ordered before there is a world"
        now, node = self.now_s, world.nodes.get(peer_of(change, self._layout))
        change = replace(change, from_s=now + change.from_s, to_s=now + change.to_s)
        if change.kind in ELASTIC:
            self._schedule(change)
        elif node is not None:
            node.changes.append(change)
            self._schedule(change)

    def _schedule(self, change: Change) -> None:
        world, peer = self.world, peer_of(change, self._layout)
        assert world is not None
        if change.kind == "kill" and change.at_step < 0:
            world.at(change.from_s, lambda _: self._kill(world.nodes[peer]))
        elif change.kind == "revive":
            world.at(change.from_s, lambda _: self._revive(world, peer))
        elif change.kind == "add_worker":
            world.at(change.from_s, lambda _: self._add_worker(world))
        elif change.kind == "remove_worker":
            world.at(change.from_s, lambda _: self._remove_worker(world, change.worker))

    def _revive(self, world: World, peer: Peer) -> None:
        """A new process, in the place of one that has died, or that will."""
        node = world.nodes[peer]
        if peer in self._awaited:
            self._sink.output(peer, f"another takes the place of {peer} already, as soon as it is dead")
        elif not node.tasks and not node.dead:
            self._sink.output(peer, f"{peer} has ended: nobody takes its place")
        elif not node.dead:
            self._sink.output(peer, f"{peer} lives: another takes its place as soon as it is dead")
            self._awaited[peer] = "revive"
        elif self._strategy.survives(peer):
            self._come(world, peer, "revive")

    def _staying(self, world: World) -> list[int]:
        """The workers that are there and have not been asked to leave."""
        there = [node for node in world.nodes.values() if node.tasks and not node.leaving]
        return sorted(node.me.index for node in there if node.me.role == "worker")

    def _add_worker(self, world: World) -> None:
        """A new process with the lowest number that is free."""
        staying = [*self._staying(world), *(peer.index for peer in self._awaited)]
        peer = Peer("worker", next(i for i in range(len(staying) + 1) if i not in staying))
        if peer in world.nodes and world.nodes[peer].tasks:  # it is about to leave
            self._awaited[peer] = "join"
        elif any(node.tasks for node in world.nodes.values()):
            self._come(world, peer, "join")

    def _remove_worker(self, world: World, number: int) -> None:
        """Ask one to leave: the last, if `number` is negative."""
        staying = self._staying(world)
        number = max(staying, default=0) if number < 0 else number
        if number in staying and len(staying) > 1:
            world.nodes[Peer("worker", number)].leaving = True
        elif number in staying:
            self._sink.output(Peer("worker", number), f"worker {number} is the only one, and stays")
        else:
            self._sink.output(Peer("worker", number), f"worker {number} is not there: nobody was asked to leave")

    def _come(self, world: World, peer: Peer, kind: str) -> None:
        """A process that was not there."""
        self._lives += 1
        old = world.nodes.get(peer)
        said = changes_of(peer, self._cluster.changes, self._layout) if old is None else old.changes
        changes = [c for c in said if c.at_step < 0]  # or it would die at that step again
        node = self._cluster.node(world, peer, self._layout, changes, seed=[self._lives, peer.index])
        for what, other in self._told:
            node.tell(what, other)
        world.nodes[peer], node.stopping, node.rate = node, self._stopping, self._rate
        node.computed = -1 if old is None else old.computed
        node.step = node.computed + 1
        node.record(kind, node.now(), node.now(), worker=peer.index)
        self._tell("came", peer)
        era = node.members.era
        for a, b in self._layout.links:
            for other in [p for p in world.nodes if a != b and {p.role, peer.role} == {a, b}]:
                node.relink([other], tag=era, unless=lambda: False)
        node.spawn(self._program, peer, node)

    def _tell(self, what: str, peer: Peer) -> None:
        self._told.append((what, peer))
        for node in self.world.nodes.values() if self.world is not None else ():
            node.tell(what, peer)

    def _let_happen(self, world: World) -> None:
        try:
            while not world.over and not self._killed:
                if self._allowed < math.inf or self._orders or self._speed is not None:
                    if not self._wait_for_turn(world):
                        continue
                elif not self.events % 256:
                    self._flush(FLUSH_S)
                world.step()
                self.events += 1
        finally:
            self._flush()

    def _program(self, me: Peer, node: SimulatedFabric) -> None:
        left = outcome_of(self._strategy, node, self._job, lambda part: self._sink.part(me, part))
        self._ending.outcomes[me] = left
        node.end()
        self._tell("parted" if left.parted else "left", me)
        if left.parted and self._awaited.get(me) == "join":
            node.world.at(node.now(), lambda _: self._come(node.world, me, self._awaited.pop(me)))

    def _close_logs(self) -> None:
        """Of processes, too, whose code stands still because another has failed."""
        for node in self.world.nodes.values() if self.world is not None else ():
            if node.chief is not None:
                node.chief.close()

    def _flush(self, after_s: float = 0.0) -> None:
        """Hand over the events, if the last were handed over so long ago."""
        now = time.monotonic()
        if self.world is not None and now - self._flushed_s >= after_s:
            self._flushed_s = now
            self.world.events.flush()

    def _kill(self, node: SimulatedFabric) -> None:
        if node.dead or not node.tasks:
            gone = "is dead" if node.dead else "has ended"
            self._sink.output(node.me, f"{node.me} {gone} already: nothing was killed")
            return
        now = node.now()
        node.record("death", now, now, worker=node.me.index)
        left = any(not outcome.parted for outcome in self._ending.outcomes.values())
        left = left or any(n.tasks for n in node.world.nodes.values() if n is not node)
        if not (self._strategy.survives(node.me) and left) and node.world.failure is None:
            lost = ProcessLost(f"{node.me} was lost at {now:.6g} s: killed by the scenario")
            node.world.failure = (node.me, lost)
        node.kill()
        self._tell("lost", node.me)
        if not self._staying(node.world):  # so the next that was to leave stays
            for other in [n for n in node.world.nodes.values() if n.leaving and n.tasks][:1]:
                other.leaving = False
        if node.me in self._awaited and self._strategy.survives(node.me):
            node.world.at(now, lambda _: self._come(node.world, node.me, self._awaited.pop(node.me)))

    def _wait_for_turn(self, world: World) -> bool:
        """Wait until the next event may happen, or there are orders, which are obeyed; may it?"""
        self._flush(0.0 if self._left_s(world) > FLUSH_S else FLUSH_S)
        with self._turn:
            self._stands = self._allowed <= 0
            self._turn.notify_all()
            while not self._orders and (left_s := self._left_s(world)) > 0:
                self._turn.wait(min(left_s, threading.TIMEOUT_MAX))
                self._stands = self._allowed <= 0
                self._turn.notify_all() if self._stands else None
            orders, self._orders = self._orders, []
            self._stands = False
            self._allowed -= not orders
        for order in orders:
            order()
        return not orders

    def _left_s(self, world: World) -> float:
        """Real seconds until the next event may happen."""
        if self._allowed <= 0:
            return math.inf
        next_s = world.env.peek()
        if self._speed is None or next_s == math.inf:  # with no event left, the world says who waits for whom
            return 0.0
        return (next_s - self._due_s()) / self._speed
