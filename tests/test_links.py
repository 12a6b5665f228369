"""Links over gloo, both ends in this process: order, growth, and what a peer may not say.

A message leaves only when its receiver asks for it; so these tests post, receive, and then flush.
"""

import threading

import pytest
import torch
import torch.distributed as dist

from distlab.errors import BadMessage
from distlab.fabric import Kind, Message, Peer, wire
from distlab.fabric.torch_fabric import DIRECT_BYTES, FIRST_BYTES, TorchFabric
from distlab.trace import EVENT, Buffer, Recorder

COUNTS = {"server": 1, "worker": 1}


def fabric(role: str, token: int = 5) -> TorchFabric:
    return TorchFabric(Peer(role, 0), COUNTS, Recorder(role, 0, Buffer(lambda rows: None)), token=token)


@pytest.fixture
def ends(tmp_path):
    """A server's link to a worker, and that worker's to the server."""
    made = [fabric("server"), fabric("worker")]
    stores = [dist.FileStore(str(tmp_path / "store"), -1) for _ in made]
    pairs = [("server", "worker")]
    threads = [threading.Thread(target=f.connect, args=(pairs, s)) for f, s in zip(made, stores, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made[0].link("worker", 0), made[1].link("server", 0)


def test_messages_arrive_whole_and_in_order(ends):
    server, worker = ends
    for step in range(3):
        worker.post(Kind.PUSH, [torch.full((4,), float(step))], version=7, step=step, loss=0.5)
        got = server.recv()
        worker.flush()
        assert (got.kind, got.version, got.step, got.loss) == (Kind.PUSH, 7, step, 0.5)
        assert got.values.tolist() == [step] * 4


@pytest.mark.parametrize("numel", [1, 1 << 14, 1 << 20])
def test_message_of_any_size_arrives(ends, numel):
    server, worker = ends
    sent = torch.arange(float(numel))
    num_bytes = worker.post(Kind.PUSH, [sent])
    got = server.recv()
    worker.flush()
    assert got.values.equal(sent)
    assert got.num_bytes == num_bytes > 4 * numel


def test_short_message_after_a_long_one_is_itself(ends):
    server, worker = ends
    for numel in (1 << 16, 3):
        worker.post(Kind.PUSH, [torch.ones(numel)])
        assert server.recv().values.numel() == numel


def test_both_ends_may_post_more_than_ever_before_either_receives(ends):
    """Or two ranks that swap would wait for each other for ever."""
    for numel in (1 << 16, 1 << 18):
        for end in ends:
            end.post(Kind.DATA, [torch.ones(numel)])
        assert [end.recv().values.sum() for end in ends] == [numel, numel]
        for end in ends:
            end.flush()


def test_posted_message_is_a_copy(ends):
    server, worker = ends
    sent = torch.ones(1000)
    worker.post(Kind.PUSH, [sent])
    sent.zero_()
    assert server.recv().values.sum() == 1000


def test_peer_with_another_token_is_refused(ends):
    server, worker = ends
    worker._token += 1
    worker.post(Kind.PULL)
    with pytest.raises(BadMessage, match="link to worker 0 is not from this run"):
        server.recv()


@pytest.mark.parametrize("size", [-1, 0, wire.MAX_BYTES + 1])
def test_announcement_of_an_absurd_size_is_refused(ends, size):
    server, worker = ends
    worker._start(Message(Kind.GROW, version=size))
    with pytest.raises(BadMessage, match=f"worker 0 announces a message of {size} bytes"):
        server.recv()


AROUND = [0, 1, 1000, DIRECT_BYTES // 4 - 1, DIRECT_BYTES // 4, DIRECT_BYTES // 4 + 1, 1 << 18]  # float32 numbers


def lent(giver, taker, tensor: torch.Tensor) -> torch.Tensor:
    """What arrives of it."""
    into = torch.empty_like(tensor)
    giver.lend(tensor)
    taker.recv_into(into)
    giver.flush()
    return into


@pytest.mark.parametrize("numel", AROUND)
def test_lent_tensor_of_any_size_arrives(ends, numel):
    server, worker = ends
    sent = torch.arange(float(numel))
    assert lent(worker, server, sent).equal(sent)


@pytest.mark.parametrize("numel", [5, DIRECT_BYTES])
@pytest.mark.parametrize("dtype", wire.DTYPES, ids=str)
def test_lent_tensor_of_any_dtype_arrives(ends, dtype, numel):
    sent = (torch.arange(numel) % 100).to(dtype)
    assert lent(*ends, sent).equal(sent)


def test_lent_tensor_may_be_a_part_of_another(ends):
    whole, into = torch.arange(3.0 * DIRECT_BYTES), torch.zeros(3 * DIRECT_BYTES)
    ends[0].lend(whole[DIRECT_BYTES : 2 * DIRECT_BYTES])
    ends[1].recv_into(into[DIRECT_BYTES : 2 * DIRECT_BYTES])
    assert into.nonzero().flatten().tolist() == list(range(DIRECT_BYTES, 2 * DIRECT_BYTES))
    assert into[DIRECT_BYTES : 2 * DIRECT_BYTES].equal(whole[DIRECT_BYTES : 2 * DIRECT_BYTES])


def test_many_lent_tensors_and_messages_arrive_in_order_in_both_directions(ends):
    for round_number in range(3):
        for numel in AROUND:
            for giver, taker in (ends, ends[::-1]):
                giver.post(Kind.PUSH, [torch.full((numel,), 7.0)], step=round_number)
                assert taker.recv().step == round_number
                sent = torch.full((numel,), float(round_number))
                assert lent(giver, taker, sent).equal(sent)


@pytest.mark.parametrize("numel", AROUND)
def test_both_ends_may_lend_before_either_receives(ends, numel):
    """Or two ranks that swap would wait for each other for ever."""
    sent, into = [torch.full((numel,), v) for v in (1.0, 2.0)], [torch.empty(numel) for _ in ends]
    for end, tensor in zip(ends, sent, strict=True):
        end.lend(tensor)
    for end, tensor in zip(ends, into, strict=True):
        end.recv_into(tensor)
    for end in ends:
        end.flush()
    assert into[0].equal(sent[1])
    assert into[1].equal(sent[0])


@pytest.mark.parametrize("numel", AROUND)
def test_lending_costs_as_many_bytes_as_posting(ends, numel):
    server, worker = ends
    sent = torch.ones(numel)
    num_bytes = worker.lend(sent)
    server.recv_into(torch.empty(numel))
    assert num_bytes == worker.post(Kind.DATA, [sent]) == wire.size([sent])
    server.recv()


def test_large_tensor_is_lent_without_a_copy(ends):
    """No buffer of the link has grown."""
    for end in ends:
        lent(end, ends[end is ends[0]], torch.ones(10 * DIRECT_BYTES))
    assert all(buffer.numel() == FIRST_BYTES for end in ends for buffer in (end._in, end._out))


BIG = DIRECT_BYTES // 4  # numbers of 4 bytes


@pytest.mark.parametrize(
    ("sent", "into", "told"),
    [
        (torch.zeros(3), torch.zeros(4), r"lent torch.float32 of shape \(3,\), not \(4,\)"),
        (torch.zeros(3), torch.zeros(3).int(), r"lent torch.float32 of shape \(3,\), not \(3,\)"),
        (torch.zeros(3, 1), torch.zeros(3), r"lent torch.float32 of shape \(3, 1\), not \(3,\)"),
        (torch.zeros(BIG), torch.zeros(1000), f"announces a tensor .{BIG}., .* more than was agreed"),
        (torch.zeros(BIG), torch.zeros(BIG).int(), f"another tensor than the one of {BIG} x torch.int32 awaited here"),
        (torch.zeros(BIG), torch.zeros(BIG + 9), f"another tensor than the one of {BIG + 9} x torch.float32"),
        (torch.zeros(BIG), torch.zeros(2 * BIG).half(), f"another tensor than the one of {2 * BIG} x torch.float16"),
    ],
)
def test_lent_tensor_that_is_not_the_one_awaited_is_refused(ends, sent, into, told):
    server, worker = ends
    worker.lend(sent)
    with pytest.raises(BadMessage, match=f"worker 0 .*{told}"):
        server.recv_into(into)


def test_lent_tensor_of_a_peer_with_another_token_is_refused(ends):
    server, worker = ends
    worker._token += 1
    worker.lend(torch.zeros(BIG))
    with pytest.raises(BadMessage, match="link to worker 0 is not from this run"):
        server.recv_into(torch.zeros(BIG))


def test_exception_in_a_task_ends_every_wait():
    def fail() -> None:
        raise ValueError("in a task")

    world = fabric("server")
    world.spawn(fail)
    with pytest.raises(ValueError, match="in a task"):
        world.until(lambda: False)


def test_lock_wakes_who_waits():
    world, done = fabric("server"), []

    def change() -> None:
        with world.lock():
            done.append(1)

    world.spawn(change)
    world.until(lambda: done == [1])


def test_recorder_hands_over_full_buffers_and_the_rest():
    got: list = []
    record = Recorder("worker", 3, Buffer(got.append, capacity=4))
    for step in range(10):
        record("push", 0.0, 1.0, step=step, peer=("server", 0), num_bytes=8)
    record.flush()
    record.flush()
    assert [len(rows) for rows in got] == [4, 4, 2]
    assert got[2]["step"].tolist() == [8, 9]
    assert all(rows.dtype == EVENT for rows in got)
