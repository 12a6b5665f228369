"""What happens when something dies: each strategy, each kind of process, killed at random, really and virtually.

python benchmarks/faults.py --rounds 50        (or `make faults`)

Every run must end within the limit; where the strategy promises to go on, with all its updates; else with an error that
names who died. In every run the ledger must balance, and where it went on a replay of its trace must end at its bits.
"noticed" is the longest time from the kill to the death in the trace (a virtual death is noticed when it happens).
"""

import math
import os
import random
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import click
import torch
from torch import nn

import distlab as dl
from distlab import plots
from distlab.errors import DivergenceWarning

COMPUTE_S, ROUNDS, LIMIT_S, WORKERS = 0.004, 150, 60.0, 3
ANY = "any of them, and back, again and again"
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
    f"AsyncPS, {ANY}": (dl.AsyncPS(locking="server"), ANY),
    f"AllReduce, {ANY}": (dl.AllReduce(), ANY),
    f"LocalSGD, {ANY}": (dl.LocalSGD(every=4), ANY),
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
            "noticed": f"{self.noticed_s * 1000:.0f} ms" if self.noticed_s else "",
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
            how = "ends, named" if who in str(error) or (who == ANY and "lost" in str(error)) else f"ends: {error}"
        self.ends[how] += 1
        self.balanced += run.ledger.balances
        self.lost += run.ledger.counts["lost"]
        self.dropped += run.ledger.counts["dropped"] * (getattr(strategy, "num_backup_workers", 0) == 0)


def again_and_again(live: dl.LiveRun, draw: random.Random) -> None:
    """Kill and revive at random until the run ends."""
    while live.launched.wait(draw.choice([0.0, 0.01, 0.1])) is None:
        with suppress(dl.DistlabError):  # it has just ended
            draw.choice([live.kill, live.revive, live.revive])(worker=draw.randrange(WORKERS))


def really(strategy: dl.Strategy, who: str, cluster: dl.LocalCluster, draw: random.Random, count: Count) -> None:
    """One run on real processes; the kill comes from outside, after a share of the updates."""
    at = draw.uniform(0.05, 0.9)
    live = dl.start(task(), strategy, cluster, num_updates=updates(strategy))
    while live.version < at * live.num_updates and live.launched.wait(0.001) is None:
        pass
    killed_s = time.monotonic()
    if who == ANY:
        again_and_again(live, draw)
        killed_s = math.inf
    else:
        os.kill(live.launched.pids[who], signal.SIGKILL)
    count.add(live, who, strategy)
    deaths = [row for part in live._listener.parts for row in part if dl.trace.KINDS[row["kind"]] == "death"]
    count.noticed_s = max([count.noticed_s, *(float(row["end_s"]) - killed_s for row in deaths)])


def virtually(strategy: dl.Strategy, who: str, draw: random.Random, count: Count) -> None:
    """The same on a virtual clock."""
    network = dl.Network(latency_s=1e-4, bandwidth_bytes_per_s=1e7)
    laws = {"compute": dl.laws.Gamma(mean_s=COMPUTE_S), "network": network, "seed": draw.randrange(1 << 30)}
    cluster, at_s = dl.SimulatedCluster(WORKERS, **laws), draw.uniform(0.05, 0.9) * ROUNDS * COMPUTE_S
    if who == ANY:
        for _ in range(20):
            at_s += draw.expovariate(20 / (ROUNDS * COMPUTE_S))
            cluster = draw.choice([cluster.kill, cluster.revive, cluster.revive])(
                worker=draw.randrange(WORKERS), at_s=at_s
            )
    else:
        role, index = who.split()
        cluster = cluster.kill(**{"worker" if role == "replica" else role: int(index)}, at_s=at_s)
    count.add(dl.start(task(), strategy, cluster, num_updates=updates(strategy)), who, strategy)


def table(
    rounds: int, only: str, worlds: str, links: str, seed: int, say: Callable[[dict[str, object]], None]
) -> list[dict[str, object]]:
    """All rows; each is said when it is there."""
    rows, draw = [], random.Random(seed)
    with dl.LocalCluster(WORKERS, compute_time_s=COMPUTE_S, links=links) as cluster:  # type: ignore[arg-type]
        for name, (strategy, who) in ROWS.items():
            for world in worlds.split(",") if only in name else ():
                count = Count()
                for _ in range(rounds):
                    if world == "real":
                        really(strategy, who, cluster, draw, count)
                    else:
                        virtually(strategy, who, draw, count)
                rows.append(count.row(name, world))
                say(rows[-1])
    return rows


@click.command()
@click.option("--rounds", default=50, help="How many kills of each kind in each world.")
@click.option("--only", default="", help="Rows whose name holds this.")
@click.option("--worlds", default="real,simulated")
@click.option("--links", default="memory", help="Or gloo.")
@click.option("--seed", default=0, help="Of the moments.")
def main(rounds: int, only: str, worlds: str, links: str, seed: int) -> None:
    """The table, and exit code 1 if a run hung or a ledger did not balance."""
    warnings.simplefilter("ignore", DivergenceWarning)
    rows = table(rounds, only, worlds, links, seed, lambda row: print(row, flush=True))
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
