"""How many of 16 workers should be spare? Time to a training loss, over b, with passing stragglers.

python benchmarks/backup_workers.py --seeds 10

Waiting for fewer gradients makes updates sooner, and noisier: the learning rate is that of the batch (linear scaling,
Goyal et al. 2017), so each update also goes less far. Both together make the curve a U.
"""

import click
import numpy as np

import distlab as dl
from distlab import plots

WORKERS, LR, TARGET = 16, 0.2, 0.5
WINDOW = 96  # gradients over which the loss is smoothed
STRAGGLERS = dl.laws.Pareto(alpha=2.0, least_s=1.0)


def seconds_to_loss(num_backup_workers: int, seed: int, late: str = "drop") -> float:
    """Virtual seconds until the smoothed training loss of digits is at the target."""
    waited_for = WORKERS - num_backup_workers
    task = dl.tasks.digits(lr=LR * waited_for / WORKERS).but(batch_size=4, seed=seed)
    cluster = dl.SimulatedCluster(WORKERS, compute=STRAGGLERS, seed=seed)
    strategy = dl.SyncPS(num_backup_workers=num_backup_workers, late=late)
    run = dl.train(task, strategy, cluster, num_updates=60 * WORKERS // waited_for, progress=False)
    losses = run.history["loss"].rolling(WINDOW // waited_for).mean()
    reached = run.history["time_s"][losses <= TARGET]
    return float(reached.iloc[0]) if len(reached) else float("nan")


@click.command()
@click.option("--seeds", default=10, help="How many.")
@click.option("--late", default="drop", help="drop or cancel.")
def main(seeds: int, late: str) -> None:
    """A row per b: mean and standard error over seeds."""
    rows = []
    for b in (0, 1, 2, 3, 4, 6, 8, 10, 12):
        times = np.array([seconds_to_loss(b, seed, late) for seed in range(seeds)])
        error = times.std(ddof=1) / len(times) ** 0.5 if seeds > 1 else float("nan")
        rows.append({"b": b, "N": WORKERS - b, "seconds": round(times.mean(), 1), "±": round(error, 1)})
        print(rows[-1], flush=True)
    print("\n" + plots.table(rows))


if __name__ == "__main__":
    main()
