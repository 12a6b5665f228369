"""The stream of samples: N workers see together what one sees alone, every sample equally often."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distlab.data import Stream, length_of, pieces, size_of

SMALL = st.integers(1, 7)


def whole(length: int, batch_size: int, steps: int, seed: int) -> list[int]:
    stream = Stream((torch.arange(length),), batch_size=batch_size, seed=seed)
    return [int(i) for step in range(steps) for i in stream.indices(step)]


@given(length=st.integers(1, 40), batch=SMALL, workers=SMALL, steps=SMALL, seed=st.integers(0, 99))
def test_workers_share_out_what_one_sees_alone(length, batch, workers, steps, seed):
    data = (torch.arange(length),)
    streams = [Stream(data, batch_size=batch, index=w, num_workers=workers, seed=seed) for w in range(workers)]
    together = [int(i) for step in range(steps) for stream in streams for i in stream.indices(step)]
    assert together == whole(length, batch * workers, steps, seed)


@given(length=st.integers(1, 40), batch=SMALL, seed=st.integers(0, 99))
def test_each_epoch_is_a_permutation(length, batch, seed):
    seen = whole(length, batch, 3 * length, seed)[: 2 * length]
    assert sorted(seen[:length]) == sorted(seen[length:]) == list(range(length))


def test_epochs_and_seeds_have_orders_of_their_own():
    seen = whole(50, 10, 10, seed=0)
    assert seen[:50] != seen[50:]
    assert seen[:50] != whole(50, 10, 5, seed=1)


def test_batches_can_be_asked_for_in_any_order():
    stream = Stream((torch.arange(10),), batch_size=4, seed=3)
    forward = [list(stream.indices(step)) for step in range(8)]
    assert [list(stream.indices(step)) for step in reversed(range(8))] == forward[::-1]


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 9])
def test_pieces_of_a_batch_are_the_batch(parts):
    batch = {"x": torch.arange(10).view(5, 2), "y": torch.arange(5)}
    cut = pieces(batch, parts)
    assert len(cut) == min(parts, 5)
    assert max(map(size_of, cut)) - min(map(size_of, cut)) <= 1
    assert all(torch.cat([p[name] for p in cut]).equal(batch[name]) for name in batch)


def test_dataset_items_are_collated():
    class Items:
        def __len__(self):
            return 4

        def __getitem__(self, i):
            return torch.tensor([i, i]), i % 2

    stream = Stream(Items(), batch_size=3)
    wanted = [int(i) for i in stream.indices(0)]
    x, y = stream.batch(0)
    assert (x.tolist(), y.tolist()) == ([[i, i] for i in wanted], [i % 2 for i in wanted])
    assert length_of(Items()) == 4
