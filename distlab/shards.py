"""Which server holds what: the flat vector of a model, cut into shards.

TensorFlow 1 places whole variables; that is easy to explain and hard to balance, since one tensor often outweighs
all others. Cutting the flat vector into equal ranges balances to a few bytes. The hard idea is what a cut costs: a
server that holds half a matrix can only run an optimizer that treats every element alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from distlab.flat import ALIGN, Ranges, Vector, padded

PLACEMENTS = ("ranges", "round-robin", "greedy")


@dataclass(frozen=True)
class Shard:
    """What one server holds of a flat vector.

    Attributes:
        ranges: (start, stop) of each part, in the vector's elements.
        shapes: of the tensors in it; of a range that cuts tensors, the range's own.
        dtype: theirs.
        among: the whole model's shapes, and which of them these are; None where tensors were cut.
    """

    ranges: Ranges
    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype
    among: tuple[tuple[torch.Size, ...], list[int]] | None = None

    def vector(self) -> Vector:
        """Room for it."""
        return Vector(self.shapes, self.dtype, self.among, self.ranges)

    def take(self, vector: Tensor) -> Tensor:
        """This shard of `vector`: itself if it is all of it, a view if it is one range, else a copy."""
        if self.ranges == ((0, len(vector)),):
            return vector
        parts = [vector[start:stop] for start, stop in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def put(self, values: Tensor, vector: Tensor) -> None:
        """Write this shard's `values` where they belong in `vector`."""
        sizes = [stop - start for start, stop in self.ranges]
        for (start, stop), part in zip(self.ranges, values.split(sizes), strict=True):
            vector[start:stop] = part


def cut(layout: Vector, num_servers: int, placement: str = "ranges", *, whole: bool = False) -> list[Shard]:
    """Cut a vector into a shard for each server.

    Args:
        placement: "ranges" of equal length; "round-robin", whole tensors in turn, blind to their size; "greedy",
            each tensor to the server that holds the fewest elements, the largest first.
        whole: cut no tensor; "ranges" then places as "greedy" does.

    Raises:
        ValueError: there is not enough for every server to hold something.

    >>> layout = Vector([torch.Size([40]), torch.Size([100])], torch.float32)
    >>> [shard.ranges for shard in cut(layout, 2)]
    [((0, 80),), ((80, 160),)]
    >>> [shard.ranges for shard in cut(layout, 2, "round-robin")]
    [((0, 48),), ((48, 160),)]
    """
    sizes = [padded(shape.numel()) for shape in layout.shapes]
    if num_servers == 1:
        return [Shard(((0, layout.size),), tuple(layout.shapes), layout.dtype)]
    if placement == "ranges" and not whole:
        return _ranges(layout, num_servers)
    if num_servers > len(sizes):
        raise ValueError(f"num_servers is {num_servers}, but there are only {len(sizes)} tensors to place")
    owners = [i % num_servers for i in range(len(sizes))] if placement == "round-robin" else _greedy(sizes, num_servers)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    mine = [[i for i, owner in enumerate(owners) if owner == server] for server in range(num_servers)]
    return [
        Shard(
            tuple((starts[i], starts[i] + sizes[i]) for i in held),
            tuple(layout.shapes[i] for i in held),
            layout.dtype,
            (tuple(layout.shapes), held),
        )
        for held in mine
    ]


def _ranges(layout: Vector, num_servers: int) -> list[Shard]:
    blocks = layout.size // ALIGN
    if num_servers > blocks:
        raise ValueError(f"num_servers is {num_servers}, but the parameters make only {blocks} pieces of {ALIGN}")
    ends = [blocks * server // num_servers * ALIGN for server in range(num_servers + 1)]
    return [Shard(((a, b),), (torch.Size([b - a]),), layout.dtype) for a, b in pairwise(ends)]


def _greedy(sizes: Sequence[int], num_servers: int) -> list[int]:
    held, owners = [0] * num_servers, [0] * len(sizes)
    for tensor in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[tensor] = min(range(num_servers), key=lambda server: held[server])
        held[owners[tensor]] += sizes[tensor]
    return owners
