"""The parameter server: it holds the parameters and the optimizer, and it is *the server* that applies.

`Server` is one process, with the whole model or one shard of it; `WorkerPort` is how it sees one worker, `ServerPort`
how a worker sees all servers.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from distlab.errors import BadMessage, PeerLost
from distlab.fabric import Fabric, Kind, Link, Message
from distlab.roles.updater import Gradient, Params, Updater
from distlab.roles.worker import Worker
from distlab.rules import MEAN, Rule
from distlab.shards import Shard
from distlab.task import Task


class Server:
    """Parameters, optimizer state and version of one run, or of one shard of its parameters.

    Args:
        shard: what it holds.
        num_updates: the version at which the run is over; never one more is applied.
        locking: "none" lets the tasks of several workers apply and read at the same time; "tensor" lets one tensor
            be updated by one of them at a time; "server" makes every apply and every read whole.
        rule: how gradients become one update.
        needed: how many gradients make an update, where they are collected.

    Attributes:
        waiting: gradients collected for the next update, by (worker, step).
        clocks: how many steps each worker has finished.
        last_push: the step of each worker's last push that has arrived; -1: none has.
        memory: for what a strategy of yours keeps on its server.
        left, dead: workers that have said goodbye, and that have not.
    """

    def __init__(
        self, fabric: Fabric, task: Task, shard: Shard, *, num_updates: int, locking: str = "server",
        rule: Rule = MEAN, needed: "Callable[[Server], int]" = lambda server: 1,
    ) -> None:  # fmt: skip
        self.fabric, self.task, self.num_updates, self.locking = fabric, task, num_updates, locking
        self.shard, self.flat = shard, shard.vector()
        fabric.flat, self._needed = self.flat, needed
        self.updater = Updater(fabric, task, self.flat, rule=rule, by_tensor=locking == "tensor")
        self.num_workers = fabric.counts["worker"]
        self.waiting: dict[tuple[int, int], Gradient] = {}
        self.clocks, self.last_push = [0] * self.num_workers, [-1] * self.num_workers
        self.left, self.dead = set[int](), set[int]()
        self.ports: list[WorkerPort] = []
        self.memory: dict[str, Any] = {}
        self.distinct = False  # may no worker have two gradients in one update?
        self.broadcasts = False  # is a new version sent to everybody, asked or not?
        self.ready, self._begun, self.updater.settle = False, self.version, self._settle
        self._settled = [-1] * self.num_workers  # the newest step of each worker of which it is known what became
        if (begin := fabric.saver.begin) is not None:
            self.ready, size = True, task.batch_size
            self.last_push = [begin.position(i, self.num_workers, size) - 1 for i in range(self.num_workers)]
            self._settled = list(self.last_push)
        fabric.saver.own("server", lambda: {"settled": self._settled}, lambda _: None)

    @property
    def live(self) -> set[int]:
        """The workers that are still there."""
        return set(range(self.num_workers)) - self.left - self.dead

    @property
    def version(self) -> int:
        """Updates applied."""
        return self.updater.version

    @property
    def over(self) -> bool:
        """No further update will be applied."""
        return self.version >= self.num_updates or self.fabric.stopping

    def wait_for(self, version: int) -> None:
        """Wait until that version is there, or no further one will be."""
        self.fabric.until(lambda: self.version >= version or self.over, f"version {version}")

    def guard(self) -> AbstractContextManager[Any]:
        """What has to be held while the parameters are read or written."""
        return self.fabric.lock("server") if self.locking == "server" else nullcontext()

    def apply(self, *gradients: Gradient) -> None:
        """Apply the mean of `gradients` as one update, or record them as unused if the last one has begun."""
        with self.fabric.lock("version"):
            begins = self._begun < self.num_updates
            self._begun += begins
        if not begins:
            self.record("unused", *gradients)
            return
        with self.guard():
            made = self.updater.apply(*gradients, lane=gradients[-1].worker)
        if made == self.num_updates:
            self.fabric.over()

    def collect(self, gradient: Gradient, *, fresh: bool = False, keep: bool = False) -> int | None:
        """Keep `gradient` until there are as many as an update needs, then apply their mean.

        Args:
            fresh: drop it if it was read at an older version than this.
            keep: its worker is answered before it is applied, so keep a copy.

        Returns: the version that it is for; None if it was dropped.
        """
        with self.guard(), self.fabric.lock():
            if fresh and gradient.read < self.version:
                self.record("drop", gradient)
                return None
            kept = replace(gradient, values=gradient.values.clone()) if keep else gradient
            self.waiting[gradient.worker, gradient.step] = kept
            made = self.version + 1
            self.settle()
            return made

    def holds(self, worker: int) -> bool:
        """Does a gradient of this worker wait for others? One that came back may have left it in another life."""
        return any(whose == worker for whose, _ in list(self.waiting)) and not self.over

    def settle(self) -> None:
        """Apply what waits, if that is enough."""
        if self.waiting and len(self.waiting) >= self._needed(self):
            self.apply(*(self.waiting.pop(key) for key in sorted(self.waiting)))
            for port in self.ports if self.broadcasts else ():
                with suppress(PeerLost):  # the task of that port will notice
                    if port.begun:
                        port.reply()

    def leave(self, worker: int, *, died: bool = False) -> None:
        """A worker is gone: others may have waited for it."""
        with self.guard(), self.fabric.lock():
            (self.dead if died else self.left).add(worker)
            if not self.over:
                self.settle()

    def welcome(self, worker: int) -> None:
        """A worker has come: it is as fast as the slowest of the others, and a new number as far in its data."""
        with self.fabric.lock():
            live, is_new = self.live, worker >= self.num_workers
            if is_new:
                slowest = min((self.last_push[w] for w in live), default=-1)
                for counts, first in ((self.clocks, 0), (self.last_push, slowest), (self._settled, slowest)):
                    counts += [first] * (worker + 1 - len(counts))
                self.num_workers = worker + 1
            self.clocks[worker] = min((self.clocks[w] for w in live), default=self.clocks[worker])
            self.dead.discard(worker)
            self.left.discard(worker)

    @property
    def unnoticed(self) -> set[int]:
        """The workers that are lost, as this process has been told, and whose links have not said so."""
        return {peer.index for peer in list(self.fabric.members.lost) if peer.role == "worker"} - self.dead - self.left

    @property
    def deserted(self) -> bool:
        """Every worker has gone."""
        return len(self.left | self.dead) == self.num_workers

    def keep_pace(self, worker: int, max_gap: int) -> None:
        """Count a step of `worker`, and wait until it is at most `max_gap` ahead of the slowest live one."""
        with self.fabric.lock():
            self.clocks[worker] += 1

        def may_go_on() -> bool:
            slowest = min((self.clocks[w] for w in self.live), default=self.clocks[worker])
            return self.clocks[worker] - slowest <= max_gap or self.over

        self.fabric.until(may_go_on, "slower workers")

    def store(self, values: Tensor) -> int:
        """Replace the parameters by what a worker wrote back; returns the new version."""
        with self.guard(), self.fabric.lock("version"):
            self.flat.params.copy_(values)
            self.updater.version += 1
            return self.version

    def initialise(self, values: Tensor) -> None:
        """Take the chief's first parameters. Only them: a chief that has come back must not undo what was learnt."""
        with self.fabric.lock():
            if not self.ready:
                self.flat.params.copy_(values)
                self.ready = True

    def record(self, outcome: str, *gradients: Gradient) -> None:
        """Say in the trace what became of gradients that were not applied: "drop" or "unused"."""
        now = self.fabric.now()
        if outcome == "drop":
            self._settle(*gradients)
        for g in gradients:
            self.fabric.record(outcome, now, now, version=self.version, **g.facts)

    def _settle(self, *gradients: Gradient) -> None:
        for g in gradients:
            self._settled[g.worker] = max(self._settled[g.worker], g.step)

    def close(self) -> None:
        """Account for the gradients that still wait for others."""
        self.record("unused", *self.waiting.values())


