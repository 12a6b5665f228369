"""The ledger: what became of every gradient and of every sample.

Each gradient that a worker began to compute ends as exactly one of: applied at a version, dropped (it came too late),
cancelled (stopped before it was computed), unused (it came, or was still under way, when the run was over), lost with
its worker or server; or split, where several servers hold a shard each and not all did the same with theirs. The sums
balance in every run; if they did not, somebody would have trained on a gradient twice, or on nothing.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from distlab.data import Stream
from distlab.task import Task
from distlab.trace import ROLES, Trace

if TYPE_CHECKING:
    import pandas as pd

FATES = ("applied", "split", "dropped", "cancelled", "unused", "lost")
FATE_OF = {"apply": "applied", "drop": "dropped", "unused": "unused", "cancel": "cancelled"}


@dataclass(frozen=True)
class Entry:
    """One gradient: whose, computed at which step on the batch at which place of the stream, and what became of it.

    `version` is the one that server 0, or whoever else applied it, made of it; -1 if there is none.
    """

    worker: int
    step: int
    samples: int
    fate: str
    version: int = -1
    batch: int = -1


@dataclass(frozen=True)
class Ledger:
    """Every gradient of a run, once, in the order of worker and step."""

    entries: tuple[Entry, ...]
    problems: tuple[str, ...] = ()

    def __repr__(self) -> str:
        said = ", ".join(f"{count} {fate}" for fate, count in self.counts.items() if count)
        return f"Ledger({len(self.entries)} gradients: {said or 'none'}{'' if self.balances else '; DOES NOT BALANCE'})"

    @property
    def counts(self) -> dict[str, int]:
        """How many gradients met each fate."""
        return {fate: sum(e.fate == fate for e in self.entries) for fate in FATES}

    @property
    def balances(self) -> bool:
        """Every gradient has one fate, and no fate is without its gradient."""
        return not self.problems

    @property
    def samples(self) -> dict[str, int]:
        """How many samples met each fate; a sample that two gradients used counts twice."""
        return {fate: sum(e.samples for e in self.entries if e.fate == fate) for fate in FATES}

    def table(self) -> "pd.DataFrame":
        """A row per worker, a column per fate."""
        import pandas as pd

        counts = Counter([(e.worker, e.fate) for e in self.entries])
        workers = pd.Index(sorted({worker for worker, _ in counts}), name="worker")
        columns = {fate: [counts[worker, fate] for worker in workers] for fate in FATES}
        return pd.DataFrame(columns, index=workers).rename_axis(columns="fate")


def ledger(trace: Trace) -> Ledger:
    """The ledger of a trace.

    A real process that is killed takes the last events of its own trace with it, up to 50 ms. What others say of its
    gradients is believed.

    >>> from distlab.trace import EVENT, KINDS
    >>> rows = np.zeros(3, EVENT)
    >>> rows["kind"] = [KINDS.index(k) for k in ("compute", "compute", "apply")]
    >>> rows["step"], rows["version"], rows["end_s"] = [0, 1, 0], [0, 0, 1], [1.0, 2.0, 1.5]
    >>> ledger(Trace(rows))
    Ledger(2 gradients: 1 applied, 1 unused)
    """
    *before, (newest, _) = trace.stretches
    return bound([*((book(part, all_killed=True), last) for part, last in before), (book(newest), math.inf)])


def book(trace: Trace, *, all_killed: bool = False) -> Ledger:
    """The ledger of one stretch. `all_killed`: at its end, without a word."""
    computed = unique(np.concatenate([trace.select("compute"), trace.select("cancel")]))
    deaths = trace.select("death")
    holders, computers = [[ROLES.index(r) for r in part] for part in (("server", "client"), ("worker", "replica"))]
    dead = set((trace.rows if all_killed else deaths[np.isin(deaths["role"], computers)])["worker"].tolist())
    all_lost = bool(np.isin(deaths["role"], holders).any())  # a gradient may be lost with who was to apply it
    fates, problems = outcomes(trace)
    latest = dict(computed.keys())  # in order, so that each worker's last step is the one that stays
    begins = lives(trace)
    unheard_of = sorted(key for key in fates if key not in computed)
    missing = [key for key in unheard_of if key[0] not in dead or is_gap(key, computed, begins)]
    cut_off = {key: (fates[key][2], fates[key][3]) for key in set(unheard_of) - set(missing)}
    problems += [f"worker {w}'s gradient of step {s} was {fates[w, s][0]}, but never computed" for w, s in missing]
    begun = set(unique(trace.select("local")))  # in a round that had not ended
    silent = [(w, s) for w, s in computed if s < latest[w] and (w, s) not in fates and (w, s) not in begun]
    vanished = [] if len(deaths) else silent
    problems += [f"worker {w}'s gradient of step {s} vanished: it was neither used nor refused" for w, s in vanished]
    entries = []
    everything = computed | cut_off
    for worker, step in sorted(everything):
        samples, batch = everything[worker, step]
        unheard = "lost" if all_lost or worker in dead else "unused"
        fate, version, said, _ = fates.get((worker, step), (unheard, -1, samples, batch))
        if 0 < samples != said:
            problems.append(f"worker {worker}'s gradient of step {step} held {samples} samples, then {said}")
        entries.append(Entry(worker, step, max(samples, said), fate, version, batch))
    return Ledger(tuple(entries), tuple(problems))


def bound(books: Sequence[tuple[Ledger, float]]) -> Ledger:
    """One ledger of those of a run's stretches. What was made after the checkpoint at which the next begins is lost."""
    if len(books) == 1:
        return books[0][0]
    entries: list[Entry] = []
    for said, last in books:
        void = [e.fate in ("applied", "split", "unused") and not 0 <= e.version <= last for e in said.entries]
        lost = [replace(e, fate="lost", version=-1) if gone else e for e, gone in zip(said.entries, void, strict=True)]
        entries += said.entries if said is books[-1][0] else lost
    return Ledger(tuple(entries), tuple(problem for said, _ in books for problem in said.problems))


