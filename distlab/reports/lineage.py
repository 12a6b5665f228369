"""Lineage: which updates are still in the parameters at the end of a `WorkerApplies` run.

A worker that writes parameters back replaces the server's; what others wrote since it read is gone. The hard
idea is to go *backwards*: the last write holds one update on top of what its worker had read, that was again
some write, and so on down to version 0. What is not on this path was overwritten.

>>> survivors_of([(0, 1), (0, 2), (1, 3)])  # version 3 was made from version 1: the write that made 2 is lost
Survivors(stores=3, surviving=2, share=0.6666666666666666)
"""

from collections.abc import Iterable
from dataclasses import dataclass

from distlab.trace import Trace


@dataclass(frozen=True)
class Survivors:
    """How much of a run's work is in its final parameters.

    Attributes:
        stores: parameters that workers wrote back, each holding one new update.
        surviving: updates that are in the last of them.
        share: the second over the first.
    """

    stores: int
    surviving: int
    share: float


def survivors(trace: Trace) -> Survivors:
    """Count the updates that outlived all later writes.

    With P equally fast workers about one in P does: the others' gradients were computed for nothing.

    Args:
        trace: of a `WorkerApplies` run; only its "store" events are read.

    Returns: whole counts, exact: a model that adds 1 per update ends at `surviving`.

    Raises:
        ValueError: there is no "store" event, or one that the path needs is missing.

    >>> import numpy as np
    >>> from distlab.trace import EVENT, KINDS
    >>> rows = np.zeros(2, EVENT)
    >>> rows["kind"], rows["read"], rows["version"] = KINDS.index("store"), [0, 0], [1, 2]
    >>> survivors(Trace(rows))
    Survivors(stores=2, surviving=1, share=0.5)
    """
    rows = trace.select("store")
    return survivors_of(zip(rows["read"].tolist(), rows["version"].tolist(), strict=True))


def survivors_of(stores: Iterable[tuple[int, int]]) -> Survivors:
    """The same from pairs: the version that a worker had read, and the one that its write became."""
    read_by = {version: read for read, version in stores}
    if not read_by:
        raise ValueError("no 'store' event: survivors are counted in runs of WorkerApplies, where workers write back")
    version, surviving = max(read_by), 0
    while version != 0:
        if read_by.get(version, version) >= version:
            raise ValueError(f"this trace does not say from which older version version {version} was made")
        version, surviving = read_by[version], surviving + 1
    return Survivors(len(read_by), surviving, surviving / len(read_by))
