"""What happened: every compute, pull, push, wait and apply of a run, with versions, bytes and times.

A trace is one table of plain numbers, an event a row. Everything that distlab reports or draws is a pure
function of it. Recording costs about a microsecond: a row goes into a buffer that is already there, and whole
buffers travel to the caller.
"""

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

#: What an event can be, and who records it.
KINDS = (
    "compute",  # whoever computes a gradient: `version` is the one its parameters were read at
    "pull",  # a worker: parameters of `version` arrived from `peer`
    "cancel",  # a worker: it stopped computing, because the version it had read is no longer wanted
    "push",  # a worker: its gradient, read at `read`, left for `peer`
    "wait",  # a worker: between a push and the moment `peer` began to answer
    "apply",  # whoever applies: `worker`'s gradient of `step`, read at `read`, became part of `version`
    "drop",  # whoever applies: `worker`'s gradient of `step` was refused
    "unused",  # whoever applies: `worker`'s gradient of `step` arrived after the last update
    "store",  # a server: parameters that `worker` wrote back became `version`
    "send",  # one message of `bytes` to `peer`: replicas, collectives
    "reduce",  # a rank: one whole all-reduce, from entering to leaving it
    "dispatch",  # the client: cut and hand out a batch
    "loss",  # the client: the loss of the gathered outputs, and its gradient
    "local",  # a worker: it applied its gradient to its own copy; what becomes of that, the end of the round will say
    "death",  # the process ended without a word
    "evaluate",  # the chief: parameters of `version` had this `loss` on the validation data
    "unplaced",  # the client: it computed what is placed on no device
    "revive",  # a new process has taken the place of one that had died
    "chief",  # a worker: the one before it was lost, so from now on it evaluates and logs
    "regroup",  # a rank: after `version`, `worker` is one of the group; `step` counts the changes of the membership
    "join",  # a new process is one more worker, or has taken the number of one that had left
    "leave",  # a worker: it was asked to leave, and holds `version`
    "restore",  # this process was lost, and nobody else has what it held: all began anew at the checkpoint of `version`
    "metric",  # the chief: of parameters of `version`, the task's metric with the number `worker` is `loss`
    "rate",  # who applies: from `version`, or its own gradient of `step`, on, at `loss` times the task's learning rate
)
ROLES = ("worker", "server", "client", "replica")

NO_VERSION = 1 << 62  # above all that there are
KIND_CODES = {kind: code for code, kind in enumerate(KINDS)}
ROLE_CODES = {role: code for code, role in enumerate(ROLES)}

EVENT = np.dtype(
    [
        ("kind", "u1"),
        ("role", "u1"),  # who recorded it
        ("index", "i2"),
        ("peer_role", "i1"),  # with whom; -1: nobody
        ("peer", "i2"),
        ("worker", "i2"),  # whose gradient; -1: none
        ("step", "i8"),  # that worker's own count; -1: none
        ("read", "i8"),  # the version its parameters had; -1: none
        ("version", "i8"),  # the version that resulted or was received; -1: none
        ("start_s", "f8"),
        ("end_s", "f8"),
        ("bytes", "i8"),
        ("samples", "i4"),
        ("loss", "f8"),
        ("batch", "i8"),  # of a gradient: the place of its batch in the one stream of samples; -1: none
    ]
)


@dataclass(frozen=True)
class Event:
    """One row of a trace, in words. Missing numbers are -1, a missing loss is nan."""

    kind: str
    who: str
    start_s: float
    end_s: float
    peer: str = ""
    worker: int = -1
    step: int = -1
    read: int = -1
    version: int = -1
    bytes: int = 0
    samples: int = 0
    loss: float = float("nan")
    batch: int = -1

    @property
    def staleness(self) -> int:
        """For an apply: how many updates were applied between the read and this one."""
        return self.version - 1 - self.read

    def __str__(self) -> str:
        if self.kind == "metric":
            return f"{self.who}: metric {self.worker} of version {self.version} was {self.loss:.4g}"
        if self.kind == "rate":
            return f"{self.who}: from version {self.version} on, the learning rate is {self.loss:g} times the task's"
        if self.kind != "apply":
            return f"{self.who}: {self.kind} from {self.start_s:.4f} s to {self.end_s:.4f} s"
        return (
            f"worker {self.worker}'s gradient, read at version {self.read}, was applied by {self.who} "
            f"as version {self.version}: staleness {self.staleness}"
        )


