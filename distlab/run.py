"""What a run leaves: its trace, its trained model, and tables and sentences made of them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from distlab.checkpoint import Checkpoint
from distlab.errors import DistlabError
from distlab.shards import Shard
from distlab.strategies.base import Outcome, Strategy
from distlab.task import Task, model_of
from distlab.trace import EVENT, ROLES, Trace

if TYPE_CHECKING:
    import pandas as pd

    from distlab.reports import Blame, Ledger, Replay, Stability

FORMAT = 3
WORDS = ("strategy", "cluster", "version", "startup_s", "steps", "num_workers", "error", "judged", "clocks")


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run.

    Attributes:
        strategy, cluster: what it ran, as text.
        trace: every event.
        params: (size,) the final parameters, flat; None if the run failed before it had any.
        version: how many updates are in them.
        local: the chief's buffers and frozen parameters.
        steps: batches that each worker finished, by name.
        num_workers: how many workers the stream of samples was dealt to at first.
        replicas: the parameters that each worker held at the end, by name, where workers hold any.
        startup_s: from the call to the first event.
        error: what ended it early, as text; "" otherwise.
        clocks: of several hosts: name -> how many seconds the chief's clock was ahead of its, and how many that may be
            wrong. All times are the chief's.
        task, algorithm: the task and the strategy themselves, for `model`, `evaluate` and `replay`.
        begin: the checkpoint that it went on from, or went back to last.
        judged: the chief's evaluations, if it came to its end; see `evaluations`.
    """

    strategy: str
    cluster: str
    trace: Trace
    params: Tensor | None
    version: int
    local: Mapping[str, Tensor] = field(default_factory=dict)
    steps: Mapping[str, int] = field(default_factory=dict)
    num_workers: int = 1
    replicas: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    startup_s: float = 0.0
    error: str = ""
    judged: Sequence[Mapping[str, float]] = field(default=(), repr=False)
    begin: Checkpoint | None = field(default=None, repr=False)
    clocks: Mapping[str, Sequence[float]] = field(default_factory=dict, repr=False)
    task: Task | None = field(default=None, repr=False)
    algorithm: Strategy | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        ended = f", ended by {self.error}" if self.error else ""
        return f"Run({self.strategy} on {self.cluster}: {self.num_updates} updates in {self.seconds:.2f} s{ended})"

    @property
    def num_updates(self) -> int:
        """Updates applied."""
        return len(np.unique(self.applies["version"]))

    @property
    def seconds(self) -> float:
        """From the first event to the last."""
        return float(self.trace.rows["end_s"].max()) if len(self.trace) else 0.0

    @property
    def applies(self) -> np.ndarray:
        """One row per gradient that became part of an update; where several processes apply the same one, the
        first to do so; where several servers hold a shard each, server 0's."""
        rows = self.trace.applies
        rows = rows[(rows["role"] != ROLES.index("server")) | (rows["index"] == 0)]
        _, first = np.unique(rows[["version", "worker", "step"]], return_index=True)
        return rows[np.sort(first)]

    @property
    def updates_per_s(self) -> float:
        """Updates per second, between the first apply and the last."""
        ends = self.applies["end_s"]
        return (self.num_updates - 1) / float(ends.max() - ends.min()) if self.num_updates > 1 else 0.0

    @property
    def mean_staleness(self) -> float:
        """Mean over applied gradients of the updates between read and apply; nan if there were none."""
        rows = self.applies
        return float((rows["version"] - 1 - rows["read"]).mean()) if len(rows) else float("nan")

    @property
    def bytes_sent(self) -> int:
        """Bytes of all messages with gradients, parameters or data, headers included, each message once. What a run
        needs once (the first parameters, the word to stop) is left out."""
        return int(self.trace.rows["bytes"].sum())

    @property
    def who_applied(self) -> list[str]:
        """The processes that applied updates."""
        return self.trace.where("apply").who

    @property
    def history(self) -> "pd.DataFrame":
        """A row per update: update, time_s, loss, worker, version_read, staleness, num_gradients.

        With several gradients in an update, loss and staleness are their means and worker is -1.
        """
        from distlab.reports import history

        return history(self)

    @property
    def evaluations(self) -> "pd.DataFrame":
        """A row per evaluation that the chief made on the way: version, time_s, loss and a column per metric.

        Empty without ``train(evaluate_every=...)``. It comes from the trace.
        """
        from distlab.reports import evaluations

        return evaluations(self)

    @property
    def model(self) -> nn.Module:
        """A module with the final parameters and the chief's buffers; a new one on each call, in eval mode."""
        if self.params is None:
            raise DistlabError("this run ended before its processes could hand over parameters; replay() may make them")
        return model_of(self._task(), self.params, dict(self.local)).eval()

    def evaluate(self, samples: Any = None) -> dict[str, float]:
        """Mean loss and metrics of `model` on the task's validation data, or on `samples`."""
        return self._task().evaluate(self.model, samples)

    @property
    def ledger(self) -> "Ledger":
        """What became of every gradient; see `reports.ledger`."""
        from distlab.reports import ledger

        return ledger(self.trace)

    def sample_counts(self) -> dict[str, np.ndarray]:
        """How often each training sample met each fate: fate -> (num_samples,)."""
        from distlab.reports import sample_counts

        return sample_counts(self.ledger, self._task())

    def replay(self, *, lr: float | None = None, without_worker: int | None = None) -> "Replay":
        """Do the run again from its trace, one gradient after the other: unedited, the same parameters to the bit.

        Args:
            lr: another learning rate, for the same arrivals.
            without_worker: leave a worker's gradients out; the others arrive as they did.
        """
        from distlab.reports import replay

        task, strategy = self._task(), self.algorithm
        if strategy is None:
            raise DistlabError("a loaded run does not hold its strategy: load it with load_run(path, task, strategy)")
        return replay(
            self.trace,
            task,
            strategy,
            num_workers=self.num_workers,
            lr=lr,
            without_worker=without_worker,
            begin=self.begin,
        )

    def blame(self) -> "Blame":
        """Who was waited for, in a synchronous run; see `reports.blame`."""
        from distlab.reports import blame

        return blame(self.trace)

    def how_many_backups(self) -> "pd.DataFrame":
        """What so many spare workers would have saved in this run, and wasted; see `reports.how_many_backups`."""
        from distlab.reports import how_many_backups

        return how_many_backups(self.trace)

    def stability(self) -> "Stability":
        """Is the learning rate too large for gradients this old? Measures the curvature; see `reports.stability`."""
        from distlab.reports import stability

        return stability(self, self._task())

    def _warn_if_diverging(self, error: BaseException | None) -> None:
        from distlab.reports.stability import warn_if_diverging

        warn_if_diverging(self, self._task(), error)

    def summary(self) -> dict[str, Any]:
        """The run in one row: strategy, updates/s, mean staleness, bytes, who applied, and the final loss."""
        from distlab.reports import summary

        return summary(self)

    def export(self, path: str | Path) -> Path:
        """Write the run for other tools: .json for https://ui.perfetto.dev, .csv for anything, a folder for TensorBoard
        (losses, metrics, staleness, updates/s and bytes by link); returns the path. See `reports.export`."""
        from distlab.reports import export

        return export(self, path)

    def save(self, path: str | Path) -> Path:
        """Write the run into the folder `path` (made if it is not there): JSON, npz and safetensors, no pickle."""
        from safetensors.torch import save_file

        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(folder / "trace.npz", rows=self.trace.rows)
        tensors = {f"local.{n}": t.contiguous().clone() for n, t in self.local.items()}
        if self.params is not None:
            tensors["params"] = self.params.contiguous()
        save_file(tensors, folder / "model.safetensors")
        words = {n: getattr(self, n) for n in WORDS} | {"format": FORMAT, "steps": dict(self.steps)}
        (folder / "run.json").write_text(json.dumps(words, indent=1))
        return folder

    def _task(self) -> Task:
        if self.task is None:
            raise DistlabError(
                "a loaded run has no task of its own: load it with load_run(path, task=..., strategy=...)"
            )
        return self.task


