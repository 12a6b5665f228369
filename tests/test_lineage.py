"""Which updates survive when workers write parameters back: by descent, and by a model that counts."""

import math

import numpy as np
import pytest

import distlab as dl
from distlab.exercises.who_applies import counting_task
from distlab.reports import Survivors, survivors
from distlab.trace import EVENT, KINDS, Trace


def stores(*pairs: tuple[int, int]) -> Trace:
    """A trace of writes: (version that the worker had read, version that its write became)."""
    rows = np.zeros(len(pairs), EVENT)
    rows["kind"], rows["end_s"] = KINDS.index("store"), range(len(pairs))
    rows["read"], rows["version"] = zip(*pairs, strict=True)
    return Trace(rows)


def test_survivors_are_the_ancestors_of_the_last_write():
    five = stores((0, 1), (0, 2), (1, 3), (2, 4), (3, 5))  # 5 was made from 3, that from 1, that from 0
    assert survivors(five) == Survivors(stores=5, surviving=3, share=0.6)


def test_survivors_do_not_depend_on_the_order_in_which_events_were_heard():
    assert survivors(stores((3, 5), (0, 2), (2, 4), (1, 3), (0, 1))).surviving == 3


def test_a_write_that_nobody_overwrote_is_not_enough_to_save_an_earlier_one():
    assert survivors(stores((0, 1), (1, 2), (2, 3), (0, 4))).surviving == 1


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_survivors_of_workers_in_turn_are_one_in_p(workers):
    trace = stores(*((max(0, version - workers), version) for version in range(1, 402)))
    assert survivors(trace).surviving == math.ceil(401 / workers)


def test_a_trace_without_writes_is_refused():
    with pytest.raises(ValueError, match="no 'store' event: survivors are counted in runs of WorkerApplies"):
        survivors(Trace(np.zeros(3, EVENT)))


@pytest.mark.parametrize("pairs", [[(0, 1), (2, 3)], [(0, 1), (2, 2)], [(0, 1), (3, 2)], [(-1, 1)]])
def test_a_descent_that_does_not_reach_version_0_is_refused(pairs):
    with pytest.raises(ValueError, match=r"from which older version version -?\d was made"):
        survivors(stores(*pairs))


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_counting_model_ends_at_the_number_of_survivors(workers):
    cluster = dl.SimulatedCluster(workers)
    run = dl.train(counting_task(), dl.WorkerApplies(), cluster, num_updates=60, progress=False)
    found = survivors(run.trace)
    assert found.stores == 60
    assert run.model.count.item() == found.surviving
    assert (found.surviving == 60) == (workers == 1)


def test_what_survives_is_the_work_of_the_last_writer_alone():
    with dl.LocalCluster(3) as cluster:
        run = dl.train(counting_task(), dl.WorkerApplies(), cluster, num_updates=60, progress=False)
    rows = run.trace.select("store")
    own = rows[rows["worker"] == rows["worker"][-1]]
    before = rows[rows["version"] <= own["read"][0]]  # others may have begun sooner: what it first read is kept
    kept = survivors(Trace(before)).surviving if len(before) else 0
    assert survivors(run.trace).surviving == len(own) + kept


def test_a_server_that_applies_loses_none():
    with dl.LocalCluster(3) as cluster:
        run = dl.train(counting_task(), dl.AsyncPS(locking="server"), cluster, num_updates=60, progress=False)
    assert run.model.count.item() == 60
