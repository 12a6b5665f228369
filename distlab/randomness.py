"""Random states: whose turn it is to draw.

torch, numpy and random keep one state per process. Where several workers live in one process, each must draw from a
stream of its own, the one its own process would have; and what runs inside the caller must leave the caller's alone.
"""

import ctypes
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

TURN = threading.RLock()  # one at a time draws from the states that this process has
numpys: Any = np.random  # its type stubs leave out how to exchange the bit generator


def seed_all(number: int) -> None:
    """Seed torch, numpy and random."""
    torch.manual_seed(number)
    np.random.seed(number % 2**32)
    random.seed(number)


def states() -> dict[str, Any]:
    """Where torch, numpy and random are, as tensors and plain numbers."""
    _, words, *numbers = tuple[Any, ...](np.random.get_state(legacy=True))
    _, own, spare = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "numpy": [torch.from_numpy(words.astype(np.int64)), *numbers],
        "random": [torch.tensor(own), spare],
    }


def set_states(kept: Mapping[str, Any]) -> None:
    """Be where `states` was called."""
    torch.set_rng_state(kept["torch"])
    words, *numbers = kept["numpy"]
    np.random.set_state(("MT19937", words.numpy().astype(np.uint32), *numbers))
    random.setstate((3, tuple(kept["random"][0].tolist()), kept["random"][1]))


@contextmanager
def undisturbed() -> Iterator[None]:
    """One thread inside, so that sums have one order; the number of threads and random's state are put back."""
    state, threads = random.getstate(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        random.setstate(state)
        torch.set_num_threads(threads)


@contextmanager
def put_back(seed: int) -> Iterator[None]:
    """All random states seeded inside, and afterwards as they were before."""
    states = torch.get_rng_state(), np.random.get_state(legacy=True), random.getstate()
    seed_all(seed)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


@contextmanager
def forked(number: int | None = None) -> Iterator[None]:
    """torch draws from a state of its own inside, seeded by `number`; no simulated process draws meanwhile."""
    with TURN, torch.random.fork_rng(devices=[]):
        if number is not None:
            torch.manual_seed(number)
        yield


class Randomness:
    """The random numbers of one process among several that share this one.

    Its states are put in place around user code, and what was there before is put back, so that code in the
    foreground does not move them, nor they it (but for random's, which is dear to read: there only the run's own are
    kept apart). numpy's whole state costs as much as a small gradient to copy: its bit generator is exchanged instead,
    and what numpy keeps beside it (the second of two normal numbers) copied once it was drawn from.
    """

    def __init__(self, seed: int = 0) -> None:
        self._torch = torch.Generator().manual_seed(seed).get_state()
        self._random = random.Random(seed).getstate()
        self._bits, self._spare = np.random.MT19937(), None  # type: Any, dict[str, Any] | None
        with TURN:
            before = numpys.get_bit_generator()
            numpys.set_bit_generator(self._bits)
            np.random.seed(seed % 2**32)
            numpys.set_bit_generator(before)

    def around(self, function: Callable[[], Any]) -> Any:
        """Call `function` with this process's random states, and keep what they became."""
        with TURN:
            torchs, bits = torch.get_rng_state(), numpys.get_bit_generator()
            torch.set_rng_state(self._torch)
            random.setstate(self._random)
            numpys.set_bit_generator(self._bits)
            if self._spare is not None:
                np.random.set_state(self._spare)
            place = position(self._bits)
            try:
                return function()
            finally:
                self._torch, self._random = torch.get_rng_state(), random.getstate()
                if self._spare is not None or position(self._bits) != place:
                    spare = np.random.get_state(legacy=False)
                    self._spare = spare if spare["has_gauss"] else None
                torch.set_rng_state(torchs)
                numpys.set_bit_generator(bits)


def position(bits: Any) -> bytes:
    """Where a Mersenne twister is: its first word, and which one comes next. Every draw changes one of them."""
    address = bits.ctypes.state_address
    return ctypes.string_at(address, 4) + ctypes.string_at(address + 624 * 4, 4)
