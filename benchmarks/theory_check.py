"""Closed form beside simulation, from larger samples than the tests take: a few minutes on one core.

    python benchmarks/theory_check.py

The measured column comes from ordinary runs of the strategies on `SimulatedCluster`; the functions that measure are
those of tests/test_theory_against_simulator.py.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from test_theory_against_simulator import EXPONENTIAL, heavy_ball, path, timed

import distlab as dl
from distlab.reports import survivors

RUNS = 2000  # for the momentum
UPDATES = 50_000  # for everything else
#: Workers, learning rate and updates with which the momentum shows best.
MOMENTUM = [(2, 0.55, 8), (4, 0.3, 12), (8, 0.3, 20), (16, 0.2, 30)]


def rows() -> Iterator[tuple[str, float, float]]:
    """What, closed form, measured."""
    run = timed(dl.AsyncPS(), 8, UPDATES, EXPONENTIAL)
    yield "AsyncPS, P = 8: mean staleness", dl.theory.mean_staleness(8), run.mean_staleness
    staleness = (run.applies["version"] - 1 - run.applies["read"])[100:]
    for age in range(4):
        yield f"  share with staleness {age}", dl.theory.staleness_probability(age, 8), np.mean(staleness == age)
    for p in (1, 4, 8, 16):
        run = timed(dl.AsyncPS(locking="server"), p, UPDATES, EXPONENTIAL, dl.laws.Exponential(mean_s=0.1))
        expected = dl.theory.server_updates_per_s(p, compute_s=1.0, apply_s=0.1)
        yield f"AsyncPS, P = {p}, one serial server: updates/s", expected, run.updates_per_s
        yield "  mean staleness", dl.theory.mean_staleness(p), run.mean_staleness
    for p in (2, 4, 8):
        share = survivors(timed(dl.WorkerApplies(), p, UPDATES, EXPONENTIAL).trace).share
        yield f"WorkerApplies, P = {p}: surviving share", dl.theory.surviving_share(p), share
    for p in (2, 8):
        update_s = 1 / timed(dl.SyncPS(), p, UPDATES // p, EXPONENTIAL).updates_per_s
        yield f"SyncPS, P = {p}: s per update", dl.theory.exponential_arrival_s(p, p, tail_s=1.0), update_s
    for p, lr, updates in MOMENTUM:
        momentum, rate = heavy_ball(np.stack([path(p, lr, updates, seed) for seed in range(RUNS)]))
        yield f"AsyncPS, P = {p}: momentum of the mean of {RUNS} runs", dl.theory.implicit_momentum(p), momentum
        yield "  its learning rate", lr / p, rate


if __name__ == "__main__":
    print(f"{'':58}{'theory':>10}{'measured':>10}{'off by':>9}")
    for what, expected, measured in rows():
        off = f"{measured / expected - 1:+.2%}" if expected else ""
        print(f"{what:58}{expected:10.4f}{measured:10.4f}{off:>9}", flush=True)
