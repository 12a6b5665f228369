"""Links between processes of one host, through memory that both have mapped.

A message is written where its receiver will read it. The hard idea is that this needs no lock: of the two slots of a
direction the sender fills one while the receiver still uses the other, and a slot changes hands by eight bytes on a
Unix socket, the bell. The kernel keeps what was written before them in order, wakes who waits, and closes the bell of a
process that has died.
"""

import os
import select
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from distlab.errors import BadMessage, DistlabError, PeerLost
from distlab.fabric import wire
from distlab.fabric.base import Link, Message, Peer
from distlab.trace import ROLES

NUM_SLOTS = 2
SLOT_BYTES = 1 << 16  # at least; a longer message gets a new slot
SPIN_S = 50e-6  # a bell that rings so soon is heard without a sleep: a sleeping core wakes in 10 to 500 microseconds
FREE = 0  # the receiver's word for a slot; the sender's is the size of what lies in it
NUMBER = struct.Struct("<q")
HELLO = struct.Struct("<QQqq")  # magic token role index
HELLO_S = 5.0  # how long a stranger may keep quiet
RETRY_S = 1e-3  # until the other end listens


class Bell:
    """One end of a Unix socket, over which two processes tell each other numbers, and hand over memory."""

    def __init__(self, end: socket.socket, peer: Peer) -> None:
        self._end, self._peer, self._poll = end, peer, select.poll()
        self._poll.register(end, select.POLLIN)

    def ring(self, number: int, *fds: int) -> None:
        """Say `number`; PeerLost if nobody is there."""
        try:
            socket.send_fds(self._end, [NUMBER.pack(number)], fds) if fds else self._end.send(NUMBER.pack(number))
        except OSError as error:
            raise PeerLost(str(self._peer)) from error

    def hear(self) -> tuple[int, list[int]]:
        """Wait for a number, and the file descriptors that come with it; PeerLost if none will come."""
        deadline = time.monotonic() + SPIN_S
        while not self._poll.poll(0) and time.monotonic() < deadline:
            pass
        try:
            data, fds, _, _ = socket.recv_fds(self._end, NUMBER.size, 1)
        except OSError as error:
            raise PeerLost(str(self._peer)) from error
        if not data:
            raise PeerLost(str(self._peer))
        if len(data) != NUMBER.size:
            raise BadMessage(f"{self._peer} rings with {len(data)} bytes, not {NUMBER.size}")
        return NUMBER.unpack(data)[0], fds


class Outgoing:
    """The direction in which this process sends."""

    def __init__(self, bell: Bell) -> None:
        self._bell, self._slots = bell, [torch.empty(0, dtype=torch.uint8)] * NUM_SLOTS
        self._sent = self._freed = 0

    def put(self, size: int, write: Callable[[Tensor], Any]) -> None:
        """Let `write` fill `size` bytes, and hand them over. Waits while the receiver has not freed a slot."""
        while self._sent - self._freed == NUM_SLOTS:
            self._bell.hear()
            self._freed += 1
        number, fds = self._sent % NUM_SLOTS, []
        if size > self._slots[number].numel():
            fds.append(new_memory(max(size, SLOT_BYTES)))
            self._slots[number] = mapped(fds[0])
        write(self._slots[number])
        try:
            self._bell.ring(size, *fds)
        finally:
            for fd in fds:
                os.close(fd)
        self._sent += 1


class Incoming:
    """The direction in which this process receives."""

    def __init__(self, bell: Bell, peer: Peer) -> None:
        self._bell, self._peer = bell, peer
        self._slots, self._taken = [torch.empty(0, dtype=torch.uint8)] * NUM_SLOTS, 0

    def take(self) -> Tensor:
        """The bytes of the next message; good until the one after it."""
        if self._taken:
            with suppress(PeerLost):  # what it sent before it was lost is still there
                self._bell.ring(FREE)
        size, fds = self._bell.hear()
        number = self._taken % NUM_SLOTS
        if fds:
            self._slots[number] = self._checked(fds[0])
        if not 0 < size <= self._slots[number].numel():
            room = self._slots[number].numel()
            raise BadMessage(f"{self._peer} announces a message of {size} bytes, in memory of {room}")
        self._taken += 1
        return self._slots[number][:size]

    def _checked(self, fd: int) -> Tensor:
        try:
            if not is_sealed(fd):
                raise BadMessage(f"{self._peer} hands over memory that it can still shrink, or none at all")
            return mapped(fd)
        finally:
            os.close(fd)


