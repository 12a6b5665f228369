"""Does a calibrated simulation predict the real run? Measured and predicted updates/s, side by side.

    python benchmarks/calibration.py                 # gradients padded to 50 ms: each worker as if it had a device
    python benchmarks/calibration.py --pad-s 0       # real compute, which the workers' cores share

The simulation draws compute times from the run's own trace and is told nothing else about its speed.
"""

import click

import distlab as dl
from distlab import plots

STRATEGIES = (
    dl.SingleWorker(),
    dl.InGraph(),
    dl.AsyncPS(),
    dl.SyncPS(),
    dl.AllReduce(),
    dl.Hogwild(),
    dl.WorkerApplies(),
    dl.BroadcastGradients(),
)


@click.command()
@click.option("--pad-s", default=0.05, show_default=True, help="A gradient takes at least so long.")
@click.option("--rounds", default=50, show_default=True, help="Gradients per worker.")
def main(pad_s: float, rounds: int) -> None:
    """Print one line per strategy and number of workers, and the worst prediction."""
    rows = []
    for num_workers in (2, 4, 8):
        with dl.LocalCluster(num_workers, compute_time_s=pad_s) as cluster:
            for strategy in STRATEGIES:
                rows.append(predict(strategy, cluster, rounds))
                print(plots.table(rows[-1:]), flush=True)
    print("\n" + plots.table(rows))
    worst = max(rows, key=lambda row: abs(float(row["ratio"]) - 1))
    print(f"worst: {worst['strategy']} with {worst['workers']} workers, {worst['ratio']} of the measured rate")


def predict(strategy: dl.Strategy, cluster: dl.LocalCluster, rounds: int) -> dict[str, object]:
    """One real run and the simulation that was made like it."""
    task = dl.tasks.digits(lr=0.05)
    samples = rounds * task.batch_size * (1 if isinstance(strategy, dl.SingleWorker) else cluster.num_workers)
    real = dl.train(task, strategy, cluster, num_samples=samples, progress=False)
    like = dl.SimulatedCluster.like(real)
    simulated = dl.train(task, strategy, like, num_updates=real.num_updates, progress=False)
    return {
        "strategy": repr(strategy),
        "workers": cluster.num_workers,
        "measured/s": round(real.updates_per_s, 1),
        "predicted/s": round(simulated.updates_per_s, 1),
        "ratio": round(simulated.updates_per_s / real.updates_per_s, 3),
    }


if __name__ == "__main__":
    main()
