"""Links through memory and over gloo, both ends in this process: order, growth, and what a peer may not say.

Over gloo a message leaves only when its receiver asks for it; so these tests post, receive, and then flush.
"""

import os
import socket
import tempfile
import threading

import pytest
import torch
from toys import DEADLINE_S, regression

from distlab.errors import BadMessage, DistlabError, PeerLost
from distlab.fabric import Kind, Message, Peer, memory_link, wire
from distlab.fabric import door as door_module
from distlab.fabric.door import Door, address, hello
from distlab.fabric.gloo_link import DIRECT_BYTES, FIRST_BYTES
from distlab.fabric.torch_fabric import TorchFabric
from distlab.roles.group import Group
from distlab.roles.updater import Updater
from distlab.roles.worker import Worker
from distlab.trace import EVENT, Buffer, Recorder

COUNTS = {"server": 1, "worker": 1}


def fabric(role: str, token: int = 5, folder: str | None = None) -> TorchFabric:
    record = Recorder(role, 0, Buffer(lambda rows: None))
    return TorchFabric(Peer(role, 0), COUNTS, record, token=token, folder=folder)


@pytest.fixture
def folder():
    """pytest's own may have too long a name for a socket."""
    with tempfile.TemporaryDirectory() as name:
        yield name


def connected(fabrics: list[TorchFabric], links: str) -> None:
    """Let each of them make its links."""
    roles = [f.me.role for f in fabrics[:2]]
    threads = [threading.Thread(target=f.connect, args=([tuple(roles)],), kwargs={"links": links}) for f in fabrics]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def two_ends(folder: str, links: str) -> tuple:
    """A server's link to a worker, and that worker's to the server."""
    made = [fabric(role, folder=folder) for role in ("server", "worker")]
    connected(made, links)
    return made[0].link("worker", 0), made[1].link("server", 0)


@pytest.fixture(params=["memory", "gloo"])
def ends(request, folder):
    return two_ends(folder, request.param)


@pytest.fixture
def gloo_ends(folder):
    return two_ends(folder, "gloo")


@pytest.fixture
def memory_ends(folder):
    return two_ends(folder, "memory")


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
def test_announcement_of_an_absurd_size_is_refused(gloo_ends, size):
    server, worker = gloo_ends
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


def test_large_tensor_is_lent_over_gloo_without_a_copy(gloo_ends):
    """No buffer of the link has grown."""
    for end in gloo_ends:
        lent(end, gloo_ends[end is gloo_ends[0]], torch.ones(10 * DIRECT_BYTES))
    assert all(buffer.numel() == FIRST_BYTES for end in gloo_ends for buffer in (end._in, end._out))


@pytest.mark.parametrize("numel", AROUND)
def test_what_was_lent_can_be_had_without_a_copy_until_the_next_receive(ends, numel):
    server, worker = ends
    for value in (1.0, 2.0):
        worker.lend(torch.full((numel,), value))
        assert server.recv_lent(torch.empty(numel)).equal(torch.full((numel,), value))
        worker.flush()


BIG = DIRECT_BYTES // 4  # numbers of 4 bytes


@pytest.mark.parametrize(
    ("sent", "into", "told"),
    [
        (torch.zeros(3), torch.zeros(4), r"lent torch.float32 of shape \(3,\), not \(4,\)"),
        (torch.zeros(3), torch.zeros(3).int(), r"lent torch.float32 of shape \(3,\), not \(3,\)"),
        (torch.zeros(3, 1), torch.zeros(3), r"lent torch.float32 of shape \(3, 1\), not \(3,\)"),
    ],
)
def test_lent_tensor_that_is_not_the_one_awaited_is_refused(ends, sent, into, told):
    server, worker = ends
    worker.lend(sent)
    with pytest.raises(BadMessage, match=f"worker 0 .*{told}"):
        server.recv_into(into)


@pytest.mark.parametrize(
    ("into", "told"),
    [
        (torch.zeros(1000), f"announces a tensor .{BIG}., .* more than was agreed"),
        (torch.zeros(BIG).int(), f"another tensor than the one of {BIG} x torch.int32 awaited here"),
        (torch.zeros(BIG + 9), f"another tensor than the one of {BIG + 9} x torch.float32"),
        (torch.zeros(2 * BIG).half(), f"another tensor than the one of {2 * BIG} x torch.float16"),
    ],
)
def test_large_tensor_that_is_not_the_one_awaited_is_refused_before_gloo_believes_it(gloo_ends, into, told):
    server, worker = gloo_ends
    worker.lend(torch.zeros(BIG))
    with pytest.raises(BadMessage, match=f"worker 0 .*{told}"):
        server.recv_into(into)


