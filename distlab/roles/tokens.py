"""TensorFlow 1's way to keep workers in step: labels that an accumulator accepts, and tokens that carry them.

A worker draws a token from one queue and labels its next gradient with it; the accumulator accepts a label that is not
older than its own step. The hard idea is what goes wrong: tokens are not addressed. One that a slow or dead worker
never drew stays in the queue, and the queue is what workers wait at: somebody else draws it who should have waited for
the next version, or gets a label that is old already. Either way it computes in vain.

Source: the behaviour of tf.compat.v1.train.SyncReplicasOptimizer and its ConditionalAccumulator.
"""

from collections import deque

from distlab.roles.server import Server, WorkerPort


class Tokens:
    """The token queue and the accumulator of one server."""

    def __init__(self, server: Server, needed: int) -> None:
        self._server = server
        self._queue = deque([0] * needed)
        self._labels = [0] * server.num_workers
        self._filled = 0  # the version whose tokens were the last to come into the queue

    def serve(self, worker: WorkerPort) -> None:
        """Accumulate or drop each of a worker's gradients by its label; answer when there is a token to draw."""
        server = self._server
        for gradient in worker.pushes():
            with server.guard(), server.fabric.lock():
                if self._labels[worker.index] < server.version:
                    server.record("drop", gradient)
                else:
                    server.collect(gradient, keep=True)
            self._draw(worker.index)
            worker.reply()

    def _draw(self, worker: int) -> None:
        server = self._server
        while not server.over:
            server.fabric.until(lambda: bool(self._queue) or server.version > self._filled or server.over, "a token")
            with server.fabric.lock():
                self._fill()
                if self._queue:
                    self._labels[worker] = self._queue.popleft()
                    return

    def _fill(self) -> None:
        """Put in a token of each new version for every worker; a worker that left may have been what it waited for."""
        while self._filled < self._server.version:
            self._filled += 1
            self._queue.extend([self._filled] * self._server.num_workers)
