"""The two misreadings of "who applies the update?", measured."""

import pytest
from toys import countdown, train

import distlab as dl


@pytest.fixture(scope="module")
def written(padded):
    """Four workers who write back what they made of parameters that were old by then."""
    return train(countdown(), dl.WorkerApplies(), padded, 120)


@pytest.fixture(scope="module")
def broadcast(four):
    return train(dl.tasks.digits(), dl.BroadcastGradients(), four, 150)


def test_worker_applies_counts_every_write_as_a_version(written):
    assert written.trace.select("store")["version"].tolist() == list(range(1, 121))
    assert written.version == 120


def test_worker_applies_is_applied_by_the_workers(written):
    assert written.who_applied == [f"worker {i}" for i in range(4)]


def test_worker_applies_loses_most_updates(written):
    """With the server applying, the parameter would be -120; of four workers' updates about 30 survive."""
    assert -60 < written.params[0] < 0


def test_worker_applies_keeps_the_updates_on_one_chain_of_writes(written):
    read = {int(row["version"]): int(row["read"]) for row in written.trace.select("store")}
    version, survivors = 120, 0
    while version:
        version, survivors = read[version], survivors + 1
    assert written.params[0] == -survivors


def test_worker_applies_with_one_worker_loses_nothing(one):
    assert train(countdown(), dl.WorkerApplies(), one, 50).params[0] == -50


def test_broadcast_gradients_is_applied_by_everybody(broadcast):
    assert broadcast.who_applied == ["server 0", *(f"worker {i}" for i in range(4))]
    for worker in range(4):
        own = broadcast.trace.select("apply", who=f"worker {worker}")["version"].tolist()
        assert own == list(range(own[0], own[-1] + 1)), "every update since its first pull, in the one order"
        assert len(own) > 30


def test_broadcast_gradients_sends_every_gradient_to_every_worker(broadcast):
    """Up once, down to each of P; asynchronously: up once, down once."""
    per_gradient = broadcast.trace.select("push")["bytes"].max()
    for worker in range(4):
        pulls = broadcast.trace.select("pull", worker=worker)
        applied = len(broadcast.trace.select("apply", who=f"worker {worker}"))
        assert (pulls["bytes"] > per_gradient).sum() == applied, "a message each, with its author"


def test_broadcast_gradients_costs_more_bytes_an_update(broadcast, four):
    right = train(dl.tasks.digits(), dl.AsyncPS(), four, 150)
    ratio = broadcast.bytes_sent / right.bytes_sent
    assert 2.0 < ratio <= (1 + 4) / 2 * 1.02  # (1 + P) / 2 without headers and the ends of the run


def test_broadcast_gradients_loses_nothing(four):
    assert train(countdown(), dl.BroadcastGradients(), four, 100).params[0] == -100
