"""One process of a real run, from its first line to its last: the far side of `local.py`.

It talks to the caller over two pipes that the caller made: one for control (events, results and errors up,
commands down), one for everything that is printed. When the control pipe closes, the caller is gone, and so is
this process, at once.
"""

import base64
import ctypes
import json
import math
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from distlab import errors
from distlab.fabric import Peer, clock
from distlab.fabric.meeting import Where
from distlab.fabric.torch_fabric import TorchFabric
from distlab.packing import to_bytes
from distlab.strategies.base import Job, Outcome, Strategy, outcome_of
from distlab.trace import Buffer, Recorder

FLUSH_S = 0.05
PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal that a process gets when its parent ends


@dataclass(frozen=True)
class Place:
    """Where a process belongs: who it is, with whom, and how they find each other."""

    me: Peer
    counts: dict[str, int]
    pairs: tuple[tuple[str, str], ...]
    token: int
    pad_s: float
    told: tuple[tuple[str, Peer], ...] = ()  # changes of the membership, so far
    step: int = -1  # the last that was heard of another process of this name
    weather: tuple[str, ...] = ()
    dies_at: float = math.inf
    links: str = "gloo"
    folder: str | None = None  # of the run, on its one host
    where: Where | None = None  # or its store, on several
    ahead_s: float = 0.0  # of this host's clock, the leader's
    rate: float = 1.0  # times the task's learning rate, as was said of a run under way


def place_of(said: dict[str, Any]) -> Place:
    """The place that was said as JSON."""
    told = tuple((what, Peer(*peer)) for what, peer in said["told"])
    pairs, weather = tuple((a, b) for a, b in said["pairs"]), tuple(said["weather"])
    return Place(**{**said, "me": Peer(*said["me"]), "told": told, "pairs": pairs, "weather": weather})


class Control:
    """This process's end of the control pipe."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe, self._lock = pipe, threading.Lock()

    def say(self, kind: str, body: Any = b"") -> None:
        """Send one message up, told apart by its first letter."""
        with self._lock:
            self.pipe.send_bytes(kind[0].encode() + bytes(body))

    def listen(self, fabric: TorchFabric, folder: str | None) -> None:
        """Obey the caller's commands until it is gone; then it may have left its folder behind as well."""
        try:
            while True:
                word, *rest = self.pipe.recv_bytes().decode().split()
                if word == "stop":
                    fabric.stopping = True
                    fabric.wake()
                elif word in ("leave", "stay"):
                    fabric.leaving = word == "leave"
                elif word == "rate":
                    fabric.rate = float(rest[0])
                elif word == "weather":
                    fabric.weather.change(rest)
                else:
                    fabric.tell(word, Peer(rest[0], int(rest[1])))
        except (EOFError, OSError):
            pass
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)


def main(payload: bytes, place: Place, pipe: Connection, out: Connection) -> None:
    """The target of the new process. Never returns: `os._exit`, so that a dead peer cannot hang the exit."""
    os.setsid()  # an interrupt of the caller's terminal or kernel must not reach this process
    wake_with_parent()
    redirect(out)
    control = Control(pipe)
    clock.set_ahead(place.ahead_s)
    record = Recorder(*place.me, Buffer(lambda rows: control.say("events", rows.tobytes())))
    lives: dict[str, Any] = {"folder": place.folder, "where": place.where}
    fabric = TorchFabric(place.me, place.counts, record, token=place.token, pad_s=place.pad_s, **lives)
    for what, peer in place.told:
        fabric.tell(what, peer)
    fabric.step, fabric.rate = place.step + bool(place.told), place.rate
    fabric.weather.change(list(place.weather))
    fabric.dies_at = place.dies_at
    threading.Thread(
        target=control.listen, args=(fabric, place.folder if place.where is None else None), daemon=True
    ).start()
    fabric.on_over = lambda: control.say("over")
    threading.Thread(target=live, args=(record, control), daemon=True).start()
    try:
        torch.set_num_threads(1)
        with ThreadPoolExecutor(1) as courier:  # parts of checkpoints leave while training goes on

            def keep(part: Tensor) -> None:
                record.flush()  # what is in a checkpoint is in the trace too
                courier.submit(control.say, "keep", part.numpy())

            outcome = run(payload, place, fabric, lambda: control.say("linked"), keep)
        record.flush()
        control.say("result", to_bytes(vars(outcome)))
    except BaseException as error:
        record.flush()
        control.say("failure", json.dumps(told_of(error, fabric.step)).encode())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def wake_with_parent() -> None:
    """Go on when the fork server ends: who stands still could not hear that the caller is gone.

    The server ends with the caller, once nobody else holds the pipe by which it knows; it gives each process an end."""
    held = getattr(forkserver._forkserver, "_forkserver_alive_fd", None)
    if sys.platform == "linux" and held is not None:
        os.close(held)
        forkserver._forkserver._forkserver_alive_fd = None  # type: ignore[attr-defined]
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)


def run(
    payload: bytes, place: Place, fabric: TorchFabric, linked: Callable[[], None], hand_over: Callable[[Tensor], Any]
) -> Outcome:
    """Unpack the job, make the links, say so, and be what the strategy says."""
    strategy, job = cloudpickle.loads(payload)
    fabric.connect(place.pairs, links=place.links, tag=len(place.told))
    linked()
    left: list[Outcome] = []
    fabric.spawn(lambda: left.append(outcome_of(strategy, fabric, job, hand_over))).join()
    return left[0]


def redirect(out: Connection) -> None:
    """Send file descriptors 1 and 2 up the pipe: that catches what C++ prints as well."""
    os.dup2(out.fileno(), 1)
    os.dup2(out.fileno(), 2)
    out.close()
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def live(record: Recorder, control: Control) -> None:
    """Hand over events every 50 ms, and give a sign of life; ends with the process."""
    tick = threading.Event()
    while not tick.wait(FLUSH_S):
        record.flush()
        control.say("heartbeat")


def describe(error: BaseException) -> tuple[bytes | None, str, str]:
    """An exception for the caller: itself if it can be pickled, its one line, its traceback."""
    text = "".join(traceback.format_exception(error))
    line = "".join(traceback.format_exception_only(error)).strip()
    try:
        packed = cloudpickle.dumps(error)
        cloudpickle.loads(packed)
    except Exception:
        return None, line, text
    return packed, line, text


def told_of(error: BaseException, step: int) -> dict[str, Any]:
    """An exception as JSON: by name and arguments, if that is enough, and pickled, for who may open that."""
    pickled, line, text = describe(error)
    args: Any = None
    with suppress(Exception):  # somebody's own
        args = error.__reduce__()[1]
    plain = isinstance(args, tuple) and all(isinstance(arg, str | int | float | None) for arg in args)
    name = type(error).__name__ if type(error).__module__ in ("builtins", errors.__name__) and plain else ""
    said = {"name": name, "args": list(args) if name else [], "line": line, "text": text, "step": step}
    return said | {"pickled": "" if pickled is None else base64.b64encode(pickled).decode()}


def pack(strategy: Strategy, job: Job) -> bytes:
    """Strategy and job for the pipe. What a notebook cell defines goes by value."""
    return cloudpickle.dumps((strategy, job))