class MemoryLink(Link):
    """A link over two bells, one for each direction."""

    def __init__(self, outgoing: socket.socket, incoming: socket.socket, *, me: Peer, peer: Peer, token: int) -> None:
        self.peer, self._me, self._token = peer, me, token
        self._out, self._in = Outgoing(Bell(outgoing, peer)), Incoming(Bell(incoming, peer), peer)

    def put(self, message: Message) -> int:
        size = wire.size(message.tensors)
        self._out.put(size, lambda slot: wire.encode(slot, message, self._me, self._token))
        return size

    def flush(self) -> None:
        """What was posted has been copied."""

    def recv(self) -> Message:
        return wire.decode(self._in.take(), self.peer, self._token)


class Door:
    """Where a process's links come in: a Unix socket in the run's folder, which only this user can enter.

    Of two processes the higher calls and the lower opens. Who does not say hello as one of the run's is turned away.

    Args:
        peers: all that this process is to have a link to.

    Attributes:
        refused: how many were turned away.
    """

    def __init__(self, folder: str, me: Peer, peers: Iterable[Peer], token: int) -> None:
        self._folder, self._me, self._token = folder, me, token
        self._expected = {hello(peer, token): peer for peer in peers if peer > me}
        self._links: dict[Peer, MemoryLink] = {}
        self._came, self.refused = threading.Condition(), 0
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.bind(address(folder, me))
        except OSError as error:
            raise DistlabError(
                f"no links through memory in {folder} ({error}): set TMPDIR to a shorter path, or use "
                f'LocalCluster(links="gloo")'
            ) from error
        self._socket.listen()
        threading.Thread(target=self._open, daemon=True).start()

    def meet(self, peers: Iterable[Peer]) -> dict[Peer, MemoryLink]:
        """A link to each of `peers`, once all have come."""
        called = {peer: self._call(peer) for peer in peers if peer < self._me}
        with self._came:
            self._came.wait_for(lambda: len(self._links) == len(self._expected))
            return called | self._links

    def _call(self, peer: Peer) -> MemoryLink:
        outgoing = socket.socket(socket.AF_UNIX)
        while outgoing.connect_ex(address(self._folder, peer)):
            time.sleep(RETRY_S)
        incoming, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(outgoing, [hello(self._me, self._token)], [theirs.fileno()])
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
            peer = self._expected.get(said)
            if peer is None or peer in self._links or not fds:
                self._refuse(caller, fds)
                return
            outgoing = socket.socket(fileno=fds[0])
            self._links[peer] = MemoryLink(outgoing, caller, me=self._me, peer=peer, token=self._token)
            self._came.notify_all()

    def _refuse(self, caller: socket.socket, fds: list[int]) -> None:
        self.refused += 1
        caller.close()
        for fd in fds:
            os.close(fd)


def hello(me: Peer, token: int) -> bytes:
    """The first words on a link."""
    return HELLO.pack(wire.MAGIC, token, ROLES.index(me.role), me.index)


def address(folder: str, peer: Peer) -> str:
    """Where a process listens."""
    return os.path.join(folder, f"{peer.role}-{peer.index}")


if hasattr(os, "memfd_create"):
    import fcntl

    SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW

    def new_memory(num_bytes: int) -> int:
        """A file without a name, that can never become shorter: who has mapped a part that is gone gets killed."""
        fd = os.memfd_create("distlab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        return fd

    def is_sealed(fd: int) -> bool:
        """Is it memory that will stay as long as it is?"""
        try:
            return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
        except OSError:
            return False

else:  # macOS

    def new_memory(num_bytes: int) -> int:
        """A file without a name."""
        with tempfile.TemporaryFile() as file:
            file.truncate(num_bytes)
            return os.dup(file.fileno())

    def is_sealed(fd: int) -> bool:
        """Such memory cannot be sealed there."""
        return True


def mapped(fd: int) -> Tensor:
    """All of a file's bytes, as memory."""
    return torch.from_file(f"/dev/fd/{fd}", shared=True, size=os.fstat(fd).st_size, dtype=torch.uint8)