class WorkerPort:
    """One worker, seen from the server: its pushes in, parameters out.

    Attributes:
        begun: has it asked for parameters?
        sent: a copy of those that it has, where the rule needs them.
    """

    def __init__(self, server: Server, link: Link) -> None:
        self.server, self.link, self.index = server, link, link.peer.index
        self.begun, self.sent = False, None  # type: bool, Tensor | None

    def pushes(self) -> Iterator[Gradient]:
        """The worker's gradients as they arrive, until the run is over.

        A gradient that arrives after the last update is recorded as unused, and its worker is told to stop.
        """
        for message in self.messages(Kind.PUSH):
            gradient = gradient_from(message, self.index, self.sent)
            if self.server.over:
                self.refuse(gradient)
            else:
                yield gradient

    def messages(self, kind: Kind) -> Iterator[Message]:
        """What arrives of `kind`; the first parameters and pulls are answered here."""
        while True:
            message = self.link.recv()
            if message.kind is Kind.STOP:
                return
            if message.kind is Kind.INIT:
                self.server.initialise(self._checked(message))
            elif message.kind is Kind.PULL:
                self.server.fabric.until(lambda: self.server.ready, "the chief's first parameters")
                if self.server.distinct:
                    self.server.fabric.until(lambda: not self.server.holds(self.index), "its own last gradient")
                self.begun = True
                self.reply()
            elif message.kind is kind:
                self._checked(message)
                self.server.last_push[self.index] = message.step
                yield message
            else:
                raise BadMessage(f"{self.link.peer} sent {message.kind.name} where {kind.name} was expected")

    def reply(self, *, params: bool = True, version: int | None = None, dropped: bool = False) -> None:
        """Answer a pull or a push: with the parameters as they are now, and with the word if the run is over."""
        server = self.server
        with server.guard():
            kind = Kind.STOP if server.over else Kind.DROPPED if dropped else Kind.PARAMS
            said = server.version if version is None else version
            values = server.flat.params
            if server.updater.rule.compensate is not None:
                values = self.sent = values.clone()
            self.link.post(kind, [values] if params else [], version=said, step=self.server.last_push[self.index])

    def refuse(self, gradient: Gradient) -> None:
        """Account for a gradient that came after the last update, and answer with the version it was read at."""
        self.server.record("unused", gradient)
        self.reply(version=gradient.read)

    def _checked(self, message: Message) -> Tensor:
        want, values = self.server.flat.params, message.values
        if values.shape != want.shape or values.dtype != want.dtype:
            raise BadMessage(
                f"{self.link.peer} sent {message.kind.name} of {tuple(values.shape)} {values.dtype}, "
                f"this run's are {tuple(want.shape)} {want.dtype}"
            )
        return values