def is_gap(key: tuple[int, int], computed: Iterable[tuple[int, int]], begins: dict[int, list[int]]) -> bool:
    """Did its worker say of a later gradient of the same life that it had computed it?"""
    worker, step = key
    end = min((first for first in begins.get(worker, ()) if first > step), default=math.inf)
    return any(w == worker and step < s < end for w, s in computed)


def unique(rows: np.ndarray) -> dict[tuple[int, int], tuple[int, int]]:
    """(worker, step) -> samples and batch, in order; a gradient that was computed in parts counts once."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    rows = rows[np.lexsort((rows["step"], rows["worker"]))]
    for worker, step, samples, batch in rows[["worker", "step", "samples", "batch"]].tolist():
        found[worker, step] = max((samples, batch), found.get((worker, step), (0, -1)))
    return found


def lives(trace: Trace) -> dict[int, list[int]]:
    """worker -> the steps at which a process that took its place began, if it came to any.

    Of a process that was killed soon, only others may have said so.
    """
    came = np.concatenate([trace.select("revive"), trace.select("join")])
    if not len(came):
        return {}
    rows = np.concatenate([trace.select("compute"), *(heard(trace, kind) for kind in FATE_OF)])
    found: dict[int, set[int]] = defaultdict(set)
    for worker, since_s in came[["worker", "end_s"]].tolist():
        its = rows[rows["worker"] == worker]
        late = its["start_s"] >= since_s
        done = its["step"][~late].max(initial=-1)  # of some of those it is said only now what became of them
        found[worker].update(sorted(its["step"][late & (its["step"] > done)].tolist())[:1])
    return {worker: sorted(steps) for worker, steps in found.items()}


def heard(trace: Trace, kind: str) -> np.ndarray:
    """What was said of gradients after they were computed."""
    return trace.applies if kind == "apply" else trace.select(kind)


def outcomes(trace: Trace) -> tuple[dict[tuple[int, int], tuple[str, int, int, int]], list[str]]:
    """(worker, step) -> (fate, version, samples, batch), and what contradicts itself."""
    found: dict[int, dict[tuple[int, int], tuple[str, int, int, int]]] = defaultdict(dict)  # by server
    problems: list[str] = []
    server = ROLES.index("server")
    for kind, fate in FATE_OF.items():
        for row in heard(trace, kind)[["role", "index", "worker", "step", "version", "samples", "batch"]].tolist():
            role, index, worker, step, version, samples, batch = row
            ending = (fate, version if fate == "applied" else -1, samples, batch)
            before = found[index if role == server else 0].setdefault((worker, step), ending)
            if before is not ending and before[:2] != ending[:2]:
                problems.append(f"worker {worker}'s gradient of step {step} was {before[0]}, then {fate}")
    if len(found) == 1:  # nobody to agree with
        return next(iter(found.values())), problems
    keys = {key: None for said in found.values() for key in said}
    by_place = {key: {place: said[key] for place, said in found.items() if key in said} for key in keys}
    return {key: together(places, len(found)) for key, places in by_place.items()}, problems


def together(places: dict[int, tuple[str, int, int, int]], num_servers: int) -> tuple[str, int, int, int]:
    """What became of a gradient on all servers: a server that has not said anything never got its part."""
    fates = {fate for fate, *_ in places.values()} | ({"unused"} if len(places) < num_servers else set())
    fate, version, samples, batch = next(iter(places.values()))
    version = places[0][1] if 0 in places else -1
    return fate if len(fates) == 1 else "split", version, samples, batch


def sample_counts(book: Ledger, task: Task) -> dict[str, np.ndarray]:
    """How often each sample of the training data met each fate.

    Returns: fate -> (num_samples,) counts. Their sum over fates says how often a sample was handed out.
    """
    counts = {fate: np.zeros(task.num_samples, int) for fate in FATES}
    stream = Stream(task.train, batch_size=task.batch_size, seed=task.seed)
    for entry in book.entries:
        np.add.at(counts[entry.fate], stream.at(entry.batch).numpy(), 1)
    return counts
