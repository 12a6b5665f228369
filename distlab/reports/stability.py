"""Stability: is the learning rate too large for gradients this old?

Near a minimum the loss is a bowl, and gradient descent breaks first along its steepest direction. The hard idea is
that only learning rate × curvature counts, against a limit that staleness alone sets (`theory.largest_stable_lr`).
The trace holds the staleness; the curvature is measured, once the run is over.
"""

import math
import timeit
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch

from distlab.data import collate
from distlab.errors import DivergenceWarning, NonFiniteLoss
from distlab.flat import trainable
from distlab.options import warn
from distlab.randomness import undisturbed
from distlab.reports.curvature import SAMPLES, curvature, gradient
from distlab.run import Run
from distlab.task import Task, model_of
from distlab.theory import largest_stable_lr

ASYNCHRONOUS = 0.5  # mean staleness
SHARE, LEAST_S = 0.05, 0.2  # what measuring may cost unasked: of the run's own gradient work, or so many seconds


@dataclass(frozen=True)
class Stability:
    """A run's learning rate × curvature, and the limit for gradients as old as its own.

    Attributes:
        lr: of the last update, with the task's schedule.
        momentum: of SGD.
        curvature: largest eigenvalue of the Hessian of the mean loss; nan if it cannot be measured.
        at: "final" or "initial": the parameters that it was measured at.
        mean_staleness, p95_staleness: updates between read and apply; nan if nothing was applied.
        limit: of lr × curvature, were all gradients as old as the mean; nan if none is known.
        why: no limit is known; "" if one is.
    """

    lr: float
    momentum: float
    curvature: float
    at: str
    mean_staleness: float
    p95_staleness: float
    limit: float
    why: str = ""

    @property
    def ratio(self) -> float:
        """lr × curvature over the limit; nan if either is not known."""
        return self.lr * self.curvature / self.limit

    @property
    def is_past(self) -> bool:
        """Is the limit exceeded? False where there is no verdict."""
        return self.ratio > 1

    @property
    def advice(self) -> str:
        """What helps."""
        switches = 'AsyncPS(lr_by_staleness="1/(1+s)"), AsyncPS(max_clock_gap=...), or '
        when, below = ("", self.limit / self.curvature) if self.is_past else (", if all data is finite", self.lr)
        return f"What helps{when}: {switches * (self.mean_staleness >= ASYNCHRONOUS)}a learning rate below {below:.3g}"

    def __str__(self) -> str:
        said = f"learning rate {self.lr:.3g} × curvature {self.curvature:.3g} (at the {self.at} parameters)"
        age = f"staleness of {self.mean_staleness:.3g} (the mean; 95 % are up to {self.p95_staleness:.3g})"
        if math.isnan(self.ratio):
            return f"{said} at a {age}: no verdict, {self.why or 'the loss is not finite there'}"
        rule = (
            f" and momentum {self.momentum:g} (if staleness is above 1, the true one is lower still)"
            if self.momentum
            else ""
        )
        return f"{said} is {self.ratio:.2f} × the limit, {self.limit:.3g}, for a constant {age}{rule}"