def load_run(path: str | Path, task: Task | None = None, strategy: Strategy | None = None) -> Run:
    """Read what `Run.save` wrote. With the run's `task`, `model` and `evaluate` work too; with its strategy, `replay`.

    Raises:
        FileNotFoundError, DistlabError: no such folder, or not a run of this version of the format.
        ValueError: it was another strategy.
    """
    from safetensors.torch import load_file

    for name, value, kind in (("task", task, Task), ("strategy", strategy, Strategy)):
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"{name} must be a {kind.__name__}, got {value!r}")
    folder = Path(path)
    if not (folder / "run.json").is_file():
        raise FileNotFoundError(f"{str(path)!r} is not a folder that run.save, or train --save, has written a run to")
    words = json.loads((folder / "run.json").read_text())
    if not isinstance(words, dict) or words.pop("format", None) != FORMAT or set(words) != set(WORDS):
        raise DistlabError(f"{folder} is not a run that this version of distlab can read")
    if strategy is not None and repr(strategy) != words["strategy"]:
        raise ValueError(f"this run's strategy was {words['strategy']}, got {strategy!r}")
    with np.load(folder / "trace.npz", allow_pickle=False) as arrays:
        rows = arrays["rows"]
    if rows.dtype != EVENT:
        raise DistlabError(f"{folder}/trace.npz does not hold a trace")
    tensors = load_file(folder / "model.safetensors")
    params = tensors.pop("params", None)
    local = {name.removeprefix("local."): tensor for name, tensor in tensors.items()}
    return Run(trace=Trace(rows), params=params, local=local, task=task, algorithm=strategy, **words)


