"""Collectives, built from send and receive alone, each as short as its picture.

Every all-reduce leaves the sum over all ranks in every rank's tensor, the same bits on each. They differ in how many
messages follow each other (latency) and in how much the busiest rank sends (bandwidth):

| all-reduce | messages one after the other | the busiest rank sends |
|---|---|---|
| through rank 0 | 2, but p - 1 queue at rank 0 each way | (p - 1) n |
| tree | 2 lg p | lg p n |
| recursive doubling | lg p | lg p n |
| ring | 2 (p - 1) | 2 (p - 1) / p n |
| halving-doubling | 2 lg p | 2 (p - 1) / p n |

Source: Thakur, Rabenseifner and Gropp 2005; the ring is Patarasuk and Yuan 2009.
"""

from collections import deque
from collections.abc import Callable, Sequence

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor

from distlab.fabric import Kind, Link, Message

SMALL_BYTES = 1 << 16  # below, an all-reduce takes as long as its messages are many


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

    def flush(self) -> None:
        """Wait until what was posted has left."""
        for link in self._links:
            if link is not None:
                link.flush()

    def swap(self, other: int, mine: Tensor) -> Tensor:
        """Send `mine` to `other` and receive what it sent."""
        self.post(other, mine)
        return self.recv(other)

    def _link(self, rank: int) -> Link:
        link = self._links[rank]
        assert link is not None, "a rank does not send to itself"
        return link


def best_all_reduce(ranks: Ranks, tensor: Tensor) -> None:
    """Few messages where the tensor is small, few bytes where it is large."""
    small = tensor.numel() * tensor.element_size() <= SMALL_BYTES
    (recursive_doubling if small or ranks.size == 2 else ring_all_reduce)(ranks, tensor)


def all_reduce_through_rank_0(ranks: Ranks, tensor: Tensor) -> None:
    """Everybody sends to rank 0, which adds in the order of the ranks and sends the sum to everybody."""
    if ranks.rank:
        ranks.post(0, tensor)
    else:
        for other in range(1, ranks.size):
            tensor.add_(ranks.recv(other))
    broadcast(ranks, tensor)


