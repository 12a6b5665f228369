"""Oracles: whatever the number of ranks and the size of the tensor, all ranks hold the sum, in the same bits."""

import queue
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distlab.collectives import Ranks, all_reduce, broadcast, ring_all_reduce
from distlab.fabric import Kind, Link, Message


class MemoryLink(Link):
    """Two queues: what the other end posts, this one receives. A message is a copy, as on a wire."""

    def __init__(self, inbox: queue.Queue, outbox: queue.Queue) -> None:
        self.inbox, self.outbox = inbox, outbox

    def put(self, message) -> int:
        self.outbox.put(message._replace(tensors=[t.clone() for t in message.tensors]))
        return sum(t.numel() * t.element_size() for t in message.tensors)

    def flush(self) -> None:
        pass

    def recv(self) -> Message:
        return self.inbox.get(timeout=10)


def on_every_rank(collective, tensors: list[torch.Tensor]) -> list[Ranks]:
    """Run `collective` with a thread per rank, each on its own tensor; returns the ranks."""
    size = len(tensors)
    boxes = {(i, j): queue.Queue() for i in range(size) for j in range(size)}
    links = [[MemoryLink(boxes[j, i], boxes[i, j]) if i != j else None for j in range(size)] for i in range(size)]
    ranks = [Ranks(i, links[i]) for i in range(size)]
    threads = [threading.Thread(target=collective, args=pair) for pair in zip(ranks, tensors, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(box.empty() for box in boxes.values()), "somebody sent what nobody wanted"
    return ranks


def random_tensors(size: int, numel: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(size * 1000 + numel)
    return [torch.randn(numel, dtype=torch.float64, generator=generator) for _ in range(size)]


@pytest.mark.parametrize("numel", [1, 2, 6, 7, 13, 1000])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("collective", [ring_all_reduce, all_reduce])
def test_all_reduce_is_the_sum(collective, size, numel):
    tensors = random_tensors(size, numel)
    want = torch.stack(tensors).sum(0)
    on_every_rank(collective, tensors)
    for got in tensors:
        torch.testing.assert_close(got, want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("size", [2, 3, 7])
def test_all_reduce_leaves_the_same_bits_everywhere(size):
    tensors = random_tensors(size, 1001)
    on_every_rank(all_reduce, tensors)
    assert all(got.equal(tensors[0]) for got in tensors)


@settings(deadline=None, max_examples=40)
@given(size=st.integers(1, 8), numel=st.integers(1, 50), seed=st.integers(0, 2**31))
def test_all_reduce_of_whole_numbers_is_exact(size, numel, seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randint(-9, 9, (numel,), generator=generator).double() for _ in range(size)]
    want = torch.stack(tensors).sum(0)
    on_every_rank(all_reduce, tensors)
    assert all(got.equal(want) for got in tensors)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_ring_sends_2_p_minus_1_over_p_of_the_tensor(size):
    numel = 42
    ranks = on_every_rank(ring_all_reduce, random_tensors(size, numel))
    assert [r.sent_bytes for r in ranks] == [2 * (size - 1) * numel // size * 8] * size


@pytest.mark.parametrize("size", [1, 2, 5])
def test_broadcast_copies_rank_0(size):
    tensors = random_tensors(size, 9)
    first = tensors[0].clone()
    on_every_rank(broadcast, tensors)
    assert all(got.equal(first) for got in tensors)


def test_rank_does_not_send_to_itself():
    with pytest.raises(AssertionError, match="a rank does not send to itself"):
        Ranks(0, [None, None]).post(0, torch.ones(1))


def test_collectives_send_data_messages():
    here, there = queue.Queue(), queue.Queue()
    Ranks(0, [None, MemoryLink(here, there)]).post(1, torch.ones(1))
    assert there.get().kind is Kind.DATA
