"""`check_strategy`: does a strategy keep its promises, whatever the cluster does to it?

A strategy that works on four idle processes may still lose a gradient when a message is late, or wait for ever when
a worker is slow. So it is run in simulated clusters of many sizes, speeds, networks and faults, and each run is held
against what must be true of *every* run. A violation is a `Case`, small enough to read, which fails again and again.
"""

import math
import random
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from distlab.clusters.simulated import SimulatedCluster
from distlab.clusters.simulated_run import SimulatedRun
from distlab.errors import DistlabError, DivergenceWarning, NonFiniteLoss, PeerLost, ProcessLost
from distlab.fabric.laws import Constant, Exponential, Gamma, Law, Pareto
from distlab.fabric.network import IDEAL, Change, Network
from distlab.options import check_count, check_word, options
from distlab.run import Run
from distlab.strategies.base import Strategy
from distlab.task import Task
from distlab.train import start

MOST_EVENTS = 200_000  # a case needs a few thousand
KNOWN = ("fresh", "distinct", "enough", "identical replicas")
STALL_S = 20.0  # so long may the simulator stand still before somebody must be holding a threading primitive
LAWS: tuple[Law, ...] = (Constant(0.1), Gamma(mean_s=0.1), Exponential(mean_s=0.1), Pareto(alpha=1.5, least_s=0.03))
NETWORKS = (IDEAL, Network(), Network(latency_s=0.02, bandwidth_bytes_per_s=1e5), Network(bandwidth_bytes_per_s=1e4))
APPLIES: tuple[Law | None, ...] = (None, Constant(0.01), Exponential(mean_s=0.05))


class PromiseBroken(DistlabError):
    """A strategy broke a promise; the message holds the case and the end of its trace."""


@dataclass(frozen=True)
class Case:
    """One simulated run of a strategy: everything that can differ."""

    strategy: Strategy
    num_workers: int = 2
    num_updates: int = 6
    compute: Law = Constant(0.1)  # noqa: RUF009
    network: Network = IDEAL
    apply_time: Law | None = None
    changes: tuple[Change, ...] = ()
    optimizer: str = "sgd"
    seed: int = 0

    @property
    def cluster(self) -> SimulatedCluster:
        """The cluster, with its scenario."""
        law, network, seed = self.compute, self.network, self.seed
        cluster = SimulatedCluster(
            self.num_workers, compute=law, network=network, apply_time=self.apply_time, seed=seed
        )
        for change in self.changes:
            cluster = cluster.changed(change)
        return cluster


def random_case(strategy: Strategy, seed: int) -> Case:
    """A case drawn from `seed`; kills leave at least one worker."""
    draw = random.Random(seed)
    num_workers = draw.choice(sizes(strategy, (1, 2, 2, 3, 4, 5, 8)))
    changes = [random_change(draw, strategy, num_workers) for _ in range(draw.choice((0, 0, 1, 2, 3)))]
    law, network, apply_time = draw.choice(LAWS), draw.choice(NETWORKS), draw.choice(APPLIES)
    optimizer, updates = draw.choice(("sgd", "momentum", "adam")), draw.randint(1, 20)
    return Case(strategy, num_workers, updates, law, network, apply_time, tuple(changes), optimizer, seed)


def sizes(strategy: Strategy, counts: Iterable[int]) -> list[int]:
    """Those of `counts` workers that the strategy can run on."""
    found = []
    for count in counts:
        with suppress(ValueError):
            strategy.check(count)
            found.append(count)
    return found


def random_change(draw: random.Random, strategy: Strategy, num_workers: int) -> Change:
    """A line of a scenario. Worker 0 is never killed before the first parameters are with the server."""
    kinds = ("slow", "throttle", "partition", "kill")
    kind = draw.choice(kinds if strategy.fixed else (*kinds, "add_worker", "remove_worker"))
    worker, start_s = draw.randrange(num_workers), draw.random()
    if kind in ("add_worker", "remove_worker"):
        return Change(kind, -1 if kind == "add_worker" else worker, start_s)
    if kind == "kill":
        return Change(kind, worker, start_s + 1.0)
    factor = {"slow": draw.choice((2.0, 5.0, 20.0)), "throttle": draw.choice((0.5, 0.1))}.get(kind, 1.0)
    return Change(kind, worker, start_s, start_s + draw.choice((0.1, 1.0, 3.0)), factor)


