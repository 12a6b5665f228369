"""How fast is the simulator? Updates per second of wall time beside plain torch in the same minute, on one core.

python benchmarks/simulator.py
"""

import resource
import time

import torch

import distlab as dl
from distlab import plots
from distlab.data import Stream

CASES = (
    ("64 workers, real gradients", 64, "real", 6_000),
    ("64 workers, timing alone", 64, "none", 30_000),
    ("1,000 workers x 20 steps, real gradients", 1_000, "real", 20_000),
)


def main() -> None:
    """Three cases of `AsyncPS` on the digits network, batches of 32, each before and after a plain loop; best of 3."""
    task, rows = dl.tasks.digits(lr=0.01), []
    for name, num_workers, gradients, num_updates in CASES:
        pairs = [(plain(task, 2_000), measure(task, num_workers, gradients, num_updates)) for _ in range(3)]
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
        loop, best = max(p for p, _ in pairs), max(rate for _, rate in pairs)
        row = {"case": name, "s": round(num_updates / best, 2), "updates/s": round(best), "MB": round(memory)}
        rows.append(row | {"plain torch, steps/s": round(loop), "ratio": round(best / loop, 2)})
        print(plots.table(rows[-1:]), flush=True)
    print("\n" + plots.table(rows))


def plain(task: dl.Task, steps: int) -> float:
    """Steps per second of a loop without distlab, on one thread."""
    torch.set_num_threads(1)
    model, stream = task.build(), Stream(task.train, batch_size=task.batch_size)
    optimizer, start = task.optimizer(list(model.parameters())), time.perf_counter()
    for step in range(steps):
        optimizer.zero_grad()
        batch = stream.batch(step)
        loss = task.loss_of(task.outputs(model, batch), batch)
        loss.backward()
        optimizer.step()
        loss.item()
    return steps / (time.perf_counter() - start)


def measure(task: dl.Task, num_workers: int, gradients: str, num_updates: int) -> float:
    """Updates per second of one run, set-up included."""
    cluster = dl.SimulatedCluster(num_workers, gradients=gradients, seed=7)
    start = time.perf_counter()
    dl.train(task, dl.AsyncPS(), cluster, num_updates=num_updates, progress=False)
    return num_updates / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
