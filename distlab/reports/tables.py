"""Tables of runs: one as rows of updates, one as a row of figures, several side by side."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distlab.run import Run
from distlab.trace import ROLES

if TYPE_CHECKING:
    import pandas as pd


def history(run: Run) -> "pd.DataFrame":
    """See `Run.history`."""
    import pandas as pd

    rows = run.applies
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


def evaluations(run: Run) -> "pd.DataFrame":
    """See `Run.evaluations`."""
    import pandas as pd

    rows = run.trace.select("evaluate")
    table = pd.DataFrame({"version": rows["version"], "time_s": rows["end_s"], "loss": rows["loss"]})
    judged = {row["version"]: row for row in run.judged}  # names, where there is no task, and runs saved before
    names = [name for name in (run.judged[0] if run.judged else ()) if name not in table]
    if run.task is not None and len(rows):
        names = list(run.task.metrics)
    seen = {(w, v): value for w, v, value in run.trace.select("metric")[["worker", "version", "loss"]].tolist()}
    for number, name in enumerate(names):
        old = [judged.get(version, {}).get(name, float("nan")) for version in rows["version"].tolist()]
        table[name] = [seen.get((number, v), usual) for v, usual in zip(rows["version"].tolist(), old, strict=True)]
    return table


def summary(run: Run) -> dict[str, Any]:
    """See `Run.summary`."""
    losses = run.applies["loss"][-20:]
    return {
        "strategy": run.strategy,
        "updates": run.num_updates,
        "updates_per_s": round(run.updates_per_s, 1),
        "mean_staleness": round(run.mean_staleness, 2),
        "bytes_sent": run.bytes_sent,
        "train_loss": round(float(losses.mean()), 4) if len(losses) else float("nan"),
        "who_applied": said(run.who_applied),
    }


def said(who: list[str]) -> str:
    """ "server 0", "4 workers", "server 0 and 4 workers"."""
    parts: list[str] = []
    for role in ("server", "client", *ROLES):
        names = [w for w in who if w.startswith(role)]
        if names and not any(role in p for p in parts):
            parts.append(names[0] if len(names) == 1 else f"{len(names)} {role}s")
    return " and ".join(parts) or "nobody"


def compare(runs: Sequence[Run] | Mapping[str, Run]) -> "pd.DataFrame":
    """Runs side by side: a row each, with what `Run.summary` says and updates/s over those of the first.

    Put a simulation beside the run it was calibrated on, and the last column is how good the prediction was.
    """
    import pandas as pd

    for run in runs.values() if isinstance(runs, Mapping) else runs:
        if not isinstance(run, Run):
            raise TypeError(f"compare takes runs, got {run!r}")
    named = runs if isinstance(runs, Mapping) else {f"{run.strategy} on {run.cluster}": run for run in runs}
    if not named:
        raise ValueError("there is no run to compare")
    table = pd.DataFrame([run.summary() for run in named.values()], index=list(named))
    return table.assign(relative=(table["updates_per_s"] / table["updates_per_s"].iloc[0]).round(3))
