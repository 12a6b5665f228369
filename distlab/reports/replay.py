"""Replay: a run, done again from its tape, one gradient after the other, in one process.

If "asynchronous training is SGD with old gradients" is true, then the order in which gradients were applied and the
versions they were read at are *all* there is to know: computing the same gradients at the same old parameters and
applying them in the same order must give the same parameters, to the last bit. Replay does that. And because it is
only a tape, it can be edited: another learning rate, a worker left out, the same arrivals.
"""

import copy
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from distlab.checkpoint import Checkpoint
from distlab.clusters.simulated import SimulatedCluster
from distlab.collectives import in_one_thread
from distlab.data import collate
from distlab.errors import DivergenceWarning
from distlab.flat import Flat, Vector, local_state
from distlab.live import LiveRun
from distlab.options import check_positive
from distlab.randomness import Randomness, set_states, undisturbed
from distlab.reports.ledger import lives
from distlab.roles.exchange import Exchange
from distlab.roles.updater import Lane, known
from distlab.roles.worker import Computer
from distlab.rules import MEAN, Rule
from distlab.shards import Shard
from distlab.strategies.base import Job, ParameterServerStrategy, Strategy
from distlab.strategies.in_graph import InGraph
from distlab.strategies.local_sgd import LocalSGD, Rounds
from distlab.task import Task, model_of
from distlab.trace import KIND_CODES, ROLES, Trace


@dataclass(frozen=True, eq=False)
class Replay:
    """What a replay came to.

    Attributes:
        params: (size,) the final parameters.
        losses: version -> mean loss of the gradients in it.
        local: the chief's buffers and frozen parameters.
    """

    task: Task
    params: Tensor
    losses: dict[int, float]
    local: dict[str, Tensor]

    def __repr__(self) -> str:
        return f"Replay({len(self.losses)} updates of {self.task!r})"

    @property
    def model(self) -> nn.Module:
        """A module with these parameters and buffers, in eval mode."""
        return model_of(self.task, self.params, self.local).eval()

    def evaluate(self, samples: Any = None) -> dict[str, float]:
        """Mean loss and metrics on the validation data, or on `samples`."""
        return self.task.evaluate(self.model, samples)


@dataclass(frozen=True)
class Line:
    """One line of the tape: a server's version, and the gradients that made it, as (worker, step, read).

    Without servers, or with one, the server is 0.
    """

    server: int
    version: int
    gradients: tuple[tuple[int, int, int], ...]


def tape(trace: Trace) -> list[Line]:
    """The updates of a trace, in order."""
    lines: dict[tuple[int, int], dict[tuple[int, int], int]] = defaultdict(dict)
    names, server = ["role", "index", "version", "worker", "step", "read"], ROLES.index("server")
    for role, index, version, worker, step, read in trace.applies[names].tolist():
        lines[index if role == server else 0, version].setdefault((worker, step), read)
    made = [Line(*key, tuple((w, s, r) for (w, s), r in sorted(held.items()))) for key, held in lines.items()]
    single = len({line.server for line in made}) == 1  # one server's versions are in order, whatever clocks say
    return sorted(made, key=lambda line: line.version) if single else made


def replay(
    trace: Trace, task: Task, strategy: Strategy, *, num_workers: int, lr: float | None = None,
    without_worker: int | None = None, begin: Checkpoint | None = None,
) -> Replay:  # fmt: skip
    """Do a run again from its trace, serially.

    Unedited, it ends at the run's parameters bit for bit, if every read was of whole versions: any simulated run,
    and real ones but those of `Hogwild` and of `AsyncPS` with locking "none" or "tensor", whose races no tape records.

    Args:
        strategy: the run's, for its rule and its shards.
        num_workers: how many there were at first.
        lr: another learning rate, for the same arrivals.
        without_worker: leave this worker's gradients out; the others arrive as they did.
        begin: the checkpoint that the run went on from, or went back to last.

    Raises:
        ValueError: the trace holds no update, `without_worker` is not on it, or a gradient was read at a version
            that is not.
    """
    trace, _ = trace.stretches[-1]  # what was made before the checkpoint, that has
    lines = tape(trace)
    if not lines:
        raise ValueError("this trace holds no update: there is nothing to replay")
    if np.isnan(trace.select("apply")["loss"]).all():
        raise ValueError('nothing was computed in this run (gradients="none"): there is nothing to replay')
    if lr is not None:
        check_positive("lr", lr)
    authors = {worker for line in lines for worker, _, _ in line.gradients}
    if without_worker is not None and without_worker not in authors:
        raise ValueError(f"without_worker={without_worker!r}: this tape has gradients of workers {sorted(authors)}")
    if isinstance(strategy, InGraph):
        if without_worker is not None:
            raise ValueError("in-graph, all replicas compute one gradient: none can be left out of it")
        return again(trace, task, strategy, num_workers, max(line.version for line in lines), lr, begin)
    with undisturbed():
        player = Player(trace, lines, task, strategy, num_workers, lr, begin)
        losses = {}
        for number, line in enumerate(lines):
            kept = [g for g in line.gradients if g[0] != without_worker]
            loss = player.play(number, line, kept)
            if line.server == 0:
                losses[line.version] = loss
        player.finish()
    return Replay(task, player.params, losses, player.local)


