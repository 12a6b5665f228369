"""What happens when something dies: each strategy, each kind of process, killed at random, really and virtually.

python benchmarks/faults.py --rounds 50        (or `make faults`)

Every run must end within the limit; where the strategy promises to go on, with all its updates; else with an error that
names who died. In every run the ledger must balance, and where it went on a replay of its trace must end at its bits.
"noticed" is the longest time from the kill to the death in the trace (a virtual death is noticed when it happens).
"""

import os
import random
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import click
import torch
from torch import nn

import distlab as dl
from distlab import plots
from distlab.errors import DivergenceWarning

COMPUTE_S, ROUNDS, LIMIT_S, WORKERS = 0.004, 150, 60.0, 3
ROWS: dict[str, tuple[dl.Strategy, str]] = {
    "AsyncPS, a worker": (dl.AsyncPS(locking="server"), "worker 2"),
    "AsyncPS, the chief": (dl.AsyncPS(locking="server"), "worker 0"),
    "AsyncPS, the server": (dl.AsyncPS(locking="server"), "server 0"),
    "AsyncPS, one of two shards": (dl.AsyncPS(locking="server", num_servers=2), "server 1"),
    "SyncPS, a worker, stop": (dl.SyncPS(), "worker 2"),
    "SyncPS, a worker, shrink": (dl.SyncPS(on_too_few="shrink"), "worker 2"),
    "SyncPS, the chief, shrink": (dl.SyncPS(on_too_few="shrink"), "worker 0"),
    "SyncPS with a spare, a worker": (dl.SyncPS(num_backup_workers=1), "worker 1"),
    "SyncPS with a spare, the server": (dl.SyncPS(num_backup_workers=1), "server 0"),
    "AllReduce, a worker": (dl.AllReduce(), "worker 2"),
    "AllReduce, the chief": (dl.AllReduce(), "worker 0"),
    "AllReduce, a ring": (dl.AllReduce(algorithm="ring", bucket_bytes=256), "worker 1"),
    "LocalSGD, a worker": (dl.LocalSGD(every=4), "worker 2"),
    "Hogwild, a worker": (dl.Hogwild(), "worker 2"),
    "InGraph, a replica": (dl.InGraph(), "replica 1"),
    "InGraph, the client": (dl.InGraph(), "client 0"),
    "SingleWorker": (dl.SingleWorker(), "worker 0"),
}


def task() -> dl.Task:
    """A small network with everything that a replay could miss: dropout, BatchNorm, momentum."""
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
    return dl.Task(
        model=lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1)),
        train=(x, x.sum(1, keepdim=True)),
        loss=nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.5),
        batch_size=8,
    )


def updates(strategy: dl.Strategy) -> int:
    """As many as make a run of about half a second."""
    each = WORKERS if strategy.gradients_per_update(WORKERS) == 1 and not isinstance(strategy, dl.SingleWorker) else 1
    return ROUNDS * each // (4 if isinstance(strategy, dl.LocalSGD) else 1)


@dataclass
class Count:
    """What happened in the runs of one row."""

    ends: Counter[str] = field(default_factory=Counter)
    noticed_s: float = 0.0
    lost: int = 0
    dropped: int = 0
    balanced: int = 0
    replayed: int = 0

    def row(self, name: str, world: str) -> dict[str, object]:
        """The row of the table."""
        runs, on = self.ends.total(), self.ends["goes on"] + self.ends["had ended"]
        return {
            "what dies": name,
            "world": world,
            "what happened": ", ".join(f"{n} {how}" for how, n in self.ends.most_common()),
            "noticed": f"{self.noticed_s * 1000:.0f} ms",
            "lost": self.lost,
            "dropped": self.dropped,
            "ledger balances": f"{self.balanced}/{runs}",
            "replayed to the bit": f"{self.replayed}/{on}",
        }

    def add(self, live: dl.LiveRun, who: str, strategy: dl.Strategy) -> None:
        """Wait for a run, and count what became of it."""
        if live.launched.wait(LIMIT_S) is None:
            live.kill()
            self.ends["HUNG"] += 1
            return
        try:
            run = live.wait()
            how = "goes on" if len(run.trace.select("death")) else "had ended"
            racy = isinstance(strategy, dl.Hogwild) and "Local" in run.cluster  # its races are on no tape
            self.replayed += racy or (run.params is not None and run.replay().params.equal(run.params))
        except (dl.ProcessLost, dl.PeerLost) as error:
            run = error.run  # type: ignore[union-attr]
            how = "ends, named" if who in str(error) else f"ends: {error}"
        self.ends[how] += 1
        self.balanced += run.ledger.balances
        self.lost += run.ledger.counts["lost"]
        self.dropped += run.ledger.counts["dropped"] * (getattr(strategy, "num_backup_workers", 0) == 0)


