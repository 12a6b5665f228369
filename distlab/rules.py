"""Rules: how the gradients that arrived become one step of the optimizer.

Usually it is their mean. An old gradient, though, says how to leave a place where the parameters no longer are; one
may trust it less (a smaller learning rate) or correct it (delay compensation). A server and a replay of its trace
use the same rule, or they would not end at the same bits.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from distlab.options import Options, check_positive, nearest

BY_STALENESS: dict[str, Callable[[int], float]] = {
    "1/s": lambda staleness: 1 / max(1, staleness),
    "1/(1+s)": lambda staleness: 1 / (1 + staleness),
}


def by_staleness(given: str | Callable[[int], float]) -> Callable[[int], float]:
    """The function that a word or a function stands for; ValueError or TypeError otherwise."""
    if isinstance(given, str):
        if given not in BY_STALENESS:
            raise ValueError(f"lr_by_staleness={given!r}: {nearest(given, BY_STALENESS)}, or a function of staleness")
        return BY_STALENESS[given]
    if not callable(given):
        raise TypeError(f"lr_by_staleness must be a word or a function of staleness, got {given!r}")
    return given


@dataclass
class DelayCompensation(Options):
    """Correct an old gradient for how far the parameters have moved since: g + λ g² (w − w_read).

    λ g² stands for the Hessian, of which it is a rough diagonal. The server keeps for every worker what it last sent
    there: one more copy of the parameters each.

    Args:
        strength: λ, or λ₀ if `adaptive`.
        adaptive: divide λ₀ by the root of a running mean of g², element by element.

    Source: Zheng et al. 2017, Asynchronous Stochastic Gradient Descent with Delay Compensation, sections 4 and 5.
    """

    strength: float = 0.04
    adaptive: bool = False
    _mean_square: Tensor | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_positive("strength", self.strength)

    def __call__(self, gradient: Tensor, moved: Tensor) -> Tensor:
        square, strength = gradient * gradient, self.strength  # type: Tensor, Tensor | float
        if self.adaptive:
            before = torch.zeros_like(square) if self._mean_square is None else self._mean_square
            self._mean_square = 0.95 * before + 0.05 * square
            strength = self.strength / (self._mean_square + 1e-7).sqrt()
        return gradient + strength * square * moved


@dataclass(frozen=True)
class Rule:
    """What becomes of gradients.

    Attributes:
        factor: the learning rate's factor by staleness.
        compensate: (gradient, how far the parameters moved since it was read) -> gradient.
    """

    factor: Callable[[int], float] | None = None
    compensate: Callable[[Tensor, Tensor], Tensor] | None = None

    def state(self) -> dict[str, Tensor]:
        """What it has come to know: vectors (size,), by name."""
        square = self.compensate._mean_square if isinstance(self.compensate, DelayCompensation) else None
        return {} if square is None else {"mean_square": square}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from `state`."""
        if isinstance(self.compensate, DelayCompensation):
            self.compensate._mean_square = state.get("mean_square")

    def combine(
        self, gradients: Sequence[Tensor], ages: Sequence[int], read: Sequence[Tensor], params: Tensor
    ) -> tuple[Tensor, float]:
        """The gradient (size,) of one step, and the factor of its learning rate.

        Args:
            gradients: each (size,).
            ages: the staleness of each, in updates.
            read: the parameters that each was computed at; used by `compensate` alone.
            params: the parameters as they are.
        """
        if self.compensate is not None:
            pairs = zip(gradients, read, strict=True)
            gradients = [compensated(self.compensate(g, params - old), g) for g, old in pairs]
        if self.factor is None:
            return mean(gradients), 1.0
        factors = [check_factor(self.factor(age), age) for age in ages]
        factor = sum(factors) / len(factors)
        if factor:
            gradients = [g * (f / factor) for g, f in zip(gradients, factors, strict=True)]
        return mean(gradients), factor


def check_factor(factor: Any, age: int) -> float:
    """`factor` if a learning rate can be multiplied by it."""
    if not isinstance(factor, Real) or not 0 <= float(factor) < math.inf:
        raise ValueError(f"lr_by_staleness({age}) must be a finite factor of 0 or more, got {factor!r}")
    return float(factor)


def compensated(values: Any, gradient: Tensor) -> Tensor:
    """`values` if they can stand for `gradient`."""
    if not isinstance(values, Tensor) or values.shape != gradient.shape or values.dtype != gradient.dtype:
        got = f"{tuple(values.shape)} {values.dtype}" if isinstance(values, Tensor) else repr(values)
        raise TypeError(f"compensation must return a tensor {tuple(gradient.shape)} {gradient.dtype}, got {got}")
    if not values.isfinite().all():
        raise ValueError("compensation returned values that are not finite")
    return values


MEAN = Rule()


def mean(gradients: Sequence[Tensor]) -> Tensor:
    """The mean of gradients, each (size,); one alone as it is."""
    return gradients[0] if len(gradients) == 1 else torch.stack(list(gradients)).mean(0)
