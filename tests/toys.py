"""Small tasks with known answers, and ways to wait for a thing instead of sleeping."""

import os
import select
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import distlab as dl
from distlab.data import Stream

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.02),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
}
PLAIN = (
    dl.SingleWorker(), dl.InGraph(), dl.AsyncPS(locking="server"), dl.SyncPS(), dl.AllReduce(), dl.WorkerApplies(),
    dl.BroadcastGradients(),
)  # fmt: skip


def nesterov(params) -> torch.optim.Optimizer:
    """DiLoCo's outer optimizer."""
    return torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)


FAMILY = (  # every option of the parameter servers and of all-reduce, alone and with others
    dl.AsyncPS(),
    dl.AsyncPS(locking="tensor"),
    dl.AsyncPS(num_servers=3),
    dl.AsyncPS(num_servers=2, placement="greedy", locking="server"),
    dl.AsyncPS(num_servers=4, placement="round-robin", locking="tensor"),
    dl.AsyncPS(max_clock_gap=0),
    dl.AsyncPS(max_clock_gap=2, num_servers=2),
    dl.AsyncPS(apply_every=3),
    dl.AsyncPS(apply_every=2, distinct=True),
    dl.AsyncPS(apply_every=2, distinct=True, locking="server", num_servers=2),
    dl.AsyncPS(apply_every=2, locking="server", max_clock_gap=1, num_servers=2),
    dl.AsyncPS(lr_by_staleness="1/(1+s)", apply_every=2),
    dl.AsyncPS(lr_by_staleness="1/s", num_servers=2),
    dl.AsyncPS(compensation=dl.DelayCompensation(strength=0.1)),
    dl.AsyncPS(compensation=dl.DelayCompensation(adaptive=True), num_servers=2, locking="server"),
    dl.SyncPS(num_servers=3),
    dl.SyncPS(num_backup_workers=1),
    dl.SyncPS(num_backup_workers=2, requeue=True),
    dl.SyncPS(num_backup_workers=1, late="cancel"),
    dl.SyncPS(num_backup_workers=1, late="cancel", requeue=True, distinct=False),
    dl.SyncPS(num_backup_workers=1, distinct=False),
    dl.SyncPS(num_backup_workers=1, num_servers=2, placement="greedy"),
    dl.SyncPS(num_backup_workers=1, semantics="tf1"),
    dl.Hogwild(),
    dl.LocalSGD(every=3),
    dl.LocalSGD(every=2, outer=nesterov, algorithm="ring"),
    dl.InGraph(place={"0": 0}),
    dl.InGraph(place={"0": 0, "2": 1}),
    dl.AllReduce(bucket_bytes=64),
    dl.AllReduce(accumulate=2, bucket_bytes=1),
    dl.AllReduce(compression=dl.TopK(share=0.3)),
    dl.AllReduce(algorithm="halving-doubling", accumulate=3, overlap=False),
)
DEADLINE_S = 60.0  # how long anything may take before a test calls it hung; nothing needs a tenth of it


def regression(optimizer: str = "sgd", **changes) -> dl.Task:
    """Float64, 61 samples (no batch size divides it), a 5-4-1 network."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(61, 5, dtype=torch.float64, generator=generator)
    parts = {
        "model": lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double(),
        "train": (x, x.pow(2).mean(1, keepdim=True)),
        "loss": F.mse_loss,
        "optimizer": OPTIMIZERS[optimizer],
        "batch_size": 4,
        "name": "regression",
    }
    return dl.Task(**parts | changes)


def watchable(**changes) -> dl.Task:
    """A regression with validation data."""
    return regression(**{"validation": regression().train, "metrics": {"error": nn.L1Loss()}} | changes)


class Scalar(nn.Module):
    """One parameter; its output is that parameter, whatever the input."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([value], dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight.expand(len(x))


def countdown(**changes) -> dl.Task:
    """One parameter, from 0; every gradient is 1 and the learning rate is 1: each update takes away exactly 1."""
    parts = {
        "model": lambda: Scalar(0.0),
        "train": (torch.zeros(16), torch.zeros(16)),
        "loss": lambda outputs, targets: outputs.mean(),
        "optimizer": lambda params: torch.optim.SGD(params, lr=1.0),
        "batch_size": 4,
        "name": "countdown",
    }
    return dl.Task(**parts | changes)


