"""How long a gradient takes on a simulated worker: laws to draw times from, and the stragglers that stretch them.

>>> Exponential(mean_s=2.0).mean_s
2.0
>>> law(0.1)
Constant(seconds=0.1)
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from distlab.options import Options


class Law(Options, ABC):
    """A distribution of positive times; `mean_s` is its mean, in seconds (ValueError where that is infinite)."""

    mean_s: Any

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, tuple) and not 0 < positive_number(name, value) < math.inf:
                raise ValueError(f"{type(self).__name__}: {name} must be positive and finite, got {value}")

    @abstractmethod
    def sample(self, rng: np.random.Generator) -> float:
        """One time, in seconds."""


@dataclass(frozen=True)
class Constant(Law):
    """Always the same."""

    seconds: float

    def sample(self, rng: np.random.Generator) -> float:
        return self.seconds

    @property
    def mean_s(self) -> float:
        return self.seconds


@dataclass(frozen=True, kw_only=True)
class Exponential(Law):
    """Memoryless: at least 0, often short, sometimes several times the mean."""

    mean_s: float

    def sample(self, rng: np.random.Generator) -> float:
        return self.mean_s * rng.standard_exponential()


@dataclass(frozen=True, kw_only=True)
class ShiftedExponential(Law):
    """A part that nobody escapes, and an exponential tail: the usual model of a straggling machine."""

    shift_s: float
    tail_s: float

    def sample(self, rng: np.random.Generator) -> float:
        return self.shift_s + self.tail_s * rng.standard_exponential()

    @property
    def mean_s(self) -> float:
        return self.shift_s + self.tail_s


@dataclass(frozen=True, kw_only=True)
class Pareto(Law):
    """A heavy tail: P(T > t) = (least_s / t) ** alpha. The smaller alpha, the heavier; infinite mean from 1 down."""

    alpha: float
    least_s: float

    def sample(self, rng: np.random.Generator) -> float:
        return self.least_s * float(rng.random()) ** (-1 / self.alpha)

    @property
    def mean_s(self) -> float:
        if self.alpha <= 1:
            raise ValueError(f"a Pareto law with alpha={self.alpha} has an infinite mean: take alpha > 1")
        return self.alpha * self.least_s / (self.alpha - 1)


@dataclass(frozen=True, kw_only=True)
class Gamma(Law):
    """Mean and spread: `variation` is the standard deviation over the mean, 0.1 for "give or take 10 %"."""

    mean_s: float
    variation: float = 0.1

    def sample(self, rng: np.random.Generator) -> float:
        shape = self.variation**-2
        return self.mean_s / shape * rng.standard_gamma(shape)


@dataclass(frozen=True)
class Empirical(Law):
    """Times that were measured; each draw is one of them."""

    times_s: Sequence[float]

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "times_s", tuple(float(t) for t in self.times_s))
        except (TypeError, ValueError):
            raise TypeError(f"Empirical needs a list of times in seconds, got {self.times_s!r}") from None
        if not self.times_s or not all(0 <= t < math.inf for t in self.times_s):
            raise ValueError("Empirical needs at least one time, all of them finite and not negative")

    def __repr__(self) -> str:
        return f"Empirical({len(self.times_s)} times, mean {self.mean_s:.3g} s)"

    def sample(self, rng: np.random.Generator) -> float:
        return self.times_s[int(rng.random() * len(self.times_s))]

    @property
    def mean_s(self) -> float:
        return float(np.mean(self.times_s))


def positive_number(name: str, value: object) -> float:
    """`value` if it is a number; TypeError that names it otherwise."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
    return float(value)


def law(value: "Law | float") -> Law:
    """A law as it is; a number of seconds as a constant."""
    return value if isinstance(value, Law) else Constant(positive_number("a time in seconds", value))
