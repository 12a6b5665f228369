"""A cluster with one worker that is slower than the others: what each strategy loses by it, beside the closed forms.

python benchmarks/mixed_cluster.py

Four workers take t = 50 ms for a gradient, most of it slept; then one of them takes 4 t. Asynchronous training loses
that one's share and nothing else, (3 + 1/4) / 4; synchronous and in-graph training run at its pace, 1/4; with one spare
a synchronous server does not wait for it. Each figure is the rate with the slow worker, divided by the one without.
"""

import warnings

import click

import distlab as dl
from distlab import plots
from distlab.errors import DivergenceWarning

WORKERS, SLOW, COMPUTE_S = 4, 4, 0.05
ROWS: dict[str, tuple[dl.Strategy, float]] = {
    "AsyncPS": (dl.AsyncPS(), (WORKERS - 1 + 1 / SLOW) / WORKERS),
    "SyncPS": (dl.SyncPS(), 1 / SLOW),
    "SyncPS, one spare": (dl.SyncPS(num_backup_workers=1), 1.0),
    "AllReduce": (dl.AllReduce(), 1 / SLOW),
    "InGraph": (dl.InGraph(), 1 / SLOW),
}


def rate(strategy: dl.Strategy, cluster: dl.Cluster, seconds: float) -> float:
    """Updates per second of a run that would take so many seconds with equal workers."""
    each = WORKERS if strategy.gradients_per_update(WORKERS) == 1 else 1
    task = dl.tasks.digits(lr=0.01)
    return dl.train(
        task, strategy, cluster, num_updates=round(each * seconds / COMPUTE_S), progress=False
    ).updates_per_s


@click.command()
@click.option("--seconds", default=5.0, help="Of a run with equal workers.")
def main(seconds: float) -> None:
    """A row per strategy."""
    warnings.simplefilter("ignore", DivergenceWarning)
    rows = []
    with dl.LocalCluster(WORKERS, compute_time_s=COMPUTE_S) as real:
        virtual = dl.SimulatedCluster(WORKERS, compute=COMPUTE_S)
        for name, (strategy, closed_form) in ROWS.items():
            row: dict[str, object] = {"strategy": name, "closed form": f"{closed_form:.3f}"}
            for world, cluster in (("simulated", virtual), ("real", real)):
                equal, mixed = (rate(strategy, c, seconds) for c in (cluster, cluster.slow(worker=3, factor=SLOW)))
                row[world] = f"{mixed / equal:.3f}"
            rows.append(row)
            print(row, flush=True)
    print("\n" + plots.table(rows))


if __name__ == "__main__":
    main()
