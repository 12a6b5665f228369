"""Steps per second of `AllReduce` on two real ranks, beside a plain loop over torch's DistributedDataParallel.

python benchmarks/all_reduce.py --rounds 5

Both train the same model on the same data with one thread a process. They take turns, and each round gives one ratio:
how fast a machine is differs from hour to hour, which of two is faster does not.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F

import distlab as dl
from distlab import plots
from distlab.fabric.torch_fabric import LOOPBACK

RANKS, WARM_UP = 2, 0.2  # of the steps are left out
POOL = 2048  # samples


def images() -> tuple[torch.Tensor, torch.Tensor]:
    """Noise of MNIST's shape, with labels."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(POOL, 1, 28, 28, generator=generator), torch.randint(0, 10, (POOL,), generator=generator)


def tiny() -> nn.Module:
    """4,810 parameters."""
    return nn.Sequential(nn.Flatten(), nn.AdaptiveAvgPool1d(64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def wide() -> nn.Module:
    """1.86 million parameters."""
    inner = [nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)]
    return nn.Sequential(nn.Flatten(), *inner)


def convnet() -> nn.Module:
    """20,490 parameters, most of the time in two convolutions."""
    first = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(32 * 7 * 7, 10))


#: name -> model, batch size, steps
WORKLOADS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "tiny MLP": (tiny, 32, 1500),
    "1.9 M MLP": (wide, 64, 200),
    "convnet": (convnet, 64, 200),
}


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of both."""
    return torch.optim.SGD(params, lr=0.01)


def ours(name: str, cluster: dl.LocalCluster, strategy: dl.Strategy) -> float:
    """Steps per second of a strategy, start left out."""
    model, batch_size, steps = WORKLOADS[name]
    task = dl.Task(model=model, train=images(), loss=F.cross_entropy, optimizer=sgd, batch_size=batch_size)
    rows = dl.train(task, strategy, cluster, num_updates=steps, progress=False).trace.select("apply", who="worker 0")
    ends = rows["end_s"][rows["worker"] == 0][int(WARM_UP * steps) :]
    return (len(ends) - 1) / float(ends[-1] - ends[0])


def ddp_rank(rank: int, name: str, folder: str) -> None:
    """One rank of the peer: torch alone. Rank 0 writes its steps per second into the folder."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    make, batch_size, steps = WORKLOADS[name]
    model = nn.parallel.DistributedDataParallel(make())
    optimizer, (x, y) = sgd(list(model.parameters())), images()
    draw = torch.Generator().manual_seed(rank)
    for step in range(steps):
        if step == int(WARM_UP * steps):
            start = time.monotonic()
        at = torch.randint(POOL, (batch_size,), generator=draw)
        optimizer.zero_grad()
        F.cross_entropy(model(x[at]), y[at]).backward()
        optimizer.step()
    if rank == 0:
        rate = (steps - int(WARM_UP * steps)) / (time.monotonic() - start)
        Path(folder, "rate").write_text(str(rate))
    dist.barrier()
    os._exit(0)  # gloo threads may outlive an orderly end


def ddp(name: str) -> float:
    """Steps per second of the peer."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(ddp_rank, (name, folder), nprocs=RANKS)
        return float(Path(folder, "rate").read_text())


@click.command()
@click.option("--rounds", default=5, help="How many launches of each.")
@click.option("--only", default="", help="One workload.")
def main(rounds: int, only: str) -> None:
    """A row per workload: medians, and the median of the rounds' ratios."""
    rows = []
    with dl.LocalCluster(num_workers=RANKS) as cluster:
        for name in [only] if only else WORKLOADS:
            pairs = [(ours(name, cluster, dl.AllReduce()), ddp(name)) for _ in range(rounds)]
            mine, theirs = (round(statistics.median(values), 1) for values in zip(*pairs, strict=True))
            ratios = sorted(a / b for a, b in pairs)
            said = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            rows.append({"workload": name, "AllReduce": mine, "DDP": theirs, "ratio": said})
            print(rows[-1], flush=True)
    print("\n" + plots.table(rows))


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK  # of the peer
    main()
