"""Random clusters, laws, networks, faults and strategies: what is true of every run. `make fuzz` draws more."""

import os

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toys import FAMILY, PLAIN

from distlab.check import APPLIES, LAWS, NETWORKS, Case, report, sizes, violations
from distlab.fabric.network import Change

STRATEGIES = PLAIN + FAMILY


@st.composite
def changes(draw, strategy, num_workers):
    kinds = ("slow", "throttle", "partition", "kill", *(("add_worker", "remove_worker") if not strategy.fixed else ()))
    kind, worker = draw(st.sampled_from(kinds)), draw(st.integers(0, num_workers - 1))
    start_s, length_s = draw(st.floats(0, 2)), draw(st.floats(0.01, 3))
    if kind in ("add_worker", "remove_worker"):
        return Change(kind, -1 if kind == "add_worker" else worker, start_s)
    if kind == "kill":
        return Change(kind, worker, start_s)
    factor = {"slow": draw(st.floats(0.2, 20)), "throttle": draw(st.floats(0.05, 1))}.get(kind, 1.0)
    return Change(kind, worker, start_s, start_s + length_s, factor)


@st.composite
def cases(draw):
    strategy = draw(st.sampled_from(STRATEGIES))
    num_workers = draw(st.sampled_from(sizes(strategy, range(1, 10))))
    return Case(
        strategy,
        num_workers,
        draw(st.integers(1, 25)),
        draw(st.sampled_from(LAWS)),
        draw(st.sampled_from(NETWORKS)),
        draw(st.sampled_from(APPLIES)),
        tuple(draw(st.lists(changes(strategy, num_workers), max_size=4))),
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