def whole(parts: Sequence[Outcome]) -> Outcome:
    """The parameters that several servers hold together; their version is the lowest of theirs."""
    held = [(part.ranges, part.params) for part in parts if part.params is not None]
    vector = torch.zeros(max(stop for ranges, _ in held for _, stop in ranges), dtype=held[0][1].dtype)
    for ranges, values in held:
        Shard(ranges, (), vector.dtype).put(values, vector)
    return Outcome(vector, min(part.version for part in parts))


def run_from(algorithm: Strategy, cluster: str, task: Task, outcomes: Mapping[Any, Outcome], **rest: Any) -> Run:
    """The run that the processes' outcomes make: buffers from the chief, the model from the process of role `final`
    that has the most updates in it (of several, the first: not all see the last one), or from all who hold a part."""
    order = sorted(outcomes.items(), key=lambda item: item[0].index)
    workers = [left for peer, left in order if peer.role == "worker"]
    final, held = [left for peer, left in order if peer.role == algorithm.final], rest.pop("num_holders", 1)
    model = max(final, key=lambda left: left.version, default=Outcome())
    if model.ranges:
        model = whole(final) if len(final) == held else Outcome()
    local: dict[str, Tensor] = {}  # the first worker's; in-graph, that of every device of the first replica
    for left in [w for w in workers if w.local is not None][:1] if workers else [left for _, left in order[::-1]]:
        local |= left.local or {}
    steps = {str(peer): left.steps for peer, left in order if peer.role in ("worker", "replica")}
    replicas = {str(peer): left.params for peer, left in order if peer.role == "worker" and left.params is not None}
    judged = [row for left in outcomes.values() for row in left.judged]  # of a chief, and of who became it later
    return Run(
        repr(algorithm),
        cluster,
        params=model.params,
        version=model.version,
        local=local,
        steps=steps,
        task=task,
        algorithm=algorithm,
        replicas=replicas,
        judged=judged,
        **rest,
    )
