"""A task: what is trained, on what, and how a step is judged and made. It knows nothing of workers.

An existing PyTorch loop becomes one by giving its parts a name:

>>> import torch, torch.nn.functional as F
>>> x, y = torch.randn(64, 8), torch.randint(0, 3, (64,))
>>> task = Task(
...     model=lambda: torch.nn.Linear(8, 3),
...     train=(x, y),
...     loss=F.cross_entropy,
...     optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
...     batch_size=16,
... )
>>> task.num_samples
64

The model is a *factory*, not a module: every process builds its own.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from distlab import data
from distlab.flat import Flat, trainable
from distlab.options import Options, check_count
from distlab.randomness import forked


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The share of rows of `outputs` (batch, classes) whose largest entry is at `targets` (batch,)."""
    return (outputs.argmax(-1) == targets).double().mean()


@dataclass(frozen=True, kw_only=True)
class Task(Options):
    """A model, its data, its loss and its optimizer.

    Args:
        model: () -> nn.Module; called once in every process, with torch seeded by `seed`.
        train: tensors of equal length, ``(inputs, targets)`` or a dict of them, or a map-style dataset.
        loss: (outputs, targets) -> scalar tensor, a mean over the batch. For a batch that is not a pair,
            (outputs, batch).
        optimizer: (parameters) -> torch.optim.Optimizer. It lives with whoever applies the update. A parameter that a
            step does not use has a gradient of zero there, not None: weight decay and momentum still move it.
        batch_size: samples per worker and step.
        seed: of the model's initial values, the order of the data and each worker's random numbers.
        forward: (model, inputs) -> outputs; by default ``model(inputs)``, or ``model(**inputs)`` for a dict.
            This is the compute-intensive part: what `InGraph` replicates.
        lr_schedule: (version) -> factor on the optimizer's learning rate. Versions count updates applied by
            all workers together, so a schedule means the same under every strategy.
        validation: like `train`; what ``run.evaluate()`` and ``train(evaluate_every=...)`` use.
        metrics: name -> (outputs, targets) -> scalar, a mean over the batch.
        name: for reprs and saved runs.

    Raises:
        TypeError, ValueError: by `check`, before any process starts, with what was asked and what was got.
    """

    model: Callable[[], nn.Module]
    train: Any
    loss: Callable[..., Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    batch_size: int = 32
    seed: int = 0
    forward: Callable[[nn.Module, Any], Any] | None = None
    lr_schedule: Callable[[int], float] | None = None
    validation: Any = None
    metrics: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    name: str = "task"

    def __repr__(self) -> str:
        return f"Task({self.name!r}, {data.length_of(self.train)} samples, batches of {self.batch_size})"

    @property
    def num_samples(self) -> int:
        """How many samples an epoch has."""
        return data.length_of(self.train)

    def but(self, **changes: Any) -> "Task":
        """The same task with some parts changed: ``task.but(batch_size=64)``."""
        Task.__new__(Task, **changes)
        return replace(self, **changes)

    def build(self) -> nn.Module:
        """A new model; equal on every call, and the caller's random state is not touched."""
        with forked(self.seed):
            return self.model()

    def outputs(self, model: nn.Module, batch: Any) -> Any:
        """What the model says to `batch`."""
        inputs, _ = pair(batch)
        if self.forward is not None:
            return self.forward(model, inputs)
        return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)

    def loss_of(self, outputs: Any, batch: Any) -> Tensor:
        """The loss of `outputs` on `batch`, a scalar tensor."""
        return self.loss(outputs, pair(batch)[1])

    def evaluate(self, model: nn.Module, samples: Any = None, *, batch_size: int = 1024) -> dict[str, float]:
        """Mean loss and metrics of `model` in eval mode, on the validation data or on `samples`.

        Returns: {"loss": .., metric: ..}, each weighted by the number of samples. The model's mode is restored.
        """
        samples = self.validation if samples is None else samples
        if samples is None:
            raise ValueError("this task has no validation data: pass Task(validation=...) or evaluate(samples=...)")
        total, count, was_training = (
            dict.fromkeys(["loss", *self.metrics], 0.0),
            data.length_of(samples),
            model.training,
        )
        model.eval()
        try:
            with torch.no_grad():
                for start in range(0, count, batch_size):
                    batch = data.collate(samples, torch.arange(start, min(start + batch_size, count)))
                    for name, value in self._judge(model, batch).items():
                        total[name] += value * data.size_of(batch)
        finally:
            model.train(was_training)
        return {name: value / count for name, value in total.items()}

    def _judge(self, model: nn.Module, batch: Any) -> dict[str, float]:
        outputs, targets = self.outputs(model, batch), pair(batch)[1]
        judged = {name: float(metric(outputs, targets)) for name, metric in self.metrics.items()}
        return {"loss": float(self.loss_of(outputs, batch)), **judged}

    def check(self) -> None:
        """One forward pass here, so that what is wrong is said before any process starts."""
        check_count("batch_size", self.batch_size)
        if check_count("seed", self.seed, least=0) >= 1 << 40:
            raise ValueError(f"seed must be below 2 ** 40, got {self.seed}")
        for name in ("model", "loss", "optimizer"):
            if not callable(getattr(self, name)) or (isinstance(getattr(self, name), nn.Module) and name == "model"):
                raise TypeError(_factory_message(name, getattr(self, name)))
        samples = self.num_samples
        if samples == 0:
            raise ValueError("the training data is empty")
        if self.batch_size > samples:
            raise ValueError(f"batch_size is {self.batch_size}, but there are only {samples} samples")
        model = self.build()
        if not isinstance(model, nn.Module):
            raise TypeError(f"the model factory must return an nn.Module, it returned {type(model).__name__}")
        params = [p for _, p in trainable(model)]
        if {id(p) for p in params} & {id(p) for p in self.build().parameters()}:
            raise ValueError(
                "the model factory returned the same parameters twice: it must make them anew on every call"
            )
        with forked():
            self._check_step(model)
        self.check_optimizer(params)
        self._check_judges()

    def check_optimizer(self, params: list[nn.Parameter]) -> None:
        """TypeError or ValueError if its factory makes no optimizer of `params` that can be used here."""
        made = self.optimizer(params)
        if not isinstance(made, torch.optim.Optimizer):
            raise TypeError("the optimizer factory must return a torch.optim.Optimizer")
        theirs = {id(p) for group in made.param_groups for p in group["params"]}
        if not theirs <= {id(p) for p in params}:
            raise ValueError("the optimizer has other parameters than those its factory was given")
        closure = inspect.signature(made.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise ValueError(
                f"{type(made).__name__} needs a closure for each step: whoever applies has only the gradient"
            )

    def _check_judges(self) -> None:
        if not isinstance(self.metrics, Mapping) or not all(callable(metric) for metric in self.metrics.values()):
            raise TypeError(f"metrics must be a dict of functions by name, got {self.metrics!r}")
        if "loss" in self.metrics:
            raise ValueError("a metric cannot be called 'loss': evaluate() returns the task's own under that name")
        if self.validation is not None and data.length_of(self.validation) == 0:
            raise ValueError("the validation data is empty")

    def _check_step(self, model: nn.Module) -> None:
        batch = data.Stream(self.train, batch_size=self.batch_size, seed=self.seed).batch(0)
        loss = self.loss_of(self.outputs(model, batch), batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"the loss must be a scalar tensor (a mean over the batch), got {got}")
        if not loss.requires_grad or loss.is_complex():
            raise ValueError("the loss must be a real number with a gradient: it does not depend on the parameters")
        if self.lr_schedule is not None and not math.isfinite(float(self.lr_schedule(0))):
            raise ValueError(f"lr_schedule(0) must be a finite factor, got {self.lr_schedule(0)}")


def _factory_message(name: str, value: Any) -> str:
    if isinstance(value, nn.Module):
        write = f"model=lambda: {type(value).__name__}(...)"
        return f"model must be a factory, so that every process builds its own: write {write}"
    return f"{name} must be a function, got {type(value).__name__}"


def pair(batch: Any) -> tuple[Any, Any]:
    """A batch as (inputs, targets): a pair as it is, anything else as both."""
    return (batch[0], batch[1]) if isinstance(batch, (tuple, list)) and len(batch) == 2 else (batch, batch)


def model_of(task: Task, params: Tensor, local: dict[str, Tensor]) -> nn.Module:
    """A model of `task` with these parameters and buffers, on memory of its own."""
    model = task.build()
    flat = Flat(model)
    if flat.params.shape != params.shape:
        raise ValueError(f"these are parameters of another model: {len(params)} numbers, this task has {flat.size}")
    flat.params.copy_(params)
    model.load_state_dict(local, strict=False)
    return model
