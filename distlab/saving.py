"""Making checkpoints while a run goes on: the caller's side.

Each process hands over its part when it comes to a version, some sooner and some later. What is once in a run comes
from those who hold it; what is a worker's own, from the first moment at which it held that version or a newer one. A
gradient that had been sent by then and was not in the version is computed again by whoever goes on from there.
"""

import os
import queue
import shutil
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from distlab.checkpoint import (
    MAKING,
    Checkpoint,
    facts_of,
    latest_checkpoint,
    layout_of,
    load_checkpoint,
    united,
    write,
)
from distlab.fabric import Peer
from distlab.options import check_count
from distlab.packing import unpacked
from distlab.strategies.base import Job, Strategy
from distlab.task import Task
from distlab.trace import KIND_CODES, ROLES


class Collector:
    """Puts the parts together and writes them, in a thread of its own.

    Args:
        folder: for the checkpoints.
        facts: what they say of their run.
        peers: all processes of the run.
        begin: what it goes on from.
        say: called with a line that the reader should see.
    """

    def __init__(
        self, folder: Path, facts: dict[str, Any], peers: Iterable[Peer], begin: Checkpoint | None,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._folder, self._facts, self._begin, self._say = folder, facts, begin, say
        self._size, self._all = layout_of(facts).size, {str(peer) for peer in peers}
        self._live = set(self._all)
        self._given: dict[str, list[dict[str, Any]]] = defaultdict(list)  # that may still be of use, in order
        self._last: dict[str, dict[str, Any]] = {}  # what each process had for itself in the last checkpoint
        self._written = -1 if begin is None else begin.version
        self._news: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._collect, name="distlab-checkpoints", daemon=True)
        self._thread.start()

    def part(self, who: Peer, data: Tensor) -> None:
        """A process has handed this over."""
        self._news.put((str(who), data))

    def events(self, rows: np.ndarray) -> None:
        """Hear who has died: nobody waits for its part; and who has come."""
        kinds = [KIND_CODES[kind] for kind in ("death", "revive", "join")]
        for row in rows[np.isin(rows["kind"], kinds)]:
            self._news.put((f"{ROLES[row['role']]} {row['index']}", bool(row["kind"] != KIND_CODES["death"])))

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint, where all processes begin anew; None if there is none."""
        done = threading.Event()
        self._news.put(("", done))
        done.wait()
        path = latest_checkpoint(self._folder)
        return self._begin if path is None else load_checkpoint(path)

    def close(self) -> None:
        """Write what can be written, and end; harmless when it has ended."""
        self._news.put(None)
        self._thread.join()

    def _collect(self) -> None:
        while (news := self._news.get()) is not None:
            who, what = news
            if isinstance(what, threading.Event):
                self._given.clear()
                self._last.clear()
                self._live = set(self._all)
                what.set()
            elif isinstance(what, bool):
                (self._live.add if what else self._live.discard)(who)
            else:
                part = unpacked(what)  # of another life than those before, maybe
                self._given[who] = [p for p in self._given[who] if p["life"] == part["life"]] + [part]
            try:
                self._write()
            except Exception as error:  # such as a full disk: training goes on, and so does the last good checkpoint
                self._say(f"a checkpoint could not be written to {self._folder}: {type(error).__name__}: {error}")

    def _write(self) -> None:
        """Write the checkpoints of which all parts are there."""
        parts = [part for given in self._given.values() for part in given if part["common"]]
        for number in sorted({part["number"] for part in parts}):
            common = united([held for part in parts if part["number"] == number for held in part["common"]], self._size)
            late = {who: [part for part in given if part["number"] >= number] for who, given in self._given.items()}
            if common is None or not all(late.get(who) for who in self._live):
                continue
            self._last |= {who: given[0]["own"] for who, given in late.items() if given}
            for who, given in self._given.items():
                self._given[who] = [part for part in given if part["number"] > number]
            if common["version"] > self._written:
                self._written = common["version"]
                write(Checkpoint(self._facts, common, settled(self._last)), self._folder)


def settled(own: Mapping[str, Any]) -> dict[str, Any]:
    """What each process had for itself; a worker is to go on after the last of its gradients that server 0 knew of."""
    made, dealt = dict(own), next((kept["place"] for kept in own.values() if "place" in kept), None)
    if "server 0" not in own or dealt is None:
        return made
    for index, step in enumerate(own["server 0"]["server"]["settled"]):
        kept = own.get(f"worker {index}", {})  # none of one that has died before it could say anything
        place = kept.get("place", {**dealt, "index": index, "step": 0, "position": 0})
        unknown = place["step"] - 1 - step
        position = place["batch"] if unknown > 0 else place["position"] - unknown  # below 0: it has died since
        made[f"worker {index}"] = {**kept, "place": {**place, "position": position}}
    return made


def check_saving(
    task: Task, strategy: Strategy, num_updates: int, folder: Any, every: int | None, resume: Any
) -> dict[str, Any]:
    """What the job says of checkpoints, if there can be any; else an error, before any process starts."""
    if every is not None:
        check_count("checkpoint_every", every)
        if folder is None:
            raise ValueError(f"checkpoint_every={every} needs a folder: pass checkpoint_dir=...")
    begin = None if resume is None else check_resume(resume, task, strategy, num_updates)
    if folder is None:
        return {"begin": begin}
    if strategy.unsaved:
        raise ValueError(f"there are no checkpoints of {strategy!r}: {strategy.unsaved}")
    return {"begin": begin, "checkpoint_dir": check_folder(folder, begin), "checkpoint_every": every}


def check_resume(resume: Any, task: Task, strategy: Strategy, num_updates: int) -> Checkpoint:
    """The checkpoint at the path `resume`, if this run can go on from it."""
    if not isinstance(resume, (str, os.PathLike)):
        raise TypeError(f"resume must be the path of a checkpoint, got {resume!r} ({type(resume).__name__})")
    if strategy.unsaved:
        raise ValueError(f"{strategy!r} cannot go on from a checkpoint: {strategy.unsaved}")
    begin = load_checkpoint(resume, task)
    mine = facts_of(task, repr(strategy), strategy.optimizer(task))
    if mine["optimizer"] != begin.facts["optimizer"]:
        theirs = f"{begin.facts['optimizer']}, under {begin.facts['strategy']}"
        raise ValueError(f"{begin.path} has the state of {theirs}; here the updates are made by {mine['optimizer']}")
    if begin.version >= num_updates:
        raise ValueError(
            f"{begin.path} holds {begin.version} updates already: num_updates counts them too, so it must be larger "
            f"than that, got {num_updates}"
        )
    return begin


def check_folder(folder: Any, begin: Checkpoint | None) -> str:
    """The absolute path of `folder`, made if it is not there, if checkpoints can be written there."""
    if not isinstance(folder, (str, os.PathLike)):
        raise TypeError(f"checkpoint_dir must be the path of a folder, got {folder!r} ({type(folder).__name__})")
    path = Path(folder).resolve()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise OSError(f"checkpoint_dir={str(folder)!r} cannot be written to: {error}") from error
    for half in path.glob(f"{MAKING}*"):  # of a run that was cut off
        shutil.rmtree(half, ignore_errors=True)
    newest = latest_checkpoint(path)
    if newest is not None and (begin is None or Path(begin.path).resolve() != newest):
        raise ValueError(
            f"checkpoint_dir={str(folder)!r} holds what this run does not go on from, the newest {newest.name}: say "
            f"resume={str(newest)!r}, or take a new folder"
        )
    return str(path)


def collector(job: Job, strategy: Strategy, num_workers: int, say: Callable[[str], None]) -> Collector | None:
    """Who makes this job's checkpoints, if there are to be any."""
    if job.checkpoint_dir is None:
        return None
    counts = strategy.layout(num_workers).counts
    peers = [Peer(role, index) for role, count in counts.items() for index in range(count)]
    facts = facts_of(job.task, repr(strategy), strategy.optimizer(job.task))
    return Collector(Path(job.checkpoint_dir), facts, peers, job.begin, say)
