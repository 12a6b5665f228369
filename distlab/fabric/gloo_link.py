"""Links over torch.distributed's gloo: between any two processes that reach each other by TCP.

Every link is a process group of two ranks of its own, so that the death of one peer is felt on one link, at
once, and by nobody else. All of a process's links share one gloo device that listens on one address.
"""

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.errors import BadMessage, PeerLost
from distlab.fabric import wire
from distlab.fabric.base import Kind, Link, Message, Peer
from distlab.fabric.weather import Weather

Gloo: Any = dist.ProcessGroupGloo  # its type stubs leave out most of it
FIRST_BYTES = 1 << 16  # a link's first buffers; they grow with the messages
DIRECT_BYTES = 1 << 18  # from here on, what is lent travels after its header, from memory to memory
FOREVER = timedelta(days=365)  # a gloo receive that times out closes its link for good, so none ever does


def gloo_options(address: str) -> Any:
    """Options for groups that listen on `address` alone and share one thread for their traffic."""
    options = Gloo._Options()
    options._timeout, options._threads = FOREVER, 1
    options._devices = [Gloo.create_device(hostname=address, lazy_init=False)]
    return options


class GlooLink(Link):
    """A link over a gloo group: `rank` is the peer's number in it."""

    def __init__(self, group: Any, rank: int, me: Peer, peer: Peer, token: int) -> None:
        self.peer, self.weather = peer, Weather()
        self._group, self._rank, self._me, self._token = group, rank, me, token
        self._out, self._in = _buffer(FIRST_BYTES), _buffer(FIRST_BYTES)
        self._head_out = _buffer(wire.HEAD_BYTES)
        self._expected: deque[tuple[Any, Tensor, Any, Tensor]] = deque()  # heads and bodies for which there is room
        self._spare = [torch.empty(0), torch.empty(0)]  # to be filled in turn
        self._over = self._closed = False  # has this end hung up? has the other?
        self._leaving: list[tuple[Any, Tensor]] = []  # sends under way, and the memory that they read
        self._sending, self._hearing = threading.Lock(), threading.RLock()  # nothing begins after this end's goodbye

    def put(self, message: Message) -> int:
        self.flush()
        size = wire.size(message.tensors)
        self.weather.hold_up(size)
        if size > self._out.numel():
            self._grow(size)
        self._start(message)
        return size

    def flush(self) -> None:
        while self._leaving:
            self._finish(self._leaving.pop(0)[0])

    def hang_up(self, largest_bytes: int = 0) -> None:
        """gloo's waits cannot be broken off: what is on its way here is taken, and the word that this was all sent."""
        with self._sending:
            hangs_up, self._over = not self._over, True
        if hangs_up:
            threading.Thread(target=self._say_goodbye, args=(largest_bytes,), daemon=True).start()

    def _say_goodbye(self, largest_bytes: int) -> None:
        last = _buffer(wire.HEAD_BYTES)
        size = wire.encode(last, Message(Kind.GONE), self._me, self._token)
        with suppress(PeerLost, BadMessage):
            farewell = self._attempt(self._group.send, last[:size])
            with self._hearing:  # whoever is waiting here gets the next message, or the other's goodbye
                while self._expected and not self._closed:
                    self._take_expected()
                scratch = _buffer(max(largest_bytes + wire.HEAD_BYTES, self._in.numel()))
                while not self._closed:
                    self._finish(self._attempt(self._group.recv, scratch))
                    self._closed, larger = wire.is_goodbye(scratch), wire.announced(scratch)
                    scratch = _buffer(larger) if larger > scratch.numel() else scratch
            self._finish(farewell)

    def recv(self) -> Message:
        with self._hearing:
            self._check_open()
            self._finish(self._attempt(self._group.recv, self._in))
            message = wire.decode(self._in, self.peer, self._token)
            if message.kind is Kind.GONE:
                self._closed = True
                raise PeerLost(str(self.peer))
            if message.kind is not Kind.GROW:
                self.weather.hold_up(message.num_bytes)
                return message
            if not 0 < message.version <= wire.MAX_BYTES:
                raise BadMessage(f"{self.peer} announces a message of {message.version} bytes")
            self._in = _buffer(message.version)
            return self.recv()

    def lend(self, tensor: Tensor) -> int:
        if size_of(tensor) < DIRECT_BYTES:
            return super().lend(tensor)
        self.flush()
        self.weather.hold_up(size_of(tensor))
        wire.encode_head(self._head_out, Message(Kind.DATA, [tensor]), self._me, self._token)
        self._send(self._head_out, tensor.view(torch.uint8))
        return wire.size([tensor])

    def expect(self, tensor: Tensor, *, into: bool = False) -> None:
        if size_of(tensor) < DIRECT_BYTES:
            return
        if not into:
            self._spare.reverse()
            if self._spare[0].numel() < tensor.numel() or self._spare[0].dtype != tensor.dtype:
                self._spare[0] = torch.empty_like(tensor)
            tensor = self._spare[0][: tensor.numel()]
        with self._hearing:
            self._check_open()
            head = _buffer(wire.HEAD_BYTES)
            works = [self._attempt(self._group.recv, part) for part in (head, tensor.view(torch.uint8))]
            self._expected.append((works[0], head, works[1], tensor))

    def recv_lent(self, like: Tensor) -> Tensor:
        if size_of(like) < DIRECT_BYTES:
            return super().recv_lent(like)
        return self._recv_expected(like, into=False)

    def recv_into(self, tensor: Tensor) -> None:
        if size_of(tensor) < DIRECT_BYTES:
            return super().recv_into(tensor)
        self._recv_expected(tensor, into=True)
        return None

    def _recv_expected(self, tensor: Tensor, *, into: bool) -> Tensor:
        with self._hearing:
            if not self._expected:
                self.expect(tensor, into=into)
            self._check_open()
            body = self._take_expected()
            if self._closed:
                raise PeerLost(str(self.peer))
        self.weather.hold_up(size_of(tensor))
        return body

    def _take_expected(self) -> Tensor:
        """What was expected first; or the link is closed."""
        head_comes, head, body_comes, body = self._expected.popleft()
        self._finish(head_comes)
        self._closed = wire.is_goodbye(head)
        if not self._closed:
            wire.check_head(head, body, self.peer, self._token)
            self._finish(body_comes)
        return body

    def _check_open(self) -> None:
        if self._closed or self._over:
            raise PeerLost(str(self.peer))

    def _grow(self, size: int) -> None:
        self._start(Message(Kind.GROW, version=size))  # not awaited: the peer may be about to post as well
        self._out = _buffer(size)

    def _start(self, message: Message) -> None:
        size = wire.encode(self._out, message, self._me, self._token)
        self._send(self._out[:size])

    def _send(self, *parts: Tensor) -> None:
        with self._sending:
            self._check_open()
            self._leaving += [(self._attempt(self._group.send, part), part) for part in parts]

    def _attempt(self, operation: Callable[..., Any], tensor: Tensor) -> Any:
        try:
            return operation([tensor], self._rank, 0)
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