class Buffer:
    """Events that wait to be handed over: `sink` gets an array of them whenever it is flushed or full."""

    def __init__(self, sink: Callable[[np.ndarray], None], capacity: int = 4096) -> None:
        self._sink, self._capacity = sink, capacity
        self._rows: list[tuple[Any, ...]] = []
        self._lock = threading.Lock()

    def add(self, row: tuple[Any, ...]) -> None:
        """Keep a row."""
        with self._lock:
            self._rows.append(row)
            full = len(self._rows) >= self._capacity
        if full:
            self.flush()

    def flush(self) -> None:
        """Hand over what is there."""
        with self._lock:
            rows, self._rows = self._rows, []
            if rows:
                self._sink(np.array(rows, EVENT))


class Recorder:
    """Writes one process's events into a buffer, which several may share."""

    def __init__(self, role: str, index: int, buffer: Buffer) -> None:
        self._me, self._add, self.flush = (ROLES.index(role), index), buffer.add, buffer.flush

    def __call__(
        self,
        kind: str,
        start_s: float,
        end_s: float,
        *,
        peer: tuple[str, int] | None = None,
        worker: int = -1,
        step: int = -1,
        read: int = -1,
        version: int = -1,
        num_bytes: int = 0,
        samples: int = 0,
        loss: float = float("nan"),
        batch: int = -1,
    ) -> None:
        role, index = self._me
        peer_role, peer_index = (ROLE_CODES[peer[0]], peer[1]) if peer else (-1, -1)
        who = (KIND_CODES[kind], role, index, peer_role, peer_index, worker)
        self._add((*who, step, read, version, start_s, end_s, num_bytes, samples, loss, batch))


class Trace:
    """All events of a run, in the order in which they ended; times in seconds from the first one's start.

    >>> rows = np.zeros(2, EVENT)
    >>> rows["kind"], rows["end_s"] = [KINDS.index("compute"), KINDS.index("apply")], [1.0, 2.0]
    >>> trace = Trace(rows)
    >>> len(trace), [e.kind for e in trace.where(kind="apply")]
    (2, ['apply'])
    """

    def __init__(self, rows: np.ndarray) -> None:
        if rows.dtype != EVENT:
            raise ValueError(f"these are not the rows of a trace: {rows.dtype}")
        self.rows = rows[np.argsort(rows["end_s"], kind="stable")]
        self.rows.flags.writeable = False

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Event]:
        return (event(row) for row in self.rows)

    def __getitem__(self, place: int) -> Event:
        return event(self.rows[place])

    def __repr__(self) -> str:
        kinds, counts = np.unique(self.rows["kind"], return_counts=True)
        said = ", ".join(f"{n} {KINDS[k]}" for k, n in zip(kinds, counts, strict=True))
        return f"Trace({len(self)} events: {said})"

    def select(self, kind: str | None = None, who: str | None = None, worker: int | None = None) -> np.ndarray:
        """The rows of one kind, of one process ("server 0") and of one worker's gradients, as an array."""
        chosen = np.ones(len(self.rows), bool)
        if kind is not None:
            if kind not in KINDS:
                raise ValueError(f"there is no event of kind {kind!r}: there is {', '.join(KINDS)}")
            chosen &= self.rows["kind"] == KINDS.index(kind)
        if who is not None:
            role, _, index = who.partition(" ")
            if role not in ROLES or not index.isdigit():
                raise ValueError(f"who must be a role and a number, as in 'server 0', got {who!r}")
            chosen &= (self.rows["role"] == ROLES.index(role)) & (self.rows["index"] == int(index))
        if worker is not None:
            chosen &= self.rows["worker"] == worker
        return self.rows[chosen]

    @property
    def stretches(self) -> list[tuple["Trace", float]]:
        """The parts of a run that went back to checkpoints, and up to which version each of them holds."""
        backs = self.select("restore")
        if not len(backs):
            return [(self, NO_VERSION)]
        rows, ends = self.rows[self.rows["kind"] != KIND_CODES["restore"]], [-math.inf, *backs["end_s"], math.inf]
        parts = [rows[(rows["end_s"] > start) & (rows["end_s"] <= stop)] for start, stop in pairwise(ends)]
        return [(Trace(part), backs["version"][i:].min(initial=NO_VERSION)) for i, part in enumerate(parts)]

    @property
    def applies(self) -> np.ndarray:
        """The rows of kind "apply" that hold. What a rank has applied and then died of, before anybody else came to the
        end of that exchange, the others have done again without it; so they have what was made after a checkpoint to
        which the run went back."""
        if len(self.select("restore")):
            return np.concatenate([(rows := part.applies)[rows["version"] <= last] for part, last in self.stretches])
        rows = self.select("apply")
        for death in self.select("death"):
            later = self.select("regroup")
            later = later[(later["end_s"] >= death["end_s"]) & (later["index"] != death["index"])]
            if len(later):
                own = (rows["role"] == death["role"]) & (rows["index"] == death["index"])
                rows = rows[~(own & (rows["end_s"] <= death["end_s"]) & (rows["version"] > later["version"].min()))]
        return rows

    def where(self, kind: str | None = None, who: str | None = None, worker: int | None = None) -> "Trace":
        """The part of the trace that `select` describes."""
        return Trace(self.select(kind, who, worker))

    @property
    def who(self) -> list[str]:
        """Every process that recorded something: servers and clients first, then workers and replicas."""
        keys = np.unique(self.rows["role"].astype(np.int64) << 16 | self.rows["index"]).tolist()
        seen = [(key >> 16, key & 0xFFFF) for key in keys]
        order = [ROLES.index(role) for role in ("server", "client", "worker", "replica")]
        return [f"{ROLES[r]} {i}" for r, i in sorted(seen, key=lambda s: (order.index(s[0]), s[1]))]

    def table(self) -> "pd.DataFrame":
        """All events as a pandas DataFrame, a column per field of `Event`."""
        import pandas as pd

        rows = self.rows
        names: dict[str, Any] = {
            "kind": np.array(KINDS)[rows["kind"]],
            "who": [f"{ROLES[r]} {i}" for r, i in zip(rows["role"], rows["index"], strict=True)],
            "peer": [name(r, i) for r, i in zip(rows["peer_role"], rows["peer"], strict=True)],
        }
        numbers = ("worker", "step", "read", "version", "start_s", "end_s", "bytes", "samples", "loss", "batch")
        return pd.DataFrame(names | {n: rows[n] for n in numbers})


