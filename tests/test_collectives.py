"""Oracles: whatever the algorithm, the number of ranks and the size, all hold the sum, in the same bits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import countdown, regression, train

import distlab as dl
from distlab.collectives import ALGORITHMS, SMALL_BYTES, Loop, Ranks, all_reduce, broadcast, in_one_thread
from distlab.fabric import Kind

each_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)
SIZES = [1, 2, 3, 5, 6, 7, 8, 16]


def random_tensors(size: int, numel: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(size * 1000 + numel)
    return [torch.randn(numel, dtype=torch.float64, generator=generator) for _ in range(size)]


def reduced(algorithm: str, tensors: list[torch.Tensor]) -> list[Ranks]:
    return in_one_thread(lambda ranks, tensor: all_reduce(ranks, tensor, algorithm), tensors)


@each_algorithm
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("numel", [1, 2, 6, 7, 13, 1000])
def test_all_reduce_is_the_sum(algorithm, size, numel):
    tensors = random_tensors(size, numel)
    want = torch.stack(tensors).sum(0)
    reduced(algorithm, tensors)
    torch.testing.assert_close(tensors[0], want, rtol=0, atol=1e-12)
    assert all(got.equal(tensors[0]) for got in tensors), "the same bits everywhere"


@settings(deadline=None, max_examples=60)
@given(
    algorithm=st.sampled_from(list(ALGORITHMS)), size=st.integers(1, 9), numel=st.integers(1, 50),
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_all_reduce_of_whole_numbers_is_exact(algorithm, size, numel, seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randint(-9, 9, (numel,), generator=generator).double() for _ in range(size)]
    want = torch.stack(tensors).sum(0)
    reduced(algorithm, tensors)
    assert all(got.equal(want) for got in tensors)


#: What the busiest of p ranks sends, in tensors, where p is a power of two.
MOST_SENT = {
    "ring": lambda p: 2 * (p - 1) / p,
    "halving-doubling": lambda p: 2 * (p - 1) / p,
    "recursive doubling": math.log2,
    "tree": math.log2,
    "rank 0": lambda p: p - 1,
}


@pytest.mark.parametrize("size", [2, 4, 8, 16])
@pytest.mark.parametrize("algorithm", MOST_SENT)
def test_busiest_rank_sends_what_the_table_says(algorithm, size):
    ranks = reduced(algorithm, random_tensors(size, 64))
    assert max(r.sent_bytes for r in ranks) == MOST_SENT[algorithm](size) * 64 * 8


@pytest.mark.parametrize("algorithm", ["ring", "halving-doubling"])
def test_bandwidth_optimal_algorithms_load_all_ranks_alike(algorithm):
    assert len({r.sent_bytes for r in reduced(algorithm, random_tensors(8, 64))}) == 1


def test_automatic_choice_takes_few_messages_for_small_tensors_and_few_bytes_for_large_ones():
    few, many = SMALL_BYTES // 8, SMALL_BYTES // 8 + 8
    assert max(r.sent_bytes for r in reduced("auto", random_tensors(8, few))) == 3 * few * 8
    assert max(r.sent_bytes for r in reduced("auto", random_tensors(8, many))) == 2 * 7 / 8 * many * 8


LINKS = {"latency_s": 1e-3, "bandwidth_bytes_per_s": 1e8}
IN_THEORY = {"halving-doubling": "rabenseifner"}  # the others have the same name there


@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize("algorithm", ["ring", "halving-doubling", "recursive doubling", "tree"])
def test_all_reduce_takes_as_long_as_its_closed_form(algorithm, size):
    model = lambda: torch.nn.Linear(1_000_000, 1, bias=False)  # noqa: E731
    task = countdown(model=model, train=(torch.zeros(16, 1_000_000), torch.zeros(16)))
    cluster = dl.SimulatedCluster(size, compute=1.0, network=dl.Network(**LINKS), gradients="none")
    run = train(task, dl.AllReduce(algorithm=algorithm), cluster, 20)
    expected = dl.theory.all_reduce_s(IN_THEORY.get(algorithm, algorithm), 4e6, size, **LINKS)
    assert 1 / run.updates_per_s - 1 == pytest.approx(expected, rel=0.01)


@each_algorithm
def test_every_algorithm_trains_alike_and_replays_to_the_same_bits(algorithm):
    runs = [
        train(regression("momentum"), dl.AllReduce(algorithm=name), dl.SimulatedCluster(5), 20)
        for name in (algorithm, "ring")
    ]
    torch.testing.assert_close(runs[0].params, runs[1].params, rtol=0, atol=1e-12)
    assert runs[0].replay().params.equal(runs[0].params)


@each_algorithm
def test_every_algorithm_runs_on_real_processes(two, algorithm):
    made = train(regression(), dl.AllReduce(algorithm=algorithm), two, 10)
    assert made.replay().params.equal(made.params)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_broadcast_copies_rank_0(size):
    tensors = random_tensors(size, 9)
    first = tensors[0].clone()
    in_one_thread(broadcast, tensors)
    assert all(got.equal(first) for got in tensors)


def test_unknown_algorithm_names_its_neighbour():
    with pytest.raises(ValueError, match="algorithm='rings': did you mean 'ring'"):
        dl.AllReduce(algorithm="rings")


def test_rank_does_not_send_to_itself():
    with pytest.raises(AssertionError, match="a rank does not send to itself"):
        Ranks(0, [None, None]).post(0, torch.ones(1))


def test_collectives_send_data_messages():
    here = Loop()
    Ranks(0, [None, here]).post(1, torch.ones(1))
    assert here.inbox[0].kind is Kind.DATA
