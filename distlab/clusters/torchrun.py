"""`TorchrunCluster`: the ranks of torchrun, on one host or many. Every rank runs the same script.

The script's own processes train nothing: rank 0's leads the run, as a notebook does on one host, and those of the other
ranks follow it, which is to start the processes that live on their hosts and to carry their words. In the end all ranks
return the same run. The hard idea is that a task never travels: every rank has made its own, by the same lines, and
only what they say of it is compared. So no rank has to trust what another could pickle.
"""

import itertools
import json
import os
import queue
import secrets
import signal
import socket
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache
from multiprocessing.connection import Connection
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from distlab.checkpoint import Checkpoint, facts_of
from distlab.clusters.base import ONLY_SIMULATED, Cluster, Ending, Launched, Sink
from distlab.clusters.home import Here
from distlab.clusters.line import Line, Listener, call
from distlab.clusters.member import CONTEXT, Member, remade, warm
from distlab.clusters.process import Place, place_of, told_of
from distlab.clusters.processes import Processes
from distlab.clusters.scenario import Scenario, check_scenario, sentence
from distlab.errors import DistlabError, ProcessLost, RemoteTraceback
from distlab.fabric import Peer
from distlab.fabric.meeting import Where
from distlab.fabric.network import Change
from distlab.options import check_positive, check_seconds
from distlab.packing import from_bytes, to_bytes
from distlab.strategies.base import Job, Outcome, Strategy
from distlab.trace import EVENT

ASKED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PINGS = 16  # for a clock: the quickest counts
REPORT_S = 0.25  # how often those who follow hear how far the run is
JOIN_S = 300.0  # how long rank 0 waits for the others at first
NUMBER = struct.Struct("<d")
_numbers = itertools.count()


class TorchrunCluster(Scenario, Cluster):
    """One worker on every rank that torchrun has started; servers go round the ranks, the in-graph client is on rank 0.

    Make it, and call `train`, on every rank alike: ``torchrun --nproc-per-node 4 script.py``. All ranks get the same
    run. What workers print, checkpoints and event files are rank 0's affair (`is_chief`), and so are `LiveRun.stop` and
    scenarios. A run waits until every rank has called for it.

    Args:
        compute_time_s: as for `LocalCluster`.
        failure_timeout_s: also how long a host may be silent before its processes are taken for dead.

    Raises:
        DistlabError: torchrun has not started this script.
        ProcessLost: a rank has not come.
    """

    def __init__(self, *, compute_time_s: float = 0.0, failure_timeout_s: float = 30.0) -> None:
        self.compute_time_s = check_seconds("compute_time_s", compute_time_s)
        self.failure_timeout_s = check_positive("failure_timeout_s", failure_timeout_s)
        if missing := [name for name in ASKED if name not in os.environ]:
            raise DistlabError(
                f"TorchrunCluster needs torchrun, as in `torchrun --nproc-per-node 4 script.py` ({missing[0]} is not "
                f"set): on one host, LocalCluster needs nothing"
            )
        self._crew = Crew(failure_timeout_s)
        self.num_workers = self._crew.size
        warm()

    def __repr__(self) -> str:
        padded = f"compute_time_s={self.compute_time_s:g}" if self.compute_time_s else ""
        return f"TorchrunCluster({padded}) of {self.num_workers}" + "".join(map(sentence, self.changes))

    @property
    def is_chief(self) -> bool:  # type: ignore[override]
        return self._crew.rank == 0

    def _with(self, changes: tuple[Change, ...]) -> "TorchrunCluster":
        other = object.__new__(type(self))
        vars(other).update(vars(self), changes=changes)
        return other

    def launch(self, strategy: Strategy, job: Job, sink: Sink, *, paused: bool = False) -> Launched:
        if paused:
            raise ValueError(ONLY_SIMULATED)
        if strategy.simulated_only:
            raise ValueError(f"on real processes this cannot be had: {strategy.simulated_only}")
        if strategy.one_host and not self._crew.on_one_host:
            raise ValueError(f"{strategy!r} cannot run on several hosts: {strategy.one_host}")
        self.check_open()
        check_scenario(self.changes, strategy, self.num_workers)
        said = call_of(strategy, job, repr(self))
        if not self.is_chief:
            return Follower(self._crew, strategy, job, sink, said)
        self._crew.gather(said)
        reports = Reports(sink, self._crew, job.begin)
        return Processes(job, strategy, self, reports, Everywhere(self._crew, reports))

    def call_off(self, error: BaseException) -> None:
        with suppress(ProcessLost):
            self._crew.calls()
            self._crew.refuse(error)

    def close(self) -> None:
        super().close()
        self._crew.close()


def call_of(strategy: Strategy, job: Job, cluster: str) -> dict[str, Any]:
    """What every rank must ask for alike."""
    task, names = job.task, ("num_updates", "num_batches", "evaluate_every", "checkpoint_every")
    said = facts_of(task, repr(strategy), strategy.optimizer(task)) | {name: getattr(job, name) for name in names}
    return json.loads(json.dumps({**said, "batch_size": task.batch_size, "cluster": cluster}))


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
                raise self.refuse(ValueError(f"{told}: all ranks must run the same script"))
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


