"""The simulated world: the same strategies on a virtual clock.

simpy keeps the time. Each task is a greenlet: blocking code that gives way, at its own line, to the clock and goes
on when its event has come. The hard idea is `block`: whatever a task waits for (a message, a lock, the end of a
computation) is one simpy event, and waiting is one switch back to the clock. Nothing runs at the same time as
anything else, so the same seed gives the same run, bit for bit. Gradients are real; only time is not.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import greenlet
import numpy as np
import simpy
import torch

from distlab.errors import Deadlock, PeerLost
from distlab.fabric import wire
from distlab.fabric.base import ALWAYS, NUM_COUNTS, Fabric, Link, Message, Parts, Peer, Running, Shared, Timed
from distlab.fabric.laws import Law
from distlab.fabric.network import Change, Nic, Traffic, standing_still
from distlab.randomness import Randomness, set_states, states
from distlab.trace import Buffer, Recorder

JOIN = "a task of its own"


class Killed(greenlet.GreenletExit):
    """Raised inside the tasks of a process that a scenario has killed; nobody should catch it."""


class World:
    """The clock, the network and the processes of one simulated run.

    Args:
        events: where its processes record theirs.
        hollow: compute nothing, so that only time and bytes are simulated.
        began_s: what its clock says first.
    """

    def __init__(self, events: Buffer, *, hollow: bool = False, began_s: float = 0.0) -> None:
        self.env, self.events, self.hollow = simpy.Environment(began_s), events, hollow
        self.main = greenlet.getcurrent()
        self.nodes: dict[Peer, SimulatedFabric] = {}
        self.nics: dict[Peer, Nic] = {}
        self.shared: dict[str, Shared] = {}
        self.traffic = Traffic(self.nics, self.at, lambda: self.env.now)
        self.failure: tuple[Peer, BaseException] | None = None
        self.current: Task | None = None
        self.running = 0  # tasks that have not ended
        self.kill: Callable[[SimulatedFabric], None] = SimulatedFabric.kill  # what a scenario does to a process

    def at(self, when: float, function: Callable[[Any], None]) -> None:
        """Call `function` at a time, not before now."""
        now = self.env.now
        self.env.timeout(when - now if when > now else 0.0).callbacks.append(function)

    def step(self) -> None:
        """Let the next event happen; Deadlock, which says who waits for whom, if there is none."""
        try:
            self.env.step()
        except simpy.core.EmptySchedule:
            tasks = [task for node in self.nodes.values() for task in node.tasks if task.why != JOIN]
            lost = [str(me) for me, node in self.nodes.items() if node.dead]
            raise Deadlock([(str(task.node.me), task.why) for task in tasks], lost) from None

    @property
    def over(self) -> bool:
        """Every process has ended, or one has failed."""
        return self.failure is not None or not self.running


class Task(Running):
    """A greenlet of a process."""

    def __init__(self, node: "SimulatedFabric", function: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.node, self._call = node, (function, args)
        self.why = "its turn"
        self.ended = node.world.env.event()
        self._greenlet = greenlet.greenlet(self._run, parent=node.world.main)
        node.tasks.append(self)
        node.world.running += 1
        start = node.world.env.event()
        self.waits, self.pending = True, start  # type: bool, simpy.Event | None
        start.callbacks.append(self.resume)
        start.succeed()

    def _run(self) -> None:
        function, args = self._call
        try:
            function(*args)
        except Killed:
            pass
        except BaseException as error:
            self.node.world.failure = self.node.world.failure or (self.node.me, error)
        self._leave()

    def _leave(self) -> None:
        self.node.tasks.remove(self)
        self.node.world.running -= 1
        self.ended.succeed()

    def resume(self, event: simpy.Event | None) -> None:
        """Go on, if it is `event` that this task waits for: it may have been killed meanwhile."""
        if self.waits and self.pending is event:
            self.waits, self.pending, self.node.world.current = False, None, self
            self._greenlet.switch()

    def block(self, event: simpy.Event | None, why: str) -> None:
        """Give way until `event`, or until somebody calls `resume`.

        Gradient mode belongs to the thread, so each task brings its own back.
        """
        self.waits, self.pending, self.why = True, event, why
        if event is not None:
            event.callbacks.append(self.resume)
        grad_mode = torch.is_grad_enabled()
        self.node.world.main.switch()
        if torch.is_grad_enabled() is not grad_mode:
            torch.set_grad_enabled(grad_mode)

    def kill(self) -> None:
        """End it where it stands."""
        self.waits, self.node.world.current = False, self
        if self._greenlet:
            self._greenlet.throw(Killed)
        elif self in self.node.tasks:  # it had not begun
            self._leave()

    def join(self) -> None:
        if self in self.node.tasks:
            self.node.block(self.ended, JOIN)


class SimulatedLink(Link):
    """One end of a link: an inbox, and the other end."""

    other: "SimulatedLink"

    def __init__(self, node: "SimulatedFabric", peer: Peer) -> None:
        self.node, self.peer = node, peer
        self.inbox: deque[Message] = deque()
        self.waiter: Task | None = None
        self.closed = False
        self._gone_s = 0.0

    def put(self, message: Message) -> int:
        self.flush()
        world, size = self.node.world, wire.size(message.tensors)
        copies = message.tensors if world.hollow else [t.detach().clone() for t in message.tensors]
        sent = message._replace(tensors=copies, num_bytes=size, sent_s=world.env.now)
        self._gone_s = world.traffic.send(self.node.me, self.peer, size, lambda _: self.other.deliver(sent))
        return size

    def flush(self) -> None:
        self.node.check_alive()
        if self.closed:
            raise PeerLost(str(self.peer))
        if self._gone_s > self.node.now():
            left = self._gone_s - self.node.now()
            never = self.node.world.env.event()
            self.node.block(self.node.world.env.timeout(left) if left < math.inf else never, f"the way to {self.peer}")

    def deliver(self, message: Message) -> None:
        """A message has arrived. It stays in the inbox until somebody takes it."""
        if not self.node.dead:
            self.inbox.append(message)
            self.wake()

    def wake(self) -> None:
        """Let whoever waits for this link look again."""
        if self.waiter is not None:
            waiter, self.waiter = self.waiter, None
            waiter.resume(waiter.pending)

    def hang_up(self, largest_bytes: int = 0) -> None:
        self.closed = self.other.closed = True
        self.node.world.at(self.node.now(), self._wake_both)  # only the clock may switch to another task

    def end(self) -> None:
        """This process has come to its end: the other end hears of it after all that was sent."""
        self.node.world.traffic.send(self.node.me, self.peer, 0, self.other.close)

    def close(self, _: Any = None) -> None:
        """The other process is gone: no message will come any more."""
        self.closed = True
        self.wake()

    def _wake_both(self, _: Any) -> None:
        self.wake()
        self.other.wake()

    def recv(self) -> Message:
        self.node.check_alive()
        while not self.inbox:
            if self.closed:
                raise PeerLost(str(self.peer))
            self.waiter = self.node.world.current
            self.node.block(None, f"a message from {self.peer}")
        return self.inbox.popleft()


class Lock:
    """A lock that a task may take again while it holds it; those who wait get it in the order in which they came."""

    def __init__(self, node: "SimulatedFabric", name: str) -> None:
        self._node, self._name = node, name
        self._owner: Task | None = None
        self._depth = 0
        self._wanted: deque[tuple[Task, simpy.Event]] = deque()

    def __enter__(self) -> None:
        me = self._node.world.current
        assert me is not None
        if self._owner not in (None, me):
            event = self._node.world.env.event()
            self._wanted.append((me, event))
            self._node.block(event, f"the lock {self._name!r}")
        self._owner, self._depth = me, self._depth + 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner, event = self._wanted.popleft() if self._wanted else (None, None)
            if event is not None:
                event.succeed()
        self._node.wake()


def drawn(law: Law, rng: np.random.Generator) -> float:
    """A time from `law`; ValueError that names it where it is none."""
    try:
        return finite(law.sample(rng), law)
    except OverflowError:
        return finite(math.inf, law)


def finite(seconds: float, source: object) -> float:
    """`seconds`, if a clock can show it."""
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{source} gave a time of {seconds} s")
    return seconds


class SimulatedFabric(Fabric):
    """One process of a simulated run.

    Args:
        laws: how long each kind of work takes; a kind without a law takes no time.
        changes: what a scenario does to this process.
        seed: of the times it draws.
    """

    parallel = False

    def __init__(
        self, world: World, me: Peer, counts: dict[str, int], record: Recorder, *, laws: dict[str, Law],
        changes: list[Change], seed: Sequence[int],
    ) -> None:  # fmt: skip
        super().__init__(me, counts, record)
        self.world, self.laws, self.changes = world, laws, changes
        self.rng = np.random.default_rng(seed)
        self.randomness = Randomness()
        self.tasks: list[Task] = []
        self.dead = False
        self._links: dict[Peer, SimulatedLink] = {}
        self._made: set[tuple[int, Peer]] = set()  # links that the other end has asked for
        self._locks: dict[str, Lock] = {}
        self._waiting: list[tuple[Callable[[], bool], simpy.Event]] = []
        self._units: dict[Any, tuple[float, float]] = {}  # work that is done in parts: its time, the share left

    def now(self) -> float:
        return self.world.env.now

    def check_alive(self) -> None:
        """A killed process does nothing more, whatever its code does with the exception."""
        if self.dead:
            raise Killed

    def block(self, event: simpy.Event | None, why: str) -> None:
        """The running task waits for `event`, or for a call of its `resume`."""
        self.check_alive()
        task = self.world.current
        assert task is not None, "only a task can wait"
        assert task.node is self, "only a task of this process can wait here"
        task.block(event, why)

    def seed(self, number: int) -> None:
        self.randomness = Randomness(number)

    def random_states(self) -> dict[str, Any]:
        return self.randomness.around(states)

    def set_random_states(self, kept: dict[str, Any]) -> None:
        self.randomness.around(lambda: set_states(kept))

    def connect(self, peer: Peer) -> None:
        """Make both ends of the link to `peer`."""
        mine, theirs = SimulatedLink(self, peer), SimulatedLink(self.world.nodes[peer], self.me)
        mine.other, theirs.other = theirs, mine
        self._links[peer] = mine
        self.world.nodes[peer]._links[self.me] = theirs

    def relink(self, peers: Sequence[Peer], *, tag: int, unless: Callable[[], bool]) -> None:
        """A link is there as soon as one end asks for it: messages wait for the other."""
        for peer in peers:
            if (tag, peer) not in self._made:
                if peer in self._links:  # the other end may wait on the one before
                    self._links[peer].hang_up()
                self.connect(peer)
                self.world.nodes[peer]._made.add((tag, self.me))
            if self.world.nodes[peer].dead:
                self._links[peer].closed = True

    def link(self, role: str, index: int) -> Link:
        return self._links[Peer(role, index)]

    def has_link(self, peer: Peer) -> bool:
        return peer in self._links

    def spawn(self, function: Callable[..., None], *args: Any) -> Running:
        return Task(self, function, args)

    def lock(self, name: str = "") -> "Lock":
        return self._locks.setdefault(name, Lock(self, name))

    def shared(self, name: str, numel: int, dtype: torch.dtype) -> Shared:
        if name not in self.world.shared:
            counts = torch.zeros(NUM_COUNTS, dtype=torch.int64)
            free = nullcontext()  # nothing else runs while it is held, as it is never held across a blocking call
            self.world.shared[name] = Shared(torch.zeros(numel, dtype=dtype), counts, free)
        return self.world.shared[name]

    def until(self, condition: Callable[[], bool], what: str = "a change of its own state") -> None:
        while not condition():
            event = self.world.env.event()
            self._waiting.append((condition, event))
            self.block(event, what)

    def wake(self) -> None:
        """Let whoever waits in `until` look again."""
        if self._waiting:
            ready = [event for condition, event in self._waiting if condition()]
            self._waiting = [(c, e) for c, e in self._waiting if e not in ready]
            for event in ready:
                event.succeed()

    def timed(
        self, kind: str, function: Callable[[], Any], share: float = 1.0, idle: Any = None, unless: Link | None = None,
        parts: Parts | None = None,
    ) -> Timed:  # fmt: skip
        self._die_at_its_step(kind)
        start, seconds = self.now(), self._seconds(kind, share)
        skip = self.world.hollow and idle is not ALWAYS
        work = (lambda: idle) if skip else (lambda: self.randomness.around(function))
        if parts is not None:  # what is there before the end must be computed before it
            value = parts.spread(work, lambda part: self._pass(start + seconds * part, kind))
            self._pass(start + seconds, kind)
            return Timed(value, start, self.now())
        if unless is not None and self._interrupted(unless, seconds):
            return Timed(None, start, self.now(), cancelled=True)
        if unless is None:
            self._pass(start + seconds, kind)
        return Timed(work(), start, self.now())  # at the end: what it changes, and what its caller says, are one moment

    def _die_at_its_step(self, kind: str) -> None:
        if kind == "compute" and any(c.kind == "kill" and 0 <= c.at_step <= self.step for c in self.changes):
            self.world.at(self.now(), lambda _: self.world.kill(self))
            self.block(None, "its end")

    def _pass(self, until_s: float, kind: str) -> None:
        if self.changes:
            until_s = standing_still(self.changes, self.now(), until_s)
        if until_s > self.now():
            self.block(self.world.env.timeout(until_s - self.now()), f"its own {kind}")

    def _interrupted(self, link: Link, seconds: float) -> bool:
        """Let so much time pass, or less if there is a message; was there one?"""
        assert isinstance(link, SimulatedLink)
        done = self.now() + seconds
        if not link.inbox:
            link.waiter = self.world.current
            self.block(self.world.env.timeout(seconds), "its own compute")
            link.waiter = None
        return bool(link.inbox) and self.now() < done

    def _seconds(self, kind: str, share: float) -> float:
        law = self.laws.get(kind)
        if law is None:
            return 0.0
        if share == 1.0:
            whole = drawn(law, self.rng)
        else:
            who = self.world.current, kind
            whole, left = self._units.pop(who, (0.0, 0.0))
            if left <= 1e-9:
                whole, left = drawn(law, self.rng), 1.0
            self._units[who] = whole, left - share
        if not self.changes:
            return whole * share
        slower = [c.factor for c in self.changes if c.kind == "slow" and kind == "compute" and c.holds(self.now())]
        return finite(whole * share * math.prod(slower), self.changes)

    def kill(self) -> None:
        """What SIGKILL does: its tasks end where they stand, its links close, what it has not sent is gone."""
        self.dead = True
        for task in list(self.tasks):
            task.kill()
        for link in self._links.values():
            link.other.close()

    def end(self) -> None:
        """What the end of its program does."""
        for link in self._links.values():
            link.end()
