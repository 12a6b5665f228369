"""What a picture of a run that is still under way needs to know, added up as the events come in."""

from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from distlab.trace import EVENT, KIND_CODES, KINDS, ROLE_CODES, event, links, name, process_keys, process_name

FAR = 1e250  # where a loss is that is farther: sums must be numbers
BINS = 240  # points of a curve: more versions are put together, two and two
RECENT_ROWS = 360  # so many rows of the newest past are shown as a timeline
SAID = ("death", "revive", "join", "leave", "chief", "restore", "drop", "rate")
WORDS = {
    "death": "{who} died",
    "revive": "{who} is back: a new process has taken its place",
    "join": "{who} joined",
    "leave": "{who} left",
    "chief": "{who} is the chief now",
    "restore": "{who} was lost: all went back to version {version}",
    "drop": "worker {worker}'s gradient, read at version {read}, was dropped by {who}",
    "rate": "from version {version} on, the learning rate is {loss:g} times the task's",
}
GONE, BACK = ("death", "leave"), ("revive", "join")


@dataclass
class Tally:
    """Sums over the events so far; their times are seconds from the first one's start.

    Args:
        num_updates: the version at which the run will be over.
    """

    num_updates: int
    first_s: float = float("nan")
    now_s: float = 0.0
    version: int = 0
    num_rows: int = 0
    ages: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))  # gradients of each staleness
    links: Counter[tuple[str, str]] = field(default_factory=Counter)  # bytes from whom to whom
    judged: dict[int, tuple[float, float]] = field(default_factory=dict)  # by version: time, validation loss
    scores: dict[int, dict[int, tuple[float, float]]] = field(default_factory=dict)  # by metric, then as judged
    gone: set[str] = field(default_factory=set)
    seen: set[int] = field(default_factory=set)
    applied: deque[str] = field(default_factory=lambda: deque(maxlen=3))
    rate: float = 1.0  # what the task's learning rate is multiplied by
    notes: deque[str] = field(default_factory=lambda: deque(maxlen=3))
    recent: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._sums, self.per_point = np.zeros((4, BINS)), 1  # rows, loss, version, time, of so many versions each
        self._by_server = False

    def add(self, rows: np.ndarray) -> None:
        """Add events, in about the order in which they ended."""
        if not len(rows):
            return
        rows = rows[np.argsort(rows["end_s"], kind="stable")]
        if np.isnan(self.first_s):
            self.first_s = float(rows["start_s"].min())
        for field_name in ("start_s", "end_s"):
            rows[field_name] -= self.first_s
        self.num_rows += len(rows)
        self.now_s = max(self.now_s, float(rows["end_s"][-1]))
        self.seen |= set(np.unique(process_keys(rows)).tolist())
        self._add_bytes(rows[rows["bytes"] > 0])
        for piece in np.split(rows, np.flatnonzero(rows["kind"] == KIND_CODES["restore"])):  # what came before is void
            self._add_notes(piece)
            self._add_applies(piece[piece["kind"] == KIND_CODES["apply"]])
            self._add_judged(piece)
        self.recent.append(rows[-3 * RECENT_ROWS :])
        while sum(map(len, self.recent[1:])) > 3 * RECENT_ROWS:
            del self.recent[0]

    @property
    def who(self) -> list[str]:
        """Every process that has said something: servers and clients first."""
        order = [ROLE_CODES[role] for role in ("server", "client", "worker", "replica")]
        return [process_name(key) for key in sorted(self.seen, key=lambda key: (order.index((key >> 16) - 1), key))]

    @property
    def curve(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Version, time in seconds and training loss: means of versions that share a point."""
        sums = self._sums[:, self._sums[0] > 0]
        if sums.shape[1] > 1 and self.version % self.per_point != self.per_point - 1:  # the last has few versions yet
            sums = np.column_stack([sums[:, :-2], sums[:, -2:].sum(1)])
        count, loss, version, time_s = sums
        return version / count, time_s / count, loss / count

    def window(self) -> tuple[np.ndarray, float]:
        """The newest rows, and how many seconds back they reach."""
        rows = np.concatenate(self.recent) if self.recent else np.zeros(0, EVENT)
        if not len(rows):
            return rows, 1.0
        ends = np.sort(rows["end_s"])
        return rows, max(self.now_s - float(ends[-min(len(ends), RECENT_ROWS)]), 1e-6)

    def _add_applies(self, rows: np.ndarray) -> None:
        if not len(rows):
            return
        self.version = max(self.version, int(rows["version"].max()))
        by_server = rows["role"] == ROLE_CODES["server"]
        self._by_server |= bool(by_server.any())
        self.applied.extend(str(event(row)) for row in (rows[by_server] if self._by_server else rows)[-3:])
        rows = rows[(rows["index"] == 0) & by_server] if self._by_server else rows
        ages = np.bincount(np.maximum(rows["version"] - 1 - rows["read"], 0))
        more = np.zeros(max(len(ages), len(self.ages)), np.int64)
        more[: len(self.ages)] += self.ages
        more[: len(ages)] += ages
        self.ages = more
        rows = rows[np.isfinite(rows["loss"])]
        bins = self._bins(rows["version"])
        for line, values in zip(
            self._sums, (1.0, np.clip(rows["loss"], -FAR, FAR), rows["version"], rows["end_s"]), strict=True
        ):
            np.add.at(line, bins, np.asarray(values, float))

    def _bins(self, versions: np.ndarray) -> np.ndarray:
        while versions.max(initial=0) >= self.per_point * BINS:
            self._sums = np.pad(self._sums.reshape(4, -1, 2).sum(2), ((0, 0), (0, BINS // 2)))
            self.per_point *= 2
        return np.maximum(versions, 0) // self.per_point

    def _add_bytes(self, rows: np.ndarray) -> None:
        pairs, which = links(rows)
        for pair, total in zip(pairs, np.bincount(which, rows["bytes"]).tolist(), strict=True):
            self.links[pair] += int(total)

    def _add_judged(self, rows: np.ndarray) -> None:
        for row in rows[rows["kind"] == KIND_CODES["evaluate"]]:
            self.judged[int(row["version"])] = float(row["end_s"]), float(row["loss"])
        for row in rows[rows["kind"] == KIND_CODES["metric"]]:
            scores = self.scores.setdefault(int(row["worker"]), {})
            scores[int(row["version"])] = float(row["end_s"]), float(row["loss"])

    def _add_notes(self, rows: np.ndarray) -> None:
        for row in rows[np.isin(rows["kind"], [KIND_CODES[kind] for kind in SAID])]:
            kind, who = KINDS[row["kind"]], name(row["role"], row["index"])
            if kind in GONE:
                self.gone.add(who)
            elif kind in BACK:
                self.gone.discard(who)
            elif kind == "restore":
                self._go_back(int(row["version"]))
            elif kind == "rate":
                if row["loss"] == self.rate:
                    continue  # another has said so
                self.rate = float(row["loss"])
            said = WORDS[kind].format(who=who, **{n: row[n].item() for n in ("version", "worker", "read", "loss")})
            self.notes.append(f"{row['end_s']:.2f} s: {said}")

    def _go_back(self, version: int) -> None:
        """Forget what was applied after a checkpoint."""
        self._sums[:, self._bins(np.array([version]))[0] + 1 :] = 0
        self.judged = {v: seen for v, seen in self.judged.items() if v <= version}
        self.version = version


def waiting(rows: np.ndarray, from_s: float, to_s: float) -> dict[tuple[str, str], float]:
    """Who waited for whom, as a share of this stretch of time: where a wait was recorded, and in an all-reduce for the
    one that came last."""
    span_s = max(to_s - from_s, 1e-12)
    shares: Counter[tuple[str, str]] = Counter()
    waits = rows[(rows["kind"] == KIND_CODES["wait"]) & (rows["end_s"] > from_s)]
    for role, index, peer_role, peer, start, end in waits[
        ["role", "index", "peer_role", "peer", "start_s", "end_s"]
    ].tolist():
        shares[name(role, index), name(peer_role, peer)] += (min(end, to_s) - max(start, from_s)) / span_s
    reduces = rows[(rows["kind"] == KIND_CODES["reduce"]) & (rows["end_s"] > from_s)]
    for step in np.unique(reduces["step"]):
        mine = reduces[reduces["step"] == step]
        last = mine[np.argmax(mine["start_s"])]
        for row in mine:
            late = min(last["start_s"], row["end_s"]) - max(row["start_s"], from_s)
            if late > 0:
                shares[name(row["role"], row["index"]), name(last["role"], last["index"])] += late / span_s
    return dict(shares)
