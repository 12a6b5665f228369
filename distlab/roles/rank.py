"""A worker as a rank: its gradient buffer, summed with those of all others, and with it what they have to agree on."""

from distlab.collectives import Ranks, all_reduce, broadcast
from distlab.roles.worker import Worker


class Rank:
    """A worker of a collective strategy: it has links to all others.

    Args:
        algorithm: of the all-reduce; see `collectives`.
    """

    def __init__(self, worker: Worker, algorithm: str) -> None:
        self.worker, self._algorithm = worker, algorithm
        fabric, me = worker.fabric, worker.index
        links = [None if i == me else fabric.link("worker", i) for i in range(fabric.counts["worker"])]
        self._ranks = Ranks(me, links)
        broadcast(self._ranks, worker.flat.params)  # the chief's, so that all begin alike

    def mean(self, *, contributes: bool) -> tuple[bool, bool]:
        """Replace `worker.flat.grads` by its mean over the workers that contribute.

        One message holds the values, a count and the votes to stop. A worker that has nothing to give sends zeros, and
        takes part until nobody has.

        Returns: did anybody contribute, and does anybody want to stop?
        """
        flat, fabric = self.worker.flat, self.worker.fabric
        if not contributes:
            flat.grads.zero_()
        flat.tail.zero_()
        flat.tail[0], flat.tail[1] = float(contributes), float(fabric.stopping)
        start, before = fabric.now(), self._ranks.sent_bytes
        all_reduce(self._ranks, flat.message, self._algorithm)
        sent, step = self._ranks.sent_bytes - before, self.worker.step
        fabric.record("reduce", start, fabric.now(), worker=self.worker.index, step=step, num_bytes=sent)
        contributors, votes = flat.tail[:2].tolist()
        if contributors:
            flat.grads.div_(contributors)
        return contributors > 0, votes > 0