def again(
    trace: Trace, task: Task, strategy: Strategy, num_workers: int, num_updates: int, lr: float | None,
    begin: Checkpoint | None,
) -> Replay:  # fmt: skip
    """Where one client decides all, the tape holds no choice: run the same program on a virtual clock."""

    def optimizer(params: Any) -> torch.optim.Optimizer:
        made = task.optimizer(params)
        for group in made.param_groups:
            group["lr"] = group["lr"] if lr is None else lr
        return made

    rate, schedule = Rates(trace), task.lr_schedule

    def scheduled(version: int) -> float:
        return rate(version + 1) * (schedule(version) if schedule else 1.0)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DivergenceWarning)  # said of the run itself
        cluster = SimulatedCluster(num_workers)
        job = Job(task.but(optimizer=optimizer, lr_schedule=scheduled), num_updates, num_workers, begin=begin)
        run = LiveRun(job.task, strategy, cluster, job).wait()
    losses = dict(zip(run.applies["version"].tolist(), run.applies["loss"].tolist(), strict=True))
    assert run.params is not None
    return Replay(task, run.params, losses, dict(run.local))


class Rates:
    """What the task's learning rate was multiplied by, beside its schedule, as the trace has it."""

    def __init__(self, trace: Trace) -> None:
        rows = trace.select("rate")
        by_server = rows["role"] == ROLES.index("server")
        self._of_servers, self._rows = bool(by_server.any()), rows[by_server] if by_server.any() else rows

    def __call__(self, version: int, server: int = 0) -> float:
        """... in the update that made `version`, of that server if there are any."""
        mine = self._rows[self._rows["index"] == server] if self._of_servers else self._rows
        return newest(mine[mine["version"] <= version], "version")

    def of(self, worker: int, step: int) -> float:
        """... where a worker applied its own gradient of `step`."""
        return newest(self._rows[(self._rows["index"] == worker) & (self._rows["step"] <= step)], "step")


def newest(rows: np.ndarray, by: str) -> float:
    """The factor of the newest of these events; 1 if there is none."""
    return float(rows["loss"][np.argsort(rows[by], kind="stable")[-1]]) if len(rows) else 1.0


class Holder:
    """One server of the tape, or whoever applies: its parameters, optimizer and rule, and the versions still read."""

    def __init__(self, vector: Vector, shard: Shard, lane: Lane, rule: Rule, begin: Checkpoint | None) -> None:
        self.vector, self.latest = vector, vector.params
        self.shard, self.lane, self.rule = shard, lane, copy.deepcopy(rule)
        self.applied = 0
        if begin is not None:
            state, self.applied = begin.portion(shard.ranges), begin.version
            vector.params.copy_(state["vectors"]["params"])
            self.lane.restore(known(state, "optimizer"))
            self.rule.restore(known(state, "rule")["vectors"])
        self.versions = {self.applied: vector.params.clone()}


