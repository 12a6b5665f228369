"""A ring beside a star, on hosts that are really apart: seconds per update and bytes per host, beside the closed forms.

python benchmarks/hosts.py --latency-ms 5 --mbit 100

The hosts are network namespaces (`tests/hosts.py`; it needs root on Linux). On a loopback the bytes of all ranks go
through the same memory, and nobody sees what a hub costs; here each host has a network card, and the hub's is the
narrow one.
"""

import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click

from distlab import plots
from distlab.theory import all_reduce_s, bytes_per_nic

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "tests"))
from hosts import Hosts, why_not
from ranks import Ranks
from toys import until

SIZE, SHORT, LONG = 3, 4, 14  # hosts; updates of two runs, whose difference is without what a run needs once
WITHIN_S = 180.0
SCRIPT = """
cluster = dl.TorchrunCluster()
outputs = int(os.environ["OUTPUTS"])

def task():
    x = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0))
    return dl.Task(
        model=lambda: torch.nn.Linear(1000, outputs, bias=False), loss=torch.nn.functional.mse_loss,
        train=(x, x[:, :1].repeat(1, outputs)), batch_size=4, optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
    )

def sent(run):
    '''By each host in an update, of what the trace knows: messages from a process to another host's.'''
    counts = [0] * 3
    for event in run.trace:
        if event.kind == "reduce":
            counts[event.worker] += event.bytes
        elif event.kind == "push" or (event.kind == "pull" and event.version):  # the first parameters come once
            worker, server = event.worker, int(event.peer.split()[1]) % 3
            if worker != server:
                counts[worker if event.kind == "push" else server] += event.bytes
    return [count / run.version for count in counts]

for strategy in (
    dl.AllReduce(algorithm="ring", overlap=False), dl.AllReduce(algorithm="rank 0", overlap=False), dl.SyncPS(),
    dl.SyncPS(num_servers=3),
):
    for num_updates in (4, 14):
        run = dl.train(task(), strategy, cluster, num_updates=num_updates, progress=False)
        first = {}
        for version, end_s in run.applies[["version", "end_s"]].tolist():
            first[version] = min(end_s, first.get(version, end_s))
        ends = [first[version] for version in sorted(first)]
        say(name=run.strategy, sent=sent(run), step_s=[b - a for a, b in zip(ends, ends[1:])])
        toys.until(lambda: rank or os.path.exists(f"{folder}/{len(open(f'{folder}/0.json').readlines())}"))
"""


@dataclass(frozen=True)
class Measured:
    """One strategy.

    Attributes:
        step_s: the median update.
        sent: bytes that each host sent in one, as the trace has them.
        wire: ... as frames, TCP and all.
    """

    name: str
    step_s: float
    sent: list[float]
    wire: list[float]


def measure(latency_s: float, bits_per_s: float, outputs: int, folder: Path) -> list[Measured]:
    """A ring, a star, one server beside rank 0, and a shard of the servers on each host."""
    with (
        Hosts(SIZE, latency_s=latency_s, bits_per_s=bits_per_s) as hosts,
        Ranks(
            SCRIPT, SIZE, folder, host=hosts.address(0), before=hosts.on, LOCAL_WORLD_SIZE="1", OUTPUTS=str(outputs)
        ) as ranks,
    ):
        marks = [hosts.sent()]
        for number in range(1, 9):
            until(lambda number=number: len(ranks.said(0)) == number or ranks.processes[0].poll(), within_s=WITHIN_S)
            marks.append(quiet(hosts))
            (folder / str(number)).touch()
        ranks.wait(within_s=WITHIN_S)
        said = ranks.said(0)[1::2]
    made = []
    for i, line in enumerate(said):
        a, b, c = marks[2 * i : 2 * i + 3]
        wire = [((z - y) - (y - x)) / (LONG - SHORT) for x, y, z in zip(a, b, c, strict=True)]
        made.append(Measured(line["name"], median(line["step_s"]), line["sent"], wire))
    return made


def quiet(hosts: Hosts) -> list[int]:
    """What each host has sent, once nothing but signs of life is sent any more."""
    last = hosts.sent()

    def is_quiet() -> bool:
        nonlocal last
        time.sleep(0.3)  # a while in which something would be sent
        before, last = last, hosts.sent()
        return sum(last) - sum(before) < 5_000

    until(is_quiet, within_s=WITHIN_S)
    return last


def expected(num_bytes: float, latency_s: float, bits_per_s: float) -> dict[str, tuple[list[float], float]]:
    """The closed forms for a ring, and for a star: bytes that each host sends, and seconds."""
    byte_s, fair = 8 / bits_per_s, bytes_per_nic(num_bytes, SIZE)
    ring_s = all_reduce_s("ring", num_bytes, SIZE, latency_s=latency_s, bandwidth_bytes_per_s=1 / byte_s)
    star_s = 2 * (latency_s + (SIZE - 1) * num_bytes * byte_s)
    return {"ring": ([fair] * SIZE, ring_s), "star": ([(SIZE - 1) * num_bytes, num_bytes, num_bytes], star_s)}


@click.command()
@click.option("--latency-ms", default=5.0, show_default=True, help="From host to host.")
@click.option("--mbit", default=100.0, show_default=True, help="Of each network card, in each direction, per second.")
@click.option("--outputs", default=300, show_default=True, help="The model has a thousand times as many parameters.")
def main(latency_ms: float, mbit: float, outputs: int) -> None:
    """Measure, and print the table."""
    if reason := why_not():
        raise click.ClickException(f"no hosts here: {reason}")
    forms = expected(outputs * 4000, latency_ms / 1000, mbit * 1e6)
    with tempfile.TemporaryDirectory() as folder:
        made = measure(latency_ms / 1000, mbit * 1e6, outputs, Path(folder))
    rows: list[dict[str, Any]] = []
    for one, form in zip(made, ("ring", "star", "star", "ring"), strict=True):
        sent, step_s = forms[form]
        times = {"s/update": f"{one.step_s:.3f}", "closed form": f"{step_s:.3f} ({form})"}
        bytes_sent = {
            "MB sent by each host": ", ".join(f"{count / 1e6:.3f}" for count in one.sent),
            "closed form ": ", ".join(f"{count / 1e6:.3f}" for count in sent),
            "on the wire": ", ".join(f"{count / 1e6:.3f}" for count in one.wire),
        }
        rows.append({"strategy": one.name} | times | bytes_sent)
    click.echo(plots.table(rows))
    for one, form in zip(made, ("ring", "star"), strict=False):
        if not 0.8 < one.step_s / forms[form][1] < 1.2:
            raise click.ClickException(f"{one.name} is not within 20 % of the closed form")


if __name__ == "__main__":
    main()