def tree_all_reduce(ranks: Ranks, tensor: Tensor) -> None:
    """Pairs, then pairs of pairs: the sums go up a tree to rank 0, and the whole one down the same tree."""
    rank, distance = ranks.rank, 1
    while distance < ranks.size and not rank & distance:
        if rank + distance < ranks.size:
            tensor.add_(ranks.recv(rank + distance))
        distance *= 2
    if rank:
        tensor.copy_(ranks.swap(rank - distance, tensor))
    while (distance := distance // 2) > 0:
        if rank + distance < ranks.size:
            ranks.post(rank + distance, tensor)


def ring_all_reduce(ranks: Ranks, tensor: Tensor) -> None:
    """Reduce-scatter, then all-gather, round a ring: each rank sends to its right and receives from its left."""
    rank, size = ranks.rank, ranks.size
    right, left = (rank + 1) % size, (rank - 1) % size
    parts = torch.tensor_split(tensor, size)
    for step in range(size - 1):  # afterwards part rank + 1 is summed here
        ranks.post(right, parts[(rank - step) % size])
        parts[(rank - step - 1) % size].add_(ranks.recv(left))
    for step in range(size - 1):
        ranks.post(right, parts[(rank + 1 - step) % size])
        parts[(rank - step) % size].copy_(ranks.recv(left))


def recursive_doubling(ranks: Ranks, tensor: Tensor) -> None:
    """Swap whole tensors at distance 1, 2, 4, ...: the sum of two is the same in either order, so all stay equal."""

    def doubling(me: int, power: int) -> None:
        for distance in distances(power):
            tensor.add_(ranks.swap(real(me ^ distance, ranks.size), tensor))

    among_a_power_of_two(ranks, tensor, doubling)


def halving_doubling(ranks: Ranks, tensor: Tensor) -> None:
    """Swap halves, then halves of halves, until each rank holds the sum of one piece; then back the same way."""

    def halving(me: int, power: int) -> None:
        pieces, low, high = torch.tensor_split(tensor, power), 0, power
        steps = []
        for distance in reversed(distances(power)):  # pieces low to high are still added here
            middle, other = (low + high) // 2, real(me ^ distance, ranks.size)
            keep, give = ((low, middle), (middle, high)) if not me & distance else ((middle, high), (low, middle))
            span(tensor, pieces, *keep).add_(ranks.swap(other, span(tensor, pieces, *give)))
            steps.append((other, keep, give))
            low, high = keep
        for other, keep, give in reversed(steps):
            span(tensor, pieces, *give).copy_(ranks.swap(other, span(tensor, pieces, *keep)))

    among_a_power_of_two(ranks, tensor, halving)


def among_a_power_of_two(ranks: Ranks, tensor: Tensor, work: Callable[[int, int], None]) -> None:
    """Fold the ranks beyond a power of two into a neighbour, let the others `work(number, power)`, and unfold."""
    power = 1 << (ranks.size.bit_length() - 1)
    folded = ranks.size - power
    if ranks.rank < 2 * folded and ranks.rank % 2:  # 1, 3, 5, ... give their tensor to 0, 2, 4, ...
        tensor.copy_(ranks.swap(ranks.rank - 1, tensor))
        return
    if ranks.rank < 2 * folded:
        tensor.add_(ranks.recv(ranks.rank + 1))
    work(ranks.rank // 2 if ranks.rank < 2 * folded else ranks.rank - folded, power)
    if ranks.rank < 2 * folded:
        ranks.post(ranks.rank + 1, tensor)


def distances(power: int) -> list[int]:
    """1, 2, 4, ... below `power`."""
    return [1 << i for i in range(power.bit_length() - 1)]


def real(number: int, size: int) -> int:
    """The rank of a number among the power of two that is left after folding."""
    folded = size - (1 << (size.bit_length() - 1))
    return 2 * number if number < folded else number + folded


def span(tensor: Tensor, pieces: Sequence[Tensor], low: int, high: int) -> Tensor:
    """The part of `tensor` that pieces `low` to `high` (not included) make up."""
    start = sum(len(piece) for piece in pieces[:low])
    return tensor[start : start + sum(len(piece) for piece in pieces[low:high])]


#: By the word that `AllReduce(algorithm=...)` takes.
ALGORITHMS: dict[str, Callable[[Ranks, Tensor], None]] = {
    "auto": best_all_reduce,
    "rank 0": all_reduce_through_rank_0,
    "tree": tree_all_reduce,
    "ring": ring_all_reduce,
    "recursive doubling": recursive_doubling,
    "halving-doubling": halving_doubling,
}


def all_reduce(ranks: Ranks, tensor: Tensor, algorithm: str = "auto") -> Tensor:
    """Sum `tensor` (1-d) over all ranks, in place; returns it. It may be written to as soon as this returns."""
    if ranks.size > 1:
        ALGORITHMS[algorithm](ranks, tensor)
        ranks.flush()
    return tensor


def broadcast(ranks: Ranks, tensor: Tensor) -> Tensor:
    """Copy rank 0's `tensor` to all, in place; returns it."""
    if ranks.rank:
        return tensor.copy_(ranks.recv(0))
    for other in range(1, ranks.size):
        ranks.post(other, tensor)
    ranks.flush()
    return tensor


class Loop(Link):
    """A link inside one thread: who receives what is not there yet lets the others go on."""

    def __init__(self) -> None:
        self.inbox: deque[Message] = deque()
        self.other = self

    def put(self, message: Message) -> int:
        self.other.inbox.append(message._replace(tensors=[t.clone() for t in message.tensors]))
        return sum(t.numel() * t.element_size() for t in message.tensors)

    def flush(self) -> None:
        """A copy has left at once."""

    def recv(self) -> Message:
        while not self.inbox:
            getcurrent().parent.switch()
        return self.inbox.popleft()


def in_one_thread(collective: Callable[[Ranks, Tensor], object], tensors: Sequence[Tensor]) -> list[Ranks]:
    """Run `collective` on every rank's tensor, in place, with no process and no clock: for replay and tests.

    Returns: the ranks, which know how many bytes each has sent.
    """
    size = len(tensors)
    links = [[Loop() for _ in range(size)] for _ in range(size)]
    for i in range(size):
        for j in range(size):
            links[i][j].other = links[j][i]
    ranks = [Ranks(i, [link if i != j else None for j, link in enumerate(links[i])]) for i in range(size)]
    running = [(greenlet(collective), pair) for pair in zip(ranks, tensors, strict=True)]
    for task, pair in running:
        task.switch(*pair)
    while alive := [task for task, _ in running if not task.dead]:
        for task in alive:
            task.switch()
    return ranks