def toy(optimizer: str = "sgd", seed: int = 0) -> Task:
    """A small task in which everything that can go wrong shows in the bits: dropout, BatchNorm, momentum."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(48, 5, generator=generator)
    makers: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": lambda params: torch.optim.SGD(params, lr=0.05),
        "momentum": lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9),
        "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    }
    return Task(
        model=lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 1)),
        train=(x, x.sum(1, keepdim=True)),
        loss=nn.functional.mse_loss,
        optimizer=makers[optimizer],
        batch_size=4,
        seed=seed,
        name="toy",
    )


def run(case: Case) -> Run:
    """Run a case; the run's `error` says how it ended."""
    task = toy(case.optimizer, case.seed)
    live = start(task, case.strategy, case.cluster, num_updates=case.num_updates)
    try:
        wait_while_it_moves(live.launched)
        with warnings.catch_warnings():  # whether the toy is stable is not the question here
            warnings.simplefilter("ignore", DivergenceWarning)
            return live.wait()
    except PromiseBroken as error:
        error.add_note(f"in {case}")
        raise
    except Exception as error:
        ended = getattr(error, "run", None)
        if not isinstance(ended, Run):
            raise
        return ended


def wait_while_it_moves(launched: object) -> None:
    """Wait for a simulated run; PromiseBroken, with the line it stands at, if its clock hangs."""
    assert isinstance(launched, SimulatedRun)
    seen, since = -1, time.monotonic()
    while launched.wait(0.05) is None:
        if launched.events > MOST_EVENTS:
            launched.kill("check_strategy")
            raise PromiseBroken(f"it goes on and on: after {launched.events} events it has not ended")
        if launched.events != seen:
            seen, since = launched.events, time.monotonic()
        elif time.monotonic() - since > STALL_S:
            frame = sys._current_frames().get(launched.ident)
            where = "".join(traceback.format_stack(frame)[-3:])
            raise PromiseBroken(
                f"the simulation stands still: a threading primitive held across a blocking call? Use fabric.lock "
                f"and fabric.until instead.\n{where}"
            )


def violations(case: Case) -> list[str]:
    """What is wrong with a run of `case`; empty if nothing is."""
    ended = run(case)
    found = [*_ending(case, ended), *_versions(case, ended), *_ledger(ended), *_promises(case, ended)]
    return found or list(_replay(ended))  # a trace that contradicts itself cannot be replayed


def _ending(case: Case, ended: Run) -> Iterator[str]:
    """It ends by itself; with an error only if a worker died that it cannot do without."""
    killed = {c.worker for c in case.changes if c.kind == "kill"}
    excused = killed and ended.error.startswith((ProcessLost.__name__, PeerLost.__name__))
    excused = excused or ended.error.startswith(NonFiniteLoss.__name__)  # whether the toy is stable is not the question
    if ended.error and not excused:
        yield f"it ended by {ended.error}"
    if not ended.error and ended.num_updates != case.num_updates:
        yield f"it made {ended.num_updates} updates of {case.num_updates}"


def _versions(case: Case, ended: Run) -> Iterator[str]:
    """Versions are 1, 2, 3 ... in time; nothing was read before it was there; contributors are distinct."""
    rows, every = ended.applies, ended.trace.select("apply")
    _, times = np.unique(every[["role", "index", "version", "worker", "step"]], return_counts=True)
    if (times > 1).any():
        yield "a gradient was applied twice to one version"
    versions = sorted(set(rows["version"].tolist()))
    if versions != list(range(1, len(versions) + 1)):
        yield f"the versions are {versions}"
    for version in versions:
        mine = rows[rows["version"] == version]
        if mine["read"].min() < 0 or mine["read"].max() >= version:
            yield f"version {version} holds gradients read at {mine['read'].tolist()}"
        if "distinct" in case.strategy.promises and len(set(mine["worker"].tolist())) != len(mine):
            yield f"version {version} holds several gradients of one worker: {mine['worker'].tolist()}"


def _ledger(ended: Run) -> Iterator[str]:
    yield from ended.ledger.problems


