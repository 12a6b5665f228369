"""Where the processes of one host find each other: a Unix socket of each in a folder that only this user can enter.

Of two processes the higher calls and the lower opens. The hard idea is that anybody may knock, at any time: strangers,
whose first word is not the run's; and members that come too early, which have been told of a change that this process
has not heard of yet. The first are turned away and counted, the second wait at the door under their tag.
"""

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from distlab.errors import DistlabError, PeerLost
from distlab.fabric import wire
from distlab.fabric.membership import Peer
from distlab.fabric.memory_link import MemoryLink
from distlab.trace import ROLES

HELLO = struct.Struct("<QQqqq")  # magic token role index tag
HELLO_S = 5.0  # how long a stranger may keep quiet
RETRY_S = 1e-3  # until the other end listens


class Door:
    """This process's door, open until it ends.

    Attributes:
        refused: how many were turned away.
    """

    def __init__(self, folder: str, me: Peer, token: int) -> None:
        self._folder, self._me, self._token = folder, me, token
        self._waiting: dict[tuple[Peer, int], MemoryLink] = {}
        self._seen: set[tuple[Peer, int]] = set()
        self._newest: dict[str, int] = {}  # role -> the tag of the links in use: who comes with an older one is late
        self._came, self.refused = threading.Condition(), 0
        self._socket = socket.socket(socket.AF_UNIX)
        with suppress(FileNotFoundError):  # left by one that has died under this name
            os.unlink(address(folder, me))
        try:
            self._socket.bind(address(folder, me))
        except OSError as error:
            raise DistlabError(
                f"no links through memory in {folder} ({error}): set TMPDIR to a shorter path, or use "
                f'LocalCluster(links="gloo")'
            ) from error
        self._socket.listen()
        threading.Thread(target=self._open, daemon=True).start()

    def meet(
        self, peers: Sequence[Peer], *, tag: int = 0, unless: Callable[[], bool] = lambda: False
    ) -> dict[Peer, MemoryLink]:
        """A link to each of `peers`, who call for the same `tag`, once all have come.

        Raises:
            PeerLost: `unless` holds before that. Say `wake` when it may.
        """
        links = {peer: self._call(peer, tag, unless) for peer in peers if peer < self._me}
        keys = [(peer, tag) for peer in peers if peer > self._me]
        with self._came:
            self._close_older({peer.role for peer in peers}, tag)
            self._came.wait_for(lambda: unless() or all(key in self._waiting for key in keys))
            links |= {key[0]: self._waiting.pop(key) for key in keys if key in self._waiting}
        if unless():
            for link in links.values():
                link.hang_up()
            raise PeerLost("another process")
        return links

    def wake(self) -> None:
        """Let `meet` look again."""
        with self._came:
            self._came.notify_all()

    def _close_older(self, roles: set[str], tag: int) -> None:
        self._newest |= dict.fromkeys(roles, tag)
        for peer, old in [key for key in self._waiting if key[0].role in roles and key[1] < tag]:
            self._waiting.pop((peer, old)).hang_up()

    def _call(self, peer: Peer, tag: int, unless: Callable[[], bool]) -> MemoryLink:
        outgoing = socket.socket(socket.AF_UNIX)
        while outgoing.connect_ex(address(self._folder, peer)):
            if unless():
                raise PeerLost(str(peer))
            time.sleep(RETRY_S)
        incoming, theirs = socket.socketpair()
        with theirs, suppress(OSError):  # it may be gone by now: the first use of the link will say so
            socket.send_fds(outgoing, [hello(self._me, self._token, tag)], [theirs.fileno()])
        return MemoryLink(outgoing, incoming, me=self._me, peer=peer, token=self._token)

    def _open(self) -> None:
        while True:
            caller, _ = self._socket.accept()
            threading.Thread(target=self._greet, args=(caller,), daemon=True).start()

    def _greet(self, caller: socket.socket) -> None:
        """Let one in, or not. A thread of its own, since a stranger may say nothing."""
        caller.settimeout(HELLO_S)
        try:
            said, fds, _, _ = socket.recv_fds(caller, HELLO.size, 1)
        except OSError:
            said, fds = b"", []
        caller.settimeout(None)
        with self._came:
            key = self._whose(said)
            if key is None or key in self._seen or not fds:
                self._refuse(caller, fds)
            elif key[1] < self._newest.get(key[0].role, 0):
                turn_away(caller, fds)
            else:
                outgoing = socket.socket(fileno=fds[0])
                self._seen.add(key)
                self._waiting[key] = MemoryLink(outgoing, caller, me=self._me, peer=key[0], token=self._token)
                self._came.notify_all()

    def _whose(self, said: bytes) -> tuple[Peer, int] | None:
        """Who says hello, and with which tag; None if it is not one of the run's that may call here."""
        if len(said) != HELLO.size:
            return None
        magic, token, role, index, tag = HELLO.unpack(said)
        if magic != wire.MAGIC or token != self._token or not 0 <= role < len(ROLES) or index < 0 or tag < 0:
            return None
        peer = Peer(ROLES[role], index)
        return (peer, tag) if peer > self._me else None

    def _refuse(self, caller: socket.socket, fds: list[int]) -> None:
        self.refused += 1
        turn_away(caller, fds)


def turn_away(caller: socket.socket, fds: list[int]) -> None:
    """Close all that it has brought."""
    caller.close()
    for fd in fds:
        os.close(fd)


def hello(me: Peer, token: int, tag: int = 0) -> bytes:
    """The first words on a link."""
    return HELLO.pack(wire.MAGIC, token, ROLES.index(me.role), me.index, tag)


def address(folder: str, peer: Peer) -> str:
    """Where a process listens."""
    return os.path.join(folder, f"{peer.role}-{peer.index}")
