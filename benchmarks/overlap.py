"""What overlap gains where communication takes as long as backward: real ranks on a loopback that is slowed down.

sudo python benchmarks/overlap.py --layers 8

Needs Linux, root and iproute2: everything runs in a network namespace of its own, whose loopback passes so many bytes
per second and no more (a token bucket). Computing is emulated, forward one third and backward two thirds of it; the
network, the messages and the sums are real. Beside each measurement stands what the simulator says.
"""

import os
import statistics
import subprocess
import sys

import click
import torch
from torch import nn
from torch.nn import functional as F

import distlab as dl
from distlab import plots, theory

SPACE, INSIDE = "distlab-overlap", "DISTLAB_OVERLAP"
WIDTH = 512  # of a layer: 1 MiB in float32


def task(layers: int) -> dl.Task:
    """So many equal layers; one sample, so that computing takes next to no time of its own."""
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0))
    return dl.Task(
        model=lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)]),
        train=(x, x),
        loss=F.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-3),
        batch_size=1,
    )


def step_s(strategy: dl.Strategy, cluster: dl.Cluster, layers: int, updates: int) -> float:
    """The median time between updates."""
    run = dl.train(task(layers), strategy, cluster, num_updates=updates, progress=False)
    return float(run.history["time_s"].diff()[updates // 5 :].median())


def measure(layers: int, ratio: float, compute_s: float, updates: int, rounds: int) -> list[dict[str, object]]:
    """A row per bucket size: time per update, what the simulator says of it, and the gain over no overlap."""
    sizes = [size for size in (1, 2, 4) if size < layers]
    ways = {"all": dl.AllReduce(overlap=False)} | {f"{n} MiB": dl.AllReduce(bucket_bytes=n << 20) for n in sizes}
    network = dl.Network(latency_s=0.0, bandwidth_bytes_per_s=bytes_per_s(layers, ratio, compute_s) / 2)
    virtual = dl.SimulatedCluster(2, compute=dl.laws.Constant(compute_s), network=network, gradients="none")
    times: dict[str, list[float]] = {name: [] for name in ways}
    with dl.LocalCluster(2, compute_time_s=compute_s, links="gloo") as cluster:
        for _ in range(rounds):
            for name, strategy in ways.items():
                times[name].append(step_s(strategy, cluster, layers, updates))
    rows: list[dict[str, object]] = []
    for name, strategy in ways.items():
        gains = sorted(1 - with_it / without for with_it, without in zip(times[name], times["all"], strict=True))
        said = {"bucket": name, "ms": round(1e3 * statistics.median(times[name]), 1)}
        said |= {"simulated, ms": round(1e3 * step_s(strategy, virtual, layers, 10), 1)}
        rows.append(said | {"gain": f"{statistics.median(gains):.0%} ({gains[0]:.0%} to {gains[-1]:.0%})"})
    each = {"forward_s": compute_s / 3, "backward_s": compute_s * 2 / 3, "transfer_s": ratio * compute_s * 2 / 3}
    predicted = theory.overlapped_step_s(layers, **each, overhead_s=0.0)
    print(f"closed form, {layers} equal buckets that cost nothing to start: {1e3 * predicted:.1f} ms")
    return rows


def bytes_per_s(layers: int, ratio: float, compute_s: float) -> float:
    """At which both ranks' gradients, on one loopback, take `ratio` times as long as backward."""
    return 2 * layers * WIDTH * WIDTH * 4 / (ratio * compute_s * 2 / 3)


def slowed_down(rate: float) -> int:
    """Run this script again, with the same arguments, behind a slow loopback; returns its exit code."""
    inside, bucket = ["ip", "netns", "exec", SPACE], f"rate {8 * rate:.0f}bit burst 256kb latency 500ms".split()
    commands = [
        ["ip", "netns", "add", SPACE],
        [*inside, "ip", "link", "set", "lo", "up"],
        [*inside, "tc", "qdisc", "add", "dev", "lo", "root", "tbf", *bucket],
    ]
    try:
        for command in commands:
            subprocess.run(command, check=True)
        return subprocess.run([*inside, sys.executable, *sys.argv], env=os.environ | {INSIDE: "1"}).returncode
    finally:
        subprocess.run(["ip", "netns", "delete", SPACE])


@click.command()
@click.option("--layers", default=8, help="Of 1 MiB each.")
@click.option("--compute-s", default=0.12, help="A gradient's emulated time.")
@click.option("--ratio", default=1.0, help="Communication over backward.")
@click.option("--updates", default=40)
@click.option("--rounds", default=3)
def main(layers: int, compute_s: float, ratio: float, updates: int, rounds: int) -> None:
    """A row per bucket size."""
    if INSIDE in os.environ:
        print(plots.table(measure(layers, ratio, compute_s, updates, rounds)))
    else:
        sys.exit(slowed_down(bytes_per_s(layers, ratio, compute_s)))


if __name__ == "__main__":
    main()