def name(role: int, index: int) -> str:
    """ "worker 2" for what the table holds as two numbers, "" for nobody."""
    return f"{ROLES[role]} {index}" if role >= 0 else ""


def process_keys(rows: np.ndarray, role: str = "role", index: str = "index") -> np.ndarray:
    """One number for each row's process, or with "peer_role" and "peer" for the one at the other end."""
    return rows[role].astype(np.int64) + 1 << 16 | rows[index].astype(np.int64) & 0xFFFF


def process_name(key: int) -> str:
    """ "worker 2" for a key of `process_keys`."""
    return name((key >> 16) - 1, key & 0xFFFF)


def links(rows: np.ndarray) -> tuple[list[tuple[str, str]], np.ndarray]:
    """From whom to whom the messages of these rows went ("" for a collective's other ranks): every link that there is,
    and for each row the place of its own among them.

    >>> rows = np.zeros(2, EVENT)
    >>> rows["kind"], rows["peer_role"] = [KIND_CODES["push"], KIND_CODES["pull"]], ROLE_CODES["server"]
    >>> links(rows)
    ([('worker 0', 'server 0'), ('server 0', 'worker 0')], array([0, 1]))
    """
    mine, peers = process_keys(rows), process_keys(rows, "peer_role", "peer")
    received = rows["kind"] == KIND_CODES["pull"]  # all others are recorded by who sent
    pairs, which = np.unique(np.where(received, peers << 32 | mine, mine << 32 | peers), return_inverse=True)
    return [(process_name(pair >> 32), process_name(pair & 0xFFFFFFFF)) for pair in pairs.tolist()], which


def event(row: np.void) -> Event:
    """A row of the table as an `Event`."""
    numbers = {n: row[n].item() for n in ("worker", "step", "read", "version", "bytes", "samples", "loss", "batch")}
    times = row["start_s"].item(), row["end_s"].item()
    return Event(
        KINDS[row["kind"]],
        name(row["role"], row["index"]),
        *times,
        name(row["peer_role"], row["peer"]),
        **numbers,
    )


def gather(parts: list[np.ndarray]) -> Trace:
    """One trace from the arrays that the processes sent: times from the first event's start."""
    rows = np.concatenate(parts) if parts else np.zeros(0, EVENT)
    if len(rows):
        first = rows["start_s"].min()
        rows["start_s"] -= first
        rows["end_s"] -= first
    return Trace(rows)