class Far:
    """A process on another rank's host."""

    def __init__(self, line: Line, number: int) -> None:
        self._line, self._number, self._ended = line, number, threading.Event()
        self.exitcode: int | None = None

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def signal(self, number: int) -> None:
        """Send it a signal; harmless when it has ended, or its host has."""
        with suppress(DistlabError):
            self._line.say("kill", self._number, bytes([number]))

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)

    def close(self) -> None:
        """Nothing is held."""

    def has_ended(self, exitcode: int | None) -> None:
        """There is news of it."""
        self.exitcode = exitcode
        self._ended.set()


class FarMember(Member):
    """Such a process, as the one who leads the run sees it."""

    is_here: ClassVar[bool] = False
    process: Far
    rank: int

    def signal(self, number: int) -> None:
        self.process.signal(number)

    def __str__(self) -> str:
        return f"{self.me} (rank {self.rank})"


class Everywhere:
    """All ranks' hosts, as rank 0 uses them."""

    def __init__(self, crew: Crew, reports: "Reports") -> None:
        self._crew, self._reports = crew, reports
        self._here, self._members = here(crew), dict[int, FarMember]()
        for rank, line in crew.lines.items():
            line.obey = self._hear
            line.on_end = lambda rank=rank: self._lose(rank)  # type: ignore[misc]

    def open(self, strategy: Strategy, job: Job) -> None:
        self._here.open(strategy, job)
        begin = None if job.begin is None else contents(job.begin)
        for rank, line in self._crew.lines.items():
            said = {"ahead_s": self._crew.clocks[rank][0], "begin": begin}
            with suppress(DistlabError):
                line.say("open", 0, to_bytes(said))

    def start(self, place: Place) -> Member:
        rank = 0 if place.me.role == "client" else place.me.index % self._crew.size
        place = replace(place, folder=self._here.folder if self._crew.on_one_host else None)
        return self._start_far(rank, place) if rank else self._here.start(place)

    def _start_far(self, rank: int, place: Place) -> Member:
        line, number = self._crew.lines[rank], len(self._members)
        control, its_control = CONTEXT.Pipe()
        out, its_out = CONTEXT.Pipe(duplex=False)
        member = self._members[number] = FarMember(place.me, Far(line, number), control, out, pid=-1)
        member.rank = rank
        line.carry(2 * number, its_control)
        line.carry(2 * number + 1, its_out)
        with suppress(DistlabError):
            line.say("start", number, json.dumps(asdict(place)).encode())
        if line.ended:
            self._lose(rank)
        return member

    def close(self, ending: Ending) -> None:
        self._here.close(ending)
        ending.clocks = {f"rank {rank}": clock for rank, clock in self._crew.clocks.items()}
        self._crew.listen()  # for the next call
        self._crew.tell("finish", body=to_bytes(self._reports.all_of(ending)))

    def _hear(self, word: str, number: int, body: bytes) -> None:
        if word == "g":
            self._members[number].process.has_ended(int(body))

    def _lose(self, rank: int) -> None:
        line = self._crew.lines[rank]
        for number, member in [(n, m) for n, m in self._members.items() if m.rank == rank]:
            member.gave_up = member.gave_up or f"rank {rank} is gone: {line.ended}"
            line.drop(2 * number, 2 * number + 1)
            member.process.has_ended(None)


def here(crew: Crew) -> Here:
    """A rank's own host."""
    return Here("gloo", where=crew.where)


def contents(begin: Checkpoint) -> dict[str, Any]:
    """A checkpoint, for `packed`."""
    return {"facts": begin.facts, "common": begin.common, "own": begin.own, "path": begin.path}


def without_repetitions(outcomes: Mapping[Peer, Outcome]) -> dict[Peer, Outcome]:
    """The same, with one memory for replicas that are equal, and so one place in what is sent."""
    made: dict[Peer, Outcome] = {}
    for peer, left in outcomes.items():
        params = left.params
        same = [other.params for other in made.values() if params is not None and equal(other.params, params)]
        made[peer] = replace(left, params=same[0] if same else params)
    return made


def equal(one: Tensor | None, two: Tensor) -> bool:
    """The same bits, as far as that can be told."""
    return one is not None and one.dtype == two.dtype and torch.equal(one, two)


