"""Random states: whose turn it is to draw.

torch, numpy and random keep one state per process. Where several workers live in one process, each must draw from a
stream of its own, the one its own process would have; and what runs inside the caller must leave the caller's alone.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_all(number: int) -> None:
    """Seed torch, numpy and random."""
    torch.manual_seed(number)
    np.random.seed(number % 2**32)
    random.seed(number)


@contextmanager
def undisturbed() -> Iterator[None]:
    """One thread inside, so that sums have one order; the caller's states and number of threads are put back."""
    states, threads = (torch.get_rng_state(), get_others()), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        set_others(states[1])
        torch.set_num_threads(threads)


class Randomness:
    """The random numbers of one process among several that share this one.

    Reading and setting three states costs as much as a small gradient. So each kind of work is watched the first time:
    what left numpy's and random's states alone runs without them from then on; what drew no number at all, and is no
    gradient, without any.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._torch: Any = None
        self._others: Any = None
        self._draws: dict[str, tuple[bool, bool]] = {}  # kind of work -> (from torch, from numpy or random)

    def around(self, kind: str, function: Callable[[], Any]) -> Any:
        """Call `function` with this process's random states, and keep what they became."""
        if self._torch is None:
            self._begin()
        first = kind not in self._draws
        torchs, others = self._draws.get(kind, (True, True))
        if torchs:
            torch.set_rng_state(self._torch)
        if others:
            set_others(self._others)
        try:
            return function()
        finally:
            before = self._torch, self._others
            if torchs:
                self._torch = torch.get_rng_state()
            if others:
                self._others = get_others()
            if first:
                drew = kind == "compute" or not self._torch.equal(before[0])
                self._draws[kind] = (drew, not same(self._others, before[1]))

    def _begin(self) -> None:
        seed_all(self._seed)
        self._torch, self._others = torch.get_rng_state(), get_others()


def get_others() -> tuple[Any, Any]:
    """The global random states of numpy and random."""
    return np.random.get_state(legacy=True), random.getstate()


def set_others(states: tuple[Any, Any]) -> None:
    """Set them."""
    np.random.set_state(states[0])
    random.setstate(states[1])


def same(one: tuple[Any, Any], two: tuple[Any, Any]) -> bool:
    """Are two such states equal?"""
    return one[1] == two[1] and one[0][2] == two[0][2] and bool((one[0][1] == two[0][1]).all())
