"""A finished run as TensorBoard's event files: its curves by version, at the times of the run.

TensorBoard shows 1,000 points of a curve, and so many are written of a longer one. A loss is the mean of the updates
that share a point. What has no version of its own (how fast, how old, how many bytes) is counted over stretches, equal
parts of the run's time, and stands at the version that the run had come to.
"""

import time
from pathlib import Path

import numpy as np

from distlab.roles.event_file import EventFile, check_folder
from distlab.run import Run
from distlab.trace import links

MOST_POINTS = 1000  # of the training loss
MOST_STRETCHES, UPDATES_EACH = 100, 10  # as many as there are so many updates for
MOST_BARS = 200  # of a histogram
MOST_LINKS = 40  # the busiest; all others are one
SUFFIX = ".distlab"  # tells an export from what a chief has written


def event_files(run: Run, folder: str | Path) -> Path:
    """Write a run for TensorBoard, into a folder that had better be its own; returns it.

    The tags: `train/loss`, by the version that an update made; `validation/...`, the loss and each metric whenever the
    chief evaluated; of each stretch `speed/updates_per_s`, and of the gradients applied in it `staleness/mean` and the
    histogram `staleness/all`; `MB_sent/worker_0_to_server_0` and so on, all until then.

    Exported again, a run takes the place of what was exported there. Its times of day are those of a run that ends now.

    Raises:
        ModuleNotFoundError, OSError: there is no tensorboard, or the folder cannot be written to.
    """
    folder = Path(check_folder(folder, "path"))
    for before in folder.glob(f"events.out.tfevents.*{SUFFIX}"):
        before.unlink()
    file = EventFile(folder, time.time() - run.seconds, suffix=SUFFIX)
    add_losses(file, run)
    add_stretches(file, run)
    file.close()
    return folder


def add_losses(file: EventFile, run: Run) -> None:
    """The training loss, and what the chief found."""
    losses = run.history[["update", "time_s", "loss"]].dropna()
    share = np.arange(len(losses)) // (-(-len(losses) // MOST_POINTS) or 1)
    points = losses.groupby(share).agg({"update": "last", "time_s": "last", "loss": "mean"})
    for version, time_s, loss in points.itertuples(index=False):
        file.add(version, time_s, {"train/loss": loss})
    for version, time_s, *values in run.evaluations.itertuples(index=False):
        names = [f"validation/{name}" for name in run.evaluations.columns[2:]]
        file.add(version, time_s, dict(zip(names, values, strict=True)))


def add_stretches(file: EventFile, run: Run) -> None:
    """Speed, staleness and bytes, stretch by stretch."""
    rows, sent = run.applies, run.trace.rows[run.trace.rows["bytes"] > 0]
    count = min(MOST_STRETCHES, run.num_updates // UPDATES_EACH) or 1
    ends = np.linspace(0, run.seconds, count + 1)[1:]
    history, ages = run.history, rows["version"] - 1 - rows["read"]
    before = np.searchsorted(np.sort(history["time_s"]), ends, side="right")
    versions = before + int(history["update"].min() - 1 if len(history) else 0)
    speeds = np.diff(before, prepend=0) / (ends[0] or np.inf)
    applied, carried = (np.searchsorted(ends, some["end_s"]) for some in (rows, sent))
    tags, which = by_link(sent)
    megabytes = np.zeros((count, len(tags)))
    np.add.at(megabytes, (carried, which), sent["bytes"] / 1e6)
    for i, (version, end_s, sums) in enumerate(zip(versions.tolist(), ends.tolist(), megabytes.cumsum(0), strict=True)):
        file.add(version, end_s, {"speed/updates_per_s": speeds[i], **dict(zip(tags, sums, strict=True))})
        if len(mine := ages[applied == i]):
            file.add(version, end_s, {"staleness/mean": mine.mean()})
            file.add_counts(version, end_s, "staleness/all", mine, MOST_BARS)


def by_link(rows: np.ndarray) -> tuple[list[str], np.ndarray]:
    """The tags of the links, and for each row which one is its message's."""
    pairs, which = links(rows)
    tags = [f"MB_sent/{who} to {to or 'the other ranks'}".replace(" ", "_") for who, to in pairs]
    if len(tags) <= MOST_LINKS:
        return tags, which
    order = np.argsort(-np.bincount(which, rows["bytes"]), kind="stable")
    place = np.minimum(np.argsort(order), MOST_LINKS)
    return [*(tags[i] for i in order[:MOST_LINKS]), "MB_sent/other_links"], place[which]
