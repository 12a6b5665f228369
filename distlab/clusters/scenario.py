"""Scenarios: who is slow, cut off, or dies, and when. The same lines drive a simulated cluster and real processes.

    cluster.slow(worker=3, factor=5).kill(worker=0, at_step=20).revive(worker=0, at_s=3)

Each line makes a new cluster. Times are seconds of the run: on a simulated cluster of its clock, on real processes from
the moment at which all had found each other.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

from distlab.fabric import Peer
from distlab.fabric.laws import positive_number
from distlab.fabric.network import Change
from distlab.options import check_count, check_options, check_positive, check_seconds, check_word, options
from distlab.strategies.base import Layout, Strategy

ROLES = ("worker", "server", "client")


class Scenario:
    """What can be said of a cluster's processes; in-graph, a "worker" is a replica.

    Attributes:
        changes: the lines of the scenario.
    """

    num_workers: int
    changes: tuple[Change, ...] = ()

    @options
    def slow(self, *, worker: int, factor: float, from_s: float = 0.0, to_s: float = math.inf) -> Self:
        """Computing takes this worker `factor` times as long: each gradient that it begins from a moment to another."""
        return self.changed(Change("slow", worker, from_s, to_s, factor))

    @options
    def throttle(self, *, worker: int, factor: float, from_s: float = 0.0, to_s: float = math.inf) -> Self:
        """This worker's NIC has `factor` (below 1) of its bandwidth. A real one is taken for one of 10 Gbit/s."""
        return self.changed(Change("throttle", worker, from_s, to_s, factor))

    @options
    def delay(self, *, worker: int, by_s: float, from_s: float = 0.0, to_s: float = math.inf) -> Self:
        """Every message to and from this worker takes so much longer. A real worker waits while it sends."""
        return self.changed(Change("delay", worker, from_s, to_s, by_s=by_s))

    @options
    def partition(self, *, worker: int, from_s: float = 0.0, to_s: float = math.inf) -> Self:
        """No message leaves or reaches this worker; those that are sent meanwhile wait."""
        return self.changed(Change("partition", worker, from_s, to_s))

    @options
    def pause(self, *, worker: int, from_s: float, to_s: float) -> Self:
        """This worker stands still (real: SIGSTOP), computing and messages, and then goes on."""
        return self.changed(Change("pause", worker, from_s, to_s))

    @options
    def kill(
        self, *, worker: int | None = None, server: int | None = None, client: int | None = None,
        at_s: float | None = None, at_step: int | None = None,
    ) -> Self:  # fmt: skip
        """This process ends (real: SIGKILL), without a word: at a time, or when it begins its gradient of a step."""
        named = {role: i for role, i in zip(ROLES, (worker, server, client), strict=True) if i is not None}
        if len(named) != 1:
            raise ValueError(f"kill names one process, as in kill(worker=0, at_s=1), got {named or 'none'}")
        if (at_s is None) == (at_step is None):
            raise ValueError("kill says when, by at_s= or by at_step=")
        if at_step is not None:
            check_count("at_step", at_step, least=0)
        (role, index), at = *named.items(), 0.0 if at_s is None else at_s
        return self.changed(Change("kill", index, at, role=role, at_step=-1 if at_step is None else at_step))

    @options
    def revive(self, *, worker: int, at_s: float) -> Self:
        """A new process takes this worker's place, then or as soon as it has died. It knows nothing but its number."""
        return self.changed(Change("revive", worker, at_s))

    @options
    def add_worker(self, *, at_s: float) -> Self:
        """One more worker joins: it takes the lowest number that is free, as those are of workers that have left or
        died, or else a new one."""
        return self.changed(Change("add_worker", NOBODY, at_s))

    @options
    def remove_worker(self, *, worker: int | None = None, at_s: float) -> Self:
        """This worker, or the one with the highest number, leaves once its gradient is used. The last one stays."""
        if worker is not None:
            check_count("worker", worker, least=0)
        return self.changed(Change("remove_worker", NOBODY if worker is None else worker, at_s))

    def scenario(self, path: str | Path) -> Self:
        """The lines in a file: JSON, such as ``[{"kind": "kill", "worker": 0, "at_s": 12}]``."""
        made = self
        try:
            lines = json.loads(Path(path).read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
        if not isinstance(lines, list):
            raise ValueError(f"{path} must hold a list of lines, got {lines!r}")
        for line in lines:
            made = made.line(line)
        return made

    def line(self, said: Mapping[str, Any]) -> Self:
        """One line, as a file says it: its kind, and the words of the method of that name."""
        if not isinstance(said, Mapping) or "kind" not in said:
            raise ValueError(f'a line of a scenario is a mapping such as {{"kind": "slow", ...}}, got {said!r}')
        words = dict(said)
        method = getattr(self, check_word("kind", words.pop("kind"), KINDS))
        check_options(method, said["kind"], words)
        return method(**words)

    def changed(self, change: Change) -> Self:
        """The same cluster with one more line of its scenario."""
        check_change(change, self.num_workers + sum(c.kind == "add_worker" for c in self.changes))
        return self._with((*self.changes, change))

    def _with(self, changes: tuple[Change, ...]) -> Self:
        raise NotImplementedError


ELASTIC = ("add_worker", "remove_worker")  # what is about the run, and not about one process
MOMENTS = ("kill", "revive", *ELASTIC)  # the others last
KINDS = ("slow", "throttle", "delay", "partition", "pause", *MOMENTS)
NOBODY = -1  # instead of a worker: whichever it will be


def check_change(change: Change, num_workers: int) -> Change:
    """`change`, if it can happen in a cluster of so many workers; TypeError or ValueError otherwise."""
    check_count(change.role, change.worker, least=NOBODY if change.kind in ELASTIC else 0)
    if change.role == "worker" and change.worker >= num_workers:
        raise ValueError(f"there is no worker {change.worker}: this cluster has 0 to {num_workers - 1}")
    for name, seconds in (("from_s or at_s", change.from_s), ("to_s", change.to_s)):
        positive_number(name, seconds)
    if not 0 <= change.from_s < math.inf or not change.to_s > change.from_s:
        raise ValueError(f"a scenario goes from 0 s or later to a later time, got {change.from_s} to {change.to_s}")
    check_positive("factor", change.factor)
    check_seconds("by_s", change.by_s)
    check_count("at_step", change.at_step, least=-1)
    if change.kind == "throttle" and change.factor > 1:
        raise ValueError(f"factor must be at most 1, the whole bandwidth, got {change.factor}")
    if change.kind == "pause" and change.to_s == math.inf:
        raise ValueError("a pause ends: say to_s=..., or kill the worker")
    return change


def check_scenario(changes: Iterable[Change], strategy: Strategy, num_workers: int) -> None:
    """ValueError if a strategy has no such server or client, or no workers that come and go. A worker that it does not
    have is nobody's: so strategies can be compared on one cluster."""
    counts = strategy.layout(num_workers).counts
    for change in changes:
        if strategy.fixed and change.kind in ELASTIC:
            raise ValueError(f"{change.kind}: no worker can join or leave {strategy!r}: {strategy.fixed}")
        if change.role != "worker" and change.worker >= counts.get(change.role, 0):
            has = f"0 to {counts[change.role] - 1}" if change.role in counts else "none"
            raise ValueError(f"there is no {change.role} {change.worker} to kill under {strategy!r}: it has {has}")


def sentence(change: Change) -> str:
    """A line of a scenario, as it is written."""
    usual = asdict(replace(Change(change.kind, 0, 0.0)))
    words: dict[str, float] = {} if change.worker == NOBODY else {change.role: change.worker}
    if change.kind in MOMENTS:
        words |= {"at_s": change.from_s} if change.at_step < 0 else {"at_step": change.at_step}
    else:
        said = {name: getattr(change, name) for name in ("factor", "by_s", "from_s", "to_s")}
        words |= {name: value for name, value in said.items() if value != usual[name]}
    return f".{change.kind}({', '.join(f'{name}={value:g}' for name, value in words.items())})"


def changes_of(peer: Peer, changes: Iterable[Change], layout: Layout) -> list[Change]:
    """The lines that are about a process."""
    return [c for c in changes if c.kind not in ELASTIC and peer_of(c, layout) == peer]


def peer_of(change: Change, layout: Layout) -> Peer:
    """Whom a line of a scenario is about: in-graph, a worker is a replica."""
    in_graph = change.role == "worker" and "worker" not in layout.counts
    return Peer("replica" if in_graph else change.role, change.worker)
