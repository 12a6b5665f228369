"""The real world: processes with links through memory or over gloo, threads, the wall clock."""

import fcntl
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from distlab.errors import DistlabError
from distlab.fabric import clock
from distlab.fabric.base import NUM_COUNTS, Fabric, Link, Parts, Peer, Running, Shared, Timed
from distlab.fabric.door import Door
from distlab.fabric.meeting import LOOPBACK_ADDRESS, Meeting, Where, open_store, watch_connections
from distlab.fabric.weather import Weather
from distlab.randomness import seed_all
from distlab.trace import Recorder

COUNTS_BYTES = NUM_COUNTS * torch.int64.itemsize
SIOCGIFADDR = 0x8915  # Linux: the address of an interface
LOOPBACK = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def interface(address: str) -> str:
    """The network interface of this host that has an address; DistlabError if none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none
                answer = fcntl.ioctl(asker, SIOCGIFADDR, name.encode()[:15].ljust(256, b"\0"))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    raise DistlabError(f"no network interface of this host has the address {address}")


class Task(Running):
    """A thread of this process; its exception is handed to the fabric."""

    def __init__(self, fabric: "TorchFabric", function: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._fabric, self._ended = fabric, False
        threading.Thread(target=self._run, args=(function, args), daemon=True).start()

    def _run(self, function: Callable[..., None], args: tuple[Any, ...]) -> None:
        try:
            function(*args)
        except BaseException as error:
            self._fabric.fail(error)
        with self._fabric.lock("tasks"):
            self._ended = True

    def join(self) -> None:
        self._fabric.until(lambda: self._ended)


class FileLock:
    """Excludes the other processes that have opened the same file. If the holder dies, the kernel lets go of it."""

    def __init__(self, path: str) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def __enter__(self) -> None:
        fcntl.flock(self.fd, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self.fd, fcntl.LOCK_UN)


class TorchFabric(Fabric):
    """One process of a real run.

    Args:
        pad_s: a gradient takes at least so long; the rest is slept, so that processes that share a core can
            act as if each had its own.
        folder: of this run alone, on the one host of all its processes; None if there may be several hosts.
        where: the store of several hosts.
    """

    def __init__(
        self, me: Peer, counts: dict[str, int], record: Recorder, *, token: int, pad_s: float = 0.0,
        folder: str | None = None, where: Where | None = None,
    ) -> None:  # fmt: skip
        super().__init__(me, counts, record)
        self._token, self._pad_s, self._folder, self._where = token, pad_s, folder, where
        self._meeting: Door | Meeting | None = None
        self.on_over: Callable[[], None] = lambda: None
        self.weather, self.dies_at = Weather(), math.inf  # what a scenario does to this process; it ends at that step
        self._links: dict[Peer, Link] = {}
        self._locks: dict[str, threading.RLock] = {}
        self._changed = threading.Condition()
        self._failure: BaseException | None = None

    def connect(self, pairs: Sequence[tuple[str, str]], *, links: str = "memory", tag: int = 0) -> None:
        """Make this process's first links, and wait for the other ends: between every process of the first role of
        a pair and every one of the second; within one role, between all.

        Args:
            links: through "memory", or over "gloo".
            tag: of this process's coming; one that has come back leaves the links within its role to its group.
        """
        if links == "memory":
            assert self._folder is not None, "processes of several hosts share no memory"
            self._meeting = Door(self._folder, self.me, self._token)
        else:
            address = LOOPBACK_ADDRESS if self._where is None else self._where.address
            self._meeting = Meeting(self._open_store, address, self.me, self._token)
        roles = {b if self.me.role == a else a for a, b in pairs if self.me.role in (a, b)}
        peers = [peer for role in sorted(roles) for peer in self.others(role) if not tag or role != self.me.role]
        self.relink(self.members.present(peers), tag=tag, unless=lambda: False)

    def _open_store(self) -> Any:
        return open_store(self._folder, self._where)

    def relink(self, peers: Sequence[Peer], *, tag: int, unless: Callable[[], bool]) -> None:
        assert self._meeting is not None, "there were no links yet"
        for peer, link in self._meeting.meet(peers, tag=tag, unless=unless).items():
            link.weather, self._links[peer] = self.weather, link
        if self._where is not None:
            watch_connections(self._where.silence_s)

    def tell(self, what: str, peer: Peer) -> None:
        super().tell(what, peer)
        if self._meeting is not None:
            self._meeting.wake()

    def over(self) -> None:
        self.on_over()

    def now(self) -> float:
        return clock.now()

    def seed(self, number: int) -> None:
        seed_all(number)

    def link(self, role: str, index: int) -> Link:
        return self._links[Peer(role, index)]

    def has_link(self, peer: Peer) -> bool:
        return peer in self._links

    def spawn(self, function: Callable[..., None], *args: Any) -> Running:
        return Task(self, function, args)

    @contextmanager
    def lock(self, name: str = ""):
        with self._locks.setdefault(name, threading.RLock()):
            yield
        self.wake()

    def shared(self, name: str, numel: int, dtype: torch.dtype) -> Shared:
        if self._folder is None:
            raise DistlabError(
                f"{self.me} asked for memory that all processes share ({name!r}): only processes of one host can, and "
                f"this run may span several. Use a LocalCluster, or a strategy that sends messages, such as AsyncPS"
            )
        path = os.path.join(self._folder, f"shared-{name}")
        lock, size = FileLock(path), COUNTS_BYTES + numel * dtype.itemsize
        with lock:  # who makes the file longer also writes a zero into its first byte, which another may be using
            memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        return Shared(memory[COUNTS_BYTES:].view(dtype), memory[:COUNTS_BYTES].view(torch.int64), lock)

    def until(self, condition: Callable[[], bool], what: str = "a change of its own state") -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or condition())
        if self._failure is not None:
            raise self._failure

    def wake(self) -> None:
        """Let everybody who waits in `until` look again."""
        with self._changed:
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """End this process's part of the run with `error`: the first one counts."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def timed(
        self, kind: str, function: Callable[[], Any], share: float = 1.0, idle: Any = None, unless: Link | None = None,
        parts: Parts | None = None,
    ) -> Timed:  # fmt: skip
        assert unless is None, "a real computation cannot be cancelled"
        if kind == "compute" and self.step >= self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        start, pad_s = self.now(), self._pad_s * share if kind == "compute" else 0.0

        def wait(part: float) -> None:
            time.sleep(max(0.0, start + pad_s * part - self.now()))

        value = parts.spread(function, wait) if parts is not None and pad_s else function()
        if kind == "compute" and self.weather.slow > 1.0:
            pad_s = max(pad_s, self.now() - start) * self.weather.slow
        if pad_s:  # a sleep of no time at all costs a tenth of a millisecond
            wait(1.0)
        return Timed(value, start, self.now())

    def default_group(self) -> None:
        # or it would listen on the address of the host's name
        os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK if self._where is None else interface(self._where.address)
        store = dist.PrefixStore(f"{self._token}/{self.me.role}s", self._open_store())
        dist.init_process_group("gloo", store=store, rank=self.me.index, world_size=self.counts[self.me.role])
