"""The connection between the process that leads a run and one that follows it on another host.

It carries words between the two, and what the pipes of the follower's processes carry, each under its number. So who
watches processes reads pipes, as on its own host. The hard idea is silence: a process that ends closes its
connections, but a host that has lost its cable says nothing, for ever. So both ends give a sign of life, and who hears
none for too long takes the other for dead.
"""

import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from typing import Any

from distlab.errors import DistlabError
from distlab.fabric.meeting import set_timeout

HEAD = struct.Struct("<cq")  # the first letter of a word, a number
BEAT_S = 0.5  # how often to give a sign of life
TICK_S = 0.05
BLOCK_BYTES = 1 << 16


class Line:
    """One end. A thread of its own hears what comes, until `over` is set.

    Args:
        silence_s: how long the other end may say nothing.
        obey: called with the letter of a word, its number and what it carries.

    Attributes:
        ended: why there will be no more; "" as long as there is.
    """

    def __init__(self, end: Connection, *, silence_s: float) -> None:
        self._end, self._silence_s, self._sending = end, silence_s, threading.Lock()
        self._carried: dict[int, Connection] = {}
        self._numbers: dict[Connection, tuple[int, bool]] = {}
        self._heard_s = self._beat_s = time.monotonic()
        self.ended = ""
        self.obey: Callable[[str, int, bytes], None] = lambda word, number, body: None
        self.on_end: Callable[[], None] = lambda: None
        with socket.socket(fileno=os.dup(end.fileno())) as wire:
            if wire.family == socket.AF_INET:
                wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                set_timeout(wire, silence_s)

    def begin(self) -> None:
        """Hear what comes."""
        threading.Thread(target=self._run, name="distlab-line", daemon=True).start()

    def say(self, word: str, number: int = 0, body: bytes = b"") -> None:
        """Send a word, told apart by its first letter; DistlabError if nobody is there."""
        try:
            with self._sending:
                self._end.send_bytes(HEAD.pack(word[0].encode(), number) + body)
        except OSError as error:
            raise DistlabError(self.ended or f"the connection is gone: {error}") from error

    def carry(self, number: int, end: Connection, *, plain: bool = False) -> None:
        """What comes out of `end` goes to the other side, and what comes from there under this number goes into it.

        Args:
            plain: it carries bytes in one direction, and not messages.
        """
        self._carried[number] = end
        if end.readable:
            self._numbers[end] = number, plain

    def drop(self, *numbers: int) -> None:
        """Carry these no more: who reads from them finds their end. Only where nobody else hears at the time."""
        for number in numbers:
            end = self._carried.pop(number, None)
            if end is not None:
                self._numbers.pop(end, None)
                end.close()

    def close(self, why: str) -> None:
        """Carry no more: who reads from the pipes finds their ends."""
        if not self.ended:
            self.ended = why
            self.drop(*self._carried)
            with suppress(OSError):
                self._end.close()
            self.on_end()

    def _run(self) -> None:
        try:
            while not self.ended:
                for end in wait([self._end, *self._numbers], TICK_S):
                    if end is self._end:
                        self._hear()
                    elif end in self._numbers:  # and not dropped since
                        self._forward(end)
                self._look_at_the_clock()
        except (OSError, EOFError, DistlabError) as error:
            self.close(str(error) or "it closed its connection")
        except Exception as error:  # in obeying: nobody would hear what comes next
            self.close(f"{type(error).__name__}: {error}")
            raise

    def _hear(self) -> None:
        data = self._end.recv_bytes()
        self._heard_s = time.monotonic()
        letter, number = HEAD.unpack_from(data)
        word, body = letter.decode(), data[HEAD.size :]
        if word == "d":
            self._put(number, body)
        elif word == "e":
            self.drop(number)
        elif word != "b":
            self.obey(word, number, body)

    def _put(self, number: int, body: bytes) -> None:
        """Into the pipe of that number, if there still is one."""
        end = self._carried.get(number)
        with suppress(OSError):  # whoever read from it is gone
            if end is not None and end.readable:
                end.send_bytes(body)
            while end is not None and not end.readable and body:
                body = body[os.write(end.fileno(), body) :]

    def _forward(self, end: Any) -> None:
        number, plain = self._numbers[end]
        try:
            data = os.read(end.fileno(), BLOCK_BYTES) if plain else end.recv_bytes()
        except (OSError, EOFError):
            data = None
        if data is None or (plain and not data):
            self.drop(number)
            self.say("end", number)
        else:
            self.say("data", number, data)

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        if now - self._beat_s > BEAT_S:
            self._beat_s = now
            self.say("beat")
        if now - self._heard_s > self._silence_s and not self._end.poll():  # it may be this end that had no time
            raise DistlabError(f"it was silent for {self._silence_s:g} s")


class Listener:
    """Where the leader waits for those who follow it."""

    def __init__(self, address: str, key: bytes, welcome: Callable[[Connection], None]) -> None:
        self._socket, self._key, self._welcome = socket.create_server((address, 0)), key, welcome
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._open, name="distlab-listener", daemon=True).start()

    def close(self) -> None:
        """Let nobody else in."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _open(self) -> None:
        with suppress(OSError):  # closed
            while True:
                caller, _ = self._socket.accept()
                threading.Thread(target=self._greet, args=(caller.detach(),), daemon=True).start()

    def _greet(self, number: int) -> None:
        """Let one in that knows the key. A thread of its own, since a stranger may say nothing."""
        end = Connection(number)
        try:
            deliver_challenge(end, self._key)
            answer_challenge(end, self._key)
        except (OSError, EOFError, AuthenticationError, AssertionError):
            end.close()
        else:
            self._welcome(end)


def call(address: tuple[str, int], key: bytes) -> Connection:
    """A connection to the `Listener` at an address."""
    end = Connection(socket.create_connection(address).detach())
    answer_challenge(end, key)
    deliver_challenge(end, key)
    return end