@pytest.mark.parametrize("into", [torch.zeros(1000), torch.zeros(BIG).int(), torch.zeros(2 * BIG).half()])
def test_large_tensor_that_is_not_the_one_awaited_is_refused(memory_ends, into):
    server, worker = memory_ends
    worker.lend(torch.zeros(BIG))
    with pytest.raises(BadMessage, match=f"worker 0 lent torch.float32 of shape .{BIG},., not .{len(into)},."):
        server.recv_into(into)


def test_lent_tensor_of_a_peer_with_another_token_is_refused(ends):
    server, worker = ends
    worker._token += 1
    worker.lend(torch.zeros(BIG))
    with pytest.raises(BadMessage, match="link to worker 0 is not from this run"):
        server.recv_into(torch.zeros(BIG))


# Memory


@pytest.mark.parametrize("numel", [1, 1 << 18])
def test_sender_waits_while_both_slots_are_in_use(memory_ends, numel):
    """Or it would write over what the receiver still reads."""
    server, worker = memory_ends
    sent = [torch.full((numel,), float(i)) for i in range(5)]
    posts = threading.Thread(target=lambda: [worker.post(Kind.PUSH, [tensor]) for tensor in sent])
    posts.start()
    got = []
    for tensor in sent:
        values = server.recv().values
        assert values.equal(tensor)
        got.append(values.data_ptr())
    posts.join()
    assert len(set(got)) == 2


def test_what_a_lost_peer_has_sent_before_is_received(memory_ends):
    server, worker = memory_ends
    for step in range(2):
        worker.post(Kind.PUSH, [torch.ones(3)], step=step)
    for half in (worker._out, worker._in):
        half._bell._end.close()
    assert [server.recv().step for _ in range(2)] == [0, 1]
    for action in (server.recv, lambda: server.post(Kind.PARAMS)):
        with pytest.raises(PeerLost, match="worker 0 was lost"):
            action()


@pytest.mark.parametrize("size", [-1, 0, 1, 10**15])
def test_bell_for_a_message_that_is_in_no_memory_is_refused(memory_ends, size):
    server, worker = memory_ends
    worker._out._bell.ring(size)
    with pytest.raises(BadMessage, match=f"worker 0 announces a message of {size} bytes, in memory of 0"):
        server.recv()


def test_bell_for_more_than_there_is_memory_is_refused(memory_ends):
    server, worker = memory_ends
    for _ in range(3):  # both slots are there now
        worker.post(Kind.PULL)
        server.recv()
    worker._out._bell.ring(memory_link.SLOT_BYTES + 1)
    with pytest.raises(BadMessage, match=r"announces a message of 65537 bytes, in memory of 65536"):
        server.recv()


def test_bell_of_another_length_is_refused(memory_ends):
    server, worker = memory_ends
    worker._out._bell._end.send(b"abc")
    with pytest.raises(BadMessage, match="worker 0 rings with 3 bytes, not 8"):
        server.recv()


def not_sealed() -> list[int]:
    """Descriptors of a file, a pipe's ends, a socket, and memory that can be shrunk."""
    memory = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, 4096)
    return [os.open(__file__, os.O_RDONLY), *os.pipe(), memory, socket.socket(socket.AF_UNIX).detach()]


@pytest.mark.parametrize("which", range(5))
def test_memory_that_its_sender_can_shrink_is_refused(memory_ends, which):
    """To read what is no longer there would kill the process."""
    server, worker = memory_ends
    fds = not_sealed()
    worker._out._bell.ring(100, fds[which])
    with pytest.raises(BadMessage, match="worker 0 hands over memory that it can still shrink, or none at all"):
        server.recv()
    for fd in fds:
        os.close(fd)


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_messages_leave_no_descriptor_behind(memory_ends):
    server, worker = memory_ends
    before = open_fds()
    for power in range(6, 20):
        worker.post(Kind.PUSH, [torch.ones(1 << power)])
        server.recv()
    assert open_fds() == before


@pytest.fixture
def door(folder):
    """A server's, which waits for one worker."""
    return Door(folder, Peer("server", 0), token=5)


def knock(folder: str) -> socket.socket:
    caller = socket.socket(socket.AF_UNIX)
    caller.connect(address(folder, Peer("server", 0)))
    return caller


def say(caller: socket.socket, words: bytes, fds: int = 1) -> None:
    ends = socket.socketpair()
    socket.send_fds(caller, [words], [ends[0].fileno()] * fds)


