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

    def post(self, to: int, *tensors: Tensor) -> None:
        """Start to send a copy of `tensors`."""
        self.sent_bytes += self._link(to).post(Kind.DATA, tensors)

    def recv_all(self, source: int) -> Sequence[Tensor]:
        """All tensors of the next message from `source`; good until the one after it."""
        return self._link(source).recv().tensors

    def flush(self) -> None:
        """Wait until what was posted has left."""
        for link in self._links:
            if link is not None:
                link.flush()

    def lend(self, to: int, tensor: Tensor) -> None:
        """Start to send `tensor` itself, to a rank that calls `recv_into`; it must not change before a flush."""
        self.sent_bytes += self._link(to).lend(tensor)

    def expect(self, source: int, tensor: Tensor, *, into: bool = False) -> None:
        """Be ready for what `source` will lend next but one, at the latest; see `Link.expect`."""
        self._link(source).expect(tensor, into=into)

    def recv_into(self, source: int, tensor: Tensor) -> None:
        """Let `tensor` be what `source` lends."""
        self._link(source).recv_into(tensor)

    def recv_like(self, source: int, tensor: Tensor) -> Tensor:
        """What `source` lends, in another memory; good until the next receive from it."""
        return self._link(source).recv_lent(tensor)

    def swap(self, other: int, mine: Tensor) -> Tensor:
        """Give `mine` to `other` and take what it gives, of the same size; good until the next receive from it."""
        self.lend(other, mine)
        theirs = self.recv_like(other, mine)
        self._link(other).flush()
        return theirs

    def give_and_take(self, other: int, tensor: Tensor) -> None:
        """Give `tensor` to `other`, and let it be what comes back once that has it."""
        self.lend(other, tensor)
        self.recv_into(other, tensor)

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
        ranks.lend(0, tensor)
    else:
        for other in range(1, ranks.size):
            tensor.add_(ranks.recv_like(other, tensor))
    broadcast(ranks, tensor)


def tree_all_reduce(ranks: Ranks, tensor: Tensor) -> None:
    """Pairs, then pairs of pairs: the sums go up a tree to rank 0, and the whole one down the same tree."""
    rank, distance = ranks.rank, 1
    while distance < ranks.size and not rank & distance:
        if rank + distance < ranks.size:
            tensor.add_(ranks.recv_like(rank + distance, tensor))
        distance *= 2
    if rank:
        ranks.give_and_take(rank - distance, tensor)
    while (distance := distance // 2) > 0:
        if rank + distance < ranks.size:
            ranks.lend(rank + distance, tensor)


def ring_all_reduce(ranks: Ranks, tensor: Tensor) -> None:
    """Reduce-scatter, then all-gather, round a ring: each rank sends to its right and receives from its left.

    It says a step ahead that it is ready: where messages take long, so does that word.
    """
    rank, size = ranks.rank, ranks.size
    right, left = (rank + 1) % size, (rank - 1) % size
    parts = torch.tensor_split(tensor, size)
    steps = [(parts[(rank - step - 1) % size], False) for step in range(size - 1)]
    steps += [(parts[(rank - step) % size], True) for step in range(size - 1)]
    ahead = iter(steps)

    def look_ahead() -> None:
        if (coming := next(ahead, None)) is not None:
            ranks.expect(left, coming[0], into=coming[1])

    look_ahead()
    for step, (part, is_summed) in enumerate(steps):
        look_ahead()
        ranks.lend(right, parts[(rank - step) % size])  # which waits until what was lent before has left
        if is_summed:  # elsewhere, and what was here has left
            ranks.recv_into(left, part)
        else:
            part.add_(ranks.recv_like(left, part))


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
            upper, halves = bool(me & distance), [(low, middle), (middle, high)]
            keep, give = [span(tensor, pieces, *halves[half]) for half in (upper, not upper)]
            ranks.lend(other, give)
            keep.add_(ranks.recv_like(other, keep))
            steps.append((other, keep, give))
            low, high = halves[upper]
        for other, keep, give in reversed(steps):
            ranks.lend(other, keep)
            ranks.recv_into(other, give)

    among_a_power_of_two(ranks, tensor, halving)


def among_a_power_of_two(ranks: Ranks, tensor: Tensor, work: Callable[[int, int], None]) -> None:
    """Fold the ranks beyond a power of two into a neighbour, let the others `work(number, power)`, and unfold."""
    power = 1 << (ranks.size.bit_length() - 1)
    folded = ranks.size - power
    if ranks.rank < 2 * folded and ranks.rank % 2:  # 1, 3, 5, ... give their tensor to 0, 2, 4, ...
        ranks.give_and_take(ranks.rank - 1, tensor)
        return
    if ranks.rank < 2 * folded:
        tensor.add_(ranks.recv_like(ranks.rank + 1, tensor))
    work(ranks.rank // 2 if ranks.rank < 2 * folded else ranks.rank - folded, power)
    if ranks.rank < 2 * folded:
        ranks.lend(ranks.rank + 1, tensor)


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
        ranks.recv_into(0, tensor)
    else:
        for other in range(1, ranks.size):
            ranks.lend(other, tensor)
        ranks.flush()
    return tensor


def all_gather(ranks: Ranks, tensors: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """What every rank gave, in the order of the ranks: everybody sends its own to everybody."""
    others = [(ranks.rank + distance) % ranks.size for distance in range(1, ranks.size)]
    for other in others:
        ranks.post(other, *tensors)
    gathered = {ranks.rank: tensors} | {other: ranks.recv_all(other) for other in others}
    ranks.flush()
    return [gathered[rank] for rank in range(ranks.size)]


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

    def hang_up(self, largest_bytes: int = 0) -> None:
        raise AssertionError("nobody dies in one thread")

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
