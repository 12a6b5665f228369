"""Links over torch.distributed's gloo: between any two processes that reach each other by TCP.

Every link is a process group of two ranks of its own, so that the death of one peer is felt on one link, at
once, and by nobody else. All of a process's links share one gloo device that listens on one address; they find
each other through a file in a directory that only this user can read, so nothing listens for strangers.
"""

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.errors import BadMessage, PeerLost
from distlab.fabric import wire
from distlab.fabric.base import Kind, Link, Message, Peer

Gloo: Any = dist.ProcessGroupGloo  # its type stubs leave out most of it
LOOPBACK_ADDRESS = "127.0.0.1"
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
        self.peer = peer
        self._group, self._rank, self._me, self._token = group, rank, me, token
        self._out, self._in = _buffer(FIRST_BYTES), _buffer(FIRST_BYTES)
        self._head_out, self._head_in = _buffer(wire.HEAD_BYTES), _buffer(wire.HEAD_BYTES)
        self._spare = torch.empty(0)
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

    def recv_lent(self, like: Tensor) -> Tensor:
        if size_of(like) < DIRECT_BYTES:
            return super().recv_lent(like)
        if (self._spare.numel(), self._spare.dtype) != (like.numel(), like.dtype):
            self._spare = torch.empty_like(like)
        self.recv_into(self._spare)
        return self._spare

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


class Meeting:
    """Where the processes of a run find each other: a store in a file.

    Args:
        counts: how many processes each role has.
    """

    def __init__(self, store: dist.Store, me: Peer, counts: dict[str, int], token: int) -> None:
        self._store, self._me, self._counts, self._token = store, me, counts, token
        self._options = gloo_options(LOOPBACK_ADDRESS)

    def pair(self, peer: Peer) -> dict[Peer, GlooLink]:
        """The link to a process of another role: a group of two."""
        low, high = sorted([self._me, peer])
        group = self._group(f"{low}-{high}", int(self._me == high), 2)
        return {peer: GlooLink(group, int(self._me == low), self._me, peer, self._token)}

    def mesh(self, peers: Iterable[Peer]) -> dict[Peer, GlooLink]:
        """The links to all other processes of the same role: one group for all."""
        group = self._group(f"{self._me.role}s", self._me.index, self._counts[self._me.role])
        return {peer: GlooLink(group, peer.index, self._me, peer, self._token) for peer in peers}

    def _group(self, name: str, rank: int, size: int) -> Any:
        return Gloo(dist.PrefixStore(f"{self._token}/{name}", self._store), rank, size, self._options)