def is_closed(caller: socket.socket) -> bool:
    """By the other end, which may not have read all."""
    try:
        return caller.recv(1) == b""
    except ConnectionResetError:
        return True


GOOD = hello(Peer("worker", 0), 5)
STRANGERS = {
    "garbage": b"x" * len(GOOD),
    "half": GOOD[:7],
    "too much of another": bytes(4096),
    "another token": hello(Peer("worker", 0), 6),
    "a number below zero": hello(Peer("worker", -1), 5),
    "a tag below zero": hello(Peer("worker", 0), 5, -1),
    "itself": hello(Peer("server", 0), 5),
}


@pytest.mark.parametrize("words", STRANGERS.values(), ids=STRANGERS)
def test_stranger_is_turned_away_and_counted_and_the_worker_still_comes_in(door, folder, words):
    stranger, quiet, good = knock(folder), knock(folder), knock(folder)
    say(stranger, words)
    assert is_closed(stranger)
    say(good, GOOD)
    links = door.meet([Peer("worker", 0)])
    assert list(links) == [Peer("worker", 0)]
    assert door.refused == 1
    quiet.close()


def test_worker_that_comes_without_a_bell_for_the_way_back_is_turned_away(door, folder):
    caller = knock(folder)
    caller.send(GOOD)
    assert is_closed(caller)
    assert door.refused == 1


def test_second_worker_of_the_same_name_is_turned_away(door, folder):
    first, second = knock(folder), knock(folder)
    say(first, GOOD)
    door.meet([Peer("worker", 0)])
    say(second, GOOD)
    assert is_closed(second)
    assert door.refused == 1


def test_stranger_that_says_nothing_is_turned_away_after_a_while(door, folder, monkeypatch):
    monkeypatch.setattr(door_module, "HELLO_S", 0.01)
    assert is_closed(knock(folder))
    assert door.refused == 1


def test_folder_with_too_long_a_name_for_a_socket_is_said(folder):
    deep = os.path.join(folder, "x" * 100)
    os.mkdir(deep)
    with pytest.raises(DistlabError, match=r'set TMPDIR to a shorter path, or use LocalCluster\(links="gloo"\)'):
        Door(deep, Peer("server", 0), token=1)


# Tasks, locks, records


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


class HangsUp:
    """Weather in which the link is hung up between the look at it and the sending."""

    def __init__(self, link) -> None:
        self.hold_up = lambda num_bytes: link.hang_up()


@pytest.mark.parametrize("numel", [4, DIRECT_BYTES])
def test_nothing_is_sent_over_gloo_after_the_goodbye(gloo_ends, numel):
    """The other end waits for no more, so it would never leave, and its sender wait for ever."""
    _, worker = gloo_ends
    worker.weather = HangsUp(worker)
    with pytest.raises(PeerLost):
        worker.lend(torch.ones(numel))


def test_link_over_gloo_that_is_hung_up_takes_what_is_larger_than_was_said(gloo_ends):
    """A state is larger than a gradient; gloo would end the process that lends it too little room."""
    server, worker = gloo_ends
    worker.post(Kind.PUSH, [torch.ones(10 * FIRST_BYTES)])
    server.hang_up(16)
    worker.flush()
    with pytest.raises(PeerLost):
        worker.recv()


@pytest.mark.parametrize("links", ["memory", "gloo"])
def test_rank_that_hears_of_a_death_before_it_begins_lets_those_go_who_have_begun(folder, links):
    """They wait on the first links, and have heard nothing yet."""
    counts, task = {"worker": 3}, regression()
    made = []
    for index in range(3):
        record = Recorder("worker", index, Buffer(lambda rows: None))
        made.append(TorchFabric(Peer("worker", index), counts, record, token=5, folder=folder))
    connected(made, links)
    groups = {}

    def begin(fabric) -> None:
        worker = Worker(fabric, task, index=fabric.me.index, num_workers=3, batch_size=4)
        groups[fabric.me.index] = Group(worker, Updater(fabric, task, worker.flat), lambda: None)

    begun, link = threading.Event(), made[0].link("worker", 1)
    post = link.put
    link.put = lambda message: (begun.set(), post(message))[1]
    early = threading.Thread(target=begin, args=(made[0],), daemon=True)
    early.start()
    assert begun.wait(DEADLINE_S)
    made[1].tell("lost", Peer("worker", 2))
    late = threading.Thread(target=begin, args=(made[1],), daemon=True)
    late.start()
    made[0].tell("lost", Peer("worker", 2))
    for thread in (early, late):
        thread.join(DEADLINE_S / 4)
    assert {index: group.ranks.size for index, group in groups.items()} == {0: 2, 1: 2}
