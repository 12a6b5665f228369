"""The two misreadings of "who applies the update?", measured."""

import numpy as np
import pytest
from toys import countdown, together, train, train_together

import distlab as dl


@pytest.fixture(scope="module")
def written(padded):
    """Four workers who write back what they made of parameters that were old by then."""
    return train_together(countdown(), dl.WorkerApplies(), padded, 30)


@pytest.fixture(scope="module")
def broadcast(four):
    return train_together(dl.tasks.digits(), dl.BroadcastGradients(), four, 40)


def test_worker_applies_counts_every_write_as_a_version(written):
    assert written.trace.select("store")["version"].tolist() == list(range(1, written.version + 1))
    assert written.version >= 4 * 29


def test_worker_applies_is_applied_by_the_workers(written):
    assert written.who_applied == [f"worker {i}" for i in range(4)]


def chain(run: dl.Run) -> list[int]:
    """The writes that are in the final parameters: the last, the one that it was made from, and so on."""
    read = {int(row["version"]): int(row["read"]) for row in run.trace.select("store")}
    versions = [run.version]
    while read[versions[-1]]:
        versions.append(read[versions[-1]])
    return versions


def test_worker_applies_keeps_the_updates_on_one_chain_of_writes(written):
    assert written.params[0] == -len(chain(written)) > -written.version


def test_worker_applies_loses_most_updates(written):
    """While all four write, about one in four survives."""
    meanwhile = together(written.trace.select("store"))
    survivors = [version for version in chain(written) if version in meanwhile]
    assert len(meanwhile) > 80
    assert len(survivors) < len(meanwhile) / 2


def test_worker_applies_with_one_worker_loses_nothing(one):
    assert train(countdown(), dl.WorkerApplies(), one, 50).params[0] == -50


def test_broadcast_gradients_is_applied_by_everybody(broadcast):
    assert broadcast.who_applied == ["server 0", *(f"worker {i}" for i in range(4))]
    for worker in range(4):
        own = broadcast.trace.select("apply", who=f"worker {worker}")["version"].tolist()
        assert own == list(range(own[0], own[-1] + 1)), "every update since its first pull, in the one order"
        assert len(own) >= 39


def test_broadcast_gradients_sends_every_gradient_to_every_worker(broadcast):
    """Up once, down to each of P; asynchronously: up once, down once."""
    per_gradient = broadcast.trace.select("push")["bytes"].max()
    for worker in range(4):
        pulls = broadcast.trace.select("pull", worker=worker)
        applied = len(broadcast.trace.select("apply", who=f"worker {worker}"))
        assert (pulls["bytes"] > per_gradient).sum() == applied, "a message each, with its author"


def test_broadcast_gradients_costs_more_bytes_an_update(broadcast, four):
    """While all P are there, P + 1 messages of the model's size and not 2: 5 / 2, and some headers."""
    right = train_together(dl.tasks.digits(), dl.AsyncPS(), four, 40)
    assert 2.2 < bytes_per_update(broadcast) / bytes_per_update(right) < 3.0


def bytes_per_update(run: dl.Run) -> float:
    applied = run.trace.select("apply", who="server 0")
    meanwhile = together(applied)
    times = applied[np.isin(applied["version"], [meanwhile[0], meanwhile[-1]])]["end_s"]
    rows = run.trace.rows[(run.trace.rows["end_s"] > times.min()) & (run.trace.rows["end_s"] <= times.max())]
    return rows["bytes"].sum() / len(meanwhile)


def test_broadcast_gradients_loses_nothing(four):
    assert train(countdown(), dl.BroadcastGradients(), four, 100).params[0] == -100