def halving(**changes) -> dl.Task:
    """One parameter w, from 8; the loss is w²/2, the gradient is w, the learning rate 1/2: a fresh update halves it."""
    parts = {
        "model": lambda: Scalar(8.0),
        "loss": lambda outputs, targets: (outputs**2 / 2).mean(),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.5),
        "name": "halving",
    }
    return countdown(**parts | changes)


def linear(**changes) -> dl.Task:
    """Five weights without a bias; the loss is what the model says, so a gradient is the mean of its batch's inputs,
    whatever the weights: see `slope`. The learning rate is 1."""
    parts = {
        "model": lambda: nn.Linear(5, 1, bias=False).double(),
        "loss": lambda outputs, targets: outputs.mean(),
        "optimizer": lambda params: torch.optim.SGD(params, lr=1.0),
        "name": "linear",
    }
    return regression().but(**parts | changes)


def slope(task: dl.Task, worker: int, step: int, num_workers: int) -> torch.Tensor:
    """The gradient that a worker computes of `linear` at its step."""
    stream = Stream(task.train, batch_size=task.batch_size, index=worker, num_workers=num_workers, seed=task.seed)
    return stream.batch(step)[0].mean(0)


def moved(task: dl.Task, run: dl.Run) -> torch.Tensor:
    """How far a run has moved the parameters, without their padding."""
    start = nn.utils.parameters_to_vector(task.build().parameters())
    return nn.utils.parameters_to_vector(run.model.parameters()).detach() - start.detach()


def spoiled(value: float, **changes) -> dl.Task:
    """Of two workers, number 1 meets `value` as a target at its step 3, and number 0 after thousands of steps."""
    x = torch.linspace(-1, 1, 5 * 40_000, dtype=torch.float64).view(-1, 5)
    y = x.sum(1, keepdim=True)
    y[Stream((x,), batch_size=4, index=1, num_workers=2).indices(3)[0]] = value
    return regression(train=(x, y), **changes)


def train(task: dl.Task, strategy: dl.Strategy, cluster: dl.LocalCluster, num_updates: int) -> dl.Run:
    """`dl.train` without a progress bar."""
    return dl.train(task, strategy, cluster, num_updates=num_updates, progress=False)


def train_together(task: dl.Task, strategy: dl.Strategy, cluster: dl.LocalCluster, gradients_each: int) -> dl.Run:
    """Train until every worker has computed so many gradients: on a busy machine one may start late."""
    live = dl.start(task, strategy, cluster, num_updates=10**9)

    def all_have() -> bool:
        computed = live.trace.select("compute")["worker"]
        return min((computed == w).sum() for w in range(cluster.num_workers)) >= gradients_each

    until(all_have)
    live.stop()
    return live.wait()


def together(rows) -> range:
    """The versions between the one where the last worker came in and the one where the first left."""
    made = [rows[rows["worker"] == w]["version"] for w in set(rows["worker"].tolist())]
    return range(max(v.min() for v in made), min(v.max() for v in made) + 1)


def refused(error: type[Exception], match: str, *, task=None, strategy=None, cluster=None, **options) -> None:
    """`train` and `start` refuse alike."""
    parts = task or countdown(), strategy or dl.AsyncPS(), cluster or dl.LocalCluster(num_workers=2)
    for call in (dl.train, dl.start):
        with pytest.raises(error, match=match):
            call(*parts, **(options or {"num_updates": 5}))


def failure(live: dl.LiveRun) -> BaseException:
    """What `wait` raises; no process may be left by then."""
    processes = Watched(live.launched.pids.values())
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        live.wait()
    assert processes.alive(within_s=0) == []
    return caught.value


def keys(rows) -> list[tuple[int, int]]:
    """Whose gradients the rows of a trace are about: (worker, step)."""
    return [(int(w), int(s)) for w, s in zip(rows["worker"], rows["step"], strict=True)]


def until(condition: Callable[[], bool], within_s: float = DEADLINE_S) -> None:
    """Look until `condition` holds; fails at the deadline."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


class Watched:
    """Processes, held by descriptors, so that a number that is used again deceives nobody."""

    def __init__(self, pids: Iterable[int]) -> None:
        self.pids = sorted(pids)
        self._fds: dict[int, int] = {}
        for pid in self.pids:
            with suppress(ProcessLookupError):  # it has ended already
                self._fds[pid] = os.pidfd_open(pid)

    def alive(self, within_s: float = DEADLINE_S) -> list[int]:
        """Those that have not ended after `within_s`; returns as soon as there are none."""
        deadline, left = time.monotonic() + within_s, []
        for pid, fd in self._fds.items():
            ended, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
            left += [] if ended else [pid]
            os.close(fd)
        return left