def stability(run: Run, task: Task, *, within_s: float = math.inf) -> Stability:
    """Measure how near a run is to the learning rate from which on gradients as old as its own diverge.

    It costs as much as some hundred gradients of 256 samples; see `curvature`.

    Args:
        task: the run's.
        within_s: give up after so many seconds.

    Returns: curvature at the final parameters, or at the initial ones if the run left none that are finite. The limit
        is that of a *constant* staleness on a quadratic. The more staleness varies, the farther beyond it training
        lives: 1.03 times with compute times of 1 ± 10 %, 3 times with exponential ones (8 workers, measured). The
        caller's random states are not touched.

    Raises:
        TimeoutError: it takes longer than `within_s`.
    """
    stale = run.applies["version"] - 1 - run.applies["read"]
    if len(run.trace.select("store")):
        stale = np.zeros_like(stale)  # a worker applies to what it has read, and overwrites what came between
    ages = stale if len(stale) else [math.nan]
    final = run.params if run.params is not None and run.params.isfinite().all() else None
    with undisturbed(), torch.enable_grad():
        model = task.build() if final is None else model_of(task, final, dict(run.local))
        lr, momentum, why = rule(task.optimizer([p for _, p in trainable(model)]))
        if task.lr_schedule is not None:
            lr *= float(task.lr_schedule(max(run.num_updates - 1, 0)))
        lr *= math.prod(run.trace.select("rate")["loss"][-1:].tolist())
        try:
            bend = curvature(task, model, within_s=within_s)
        except RuntimeError as error:
            bend, why = math.nan, f"the loss cannot be differentiated twice ({str(error).partition('.')[0]})"
    if "lr_by_staleness" in run.strategy:
        why = "with lr_by_staleness each gradient has a learning rate of its own"
    if "compensation" in run.strategy:
        why = "with compensation an old gradient is not applied as it was computed"
    why = why if len(stale) else "no update was applied"
    limit = math.nan if why else limit_at(float(np.mean(ages)), momentum)
    at = "initial" if final is None else "final"
    return Stability(lr, momentum, bend, at, float(np.mean(ages)), float(np.quantile(ages, 0.95)), limit, why)


def rule(optimizer: torch.optim.Optimizer) -> tuple[float, float, str]:
    """Learning rate, momentum, and why no limit is known of this optimizer ("": one is)."""
    groups, names = optimizer.param_groups, ("lr", "momentum", "dampening", "nesterov", "maximize")
    lr, momentum = float(groups[0]["lr"]), groups[0].get("momentum", 0.0)
    plain = [lr, momentum, 0, False, False]
    if type(optimizer) is torch.optim.SGD and all([g[name] for name in names] == plain for g in groups):
        return lr, momentum, ""
    return lr, momentum, f"the limit is one of SGD with or without plain momentum, not of {type(optimizer).__name__}"


def limit_at(staleness: float, momentum: float) -> float:
    """The limit of lr × curvature. One over it grows almost evenly with age; between two whole ages, evenly.

    With momentum it is exact at ages 0 and 1; beyond, the true one is lower, by up to a third: what is past this one
    is past that one too.

    >>> [round(limit_at(staleness, 0.0), 3) for staleness in (0, 0.5, 1, 7)]
    [2.0, 1.333, 1.0, 0.209]
    """
    ages = [math.floor(staleness), math.floor(staleness) + 1]
    limits = [(1 - momentum if age else 1 + momentum) * largest_stable_lr(age) for age in ages]
    return float(1 / np.interp(staleness, ages, np.divide(1, limits)))


def warn_if_diverging(run: Run, task: Task, error: BaseException | None) -> None:
    """Say so, once a run is over, if its loss left the finite or it is asynchronous and past its limit.

    Nothing is measured where nothing was computed, nor where it would take long; what goes wrong in here is not the
    run's fault, and stays in here.
    """
    failed = error if isinstance(error, NonFiniteLoss) else None
    if not failed and (error or not run.mean_staleness >= ASYNCHRONOUS or not np.isfinite(run.applies["loss"]).any()):
        return
    try:
        found = stability(run, task, within_s=affordable_s(run, task))
    except (Exception, SystemExit):
        return
    said = f"{found}. {found.advice}"
    if failed:
        failed.add_note(said)
    if failed or found.is_past:
        with suppress(*[DivergenceWarning] if failed else []):  # as an error it would hide the one of the run
            warn(said, DivergenceWarning)


def affordable_s(run: Run, task: Task) -> float:
    """How long measuring may take unasked; TimeoutError if not even the first product would fit."""
    model, batch = task.build().eval(), collate(task.train, torch.arange(task.batch_size))
    with undisturbed(), torch.enable_grad():  # twice, for the first one pays for what torch does once
        once_s = min(timeit.repeat(lambda: gradient(task, model, batch), number=1, repeat=2))
    budget_s = max(LEAST_S, SHARE * len(run.trace.select("compute")) * once_s)
    if 3 * once_s * SAMPLES / task.batch_size > budget_s:
        raise TimeoutError("a single product takes longer than all of it may")
    return budget_s
