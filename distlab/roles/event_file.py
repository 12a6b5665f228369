"""TensorBoard's event files: what the chief writes while a run goes on, and `Run.export` when it is over.

The hard idea is the time. TensorBoard knows times of day only, and shows how far apart they are; so each point has the
run's own time, added to when the run began. Where time is virtual, what TensorBoard shows is virtual too.
"""

import importlib.util
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np


class EventFile:
    """A point of a curve is a version, a time of the run and a value; needs tensorboard.

    Args:
        folder: there already, and the file is one more in it.
        began_s: the time of day, as of `time.time`, at the run's second 0.
        suffix: what the file's name ends in.
    """

    def __init__(self, folder: str | Path, began_s: float, *, suffix: str = "") -> None:
        from torch.utils.tensorboard import SummaryWriter

        # It keeps little back: who is killed closes nothing.
        self._writer, self._began_s = SummaryWriter(str(folder), flush_secs=1, filename_suffix=suffix), began_s

    def add(self, version: int, time_s: float, values: Mapping[str, float]) -> None:
        """A point for each curve, by its tag."""
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, version, walltime=self._began_s + time_s)

    def add_counts(self, version: int, time_s: float, tag: str, values: np.ndarray, most_bars: int) -> None:
        """A histogram of whole numbers, one bar for each or, where those were too many, for several."""
        low, high = int(values.min()), int(values.max())
        wide = -(-(high + 1 - low) // most_bars)
        counts = np.bincount((values - low) // wide)
        sums = len(values), float(values.sum()), float((values.astype(float) ** 2).sum())
        limits = (low - 0.5 + wide * (np.arange(len(counts)) + 1)).tolist()
        when = {"global_step": version, "walltime": self._began_s + time_s}
        self._writer.add_histogram_raw(tag, low, high, *sums, limits, counts.tolist(), **when)

    def close(self) -> None:
        """Finish the file; harmless when it has been."""
        self._writer.close()


def check_folder(folder: str | os.PathLike[str], option: str) -> str:
    """The absolute path of an option's folder, made if it is not there, if event files can be written there."""
    if not isinstance(folder, (str, os.PathLike)):
        raise TypeError(f"{option} must be the path of a folder, got {folder!r} ({type(folder).__name__})")
    if importlib.util.find_spec("tensorboard") is None:
        raise ModuleNotFoundError(f"{option}={str(folder)!r} needs tensorboard: pip install 'distlab[tensorboard]'")
    if not str(folder):  # or the files would lie about where the caller stands
        raise ValueError(f"{option}='' names no folder")
    path = Path(folder).resolve()  # a worker may stand elsewhere
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return str(path)
    except OSError as error:
        raise OSError(f"{option}={str(folder)!r} cannot be written to: {error}") from error