def really(strategy: dl.Strategy, who: str, cluster: dl.LocalCluster, at: float, count: Count) -> None:
    """One run on real processes; the kill comes from outside, after a share of the updates."""
    live = dl.start(task(), strategy, cluster, num_updates=updates(strategy))
    while live.version < at * live.num_updates and live.launched.wait(0.001) is None:
        pass
    killed_s = time.monotonic()
    os.kill(live.launched.pids[who], signal.SIGKILL)
    count.add(live, who, strategy)
    deaths = [row for part in live._listener.parts for row in part if dl.trace.KINDS[row["kind"]] == "death"]
    count.noticed_s = max([count.noticed_s, *(float(row["end_s"]) - killed_s for row in deaths)])


def virtually(strategy: dl.Strategy, who: str, seed: int, at: float, count: Count) -> None:
    """The same on a virtual clock."""
    role, index = who.split()
    victim = {"worker" if role == "replica" else role: int(index)}
    network = dl.Network(latency_s=1e-4, bandwidth_bytes_per_s=1e7)
    cluster = dl.SimulatedCluster(WORKERS, compute=dl.laws.Gamma(mean_s=COMPUTE_S), network=network, seed=seed)
    cluster = cluster.kill(**victim, at_s=at * ROUNDS * COMPUTE_S)
    count.add(dl.start(task(), strategy, cluster, num_updates=updates(strategy)), who, strategy)


def table(
    rounds: int, only: str, worlds: str, seed: int, say: Callable[[dict[str, object]], None]
) -> list[dict[str, object]]:
    """All rows; each is said when it is there."""
    rows, draw = [], random.Random(seed)
    with dl.LocalCluster(WORKERS, compute_time_s=COMPUTE_S) as cluster:
        for name, (strategy, who) in ROWS.items():
            for world in worlds.split(",") if only in name else ():
                count = Count()
                for number in range(rounds):
                    at = draw.uniform(0.05, 0.9)
                    if world == "real":
                        really(strategy, who, cluster, at, count)
                    else:
                        virtually(strategy, who, number, at, count)
                rows.append(count.row(name, world))
                say(rows[-1])
    return rows


@click.command()
@click.option("--rounds", default=50, help="How many kills of each kind in each world.")
@click.option("--only", default="", help="Rows whose name holds this.")
@click.option("--worlds", default="real,simulated")
@click.option("--seed", default=0, help="Of the moments.")
def main(rounds: int, only: str, worlds: str, seed: int) -> None:
    """The table, and exit code 1 if a run hung or a ledger did not balance."""
    warnings.simplefilter("ignore", DivergenceWarning)
    rows = table(rounds, only, worlds, seed, lambda row: print(row, flush=True))
    print("\n" + plots.table(rows))
    wrong = [row for row in rows if "HUNG" in str(row["what happened"]) or "ends:" in str(row["what happened"])]
    wrong += [
        row
        for row in rows
        for name in ("ledger balances", "replayed to the bit")
        if len(set(str(row[name]).split("/"))) > 1
    ]
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
