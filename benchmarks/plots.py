"""How long does each picture of a million events take? Seconds, drawing included, on one core.

python benchmarks/plots.py
"""

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from matplotlib.figure import Figure

import distlab as dl
from distlab import plots
from distlab.trace import Trace

EVENTS = 1_000_000
STRATEGIES = (dl.AsyncPS(), dl.SyncPS(num_backup_workers=1))


def main() -> None:
    """Every picture of a run of each strategy, on eight workers of which one is slow; best of 3."""
    rows = []
    for strategy in STRATEGIES:
        run = long_run(strategy)
        for name, picture in pictures(run).items():
            rows.append({"strategy": run.strategy, "picture": name, "events": len(run.trace)})
            rows[-1]["s"] = round(min(seconds(picture) for _ in range(3)), 2)
    print(plots.table(rows))


def pictures(run: dl.Run) -> dict[str, Callable[[], Figure]]:
    """Each picture of all of a run, by name."""
    span_s = run.seconds
    return {
        "plot_loss": lambda: plots.plot_loss(run),
        "plot_speedup": lambda: plots.plot_speedup({"runs": [run]}),
        "plot_timeline": lambda: plots.plot_timeline(run, to_s=span_s),
        "plot_utilization": lambda: plots.plot_utilization(run),
        "plot_staleness": lambda: plots.plot_staleness(run),
        "plot_versions": lambda: plots.plot_versions(run),
        "plot_traffic": lambda: plots.plot_traffic(run),
        "plot_ledger": lambda: plots.plot_ledger(run),
        "plot_comparison": lambda: plots.plot_comparison(run, span_s=span_s),
        "plot_overview": lambda: plots.plot_overview(run),
    }


def seconds(picture: Callable[[], Figure]) -> float:
    """How long it takes to make a figure and draw it."""
    start = time.perf_counter()
    picture().canvas.draw()
    return time.perf_counter() - start


def long_run(strategy: dl.Strategy, events: int = EVENTS) -> dl.Run:
    """A run of so many events: the rows of a real one, time after time."""
    cluster = dl.SimulatedCluster(8, compute=dl.laws.Exponential(mean_s=0.1), network=dl.Network(latency_s=0.01))
    run = dl.train(dl.tasks.digits(), strategy, cluster.slow(worker=3, factor=3), num_updates=400, progress=False)
    once = run.trace.rows
    fates = [run.trace.select(kind)[["worker", "step"]].tolist() for kind in ("apply", "drop", "unused")]
    known = {pair for pairs in fates for pair in pairs}  # the others were under way at the end
    once = once[[step < 0 or (worker, step) in known for worker, step in once[["worker", "step"]].tolist()]]
    times = -(-events // len(once))
    rows, turn = np.tile(once, times)[:events], np.repeat(np.arange(times), len(once))[:events]
    for field, ahead in (("version", run.version), ("read", run.version), ("step", once["step"].max() + 1)):
        rows[field] += np.where(rows[field] >= 0, turn * ahead, 0)
    rows["start_s"] += turn * run.seconds
    rows["end_s"] += turn * run.seconds
    return replace(run, trace=Trace(rows), version=run.version * times)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
