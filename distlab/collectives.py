"""Collectives, built from send and receive alone, each as short as its picture.

`all_reduce` leaves the sum over all ranks in every rank's tensor, the same bits on each: every piece is summed
by one rank only and then copied. With two ranks they swap whole tensors and add; with more, the pieces go round
a ring: p - 1 steps to sum them, p - 1 to spread them, and each rank sends 2 (p - 1) / p of the tensor, however
many there are (Patarasuk & Yuan 2009).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from distlab.fabric import Kind, Link


class Ranks:
    """The ranks of a collective, seen from one of them.

    Args:
        rank: this one's number.
        links: to every rank; the entry at `rank` is not used.
    """

    def __init__(self, rank: int, links: Sequence[Link | None]) -> None:
        self.rank, self.size, self._links = rank, len(links), links
        self.sent_bytes = 0

    def post(self, to: int, tensor: Tensor) -> None:
        """Start to send a copy of `tensor`."""
        self.sent_bytes += self._link(to).post(Kind.DATA, [tensor])

    def recv(self, source: int) -> Tensor:
        """The next tensor from `source`; good until the one after it."""
        return self._link(source).recv().values

    def flush(self, to: int) -> None:
        """Wait until what was posted to `to` has left."""
        self._link(to).flush()

    def _link(self, rank: int) -> Link:
        link = self._links[rank]
        assert link is not None, "a rank does not send to itself"
        return link


def all_reduce(ranks: Ranks, tensor: Tensor) -> Tensor:
    """Sum `tensor` (1-d) over all ranks, in place; returns it."""
    if ranks.size == 2:
        return swap_and_add(ranks, tensor)
    return ring_all_reduce(ranks, tensor)


def swap_and_add(ranks: Ranks, tensor: Tensor) -> Tensor:
    """Two ranks: send mine, add yours. One step; the sum of two is the same in either order."""
    other = 1 - ranks.rank
    ranks.post(other, tensor)
    theirs = ranks.recv(other)
    ranks.flush(other)
    return tensor.add_(theirs)


def ring_all_reduce(ranks: Ranks, tensor: Tensor) -> Tensor:
    """Reduce-scatter, then all-gather, round a ring."""
    rank, size = ranks.rank, ranks.size
    right, left = (rank + 1) % size, (rank - 1) % size
    parts = torch.tensor_split(tensor, size)
    for step in range(size - 1):  # afterwards part rank + 1 is summed here
        ranks.post(right, parts[(rank - step) % size])
        parts[(rank - step - 1) % size].add_(ranks.recv(left))
    for step in range(size - 1):
        ranks.post(right, parts[(rank + 1 - step) % size])
        parts[(rank - step) % size].copy_(ranks.recv(left))
    if size > 1:
        ranks.flush(right)
    return tensor


def broadcast(ranks: Ranks, tensor: Tensor) -> Tensor:
    """Copy rank 0's `tensor` to all, in place; returns it."""
    if ranks.rank:
        return tensor.copy_(ranks.recv(0))
    others = range(1, ranks.size)
    for other in others:
        ranks.post(other, tensor)
    for other in others:
        ranks.flush(other)
    return tensor


def serial_all_reduce(tensors: Sequence[Tensor]) -> Tensor:
    """What `all_reduce` leaves on every rank, bit for bit, from all ranks' tensors at once; for replay and tests.

    Part k is summed round the ring from rank k on, so different parts add in different orders.
    """
    size = len(tensors)
    if size <= 2:
        return tensors[0] + tensors[1] if size == 2 else tensors[0].clone()
    cut = [torch.tensor_split(t, size) for t in tensors]
    sums = []
    for part in range(size):
        total = cut[part][part].clone()
        for rank in range(part + 1, part + size):
            total = cut[rank % size][part] + total
        sums.append(total)
    return torch.cat(sums)
