"""The real world: torch.distributed's gloo between processes, threads, the wall clock.

Every link is a process group of two ranks of its own, so that the death of one peer is felt on one link, at
once, and by nobody else. All of a process's links share one gloo device that listens on one address; they find
each other through a file in a directory that only this user can read, so nothing listens for strangers.
"""

import fcntl
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.errors import BadMessage, DistlabError, PeerLost
from distlab.fabric import wire
from distlab.fabric.base import NUM_COUNTS, Fabric, Kind, Link, Message, Parts, Peer, Running, Shared, Timed
from distlab.randomness import seed_all
from distlab.trace import Recorder

Gloo: Any = dist.ProcessGroupGloo  # its type stubs leave out most of it
FIRST_BYTES = 1 << 16  # a link's first buffers; they grow with the messages
DIRECT_BYTES = 1 << 18  # from here on, what is lent travels after its header, from memory to memory
COUNTS_BYTES = NUM_COUNTS * torch.int64.itemsize
LOOPBACK = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
FOREVER = timedelta(days=365)  # a gloo receive that times out closes its link for good, so none ever does


def gloo_options(address: str) -> Any:
    """Options for groups that listen on `address` alone and share one thread for their traffic."""
    options = Gloo._Options()
    options._timeout, options._threads = FOREVER, 1
    options._devices = [Gloo.create_device(hostname=address, lazy_init=False)]
    return options


class TorchLink(Link):
    """A link over a gloo group: `rank` is the peer's number in it."""

    def __init__(self, group: Any, rank: int, me: Peer, peer: Peer, token: int) -> None:
        self.peer = peer
        self._group, self._rank, self._me, self._token = group, rank, me, token
        self._out, self._in = _buffer(FIRST_BYTES), _buffer(FIRST_BYTES)
        self._head_out, self._head_in = _buffer(wire.HEAD_BYTES), _buffer(wire.HEAD_BYTES)
        self._leaving: list[tuple[Any, Tensor]] = []  # sends under way, and the memory that they read

    def put(self, message: Message) -> int:
        self.flush()
        size = wire.size(message.tensors)
        if size > self._out.numel():
            self._grow(size)
        self._start(message)
        return size

    def flush(self) -> None:
        while self._leaving:
            self._finish(self._leaving.pop(0)[0])

    def recv(self) -> Message:
        self._finish(self._attempt(self._group.recv, [self._in]))
        message = wire.decode(self._in, self.peer, self._token)
        if message.kind is not Kind.GROW:
            return message
        if not 0 < message.version <= wire.MAX_BYTES:
            raise BadMessage(f"{self.peer} announces a message of {message.version} bytes")
        self._in = _buffer(message.version)
        return self.recv()

    def lend(self, tensor: Tensor) -> int:
        if size_of(tensor) < DIRECT_BYTES:
            return super().lend(tensor)
        self.flush()
        wire.encode_head(self._head_out, Message(Kind.DATA, [tensor]), self._me, self._token)
        for part in (self._head_out, tensor.view(torch.uint8)):
            self._leaving.append((self._attempt(self._group.send, [part]), part))
        return wire.size([tensor])

    def recv_into(self, tensor: Tensor) -> None:
        if size_of(tensor) < DIRECT_BYTES:
            return super().recv_into(tensor)
        head, body = [self._attempt(self._group.recv, [t]) for t in (self._head_in, tensor.view(torch.uint8))]
        self._finish(head)
        wire.check_head(self._head_in, tensor, self.peer, self._token)
        self._finish(body)
        return None

    def _grow(self, size: int) -> None:
        self._start(Message(Kind.GROW, version=size))  # not awaited: the peer may be about to post as well
        self._out = _buffer(size)

    def _start(self, message: Message) -> None:
        size = wire.encode(self._out, message, self._me, self._token)
        self._leaving.append((self._attempt(self._group.send, [self._out[:size]]), self._out))

    def _attempt(self, operation: Callable[..., Any], tensors: list[Tensor]) -> Any:
        try:
            return operation(tensors, self._rank, 0)
        except RuntimeError as error:
            raise PeerLost(str(self.peer)) from error

    def _finish(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise PeerLost(str(self.peer)) from error


def size_of(tensor: Tensor) -> int:
    """Its bytes."""
    return tensor.numel() * tensor.element_size()


def _buffer(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


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
    """

    def __init__(
        self, me: Peer, counts: dict[str, int], record: Recorder, *, token: int, pad_s: float = 0.0,
        folder: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(me, counts, record)
        self._token, self._pad_s, self._folder = token, pad_s, folder
        self._links: dict[Peer, TorchLink] = {}
        self._locks: dict[str, threading.RLock] = {}
        self._changed = threading.Condition()
        self._failure: BaseException | None = None

    def connect(self, pairs: Sequence[tuple[str, str]], store: dist.Store, address: str = "127.0.0.1") -> None:
        """Make this process's links, and wait for the other ends: between every process of the first role of a
        pair and every one of the second, each a group of its own; within one role, one group for all."""
        options = gloo_options(address)
        links = [(Peer(a, i), Peer(b, j)) for a, b in pairs if a != b for i in self._all(a) for j in self._all(b)]
        mine = [ends for ends in links if self.me in ends]
        tasks = [self.spawn(self._pair, *ends, store, options) for ends in mine]
        if (self.me.role, self.me.role) in pairs:
            tasks.append(self.spawn(self._mesh, store, options))
        for task in tasks:
            task.join()

    def _all(self, role: str) -> range:
        return range(self.counts[role])

    def _pair(self, first: Peer, second: Peer, store: dist.Store, options: Any) -> None:
        rank, peer = (0, second) if self.me == first else (1, first)
        group = Gloo(dist.PrefixStore(f"{self._token}/{first}-{second}", store), rank, 2, options)
        self._links[peer] = TorchLink(group, 1 - rank, self.me, peer, self._token)

    def _mesh(self, store: dist.Store, options: Any) -> None:
        role, rank, size = *self.me, self.counts[self.me.role]
        group = Gloo(dist.PrefixStore(f"{self._token}/{role}s", store), rank, size, options)
        for peer in (Peer(role, i) for i in range(size) if i != rank):
            self._links[peer] = TorchLink(group, peer.index, self.me, peer, self._token)

    def now(self) -> float:
        return time.monotonic()

    def seed(self, number: int) -> None:
        seed_all(number)

    def link(self, role: str, index: int) -> Link:
        return self._links[Peer(role, index)]

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
        start, pad_s = self.now(), self._pad_s * share if kind == "compute" else 0.0
        wait = lambda part: time.sleep(max(0.0, start + pad_s * part - self.now()))  # noqa: E731
        value = parts.spread(function, wait) if parts is not None and pad_s else function()
        if pad_s:  # a sleep of no time at all costs a tenth of a millisecond
            wait(1.0)
        return Timed(value, start, self.now())

    def default_group(self) -> None:
        if self._folder is None:
            raise DistlabError(f"{self.me} asked for a group over a file, which only processes of one host can have")
        os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK  # or it would listen on the address of the host's name
        store = dist.FileStore(os.path.join(self._folder, f"{self.me.role}s"), self.counts[self.me.role])
        dist.init_process_group("gloo", store=store, rank=self.me.index, world_size=self.counts[self.me.role])
