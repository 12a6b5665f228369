"""Who takes part under torchrun: this rank, and its lines to the others, before a run and after it."""

import itertools
import json
import os
import queue
import secrets
import socket
import struct
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from distlab.checkpoint import facts_of
from distlab.clusters.home import Here
from distlab.clusters.line import Line, Listener, call
from distlab.clusters.process import told_of
from distlab.data import tensors_of
from distlab.errors import DistlabError, ProcessLost
from distlab.fabric.meeting import Where
from distlab.strategies.base import Job, Strategy

PINGS = 16  # for a clock: the quickest counts
SAMPLES = 1000  # of a data set, for its checksum
JOIN_S = 300.0  # how long rank 0 waits for the others at first
NUMBER = struct.Struct("<d")
_numbers = itertools.count()


class Crew:
    """This rank, and its lines to the others: rank 0 has one to each, they have one to rank 0.

    Attributes:
        rank, size: of this one, and of all.
        on_one_host: are all ranks on one host?
        where: the store, and this host's address.
        lines: by rank.
        clocks: by rank, how far this rank's clock is ahead of its, and by how much that may be wrong, in seconds.
    """

    def __init__(self, silence_s: float) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.on_one_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.where = Where(host, port, own_address(host), silence_s)
        self.lines: dict[int, Line] = {}
        self.clocks: dict[int, tuple[float, float]] = {}
        self._silence_s, self._calls = silence_s, queue.SimpleQueue[tuple[int, Any]]()
        self._answers: queue.SimpleQueue[float] = queue.SimpleQueue()
        store = dist.PrefixStore(f"distlab/{next(_numbers)}", meeting_place())
        if self.rank == 0:
            self._wait_for_others(store)
        else:
            leader = json.loads(store.get("leader"))
            end = call((leader["address"], leader["port"]), bytes.fromhex(leader["key"]))
            end.send_bytes(str(self.rank).encode())
            self._add(0, end)

    def _wait_for_others(self, store: Any) -> None:
        key, came = secrets.token_bytes(32), queue.SimpleQueue[tuple[int, Connection]]()
        listener = Listener(self.where.address, key, lambda end: came.put((int(end.recv_bytes()), end)))
        store.set("leader", json.dumps({"address": self.where.address, "port": listener.port, "key": key.hex()}))
        deadline = time.monotonic() + JOIN_S
        while len(self.lines) < self.size - 1:
            try:
                self._add(*came.get(timeout=deadline - time.monotonic()))
            except (queue.Empty, ValueError):
                missing = sorted({*range(1, self.size)} - set(self.lines))
                raise ProcessLost(f"ranks {missing} have not come within {JOIN_S:g} s") from None
        listener.close()

    def _add(self, rank: int, end: Connection) -> None:
        line = self.lines[rank] = Line(end, silence_s=self._silence_s)
        self.listen()
        line.begin()

    def listen(self) -> None:
        """To what is said between runs."""
        for rank, line in self.lines.items():
            line.obey = lambda word, number, body, rank=rank: self.hear(rank, word, body)  # type: ignore[misc]
            line.on_end = lambda rank=rank: self._calls.put((rank, None))  # type: ignore[misc]

    def hear(self, rank: int, word: str, body: bytes) -> None:
        """Somebody calls, or wants to know the time, or says it."""
        if word == "c":
            self._calls.put((rank, json.loads(body)))
        elif word == "a":
            self._answers.put(NUMBER.unpack(body)[0])
        elif word == "p":
            self.lines[rank].say("answer", 0, NUMBER.pack(time.monotonic()))

    def gather(self, mine: Mapping[str, Any]) -> None:
        """Wait until every rank has called for a run, for the same one, and learn how far apart the clocks are.

        Raises:
            ValueError: another rank calls for something else.
            ProcessLost: one is gone.
        """
        for rank, said in self.calls().items():
            if differ := [name for name in mine if said.get(name) != mine[name]]:
                what = differ[0]
                told = f"rank {rank} calls for a run with {what}={said.get(what)!r}, rank 0 with {mine[what]!r}"
                raise self.refuse(ValueError(f"{told}: all ranks run the same script, and seed what it draws"))
        self.clocks = {rank: self._compare_clocks(line) for rank, line in self.lines.items()}

    def calls(self) -> dict[int, Mapping[str, Any]]:
        """What every other rank calls for, once all have; ProcessLost if one is gone."""
        calls: dict[int, Mapping[str, Any]] = {}
        while len(calls) < len(self.lines):
            rank, said = self._calls.get()
            if said is None or self.lines[rank].ended:
                raise ProcessLost(f"rank {rank} is gone: {self.lines[rank].ended}")
            calls[rank] = said
        return calls

    def refuse(self, error: BaseException) -> BaseException:
        """There will be no run: let the call of every rank raise `error`, which is returned."""
        self.tell("refuse", body=json.dumps(told_of(error, -1)).encode())
        return error

    def _compare_clocks(self, line: Line) -> tuple[float, float]:
        """The other end's answer lies somewhere between the question and its arrival here: in the middle, or half of
        that away."""
        found = []
        for _ in range(PINGS):
            asked = time.monotonic()
            line.say("ping")
            theirs = self._answers.get(timeout=self._silence_s)
            took = time.monotonic() - asked
            found.append((took / 2, asked + took / 2 - theirs))
        error, ahead = min(found)
        return ahead, error

    def tell(self, word: str, number: int = 0, body: bytes = b"") -> None:
        """Say something to all that are there."""
        for line in self.lines.values():
            with suppress(DistlabError):
                line.say(word, number, body)

    def close(self) -> None:
        """Hang up."""
        for line in self.lines.values():
            line.close("the cluster was closed")


@cache
def meeting_place() -> Any:
    """The store that torchrun told of. Kept, as rank 0 may be its server."""
    store, _, _ = next(dist.rendezvous("env://"))
    return store


def own_address(host: str) -> str:
    """The address of this host, as `host` sees it. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        asker.connect((host, 1))
        return asker.getsockname()[0]


def here(crew: Crew) -> Here:
    """A rank's own host."""
    return Here("gloo", where=crew.where)


def call_of(strategy: Strategy, job: Job, cluster: str) -> dict[str, Any]:
    """What every rank must ask for alike."""
    task, names = job.task, ("num_updates", "num_batches", "evaluate_every", "checkpoint_every")
    said = facts_of(task, repr(strategy), strategy.optimizer(task)) | {name: getattr(job, name) for name in names}
    said |= {"a checksum of its data": checksum(task.train), "batch_size": task.batch_size, "cluster": cluster}
    return json.loads(json.dumps(said))


def checksum(data: Any) -> int | None:
    """Of tensors, or of a thousand of their samples; None of a data set that makes them."""
    some = [part[:: len(part) // SAMPLES + 1].contiguous().view(-1) for part in tensors_of(data) or ()]
    sums = [zlib.crc32(part.view(torch.uint8).numpy().tobytes()) for part in some]
    return zlib.crc32(repr(sums).encode()) if sums else None