class ServerPort:
    """The servers, seen from a worker: pull parameters, push gradients.

    Every server gets its message before any answer is awaited. Each answers with its own version: the parameters of
    a pull may then mix updates that one server has made and another has not.
    """

    def __init__(self, worker: Worker, links: Sequence[Link], shards: Sequence[Shard]) -> None:
        self.worker, self.links, self._shards = worker, links, shards
        self._pulled, self._last_push = (
            False,
            -1,
        )  # that has arrived: the step; another process of this name may have sent it
        self._whole = torch.zeros_like(worker.flat.params) if len(links) > 1 else None

    @property
    def link(self) -> Link:
        """The one server's."""
        assert len(self.links) == 1, "several servers have several links"
        return self.links[0]

    def pull(self) -> Params:
        """Ask for the parameters and wait for them. The chief sends the first ones before."""
        begins = not self._pulled
        self._pulled = True
        if begins and self.worker.is_chief:
            self._post(Kind.INIT, self.worker.flat.params)
        self._post(Kind.PULL)
        params = self.answer()
        if begins and (self._last_push >= 0 or self.worker.next):  # another process of this name has come so far
            self.worker.step = self.worker.next = max(self.worker.next, self._last_push + 1)
        return params

    def push(self, gradient: Gradient) -> Params:
        """Send `gradient` and wait for the answer: the next parameters."""
        self.send(Kind.PUSH, gradient.values, gradient)
        return self.answer(gradient.step)

    def send(self, kind: Kind, values: Tensor, gradient: Gradient) -> None:
        """Send `values` under the header of `gradient`."""
        fabric = self.worker.fabric
        start = fabric.now()
        sent, facts, end = self._post(kind, values, gradient), gradient.facts, fabric.now()
        for number, (link, num_bytes) in enumerate(zip(self.links, sent, strict=True)):
            facts["read"] = gradient.reads[number] if gradient.reads else gradient.read
            fabric.record("push", start, end, peer=link.peer, num_bytes=num_bytes, **facts)

    def _post(self, kind: Kind, values: Tensor | None = None, gradient: Gradient | None = None) -> list[int]:
        sent, header = [], gradient.header if gradient else {}
        for number, (link, shard) in enumerate(zip(self.links, self._shards, strict=True)):
            if gradient is not None and gradient.reads:
                header["version"] = gradient.reads[number]
            sent.append(link.post(kind, [] if values is None else [shard.take(values)], **header))
        for link in self.links:
            link.flush()
        return sent

    def answer(self, pushed: int = -1) -> Params:
        """Wait for every server's parameters. A broadcast that left before the gradient of step `pushed` had arrived
        is its answer too: it came too late."""
        messages = [self._receive(link) for link in self.links]
        self._last_push = max(m.step for m in messages)
        self.worker.ended = all(m.kind is Kind.STOP for m in messages)
        dropped = all(m.kind is Kind.DROPPED or m.step < pushed for m in messages)
        versions = tuple(m.version for m in messages)
        if self._whole is None:
            params = Params(messages[0].values, versions[0], (), dropped)
        else:
            for shard, message in zip(self._shards, messages, strict=True):
                shard.put(message.values, self._whole)
            params = Params(self._whole, versions[0], versions, dropped)
        self.worker.held = params.version
        if self.worker.ended:
            self.worker.look(params)  # the last ones: no gradient will be computed at them
        return params

    def receive(self) -> Message:
        """The one server's next message."""
        message = self._receive(self.link)
        self.worker.ended = message.kind is Kind.STOP
        return message

    def _receive(self, link: Link) -> Message:
        """The trace keeps the wait and the transfer (a pull) apart."""
        fabric, worker, asked = self.worker.fabric, self.worker, self.worker.fabric.now()
        message = link.recv()
        end = fabric.now()
        began = min(max(message.sent_s, asked), end)
        said: dict[str, Any] = {"worker": worker.index, "step": fabric.step, "version": message.version}
        said["peer"] = link.peer
        fabric.record("wait", asked, began, **said)
        fabric.record("pull", began, end, num_bytes=message.num_bytes, **said)
        return message


def gradient_from(message: Message, worker: int, at: Tensor | None = None) -> Gradient:
    """A push as the gradient that it carries; its values are the link's buffer, good until the next message."""
    facts: dict[str, Any] = {
        "step": message.step,
        "samples": message.samples,
        "loss": message.loss,
        "batch": message.batch,
    }
    return Gradient(message.values, message.version, worker, at=at, **facts)