class Player:
    """Plays a tape: who holds parameters, and every worker's model, buffers and random numbers."""

    def __init__(
        self, trace: Trace, lines: list[Line], task: Task, strategy: Strategy, num_workers: int, lr: float | None,
        begin: Checkpoint | None,
    ) -> None:  # fmt: skip
        self.task, self.num_workers, self.lr, self.begin = task, num_workers, lr, begin
        self.flat, self.rule = Flat(task.build()), MEAN
        whole = Shard(((0, self.flat.size),), tuple(self.flat.shapes), self.flat.dtype)
        shards = [whole]
        if isinstance(strategy, ParameterServerStrategy):
            self.rule, shards = strategy.rule, strategy.cut(task, self.flat)
        self.holders = [self._holder(shard) for shard in shards]
        self.workers: dict[int, Computer] = {}
        self.random: dict[int, Randomness] = {}
        self.rate = Rates(trace)
        self.own_lanes: dict[int, Lane] = {}
        self.anew: set[int] = set()  # workers whose place another process has taken
        self.computes = reads(trace, len(shards))
        self.begins = defaultdict(list, lives(trace))
        self.ahead = {worker: deque(sorted(steps)) for worker, steps in self.computes.items()}  # not yet computed
        self.done: dict[tuple[int, int], tuple[Tensor, float]] = {}
        self.uses = Counter((w, s) for line in lines for w, s, _ in line.gradients)
        self.last_use = last_uses(lines, self.computes)
        has = {kind: len(trace.select(kind)) > 0 for kind in ("store", "reduce")}
        self.make = self._worker if has["store"] else self._mean
        self.exchanges: list[Exchange] = []
        self.groups = [(-1, list(range(num_workers))), *groups(trace)]
        if has["reduce"] or hasattr(strategy, "exchange"):
            self.make, self.exchange = self._every, getattr(strategy, "exchange", Exchange)
            self.exchanges = [self.exchange(self.flat) for _ in range(max(map(max, (g for _, g in self.groups))) + 1)]
        elif not any(has.values()) and applies_its_own(trace):
            self.make = self._own
        if isinstance(strategy, LocalSGD):
            self.make, self.outer = self._rounds, Rounds(task, self.flat, strategy.outer)
            self.outer.begin(self.flat.params)
            if begin is not None:
                self.outer.restore(begin.portion(whole.ranges))

    def play(self, number: int, line: Line, gradients: list[tuple[int, int, int]]) -> float:
        """Make the version of line `number` from `gradients`; returns their mean loss, nan if there are none."""
        loss, holder = float("nan"), self.holders[line.server]
        if gradients:
            loss = self.make(line, gradients)
            holder.applied += 1
        holder.versions[line.version] = holder.latest.clone()
        for server, other in enumerate(self.holders):
            newest = max(other.versions)
            for old in [v for v in other.versions if v < newest and self.last_use.get((server, v), -1) <= number]:
                del other.versions[old]
        return loss

    def finish(self) -> None:
        """What the chief computed and nobody used still moved its buffers."""
        chief = min(self.computes)
        while self.ahead[chief]:
            self._next(chief)

    @property
    def params(self) -> Tensor:
        """(size,) all parameters, as they are."""
        whole = torch.zeros_like(self.flat.params)
        for holder in self.holders:
            holder.shard.put(holder.latest, whole)
        return whole

    @property
    def local(self) -> dict[str, Tensor]:
        """What is local to the chief: the first worker on the tape."""
        chief = self.workers[min(self.workers)].model if self.workers else self.task.build()
        return {name: tensor.clone() for name, tensor in local_state(chief).items()}

    def _mean(self, line: Line, gradients: list[tuple[int, int, int]]) -> float:
        """Whoever holds the parameters applied the gradients by its rule: their mean, if it has no other."""
        holder = self.holders[line.server]
        done = [self._gradient(worker, step) for worker, step, _ in gradients]
        values = [holder.shard.take(values) for values, _ in done]
        ages = [line.version - 1 - read for *_, read in gradients]
        old = [holder.versions[read] for *_, read in gradients]
        mean, factor = holder.rule.combine(values, ages, old, holder.latest)
        self._step(holder.lane, mean, holder.applied, factor * self.rate(line.version, line.server))
        return float(np.mean([loss for _, loss in done]))

    def _every(self, line: Line, gradients: list[tuple[int, int, int]]) -> float:
        """Every worker applied the mean of all."""
        holder, losses = self.holders[0], []
        messages: dict[int, Tensor] = {}
        for worker, step, _ in gradients:
            message, loss = self._gradient(worker, step)
            messages[worker] = messages[worker] + message if worker in messages else message
            losses.append(loss)
        mean = self._all_reduced(messages, len(gradients), line.version)
        self._step(holder.lane, mean, holder.applied, self.rate(line.version))
        return float(np.mean(losses))

    def _all_reduced(self, messages: dict[int, Tensor], count: int, version: int) -> Tensor:
        """The mean, summed in the run's own order; a worker whose data was used up sent zeros."""
        zeros = torch.zeros_like(self.flat.message)
        group = [group for after, group in self.groups if after < version][-1]
        held = [messages.get(worker, zeros).clone() for worker in group]
        in_one_thread(lambda ranks, message: self.exchanges[group[ranks.rank]](ranks, message), held)
        return held[0].div_(count)[: self.flat.size]

    def _worker(self, line: Line, gradients: list[tuple[int, int, int]]) -> float:
        """A worker applied it to what it had read, and wrote that back."""
        (worker, step, read), *_ = gradients
        values, loss = self._gradient(worker, step)
        flat = self._computer(worker, step).flat
        lane = self._own_lane(worker, flat)
        flat.params.copy_(self.holders[0].versions[read])
        self._step(lane, values[: flat.size], read, self.rate.of(worker, step))
        self.holders[0].latest = flat.params.clone()
        return loss

    def _own(self, line: Line, gradients: list[tuple[int, int, int]]) -> float:
        """A worker applied it to what all share, with an optimizer of its own."""
        (worker, step, _), *_ = gradients
        values, loss = self._gradient(worker, step)
        holder, lane = self.holders[0], self._own_lane(worker, self.holders[0].vector)
        self._step(lane, values[: self.flat.size], holder.applied, self.rate.of(worker, step))
        return loss

    def _rounds(self, line: Line, gradients: list[tuple[int, int, int]]) -> float:
        """Each worker took its steps alone, from where the round began; then all took the mean of their moves."""
        holder, losses, moves = self.holders[0], [], {}
        for worker, step, _ in gradients:
            flat = self._computer(worker, step).flat
            if worker not in moves:
                flat.params.copy_(holder.latest)
            while self.ahead[worker][0] < step:  # of a life that ended in the middle of a round
                self.ahead[worker].popleft()
            losses.append(self._compute(worker, step, flat.params))
            self._step(self._own_lane(worker, flat), flat.grads, holder.applied, self.rate.of(worker, step))
            moves[worker] = flat.message.clone()
            torch.sub(flat.params, holder.latest, out=moves[worker][: flat.size])
        self.outer.end(self._all_reduced(moves, len(moves), line.version))
        holder.latest = self.outer.start.params.clone()
        return float(np.mean(losses))

    def _gradient(self, worker: int, step: int) -> tuple[Tensor, float]:
        """A worker's gradient (size + tail,) of `step` and its loss. All of its earlier ones are computed before: each
        draws random numbers and moves buffers."""
        for first in [first for first in self.begins[worker] if first <= step]:  # what came of a life before is known
            while self.ahead[worker] and self.ahead[worker][0] < first:
                self.ahead[worker].popleft()
        while (worker, step) not in self.done:
            assert self.ahead.get(worker), f"worker {worker}'s gradient of step {step} was never computed"
            self._next(worker)
        self.uses[worker, step] -= 1
        return self.done[worker, step] if self.uses[worker, step] else self.done.pop((worker, step))

    def _next(self, worker: int) -> None:
        step = self.ahead[worker][0]
        computer, (versions, _) = self._computer(worker, step), self.computes[worker][step]
        params = torch.zeros_like(self.flat.params)
        for holder, version in zip(self.holders, versions, strict=True):
            if version not in holder.versions:
                raise ValueError(f"worker {worker} read version {version} at step {step}: not on this tape")
            holder.shard.put(holder.versions[version], params)

        loss = self._compute(worker, step, params)
        if self.uses[worker, step]:
            self.done[worker, step] = computer.flat.message.clone(), loss

    def _compute(self, worker: int, step: int, params: Tensor) -> float:
        computer, (_, batch) = self._computer(worker, step), self.computes[worker][step]
        self.ahead[worker].popleft()
        samples = computer.stream.at(batch)
        return self.random[worker].around(lambda: computer.backward(params, collate(self.task.train, samples)))

    def _step(self, lane: Lane, mean: Tensor, version: int, factor: float) -> None:
        lane.step(mean, factor * (self.task.lr_schedule(version) if self.task.lr_schedule else 1.0))

    def _holder(self, shard: Shard) -> Holder:
        vector = shard.vector()
        vector.params.copy_(shard.take(self.flat.params))
        return Holder(vector, shard, self._lane(vector), self.rule, self.begin)

    def _own_lane(self, worker: int, flat: Vector) -> Lane:
        if worker not in self.own_lanes:
            self.own_lanes[worker] = self._lane(flat)
            if self.begin is not None and worker not in self.anew:
                kept = [self._kept(worker)[name] for name in ("inner", "lane") if name in self._kept(worker)]
                self.own_lanes[worker].restore(kept[0] if kept else known(self.begin.common, "optimizer"))
        return self.own_lanes[worker]

    def _lane(self, flat: Vector) -> Lane:
        lane = Lane(self.task, flat, None)
        if self.lr is not None:
            lane.rates = [self.lr] * len(lane.rates)
        return lane

    def _computer(self, worker: int, step: int) -> Computer:
        begun = [first for first in self.begins[worker] if first <= step]
        if begun:  # a new process, which knows nothing of the one before; its first gradient may have been cancelled
            self.begins[worker] = self.begins[worker][len(begun) :]
            self.anew.add(worker)
            for kept in (self.workers, self.random, self.own_lanes):
                kept.pop(worker, None)
            if self.exchanges:
                self.exchanges[worker] = self.exchange(self.flat)
        if worker not in self.workers:
            part = {"index": worker, "num_workers": self.num_workers, "batch_size": self.task.batch_size}
            self.workers[worker] = Computer(self.task, **part)
            self.random[worker] = Randomness(self.workers[worker].seed)
            self._go_on(worker)
        return self.workers[worker]

    def _kept(self, worker: int) -> Mapping[str, Any]:
        """What the checkpoint has of a worker that it knows."""
        return {} if self.begin is None or worker in self.anew else self.begin.own.get(f"worker {worker}", {})

    def _go_on(self, worker: int) -> None:
        """Let a worker be as the checkpoint has it."""
        kept = self._kept(worker)
        if "worker" in kept:
            self.workers[worker].model.load_state_dict(kept["worker"]["local"], strict=False)
            self.random[worker].around(lambda: set_states(kept["worker"]["random"]))
        if "exchange" in kept and self.exchanges:
            self.exchanges[worker].restore(kept["exchange"])


