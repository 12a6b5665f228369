"""A member of a real run: one process as its caller sees it, from the start of it to the news of its end.

It comes from a fork server that has torch loaded. The caller's script is not imported there, so a script needs no
guard, and what a notebook cell defines travels by value.
"""

import base64
import builtins
import codecs
import multiprocessing as mp
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver, spawn
from multiprocessing.connection import Connection
from typing import Any, ClassVar
from unittest.mock import patch

import cloudpickle
import numpy as np

from distlab import errors
from distlab.clusters import process
from distlab.clusters.process import Place
from distlab.clusters.sources import with_source
from distlab.errors import ProcessLost, RemoteError, RemoteTraceback
from distlab.fabric import Peer
from distlab.trace import Buffer, Recorder

METHOD = "forkserver" if "forkserver" in mp.get_all_start_methods() and sys.platform != "darwin" else "spawn"
CONTEXT: Any = mp.get_context(METHOD)
PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "distlab.clusters.process", "distlab.strategies"]
_starting = threading.Lock()


def warm() -> None:
    """Start the fork server, if it is not there; it loads torch while the caller goes on."""
    if METHOD == "forkserver":
        CONTEXT.set_forkserver_preload(PRELOAD)
        forkserver.ensure_running()


@dataclass(eq=False)
class Member:
    """The caller's side of one process.

    Attributes:
        is_here: is it a process of this host, started by this one?
    """

    is_here: ClassVar[bool] = True
    me: Peer
    process: Any
    control: Connection
    out: Connection
    pid: int
    said: str = ""  # "r" once its result is here, "f" once its failure is
    linked: bool = False  # has it found the others?
    step: int = -1
    computed: int = -1  # the last step of which it, or one whose place it has taken, had a gradient
    heard_s: float = field(default_factory=time.monotonic)  # when it last gave a sign of life
    stopped: bool = False  # by a scenario
    killed: bool = False  # by a scenario, and its death may not yet be noticed
    leaves: bool = False  # as it was asked to
    gave_up: str = ""  # why it was ended, if it was
    line: list[str] = field(default_factory=list)  # printed, but not yet ended
    decode: Any = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace").decode)

    def kill(self) -> None:
        """End it now; harmless when it has ended."""
        with suppress(ValueError):  # it is closed
            self.process.kill()

    def give_up(self, why: str) -> None:
        """End it, and say why in the news of its death."""
        self.gave_up = why
        self.kill()

    def signal(self, number: int) -> None:
        """Send it a signal; harmless when it has ended."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def order(self, *words: str) -> None:
        """Send it a command; harmless when it has ended."""
        with suppress(OSError):
            self.control.send_bytes(" ".join(words).encode())

    def end(self) -> None:
        """End it, wait for that, and give back every descriptor."""
        self.kill()
        self.process.join()
        self.process.close()
        self.control.close()
        self.out.close()

    def __str__(self) -> str:
        return f"{self.me} (pid {self.pid})"


def start(payload: bytes, place: Place) -> Member:
    """Start one process. The caller's script is not imported there: what it needs travels in `payload`."""
    control, its_control = CONTEXT.Pipe()
    out, its_out = CONTEXT.Pipe(duplex=False)
    child = launch(process.main, (payload, place, its_control, its_out), str(place.me))
    its_control.close()
    its_out.close()
    return Member(place.me, child, control, out, child.pid)


def launch(target: Callable[..., None], args: tuple[Any, ...], name: str) -> Any:
    """A new process that calls `target`, and ends with this one."""
    child = CONTEXT.Process(target=target, args=args, name=name, daemon=True)
    with _starting, patch.object(spawn, "get_preparation_data", _without_main(spawn.get_preparation_data)):
        child.start()
    return child


def _without_main(original: Any) -> Any:
    def data(name: str) -> dict[str, Any]:
        return {k: v for k, v in original(name).items() if not k.startswith("init_main_from")}

    return data


def rebuild(who: str, said: Mapping[str, Any], *, trusted: bool) -> BaseException:
    """A process's exception, as the caller will see it; see `process.told_of`. `trusted`: may it be unpickled?"""
    try:
        error = cloudpickle.loads(base64.b64decode(said["pickled"])) if trusted else remade(said)
    except Exception:
        error = remade(said)
    if not isinstance(error, Exception):  # SystemExit on a worker must not end the caller
        error = RemoteError(said["line"])
    at = f" at step {said['step']}" if said["step"] >= 0 else ""
    error.add_note(f"raised on {who}{at}")
    error.__cause__ = RemoteTraceback(with_source(said["text"]))
    return error


def remade(said: Mapping[str, Any]) -> BaseException:
    """An exception of Python's or of distlab's own, from its name and arguments; others are told of."""
    kind = getattr(builtins, said["name"], None) or getattr(errors, said["name"], None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        return kind(*said["args"])
    return RemoteError(said["line"])


def notice(kind: str, member: Member, version: int = -1) -> np.ndarray:
    """The row of a trace that says when a process died, took another's place, or took all others with it."""
    rows: list[np.ndarray] = []
    record = Recorder(*member.me, Buffer(rows.append))
    record(kind, time.monotonic(), time.monotonic(), worker=member.me.index, step=member.step, version=version)
    record.flush()
    return rows[0]


def lost(member: Member) -> ProcessLost:
    """The error for a process that ended without a word."""
    code = member.process.exitcode
    how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
    how = member.gave_up or how
    before = "it reported a step" if member.linked else "it had found the others"
    at = f"at step {member.step} (the last it reported)" if member.step >= 0 else f"before {before}"
    return ProcessLost(f"{member} was lost {at}: {how}")
