"""How fast is the simulator? Updates per second of wall time, and memory, on one core.

python benchmarks/simulator.py
"""

import resource
import time

import distlab as dl
from distlab import plots

CASES = (
    ("64 workers, real gradients", 64, "real", 6_000),
    ("64 workers, timing alone", 64, "none", 30_000),
    ("1,000 workers x 20 steps, real gradients", 1_000, "real", 20_000),
)


def main() -> None:
    """Three cases of `AsyncPS` on the digits network, batches of 32; the best of three rounds."""
    task, rows = dl.tasks.digits(lr=0.01), []
    for name, num_workers, gradients, num_updates in CASES:
        best = min(measure(task, num_workers, gradients, num_updates) for _ in range(3))
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
        rows.append({"case": name, "s": round(best, 2), "updates/s": round(num_updates / best), "MB": round(memory)})
        print(plots.table(rows[-1:]), flush=True)
    print("\n" + plots.table(rows))


def measure(task: dl.Task, num_workers: int, gradients: str, num_updates: int) -> float:
    """Seconds for one run, set-up included."""
    cluster = dl.SimulatedCluster(num_workers, gradients=gradients, seed=7)
    start = time.perf_counter()
    dl.train(task, dl.AsyncPS(), cluster, num_updates=num_updates, progress=False)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