def groups(trace: Trace) -> list[tuple[int, list[int]]]:
    """Who made the versions after which one, in the order of the changes."""
    members: dict[int, set[int]] = defaultdict(set)
    after: dict[int, int] = {}
    for worker, era, version in trace.select("regroup")[["worker", "step", "version"]].tolist():
        members[era].add(worker)
        after[era] = version
    return [(after[era], sorted(members[era])) for era in sorted(after)]


def applies_its_own(trace: Trace) -> bool:
    """Did each worker apply its own gradients, and nobody another's?"""
    rows = trace.select("apply")
    return bool(((rows["role"] == ROLES.index("worker")) & (rows["index"] == rows["worker"])).all())


def reads(trace: Trace, num_servers: int) -> dict[int, dict[int, tuple[tuple[int, ...], int]]]:
    """worker -> step -> the version of each server that this gradient was computed at, and its batch."""
    found: dict[int, dict[int, tuple[tuple[int, ...], int]]] = defaultdict(dict)
    pulled: dict[int, dict[int, int]] = defaultdict(dict)  # what each worker was given last
    rows = trace.rows[np.isin(trace.rows["kind"], [KIND_CODES["pull"], KIND_CODES["compute"]])]
    for kind, worker, step, server, version, read, batch in rows[
        ["kind", "worker", "step", "peer", "version", "read", "batch"]
    ].tolist():
        if kind == KIND_CODES["pull"]:
            pulled[worker][server] = version
        else:
            versions = tuple(pulled[worker][i] for i in range(num_servers)) if num_servers > 1 else (read,)
            found[worker][step] = versions, batch
    return completed(trace, found, num_servers)


