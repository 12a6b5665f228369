"""What does watching cost? The dashboard of a real run with three workers and of a simulated one.

python benchmarks/dashboard.py

The drawing thread's own CPU seconds are counted, so other load on the machine changes them little; the first picture,
which fonts and layout make dear, is counted alone. A press is that of "Kill": seconds until the death is in the trace.
Updates per second, by the wall clock, are those of pairs of runs, one watched, one not, in turns: the median, and of
the ratio its range. A simulated run goes as fast as it can, so whatever is drawn it pays for.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import click

import distlab as dl
from distlab import plots
from distlab.dashboard import Dashboard

WORLDS = {"real": dl.LocalCluster, "simulated": dl.SimulatedCluster}
VICTIM, ENDLESS = 1, 10**9


def cpu_s(board: Dashboard) -> float:
    """What its thread has used of a core."""
    return time.clock_gettime(time.pthread_getcpuclockid(board._thread.ident))


def until(true: Callable[[], bool], timeout_s: float = 60.0) -> float:
    """Wait until it is `true`; the seconds that it took."""
    began = time.monotonic()
    while not true():
        if time.monotonic() - began > timeout_s:
            raise TimeoutError("this never came true")
        time.sleep(0.005)
    return time.monotonic() - began


def speed(live: dl.LiveRun, seconds: float) -> float:
    """Updates per second from now on, by the wall clock."""
    began, version = time.monotonic(), live.version
    time.sleep(seconds)
    return (live.version - version) / (time.monotonic() - began)


def is_dead(live: dl.LiveRun) -> bool:
    """Is the death in the trace?"""
    return any(len(part[part["kind"] == dl.trace.KIND_CODES["death"]]) for part in live.heard(0)[0])


def unwatched(cluster: dl.Cluster, seconds: float) -> float:
    """Updates per second of a run that nobody looks at."""
    live = dl.start(dl.tasks.digits(), dl.AsyncPS(), cluster, num_updates=ENDLESS)
    until(lambda: live.version > 0)
    per_s = speed(live, seconds)
    live.stop()
    live.wait()
    return per_s


def watched(cluster: dl.Cluster, seconds: float) -> dict[str, float]:
    """The same beside a dashboard, and what that used."""
    live = dl.start(dl.tasks.digits(), dl.AsyncPS(), cluster, num_updates=ENDLESS)
    board = Dashboard(live)
    board.start()
    until(lambda: live.version > 0 and board.drawn > 0)
    first_s, drawn, began = cpu_s(board), board.drawn, time.monotonic()
    found = {"first picture, CPU s": first_s, "updates/s, watched": speed(live, seconds)}
    took_s = time.monotonic() - began
    found |= {"of a core": (cpu_s(board) - first_s) / took_s, "pictures/s": (board.drawn - drawn) / took_s}
    board._worker.value = VICTIM
    board.order("Kill", board.buttons["Kill"])
    found["press, s"] = until(lambda: is_dead(live))
    live.stop()
    live.wait()
    board.finish()
    return found


def measure(world: str, seconds: float, rounds: int) -> dict[str, Any]:
    """A row: the medians of so many pairs of runs."""
    pairs = []
    with WORLDS[world](3) as cluster:
        unwatched(cluster, 0.5)  # what is slow once
        for _ in range(rounds):
            pairs.append(watched(cluster, seconds) | {"updates/s, not": unwatched(cluster, seconds)})
    row: dict[str, Any] = {"run": world}
    for name in pairs[0]:
        value = statistics.median(pair[name] for pair in pairs)
        row[name] = f"{value:.1%}" if name == "of a core" else f"{value:,.0f}" if "updates" in name else f"{value:.2f}"
    ratios = sorted(pair["updates/s, watched"] / pair["updates/s, not"] for pair in pairs)
    return row | {"ratio": f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"}


@click.command()
@click.option("--seconds", default=15.0, help="Of each run.")
@click.option("--rounds", default=3, help="Pairs of runs.")
def main(seconds: float, rounds: int) -> None:
    """A row per world."""
    print(plots.table([measure(world, seconds, rounds) for world in WORLDS]))


if __name__ == "__main__":
    main()
