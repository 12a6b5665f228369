"""Pencil arithmetic: two real workers, one parameter, and every number of the trace known beforehand.

w starts at 8, the loss is w²/2, so the gradient is w; the learning rate is 1/2. The workers take turns.
"""

from dataclasses import replace

import pytest
from toys import halving, train

import distlab as dl

MESSAGE_BYTES = 192 + 128  # header and one tensor's line, aligned; 16 float64


class TakeTurns(dl.AsyncPS):
    """Asynchronous, but the server applies worker 0's gradient, then worker 1's, then worker 0's, ..."""

    def serve(self, server, worker):
        turn = worker.index
        for gradient in worker.pushes():
            kept = replace(gradient, values=gradient.values.clone())
            with server.fabric.lock():
                server.arrived = getattr(server, "arrived", 0) + 1
            server.fabric.until(lambda: server.arrived >= 2)  # both have pulled version 0
            server.fabric.until(lambda turn=turn: server.version == turn or server.over)
            with server.fabric.lock():
                server.apply(kept)
            worker.reply()
            turn += 2


@pytest.fixture(scope="module")
def run(two):
    return train(halving(), TakeTurns(locking="server"), two, 4)


def test_two_workers_by_hand_end_at_minus_2(run):
    """8 - 8/2 = 4, and worker 1's gradient is still 8: 4 - 8/2 = 0. Then 0 - 4/2 = -2 and -2 - 0/2 = -2."""
    assert run.params[0] == -2


def test_two_workers_by_hand_with_fresh_pulls_end_at_one_half(one):
    """8, 4, 2, 1, 1/2: so the two above did compute on old parameters."""
    assert train(halving(), dl.AsyncPS(), one, 4).params[0] == 0.5


def test_two_workers_by_hand_apply_in_turn(run):
    told = [(e.version, e.worker, e.read, e.staleness, e.loss) for e in run.trace if e.kind == "apply"]
    assert told == [(1, 0, 0, 0, 32.0), (2, 1, 0, 1, 32.0), (3, 0, 1, 1, 8.0), (4, 1, 2, 1, 0.0)]


def test_two_workers_by_hand_make_this_history(run):
    history = run.history
    assert history["update"].tolist() == [1, 2, 3, 4]
    assert history["worker"].tolist() == [0, 1, 0, 1]
    assert history["version_read"].tolist() == [0, 0, 1, 2]
    assert history["staleness"].tolist() == [0, 1, 1, 1]
    assert history["loss"].tolist() == [32, 32, 8, 0]
    assert run.mean_staleness == 3 / 4


def test_two_workers_by_hand_pull_at_these_versions(run):
    pulled = {w: run.trace.select("pull", worker=w)["version"].tolist()[:3] for w in (0, 1)}
    assert pulled[0] == [0, 1, 3]
    assert pulled[1][:2] == [0, 2]


def test_two_workers_by_hand_send_these_bytes(run):
    assert set(run.trace.select("push")["bytes"]) == {MESSAGE_BYTES}
    assert set(run.trace.select("pull")["bytes"]) == {MESSAGE_BYTES}
    messages = len(run.trace.select("push")) + len(run.trace.select("pull"))
    assert run.bytes_sent == messages * MESSAGE_BYTES


def test_an_event_reads_as_a_sentence(run):
    second = next(e for e in run.trace if e.kind == "apply" and e.version == 2)
    assert str(second) == ("worker 1's gradient, read at version 0, was applied by server 0 as version 2: staleness 1")
