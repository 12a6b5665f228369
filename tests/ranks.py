"""Ranks: the processes that torchrun would start, started by a test, so that one can be ended alone."""

import json
import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

from toys import DEADLINE_S

HERE = Path(__file__).parent
PATH = os.pathsep.join([str(HERE), str(HERE.parent)])  # for a process that imports what tests do
PRELUDE = """
import json, os, sys, time
import torch
import toys
import distlab as dl

torch.set_num_threads(1)
rank, folder = int(os.environ["RANK"]), sys.argv[1]

def say(**words):
    with open(f"{folder}/{rank}.json", "a") as file:
        print(json.dumps(words), file=file)

"""


class Ranks:
    """`size` processes that run the same script. What rank r says with `say(...)` is `said(r)`, a list.

    Args:
        body: what the script does; it may use `dl`, `toys`, `rank` and `say`.
        before: words of a command line before that of each rank, such as a network namespace to be in.
        by_torchrun: does torchrun start them, one on each host?
    """

    def __init__(
        self, body: str, size: int, folder: Path, *, host: str = "127.0.0.1", before: Any = lambda rank: [],
        by_torchrun: bool = False, **env: str,
    ) -> None:  # fmt: skip
        self.folder, self.size = folder, size
        (python, *words), port = script(body, folder), str(free_port())
        shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": host, "MASTER_PORT": port, "PYTHONPATH": PATH}
        torchrun = ["-m", "torch.distributed.run", f"--nnodes={size}", "--nproc-per-node=1", f"--master-addr={host}"]
        self.processes = []
        for rank in range(size):
            mine = {"RANK": str(rank), "LOCAL_WORLD_SIZE": env.get("LOCAL_WORLD_SIZE", str(size)), **env}
            start = [*torchrun, f"--master-port={port}", f"--node-rank={rank}"] if by_torchrun else []
            command = [*before(rank), python, *start, *words]
            with open(folder / f"{rank}.out", "w") as out:
                process = subprocess.Popen(
                    command, env=os.environ | shared | mine, stdout=out, stderr=subprocess.STDOUT
                )
            self.processes.append(process)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()

    def said(self, rank: int) -> list[dict[str, Any]]:
        """What a rank has said so far."""
        return said(self.folder, rank)

    def printed(self, rank: int) -> str:
        """What it has printed."""
        return (self.folder / f"{rank}.out").read_text()

    def wait(self, *ranks: int, within_s: float = DEADLINE_S) -> None:
        """Until these, or all, have come to their end; an error if that was not a good one."""
        deadline = time.monotonic() + within_s
        for rank in ranks or range(self.size):
            try:
                code = self.processes[rank].wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"rank {rank} hangs; it printed {self.printed(rank)}") from None
            assert code == 0, f"rank {rank} ended with {code}: {self.printed(rank)}"


def script(body: str, folder: Path) -> list[str]:
    """The command that runs it as one rank."""
    folder.mkdir(exist_ok=True)
    path = folder / "script.py"
    path.write_text(PRELUDE + textwrap.dedent(body))
    return [sys.executable, str(path), str(folder)]


def said(folder: Path, rank: int) -> list[dict[str, Any]]:
    """What a rank has said in a folder."""
    path = folder / f"{rank}.json"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def torchrun(body: str, size: int, folder: Path) -> list[list[dict[str, Any]]]:
    """What each rank says, when torchrun itself has started them all."""
    python, *rest = script(body, folder)
    command = [python, "-m", "torch.distributed.run", f"--nproc-per-node={size}", f"--master-port={free_port()}", *rest]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": PATH}, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
    return [said(folder, rank) for rank in range(size)]


def free_port() -> int:
    """A port at which nobody listens."""
    with socket.socket() as asker:
        asker.bind(("127.0.0.1", 0))
        return asker.getsockname()[1]
