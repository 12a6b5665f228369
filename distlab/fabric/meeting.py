"""Where the processes of several hosts, or of one that uses gloo, find each other: a store that all of them reach."""

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch.distributed as dist

from distlab.errors import PeerLost
from distlab.fabric.base import Peer
from distlab.fabric.gloo_link import FOREVER, Gloo, GlooLink, gloo_options

LOOPBACK_ADDRESS = "127.0.0.1"
RETRY_S = 1e-3  # until the others have come


class Where(NamedTuple):
    """A store of several hosts, the address at which this one listens, and how long another may be silent."""

    host: str
    port: int
    address: str
    silence_s: float


def watch_connections(silence_s: float) -> None:
    """Let the kernel look after all of this process's connections to others: a host that has vanished closes none, and
    gloo would wait for it for ever."""
    for name in os.listdir("/dev/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as end:  # not every file is a connection
            if end.family == socket.AF_INET and end.type == socket.SOCK_STREAM:
                set_timeout(end, silence_s)


def set_timeout(end: socket.socket, silence_s: float) -> None:
    """Let a connection fail when the other end's host does not answer for so long."""
    every_s = max(1, round(silence_s / 4))
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    values = {"TCP_KEEPIDLE": every_s, "TCP_KEEPINTVL": every_s, "TCP_KEEPCNT": 3}
    for option, value in (values | {"TCP_USER_TIMEOUT": round(silence_s * 1000)}).items():
        if hasattr(socket, option):  # macOS has not all of them
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def open_store(folder: str | None, where: Where | None) -> Any:
    """The store of a run: on several hosts, or in a file of its folder, which only this user can read."""
    if where is not None:
        store = dist.TCPStore(where.host, where.port, is_master=False, wait_for_workers=False)
        store.set_timeout(FOREVER)
        return store
    assert folder is not None, "processes of several hosts cannot meet in a folder"
    return dist.FileStore(os.path.join(folder, "store"), -1)


class Meeting:
    """Where processes find each other.

    Args:
        open_store: a new connection to the store that all share. What waits in one waits alone.
        address: where this process listens.
    """

    def __init__(self, open_store: Callable[[], Any], address: str, me: Peer, token: int) -> None:
        self._open = lambda: dist.PrefixStore(str(token), open_store())
        self._store = self._open()
        self._me, self._token, self._options = me, token, gloo_options(address)

    def meet(
        self, peers: Sequence[Peer], *, tag: int = 0, unless: Callable[[], bool] = lambda: False
    ) -> dict[Peer, GlooLink]:
        """A link to each of `peers`, who call for the same `tag`: within a role over one group for all.

        Raises:
            PeerLost: `unless` holds before all have come.
        """
        self._store.set(f"{tag}/{self._me}", "here")
        while not all(self._store.check([f"{tag}/{peer}"]) for peer in peers):
            if unless():
                raise PeerLost("another process")
            time.sleep(RETRY_S)
        making = Making(lambda: self._make(tag, peers))
        while not making.done.wait(RETRY_S):
            if unless():  # one of the others may have died, or heard of it and gone: it would never come
                making.abandon()
                raise PeerLost("another process")
        return making.links()

    def wake(self) -> None:
        """`meet` looks by itself."""

    def _make(self, tag: int, peers: Sequence[Peer]) -> dict[Peer, GlooLink]:
        alike = sorted(peer for peer in peers if peer.role == self._me.role)
        store = self._open()  # it may wait for somebody who never comes, and keep others from this connection
        groups = [[self._me, peer] for peer in sorted(peers) if peer not in alike] + [[self._me, *alike]] * bool(alike)
        made = [self._links(store, tag, sorted(group)) for group in groups]
        return {peer: link for links in made for peer, link in links.items()}

    def _links(self, store: Any, tag: int, group: list[Peer]) -> dict[Peer, GlooLink]:
        name = f"{tag}/{'-'.join(map(str, group))}"
        made = Gloo(dist.PrefixStore(name, store), group.index(self._me), len(group), self._options)
        others = [(rank, peer) for rank, peer in enumerate(group) if peer != self._me]
        return {peer: GlooLink(made, rank, self._me, peer, self._token) for rank, peer in others}


class Making:
    """Links being made in a thread of their own: gloo cannot be told to stop waiting for somebody.

    Attributes:
        done: set when they are there, or cannot be had.
    """

    def __init__(self, make: Callable[[], dict[Peer, GlooLink]]) -> None:
        self.done, self._lock = threading.Event(), threading.Lock()
        self._links: dict[Peer, GlooLink] = {}
        self._error: RuntimeError | None = None
        self._abandoned = False
        threading.Thread(target=self._run, args=(make,), daemon=True).start()

    def links(self) -> dict[Peer, GlooLink]:
        """What was made; PeerLost if somebody was lost meanwhile."""
        if self._error is not None:
            raise PeerLost("another process") from self._error
        return self._links

    def abandon(self) -> None:
        """Nobody wants them any more, and those at the other ends shall hear it, should the links ever be there."""
        with self._lock:
            self._abandoned = True
            self._hang_up()

    def _run(self, make: Callable[[], dict[Peer, GlooLink]]) -> None:
        try:
            links = make()
            with self._lock:
                self._links = links
                if self._abandoned:
                    self._hang_up()
        except RuntimeError as error:
            self._error = error
        self.done.set()

    def _hang_up(self) -> None:
        for link in self._links.values():
            link.hang_up()
