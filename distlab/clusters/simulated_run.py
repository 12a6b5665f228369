"""A simulated run under way: a world, a thread that lets its events happen, and who may stop it."""

import math
import threading
import time
import traceback
from collections.abc import Callable

from torch import Tensor

from distlab.clusters.base import Ending, Launched
from distlab.errors import ProcessLost, RemoteError
from distlab.fabric import Peer
from distlab.fabric.simulated import SimulatedFabric, World
from distlab.options import check_count
from distlab.randomness import undisturbed
from distlab.strategies.base import Job, Strategy, outcome_of

FLUSH_S = 0.05  # events are handed over this often, as those of real processes are
GIVE_UP_S = 2.0  # how long `kill` waits for user code that may never come back


class SimulatedRun(Launched):
    """A simulated run, in a thread of its own, which can be paused and stepped."""

    def __init__(self, build: Callable[[], World], strategy: Strategy, job: Job, paused: bool) -> None:
        self._build, self._strategy, self._job = build, strategy, job
        self._ending, self._over = Ending(), threading.Event()
        self._turn = threading.Condition()
        self._allowed: float = 0 if paused else math.inf  # events that may still happen before the next pause
        self._orders: list[Callable[[], None]] = []
        self._killed = ""  # by whom
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

    def kill(self, why: str = "LiveRun.kill()") -> None:
        self._killed = why
        self._order(lambda: None)
        if threading.current_thread() is not self._thread:
            self._over.wait(GIVE_UP_S)  # user code that never comes back cannot be ended from outside

    def wait(self, timeout_s: float | None = None) -> Ending | None:
        return self._ending if self._over.wait(timeout_s) else None

    def pause(self) -> None:
        self._allow(0)

    def resume(self) -> None:
        self._allow(math.inf)

    def params(self) -> dict[str, Tensor]:
        nodes = self.world.nodes if self.world is not None else {}
        return {str(me): node.flat.params.clone() for me, node in nodes.items() if node.flat is not None}

    def step(self, events: int = 1) -> float:
        self._allow(check_count("events", events))
        with self._turn:
            self._turn.wait_for(lambda: self._allowed <= 0 or self._over.is_set())
        return self.world.env.now if self.world else 0.0

    def _allow(self, events: float) -> None:
        with self._turn:
            self._allowed = events
            self._turn.notify_all()

    def _order(self, order: Callable[[], None]) -> None:
        with self._turn:
            self._orders.append(order)
            self._turn.notify_all()

    def _stop(self) -> None:
        assert self.world is not None
        self._allowed = math.inf
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
        world = self.world = self._build()
        for me, node in world.nodes.items():
            node.spawn(self._program, me, node)
            for change in node.changes:
                if change.kind == "kill":
                    world.at(change.from_s, lambda _, node=node: self._kill(node))  # type: ignore[misc]
        try:
            self._let_happen(world)
        finally:
            self._flush()
        if self._killed:
            raise ProcessLost(f"the run was ended at {world.env.now:.6g} s by {self._killed}")
        if world.failure is not None:
            me, error = world.failure
            if not isinstance(error, Exception):  # SystemExit in user code must not end the caller
                error = RemoteError("".join(traceback.format_exception_only(error)).strip())
            error.add_note(f"raised on {me} at {world.env.now:.6g} s of virtual time")
            raise error

    def _let_happen(self, world: World) -> None:
        told_s = time.monotonic()
        while not world.over and not self._killed:
            if self._allowed < math.inf or self._orders:
                self._wait_for_turn()
            elif not self.events % 256 and time.monotonic() - told_s > FLUSH_S:
                self._flush()
                told_s = time.monotonic()
            if not self._killed:
                world.step()
                self.events += 1

    def _program(self, me: Peer, node: SimulatedFabric) -> None:
        self._ending.outcomes[me] = outcome_of(self._strategy, node, self._job)

    def _close_logs(self) -> None:
        """Of processes, too, whose code stands still because another has failed."""
        for node in self.world.nodes.values() if self.world is not None else ():
            if node.chief is not None:
                node.chief.close()

    def _flush(self) -> None:
        if self.world is not None:
            self.world.events.flush()

    def _kill(self, node: SimulatedFabric) -> None:
        if node.dead or not node.tasks:
            return  # it has ended before
        now = node.now()
        node.record("death", now, now, worker=node.me.index)
        left = self._ending.outcomes or any(n.tasks for n in node.world.nodes.values() if n is not node)
        if not (self._strategy.survives(node.me) and left) and node.world.failure is None:
            lost = ProcessLost(f"{node.me} was lost at {now:.6g} s: killed by the scenario")
            node.world.failure = (node.me, lost)
        node.kill()

    def _wait_for_turn(self) -> None:
        if self._allowed <= 0:
            self._flush()
        with self._turn:
            self._turn.notify_all()
            self._turn.wait_for(lambda: self._allowed > 0 or self._orders)
            orders, self._orders = self._orders, []
            self._allowed -= not orders
        for order in orders:
            order()
