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
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from distlab.errors import BadMessage, PeerLost
from distlab.fabric import wire
from distlab.fabric.base import Link, Message, Peer
from distlab.fabric.weather import Weather

NUM_SLOTS = 2
SLOT_BYTES = 1 << 16  # at least; a longer message gets a new slot
SPIN_S = 50e-6  # a bell that rings so soon is heard without a sleep: a sleeping core wakes in 10 to 500 microseconds
FREE = 0  # the receiver's word for a slot; the sender's is the size of what lies in it
NUMBER = struct.Struct("<q")


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

    def hang_up(self) -> None:
        """Let everybody hear, at both ends, that there will be no more."""
        with suppress(OSError):  # the other end has done so
            self._end.shutdown(socket.SHUT_RDWR)

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
        self.weather = Weather()
        self.peer, self._me, self._token = peer, me, token
        self._bells = Bell(outgoing, peer), Bell(incoming, peer)
        self._out, self._in = Outgoing(self._bells[0]), Incoming(self._bells[1], peer)

    def put(self, message: Message) -> int:
        size = wire.size(message.tensors)
        self.weather.hold_up(size)
        self._out.put(size, lambda slot: wire.encode(slot, message, self._me, self._token))
        return size

    def flush(self) -> None:
        """What was posted has been copied."""

    def hang_up(self, largest_bytes: int = 0) -> None:
        for bell in self._bells:
            bell.hang_up()

    def recv(self) -> Message:
        message = wire.decode(self._in.take(), self.peer, self._token)
        self.weather.hold_up(message.num_bytes)
        return message


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
