"""The exchange: how the ranks' gradients become their sum, whole or bucket by bucket.

Backward computes the gradients of the last layers first. Cut into buckets in that order, the first can be summed
while backward still computes the others. The hard idea is what all ranks must agree on without a word: the order of
the buckets. So it is the order of the parameters, reversed, not the one in which gradients happen to be there.
"""

from itertools import accumulate
from typing import Any

from torch import Tensor

from distlab.collectives import Ranks, all_gather, all_reduce
from distlab.compression import Compression, Feedback
from distlab.flat import Flat, padded

FIRST_BUCKET_BYTES = 1 << 20  # small, so that the network has something to do soon (Li et al. 2020)


class Exchange:
    """Sums a message of every rank: gradients, and a tail of small numbers.

    Args:
        flat: whose `message` it is.
        algorithm: of the all-reduce; see `collectives`.
        bucket_bytes: a bucket is full with so many; None: all is one bucket.

    Attributes:
        buckets: (start, stop) of each, in the order in which they are summed; the first has the tail.
        parameters: of which parameters each holds the gradients.
    """

    def __init__(self, flat: Flat, algorithm: str = "auto", bucket_bytes: int | None = None) -> None:
        self._algorithm = algorithm
        sizes = [padded(shape.numel()) for shape in flat.shapes]
        self.parameters = in_buckets(sizes, flat.dtype.itemsize, bucket_bytes)
        stops = [len(flat.message), *(sum(sizes[: held[-1]]) for held in self.parameters)]
        self.buckets = list(zip(stops[1:], stops, strict=False))
        whole, held = flat.size, [sum(sizes[i] for i in held) for held in self.parameters]
        self.shares = [done / whole for done in accumulate(held)]

    def sum_bucket(self, ranks: Ranks, message: Tensor, number: int) -> None:
        """Let a bucket of `message` be its sum over all ranks."""
        start, stop = self.buckets[number]
        all_reduce(ranks, message[start:stop], self._algorithm)

    def state(self) -> dict[str, Any]:
        """What this rank's has to remember from one exchange to the next."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""

    def undo(self) -> None:
        """Forget an exchange that did not come to its end, if there is one."""

    def __call__(self, ranks: Ranks, message: Tensor) -> None:
        """Let all of `message` be its sum over all ranks."""
        for number in range(len(self.buckets)):
            self.sum_bucket(ranks, message, number)


class CompressedExchange(Exchange):
    """Sends less: every rank gathers what the others compressed, and adds in the order of the ranks."""

    def __init__(self, flat: Flat, compression: Compression) -> None:
        super().__init__(flat)
        self._feedback = Feedback(compression, flat.grads)
        self._before: Tensor | None = None  # while an exchange is under way: what was left out until then

    def state(self) -> dict[str, Any]:
        return {"error": self._feedback.error}

    def restore(self, state: dict[str, Any]) -> None:
        self._feedback.error = state["error"]

    def undo(self) -> None:
        if self._before is not None:
            self._feedback.error, self._before = self._before, None

    def sum_bucket(self, ranks: Ranks, message: Tensor, number: int) -> None:
        grads, tail = message[: len(self._feedback.error)], message[len(self._feedback.error) :]
        self._before = self._feedback.error
        sent = self._feedback.compress(grads)
        gathered = all_gather(ranks, [*sent, tail.clone()])
        message.zero_()
        for *theirs, their_tail in gathered:
            grads.add_(self._feedback.restore(theirs))
            tail.add_(their_tail)
        self._before = None


def in_buckets(sizes: list[int], itemsize: int, bucket_bytes: int | None) -> list[list[int]]:
    """Parameters by bucket, the last ones first; none is split. A bucket is closed once it is full."""
    buckets: list[list[int]] = [[]]
    held, limit = 0, None if bucket_bytes is None else min(FIRST_BUCKET_BYTES, bucket_bytes)
    for i in reversed(range(len(sizes))):
        if limit is not None and held >= limit:
            buckets.append([])
            held, limit = 0, bucket_bytes
        buckets[-1].append(i)
        held += sizes[i] * itemsize
    return buckets