def completed(trace: Trace, found: dict[int, Any], num_servers: int) -> dict[int, Any]:
    """`reads`, with what a killed process had no time to say of its last gradients, as far as its server can tell."""
    rows = np.concatenate([trace.applies, trace.select("drop"), trace.select("unused")])
    for worker, step, read, batch in rows[["worker", "step", "read", "batch"]].tolist():
        if step not in found[worker]:
            if num_servers > 1:
                raise ValueError(
                    f"worker {worker} was killed before it could say how it came to step {step}: no replay"
                )
            found[worker][step] = (read,), batch
    return found


def last_uses(lines: list[Line], computes: dict[int, dict[int, tuple[tuple[int, ...], int]]]) -> dict[Any, int]:
    """(server, version) -> the last line that needs it: a gradient is computed when its worker's next one is."""
    uses: dict[tuple[int, int], int] = {}
    waiting = {worker: deque(sorted(steps)) for worker, steps in computes.items()}
    for number, line in enumerate(lines):
        for worker, step, read in line.gradients:
            uses[line.server, read] = number
            while waiting.get(worker) and waiting[worker][0] <= step:
                versions, _ = computes[worker][waiting[worker].popleft()]
                uses |= dict.fromkeys(enumerate(versions), number)
    for step in waiting.get(min(computes, default=0), ()):
        versions, _ = computes[min(computes)][step]
        uses |= dict.fromkeys(enumerate(versions), len(lines))
    return uses
