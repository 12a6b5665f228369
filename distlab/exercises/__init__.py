"""The checks of the lessons' exercises. Each answers with one of three outcomes, and with the reason.

A lesson has one module here: its sketch, its toy, and its `Exercise`. The hard idea is how a misconception is
named: not by reading the reader's code, but by playing what people tend to believe through the same cases as the
attempt. Whoever comes to the same numbers as a belief holds it, however it is written.

>>> double = Exercise(
...     play=lambda function: [function(1.0), function(3.0)],
...     right=(lambda x: 2 * x,),
...     why="twice is twice",
...     misreadings=[((lambda x: x + 1,), "that adds one: it is right for 1 only")],
... )
>>> double.check(lambda x: x + x)
Correct: twice is twice
>>> double.check(lambda x: 1 + x)
Not yet: that adds one: it is right for 1 only
>>> double.check(lambda x: None)
Not attempted: `<lambda>` still returns nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal

import numpy as np

Functions = tuple[Callable[..., Any], ...]


@dataclass(frozen=True, repr=False)
class Verdict:
    """What a check found.

    Attributes:
        outcome: "not attempted", "not yet" or "correct".
        why: in Markdown; the misconception that an attempt seems to hold, or the reason why it works.
    """

    outcome: Literal["not attempted", "not yet", "correct"]
    why: str

    def __repr__(self) -> str:
        return f"{self.outcome.capitalize()}: {self.why}"

    def _repr_markdown_(self) -> str:
        return f"**{self.outcome.capitalize()}.** {self.why[:1].upper()}{self.why[1:]}"


def not_attempted(why: str) -> Verdict:
    """The stub is as it was."""
    return Verdict("not attempted", why)


def not_yet(why: str) -> Verdict:
    """An attempt that fails, and what it seems to believe."""
    return Verdict("not yet", why)


def correct(why: str) -> Verdict:
    """It works, and this is why."""
    return Verdict("correct", why)


class NothingReturned(Exception):
    """One of the reader's functions is still a stub."""


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """Functions that the reader writes, and what they should come to.

    Attributes:
        play: (*functions) -> numbers: what the functions make of all cases.
        right: functions that solve it.
        why: what a reader should take away who solved it, in Markdown.
        misreadings: functions as people tend to write them, and what is wrong with each.
        cases: (index of the first wrong number, wanted, got) -> a sentence, for an attempt that is none of these;
            None names the numbers alone.
        tolerance: relative and absolute, within which numbers are the same.
    """

    play: Callable[..., Sequence[float]]
    right: Functions
    why: str
    misreadings: Sequence[tuple[Functions, str]]
    cases: Callable[[int, float, float], str] | None = None
    tolerance: float = 1e-6

    def check(self, *functions: Callable[..., Any]) -> Verdict:
        """Judge an attempt. What it raises is part of the verdict."""
        if len(functions) != len(self.right) or not all(callable(function) for function in functions):
            return not_yet(f"the check takes your {len(self.right)} function(s), not what they return.")
        try:
            got = self._played(tuple(returning(function) for function in functions))
        except NothingReturned as stub:
            return not_attempted(str(stub))
        except Exception as error:
            return not_yet(f"your code raised {type(error).__name__}: {error}")
        wanted = self._played(self.right)
        if self._same(got, wanted):
            return correct(self.why)
        for wrong, why in self.misreadings:
            if self._same(got, self._played(wrong)):
                return not_yet(why)
        if got.shape != wanted.shape:
            return not_yet(f"numbers of shape {wanted.shape} should come out; yours have {got.shape}.")
        at = int(np.argmin(np.isclose(got, wanted, self.tolerance, self.tolerance)))
        say = self.cases or (lambda i, want, have: f"number {i} should be {want:g}; yours is {have:g}.")
        return not_yet(say(at, float(wanted[at]), float(got[at])))

    def _played(self, functions: Functions) -> np.ndarray:
        return np.asarray([float(value) for value in self.play(*functions)])

    def _same(self, one: np.ndarray, other: np.ndarray) -> bool:
        return one.shape == other.shape and np.allclose(one, other, self.tolerance, self.tolerance)


def returning(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, whose silence is an exception."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if (result := function(*args, **kwargs)) is None:
            raise NothingReturned(f"`{function.__name__}` still returns nothing.")
        return result

    return call
