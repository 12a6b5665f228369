"""Random clusters, laws, networks, faults and strategies: what is true of every run. `make fuzz` draws more."""

import os

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import distlab as dl
from distlab.check import APPLIES, LAWS, NETWORKS, Case, report, violations
from distlab.fabric.network import Change

STRATEGIES = (
    dl.SingleWorker(), dl.InGraph(), dl.AsyncPS(), dl.AsyncPS(locking="server"), dl.SyncPS(), dl.AllReduce(),
    dl.Hogwild(), dl.WorkerApplies(), dl.BroadcastGradients(),
)  # fmt: skip


@st.composite
def changes(draw, num_workers):
    kind, worker = (
        draw(st.sampled_from(("slow", "throttle", "partition", "kill"))),
        draw(st.integers(0, num_workers - 1)),
    )
    start_s, length_s = draw(st.floats(0, 2)), draw(st.floats(0.01, 3))
    if kind == "kill":
        return Change(kind, worker, start_s)
    factor = {"slow": draw(st.floats(0.2, 20)), "throttle": draw(st.floats(0.05, 1))}.get(kind, 1.0)
    return Change(kind, worker, start_s, start_s + length_s, factor)


@st.composite
def cases(draw):
    num_workers = draw(st.integers(1, 9))
    return Case(
        draw(st.sampled_from(STRATEGIES)),
        num_workers,
        draw(st.integers(1, 25)),
        draw(st.sampled_from(LAWS)),
        draw(st.sampled_from(NETWORKS)),
        draw(st.sampled_from(APPLIES)),
        tuple(draw(st.lists(changes(num_workers), max_size=4))),
        draw(st.sampled_from(("sgd", "momentum", "adam"))),
        draw(st.integers(0, 1000)),
    )


MORE = os.environ.get("DISTLAB_FUZZ")  # so many examples, new ones each time


@settings(
    max_examples=int(MORE or 20),
    derandomize=not MORE,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
@given(cases())
def test_whatever_happens_every_run_keeps_what_is_true_of_all(case):
    assert not violations(case), report(case)
