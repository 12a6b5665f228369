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

    def serve(self, worker: WorkerPort) -> None:
        """Accumulate or drop each of a worker's gradients by its label; answer when there is a token to draw."""
        server = self._server
        for gradient in worker.pushes():
            with server.guard(), server.fabric.lock():
                before = server.version
                if self._labels[worker.index] < before:
                    server.record("drop", gradient)
                else:
                    server.collect(gradient, keep=True)
                if server.version > before:
                    self._queue.extend([server.version] * server.num_workers)
            self._draw(worker.index)
            worker.reply()

    def _draw(self, worker: int) -> None:
        while not self._server.over:
            self._server.fabric.until(lambda: bool(self._queue) or self._server.over, "a token")
            with self._server.fabric.lock():
                if self._queue:
                    self._labels[worker] = self._queue.popleft()
                    return
