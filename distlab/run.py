"""What a run leaves: its trace, its trained model, and tables and sentences made of them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from distlab.errors import DistlabError
from distlab.strategies.base import Outcome, model_of
from distlab.task import Task
from distlab.trace import EVENT, ROLES, Trace

if TYPE_CHECKING:
    import pandas as pd

    from distlab.reports import Ledger, Replay, Stability

FORMAT = 1
WORDS = ("strategy", "cluster", "version", "startup_s", "steps", "num_workers", "error")


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
        num_workers: how many workers the stream of samples was dealt to.
        replicas: the parameters that each worker held at the end, by name, where workers hold any.
        startup_s: from the call to the first event.
        error: what ended it early, as text; "" otherwise.
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
    task: Task | None = field(default=None, repr=False)

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
        first to do so."""
        rows = self.trace.select("apply")
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
        import pandas as pd

        rows = self.applies
        names = ("version", "worker", "read", "end_s", "loss")
        table = pd.DataFrame({name: rows[name] for name in names})
        table["staleness"] = table["version"] - 1 - table["read"]
        updates = table.groupby("version")
        history = updates.agg(
            time_s=("end_s", "min"), loss=("loss", "mean"), worker=("worker", "first"),
            version_read=("read", "min"), staleness=("staleness", "mean"), num_gradients=("read", "size"),
        )  # fmt: skip
        history["worker"] = history["worker"].where(history["num_gradients"] == 1, -1)
        return history.rename_axis("update").reset_index()

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

        return sample_counts(self.ledger, self._task(), self.num_workers)

    def replay(self, *, lr: float | None = None, without_worker: int | None = None) -> "Replay":
        """Do the run again from its trace, one gradient after the other: unedited, the same parameters to the bit.

        Args:
            lr: another learning rate, for the same arrivals.
            without_worker: leave a worker's gradients out; the others arrive as they did.
        """
        from distlab.reports import replay

        edits = {"lr": lr, "without_worker": without_worker}
        return replay(self.trace, self._task(), num_workers=self.num_workers, **edits)  # type: ignore[arg-type]

    def stability(self) -> "Stability":
        """Is the learning rate too large for gradients this old? Measures the curvature; see `reports.stability`."""
        from distlab.reports import stability

        return stability(self, self._task())

    def _warn_if_diverging(self, error: BaseException | None) -> None:
        from distlab.reports.stability import warn_if_diverging

        warn_if_diverging(self, self._task(), error)

    def summary(self) -> dict[str, Any]:
        """The run in one row: strategy, updates/s, mean staleness, bytes, who applied, and the final loss."""
        losses = self.applies["loss"][-20:]
        return {
            "strategy": self.strategy,
            "updates": self.num_updates,
            "updates_per_s": round(self.updates_per_s, 1),
            "mean_staleness": round(self.mean_staleness, 2),
            "bytes_sent": self.bytes_sent,
            "train_loss": round(float(losses.mean()), 4) if len(losses) else float("nan"),
            "who_applied": said(self.who_applied),
        }

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
            raise DistlabError("a loaded run has no task of its own: load it with load_run(path, task=...)")
        return self.task


def said(who: list[str]) -> str:
    """ "server 0", "4 workers", "server 0 and 4 workers"."""
    parts: list[str] = []
    for role in ("server", "client", *ROLES):
        names = [w for w in who if w.startswith(role)]
        if names and not any(role in p for p in parts):
            parts.append(names[0] if len(names) == 1 else f"{len(names)} {role}s")
    return " and ".join(parts) or "nobody"


def load_run(path: str | Path, task: Task | None = None) -> Run:
    """Read what `Run.save` wrote. With the run's `task`, `model` and `evaluate` work too.

    Raises:
        FileNotFoundError, DistlabError: no such folder, or not a run of this version of the format.
    """
    from safetensors.torch import load_file

    if task is not None and not isinstance(task, Task):
        raise TypeError(f"task must be a Task, got {task!r}")
    folder = Path(path)
    words = json.loads((folder / "run.json").read_text())
    if not isinstance(words, dict) or words.pop("format", None) != FORMAT or set(words) != set(WORDS):
        raise DistlabError(f"{folder} is not a run that this version of distlab can read")
    with np.load(folder / "trace.npz", allow_pickle=False) as arrays:
        rows = arrays["rows"]
    if rows.dtype != EVENT:
        raise DistlabError(f"{folder}/trace.npz does not hold a trace")
    tensors = load_file(folder / "model.safetensors")
    params = tensors.pop("params", None)
    local = {name.removeprefix("local."): tensor for name, tensor in tensors.items()}
    return Run(trace=Trace(rows), params=params, local=local, task=task, **words)


def run_from(strategy: str, cluster: str, task: Task, final: str, outcomes: Mapping[Any, Outcome], **rest: Any) -> Run:
    """The run that the processes' outcomes make: the model from number 0 of `final`, buffers from the chief."""
    order = sorted(outcomes.items(), key=lambda item: item[0].index)
    first = {peer.role: left for peer, left in reversed(order)}
    model = first.get(final, Outcome())
    chief = first.get("worker") or first.get("replica") or Outcome()
    steps = {str(peer): left.steps for peer, left in outcomes.items() if peer.role in ("worker", "replica")}
    replicas = {str(peer): left.params for peer, left in order if peer.role == "worker" and left.params is not None}
    local = chief.local or {}
    return Run(
        strategy,
        cluster,
        params=model.params,
        version=model.version,
        local=local,
        steps=steps,
        task=task,
        replicas=replicas,
        **rest,
    )


def compare(runs: Sequence[Run] | Mapping[str, Run]) -> "pd.DataFrame":
    """Runs side by side: a row each, with what `Run.summary` says and updates/s over those of the first.

    Put a simulation beside the run it was calibrated on, and the last column is how good the prediction was.
    """
    import pandas as pd

    named = runs if isinstance(runs, Mapping) else {f"{r.strategy} on {r.cluster}": r for r in runs}
    if not named:
        raise ValueError("there is no run to compare")
    table = pd.DataFrame([run.summary() for run in named.values()], index=list(named))
    return table.assign(relative=(table["updates_per_s"] / table["updates_per_s"].iloc[0]).round(3))
