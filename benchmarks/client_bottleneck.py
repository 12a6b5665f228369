"""Why is between-graph replication faster than in-graph? Gradients per second of both, on real processes.

python benchmarks/client_bottleneck.py --figure client_bottleneck.png

Messages go over gloo, as between hosts. A gradient takes R = 0.1 s, nearly all of it slept, and needs a batch of --mb
megabytes. In-graph, one client loads, cuts and ships every replica's batch; between-graph, every worker loads its own.
D, the client's seconds for one replica, is read from the traces: from the end of an apply to the first wait of the next
step the client does nothing but feed, so D is all that time, divided by all replicas fed. It is no constant: more
replicas make a larger batch, for which memory is new every time. c is a worker's own time for its batch: from the end
of a pull to the beginning of its gradient.

The closed form, min(p / (R + D), 1 / D), is a ceiling: its client feeds one replica while another computes. The client
of `InGraph` feeds all, then waits for all, so that a step takes R + p D: it comes to 1 / D too, but later.
"""

import os
from typing import Any

import click
import numpy as np
import torch
from torch.nn import functional as F

import distlab as dl
from distlab import plots, theory

COMPUTE_S, BATCH_SIZE, SEEN = 0.1, 16, 8
COPIES = 6  # of all batches at one time: the client's last two, what it sends, what replicas receive, and a reserve
PUSH = {"num_bytes": 512, "bandwidth_bytes_per_s": 1e8}  # nine parameters and a header: the server is never the limit
CURVES = {
    "between-graph": ("between-graph: p / (R + c)", plots.BLUE, "o", "--"),
    "in-graph": ("in-graph, ceiling: min(p / (R + D), 1 / D)", plots.RED, "s", "--"),
    "in steps": ("in-graph, step after step: p / (R + p D)", plots.RED, None, ":"),
}


def task(mb: float) -> dl.Task:
    """Samples that are all views of one row, until a batch copies them; the model looks at a few columns."""
    samples = torch.linspace(-1, 1, round(mb * 1e6 / 4 / BATCH_SIZE)).expand(1024, -1)
    return dl.Task(
        model=lambda: torch.nn.Linear(SEEN, 1),
        forward=lambda model, x: model(x[:, :SEEN]),
        train=(samples, torch.zeros(1024, 1)),
        loss=F.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-4),
        batch_size=BATCH_SIZE,
    )


def replicas_per_s(run: dl.Run) -> float:
    """Gradients applied per second, from the moment at which every worker has contributed to the end."""
    rows = run.trace.select("apply")
    begun = max(rows["end_s"][rows["worker"] == w].min() for w in range(run.num_workers))
    return float((rows["end_s"] > begun).sum() / (rows["end_s"].max() - begun))


def client_s(run: dl.Run) -> float:
    """D: from the end of an apply to the first wait of the next step, for each replica."""
    applied, waits = run.trace.select("apply", worker=0), run.trace.select("wait")
    begins = waits["start_s"][waits["peer"] == 0][::2]  # replica 0 is the first; a step awaits it twice
    return float((begins[1:] - applied["end_s"][:-1]).mean() / run.num_workers)


def own_s(run: dl.Run) -> float:
    """c: from the end of a pull to the beginning of the gradient; the first, while others start, is left out."""
    gaps = []
    for w in range(run.num_workers):
        pulled, computed = run.trace.select("pull", worker=w), run.trace.select("compute", worker=w)
        gaps.append((computed["start_s"] - pulled["end_s"][: len(computed)])[1:])
    return float(np.concatenate(gaps).mean())


def measure(p: int, mb: float, updates: int) -> dict[str, Any]:
    """Both strategies on `p` workers, so many steps each."""
    with dl.LocalCluster(p, compute_time_s=COMPUTE_S, links="gloo") as cluster:
        fed = dl.train(task(mb), dl.InGraph(), cluster, num_updates=updates, progress=False)
        own = dl.train(task(mb), dl.AsyncPS(), cluster, num_updates=updates * p, progress=False)
    rates = {"in-graph": replicas_per_s(fed), "between-graph": replicas_per_s(own)}
    return {"p": p, "D": client_s(fed), "c": own_s(own), **rates}


