"""Options are keyword-only; one that does not exist fails and names its nearest neighbour."""

import difflib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def nearest(word: str, known: Iterable[str]) -> str:
    """ "; did you mean 'x'?" for a near miss, else the list of what there is."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"there is {', '.join(known) or 'none'}"


def check_options(function: Callable[..., Any], name: str, given: Iterable[str]) -> None:
    """Raise TypeError if `given` holds a keyword that `function` does not take."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    known = [n for n, p in parameters.items() if n != "self" and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for option in given:
        if option not in known:
            raise TypeError(f"{name} has no option {option!r}: {nearest(option, known)}")


def options(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that a misspelt keyword names its neighbour."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        check_options(function, function.__qualname__, kwargs)
        return function(*args, **kwargs)

    return call


class Options:
    """A base class whose constructors say which option was meant."""

    def __new__(cls, *args: Any, **kwargs: Any):
        check_options(cls.__init__, cls.__name__, kwargs)
        return super().__new__(cls)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, and point at the line outside of this package that led here."""
    names = [frame.frame.f_globals.get("__name__", "") for frame in inspect.stack(0)]
    depth = next((n for n, name in enumerate(names, 1) if name.split(".")[0] != "distlab"), 1)
    warnings.warn(message, category, stacklevel=depth)


def check_count(name: str, value: Any, least: int = 1) -> int:
    """`value` if it is an int of at least `least`; TypeError or ValueError that says which otherwise."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be a whole number, got {value!r} ({type(value).__name__})")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return int(value)


def check_bool(name: str, value: Any) -> bool:
    """`value` if it is True or False; TypeError otherwise."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def check_word(name: str, value: Any, words: Iterable[str]) -> str:
    """`value` if it is one of `words`; ValueError that names the nearest otherwise."""
    if value not in words:
        raise ValueError(f"{name}={value!r}: {nearest(str(value), words)}")
    return value


def check_seconds(name: str, value: Any) -> float:
    """`value` as a float if it is a finite time of at least 0 s."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number of seconds, got {value!r} ({type(value).__name__})")
    if not 0 <= float(value) < float("inf"):
        raise ValueError(f"{name} must be a finite number of seconds, 0 or more, got {value}")
    return float(value)


def check_positive(name: str, value: Any) -> float:
    """`value` as a float if it is a positive, finite number; TypeError or ValueError that names it otherwise."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
    if not 0 < float(value) < float("inf"):
        raise ValueError(f"{name} must be positive and finite, got {value}")
    return float(value)