def _promises(case: Case, ended: Run) -> Iterator[str]:
    """What the strategy itself promises."""
    rows = ended.applies
    if "fresh" in case.strategy.promises and (stale := rows[rows["version"] - 1 != rows["read"]]).size:
        yield f"version {stale['version'][0]} holds a gradient read at {stale['read'][0]}"
    if "enough" in case.strategy.promises:
        joined, left, dead = (len(ended.trace.select(kind)) for kind in ("join", "leave", "death"))
        gone = left + (dead if case.strategy.shrinks else 0)
        wanted = case.strategy.gradients_per_update(case.num_workers + joined)
        least = min(wanted, max(1, case.strategy.gradients_per_update(max(1, case.num_workers - gone))))
        versions, counts = torch.as_tensor(rows["version"].copy()).unique(return_counts=True)
        short = versions[(counts < least) | (counts > wanted)].tolist()
        if short and not (ended.error and short == [versions.max().item()]):
            yield f"versions {short} do not hold {wanted} gradients each"
    if "identical replicas" in case.strategy.promises and not ended.error:
        replicas = list(ended.replicas.values())
        if not replicas or not all(replicas[0].equal(other) for other in replicas):
            yield "the replicas differ, or there are none"


def _replay(ended: Run) -> Iterator[str]:
    """Doing it again from the trace gives the same bits."""
    if ended.error or ended.params is None or not ended.num_updates:
        return
    again = ended.replay().params
    if not same_bits(again, ended.params):
        yield f"a replay of the trace ends elsewhere: {float((again - ended.params).abs().max()):.3g} apart"


def same_bits(one: Tensor, two: Tensor) -> bool:
    """Equal, not-a-numbers included."""
    return torch.equal(one.nan_to_num(math.inf), two.nan_to_num(math.inf))


def smaller(case: Case) -> Iterator[Case]:
    """Cases a little simpler than `case`."""
    for i in range(len(case.changes)):
        yield replace(case, changes=case.changes[:i] + case.changes[i + 1 :])
    if case.num_updates > 1:
        yield replace(case, num_updates=case.num_updates // 2)
        yield replace(case, num_updates=case.num_updates - 1)
    for count in sizes(case.strategy, range(case.num_workers - 1, 0, -1))[:1]:
        yield replace(case, num_workers=count, changes=tuple(c for c in case.changes if c.worker < count))
    plain = (replace(case, compute=Constant(0.1)), replace(case, network=IDEAL), replace(case, optimizer="sgd"))
    yield from (simpler for simpler in (*plain, replace(case, apply_time=None)) if simpler != case)


def smallest(case: Case, fails: Callable[[Case], bool], budget: int = 60) -> Case:
    """The simplest case found that still fails."""
    tried = 0
    while tried < budget:
        for simpler in smaller(case):
            tried += 1
            if fails(simpler):
                case = simpler
                break
        else:
            return case
    return case


def report(case: Case) -> str:
    """A failing case, for a reader: what is wrong, the case, the end of its trace."""
    ended, wrong = run(case), violations(case)
    events = "\n".join(f"  {event}" for event in list(ended.trace)[-15:])
    return "\n".join([f"{case.strategy} broke a promise:", *(f"- {w}" for w in wrong), f"in {case}", events])


@options
def check_strategy(strategy: Strategy, *, num_cases: int = 30, seed: int = 0) -> str:
    """Run `strategy` in many random simulated clusters; PromiseBroken with a small counter-example if it fails.

    Checked in every run: it ends; versions are 1, 2, 3 ... and none holds a gradient from the future or two of one
    worker; every gradient has exactly one fate; what the strategy's `promises` say; a serial replay of the trace
    gives the same parameters to the bit.

    Args:
        strategy: of your own, say; a class from a notebook cell will do.
        num_cases: how many clusters to try.
        seed: of the first; the others follow.

    Returns: one sentence.
    """
    check_count("num_cases", num_cases)
    check_count("seed", seed, least=0)
    if not isinstance(strategy, Strategy):
        raise TypeError(f"strategy must be a Strategy, got {strategy!r}")
    for promise in strategy.promises:
        check_word("a promise", promise, KNOWN)
    for number in range(seed, seed + num_cases):
        case = random_case(strategy, number)
        if violations(case):
            raise PromiseBroken(report(smallest(case, lambda c: bool(violations(c)))))
    return f"{strategy} kept its promises in {num_cases} simulated clusters (seeds {seed} to {seed + num_cases - 1})"