class Reports:
    """Rank 0's listener, whose news the other ranks hear too."""

    def __init__(self, sink: Sink, crew: Crew, begin: Checkpoint | None) -> None:
        self._sink, self._crew, self._begin, self._said_s = sink, crew, begin, 0.0
        self._parts: list[np.ndarray] = []

    @property
    def version(self) -> int:
        return self._sink.version

    @property
    def loss(self) -> float:
        return self._sink.loss

    def events(self, rows: np.ndarray) -> None:
        self._sink.events(rows)
        self._parts.append(rows)
        if time.monotonic() - self._said_s > REPORT_S:
            self._said_s = time.monotonic()
            self._crew.tell("version", self.version, NUMBER.pack(self.loss))

    def output(self, who: Peer, text: str) -> None:
        self._sink.output(who, text)

    def part(self, who: Peer, data: Tensor) -> None:
        self._sink.part(who, data)

    def go_back(self) -> Checkpoint | None:
        self._begin = self._sink.go_back()
        return self._begin

    def progress(self, version: int, loss: float) -> None:
        self._sink.progress(version, loss)

    def began_at(self, begin: Checkpoint | None) -> None:
        self._sink.began_at(begin)

    def all_of(self, ending: Ending) -> dict[str, Any]:
        """Everything that the others need to have the same run."""
        rows = np.concatenate(self._parts) if self._parts else np.zeros(0, EVENT)
        error = ending.error
        said = None if error is None else told_of(error, -1) | {"notes": getattr(error, "__notes__", [])}
        return {
            "outcomes": {tuple(peer): vars(left) for peer, left in without_repetitions(ending.outcomes).items()},
            "error": said,
            "cause": str(error.__cause__.args[0]) if error and isinstance(error.__cause__, RemoteTraceback) else "",
            "clocks": ending.clocks,
            "rows": torch.from_numpy(np.frombuffer(bytearray(rows.tobytes()), np.uint8)),
            "begin": None if self._begin is None else contents(self._begin),
        }


class Follower(Launched):
    """A run that rank 0 leads, on another rank."""

    def __init__(self, crew: Crew, strategy: Strategy, job: Job, sink: Sink, said: Mapping[str, Any]) -> None:
        self._crew, self._strategy, self._job, self._sink = crew, strategy, job, sink
        self._line, self._here = crew.lines[0], here(crew)
        self._members: dict[int, Member] = {}
        self._ending, self._over = Ending(), threading.Event()
        self._line.obey, self._line.on_end = self._obey, self._lose
        try:
            self._line.say("call", 0, json.dumps(said).encode())
        except DistlabError:
            self._lose()

    def stop(self) -> None:
        """Rank 0 asks for it."""

    def change(self, change: Change) -> None:
        """Rank 0 sees to it."""

    def kill(self, why: str = "LiveRun.kill()") -> None:
        for member in list(self._members.values()):
            member.kill()
        if not self._over.is_set():
            self._end(Ending(error=ProcessLost(f"the run was ended on rank {self._crew.rank} by {why}")))

    def wait(self, timeout_s: float | None = None) -> Ending | None:
        return self._ending if self._over.wait(timeout_s) else None

    def _obey(self, word: str, number: int, body: bytes) -> None:
        if word == "o":
            said = from_bytes(body)
            begin = None if said["begin"] is None else Checkpoint(**said["begin"])
            self.ahead_s = said["ahead_s"]
            self._here.open(self._strategy, replace(self._job, begin=begin))
        elif word == "s":
            self._start(number, json.loads(body))
        elif word == "k":
            self._members[number].signal(body[0])
        elif word == "v":
            self._sink.progress(number, NUMBER.unpack(body)[0])
        elif word == "r":
            self._end(Ending(error=remade(json.loads(body))))
        elif word == "f":
            self._finish(from_bytes(body))
        else:
            self._crew.hear(0, word, body)

    def _start(self, number: int, said: dict[str, Any]) -> None:
        member = self._members[number] = self._here.start(replace(place_of(said), ahead_s=self.ahead_s))
        self._line.carry(2 * number, member.control)
        self._line.carry(2 * number + 1, member.out, plain=True)
        threading.Thread(target=self._await_end, args=(number, member), daemon=True).start()

    def _await_end(self, number: int, member: Member) -> None:
        member.process.join()
        with suppress(DistlabError):
            self._line.say("gone", number, str(member.process.exitcode).encode())

    def _finish(self, said: dict[str, Any]) -> None:
        rows = np.frombuffer(said["rows"].numpy().tobytes(), EVENT)
        self._sink.events(rows)
        self._sink.began_at(None if said["begin"] is None else Checkpoint(**said["begin"]))
        outcomes = {Peer(*peer): Outcome(**left) for peer, left in said["outcomes"].items()}
        error = None
        if said["error"] is not None:
            error = remade(said["error"])
            for note in said["error"]["notes"]:
                error.add_note(note)
            error.__cause__ = RemoteTraceback(said["cause"]) if said["cause"] else None
        self._end(Ending(outcomes, error, said["clocks"]))

    def _lose(self) -> None:
        for member in list(self._members.values()):
            member.kill()
        why = f"rank 0, which leads the run, is gone: {self._line.ended}"
        self._end(Ending(error=ProcessLost(why)))

    def _end(self, ending: Ending) -> None:
        if not self._over.is_set():
            self._ending = ending
            self._here.close(ending)
            self._over.set()
