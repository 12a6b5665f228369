"""What does staleness cost? Validation error of digits after 1,200 updates of equal asynchronous workers.

python benchmarks/staleness.py --seeds 5

Equal workers take turns, so every gradient is exactly (workers - 1) updates old. Which staleness one can afford depends
on the learning rate; and on the switches that make old gradients count for less.
"""

import warnings

import click
import numpy as np

import distlab as dl
from distlab import plots

STRATEGIES = {
    "AsyncPS()": dl.AsyncPS(),
    '"1/(1+s)"': dl.AsyncPS(lr_by_staleness="1/(1+s)"),
    "compensated": dl.AsyncPS(compensation=dl.DelayCompensation(strength=0.04)),
}


def error(staleness: int, lr: float, strategy: dl.Strategy, seed: int) -> float:
    """Validation error in per cent; 90 (guessing) if the loss left the finite."""
    task = dl.tasks.digits(lr=lr, seed=seed)
    cluster = dl.SimulatedCluster(staleness + 1, compute=1.0, network=dl.Network(latency_s=0.0), seed=seed)
    try:
        run = dl.train(task, strategy, cluster, num_updates=1200, progress=False)
    except dl.NonFiniteLoss:
        return 90.0
    return 100 * (1 - run.evaluate()["accuracy"])


@click.command()
@click.option("--seeds", default=5, help="How many.")
def main(seeds: int) -> None:
    """A row per staleness and learning rate, a column per strategy: the median over seeds."""
    warnings.simplefilter("ignore", dl.DivergenceWarning)
    rows = []
    for lr in (0.2, 0.05):
        for staleness in (0, 4, 16, 32):
            found = {
                name: round(float(np.median([error(staleness, lr, s, seed) for seed in range(seeds)])), 1)
                for name, s in STRATEGIES.items()
            }
            rows.append({"lr": lr, "staleness": staleness, **{f"{name}, %": value for name, value in found.items()}})
            print(rows[-1], flush=True)
    print("\n" + plots.table(rows))


if __name__ == "__main__":
    main()