def models(p: int, d: float, c: float) -> dict[str, float]:
    """Gradients per second by the closed forms, and by adding up one step of `InGraph`."""
    ceiling = theory.in_graph_replicas_per_s(p, compute_s=COMPUTE_S, client_s=d)
    between = theory.between_graph_replicas_per_s(p, compute_s=COMPUTE_S, dispatch_s=c, **PUSH)
    return {"between-graph": between, "in-graph": ceiling, "in steps": p / (COMPUTE_S + p * d)}


def draw(rows: list[dict[str, Any]], d: float, c: float, mb: float) -> Any:
    """Points as measured, broken lines as the closed forms say."""
    figure, axes = plots.blank(7.5, 4.8)
    workers, counts = [row["p"] for row in rows], range(1, max(row["p"] for row in rows) + 1)
    for name, (label, colour, marker, style) in CURVES.items():
        if marker:
            measured = [row[name] for row in rows]
            axes.plot(workers, measured, color=colour, marker=marker, label=f"{name}, measured")
        axes.plot(counts, [models(p, d, c)[name] for p in counts], color=colour, linestyle=style, label=label)
    axes.set(xscale="log", yscale="log", xlabel="workers p", ylabel="gradients per second")
    axes.set_xticks(workers, [str(p) for p in workers])
    axes.set_title(f"R = {COMPUTE_S} s, {mb:g} MB a batch: D = {1e3 * d:.0f} ms, c = {1e3 * c:.0f} ms", loc="left")
    axes.legend(frameon=False)
    return figure


@click.command()
@click.option("--workers", multiple=True, type=click.IntRange(1), default=[1, 2, 4, 8, 16], show_default=True)
@click.option("--mb", default=24.0, show_default=True, help="Megabytes fed per replica and step.")
@click.option("--updates", type=click.IntRange(3), default=20, show_default=True, help="Steps of each worker.")
@click.option("--figure", type=click.Path(dir_okay=False), help="Save a picture here.")
def main(workers: tuple[int, ...], mb: float, updates: int, figure: str | None) -> None:
    """A row per number of workers: measured, and what the closed forms say."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    rows = []
    for p in sorted(set(workers)):
        if COPIES * p * mb * 1e6 > memory / 2:
            print(f"{p} workers with {mb:g} MB each would fill most of this machine's memory: left out")
            continue
        try:
            rows.append(measure(p, mb, updates))
        except dl.DistlabError as error:
            print(f"{p} workers: no figure, for the run ended early: {error}")
            continue
        print({name: round(value, 4) for name, value in rows[-1].items()}, flush=True)
    if not rows:
        raise click.ClickException("nothing was measured: fewer workers, or fewer megabytes")
    d, c = np.average([row["D"] for row in rows], weights=[row["p"] for row in rows]), min(row["c"] for row in rows)
    table = []
    for row in rows:
        model = models(row["p"], d, c)
        table.append(
            {
                "workers": row["p"],
                "in-graph/s": round(row["in-graph"], 1),
                "ceiling": round(model["in-graph"], 1),
                "in steps": round(model["in steps"], 1),
                "between-graph/s": round(row["between-graph"], 1),
                "model": round(model["between-graph"], 1),
                "ratio": round(row["between-graph"] / row["in-graph"], 2),
            }
        )
    knee = theory.in_graph_knee(compute_s=COMPUTE_S, client_s=d)
    print("\n" + plots.table(table))
    print(
        f"D = {1e3 * d:.1f} ms: at most 1/D = {1 / d:.1f} gradients/s in-graph, and the knee is at {knee:.1f} workers."
    )
    print(f"c = {1e3 * c:.1f} ms with least company.")
    if rows[-1]["between-graph"] < 0.8 * models(rows[-1]["p"], d, c)["between-graph"]:
        print("Between-graph falls short of its model: so many workers' loading is too much for this machine's cores.")
    if figure:
        draw(rows, d, c, mb).savefig(figure, dpi=150)


if __name__ == "__main__":
    main()
