"""The chief: worker 0 (in-graph: the client) evaluates and logs while the run goes on, as TF1's chief did.

It judges whatever parameters it holds anyway: nothing is asked of a server, and nobody waits for it. The hard idea is
that looking must not change what is looked at: a forward pass moves buffers and draws random numbers. So the chief
computes on a model of its own, in eval mode, and puts the random states back.
"""

import math
import time
from collections.abc import Callable
from typing import Any

from torch import nn

from distlab.fabric import Fabric
from distlab.fabric.base import Timed
from distlab.flat import Flat, local_state
from distlab.randomness import put_back
from distlab.roles.event_file import EventFile
from distlab.roles.updater import Params
from distlab.task import Task


class Chief:
    """A run with a chief that looks ends at the same bits as one without.

    Args:
        model: its worker's; buffers are read there, and nothing is changed.
        every: evaluate at the first version held from each multiple of this on; None: never.
        log_dir: a folder that is there, for TensorBoard's event files; None: write none.

    Attributes:
        judged: what each evaluation came to: the version, the loss and each metric by name.
    """

    def __init__(self, fabric: Fabric, task: Task, model: nn.Module, *, every: int | None, log_dir: str | None) -> None:
        self.judged: list[dict[str, float]] = []
        self._fabric, self._task, self._worker_model = fabric, task, model
        self._every, self._next = every or 1, math.inf if every is None else 0
        self._model = self._apart(task.build).eval()  # a factory that draws numbers must not draw the worker's
        self._flat = Flat(self._model)
        self._file = None if log_dir is None else self._apart(lambda: EventFile(log_dir, time.time() - fabric.now()))

    def look(self, params: Params) -> None:
        """The worker holds `params`: evaluate them if it is time to."""
        if not self.is_due(params.version):
            return
        self._next = (params.version // self._every + 1) * self._every
        idle = dict.fromkeys(("loss", *self._task.metrics), math.nan)
        done = self._timed(lambda: self._evaluate(params), idle)
        self._fabric.record("evaluate", done.start_s, done.end_s, version=params.version, loss=done.value["loss"])
        for number, name in enumerate(self._task.metrics):
            said = {"worker": number, "version": params.version, "loss": done.value[name]}
            self._fabric.record("metric", done.end_s, done.end_s, **said)
        self.judged.append({"version": params.version, **done.value})
        self._write(params.version, {f"validation/{name}": value for name, value in done.value.items()})

    def is_due(self, version: int) -> bool:
        """Will `look` evaluate parameters of this version?"""
        return version >= self._next

    def log(self, version: int, loss: float) -> None:
        """The worker's training loss at `version`."""
        if self._file is not None:
            self._write(version, {"train/loss": loss})
            schedule, rate = self._task.lr_schedule, self._fabric.rate
            if schedule is not None or rate != 1.0:
                factor = self._timed(lambda: rate * float(schedule(version) if schedule else 1.0), math.nan).value
                self._write(version, {"train/lr_factor": factor})

    def close(self) -> None:
        """Finish the event file; harmless when it has been."""
        if self._file is not None:
            self._file.close()

    def _evaluate(self, params: Params) -> dict[str, float]:
        self._flat.params.copy_(params.values)
        self._model.load_state_dict(local_state(self._worker_model), strict=False)
        return self._task.evaluate(self._model)

    def _timed(self, function: Callable[[], Any], idle: Any) -> Timed:
        return self._fabric.timed("evaluate", lambda: self._apart(function), idle=idle)

    def _apart(self, function: Callable[[], Any]) -> Any:
        """With random numbers of its own, every time the same, so that evaluations can be compared."""
        with put_back(self._task.seed):
            return function()

    def _write(self, version: int, values: dict[str, float]) -> None:
        if self._file is not None:
            self._file.add(version, self._fabric.now(), values)
