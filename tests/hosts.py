"""Hosts: network namespaces, with a switch between them that has a latency and a bandwidth, and cables that can be cut.

The switch is a process that reads frames from one host's interface and writes them to another's when they would have
arrived. Its interfaces send and receive one frame after the other at their bandwidth, in both directions at once, as
those of `distlab.Network` do. Run as a script, this file is the switch.
"""

import fcntl
import heapq
import itertools
import json
import os
import select
import struct
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

TUNSETIFF, TAP, NO_HEADER = 0x400454CA, 0x0002, 0x1000
MTU = 9000
FRAME_BYTES = MTU + 64
BROADCAST = b"\xff" * 6
TUNING = {  # as on hosts that are far apart: windows that the whole way fits into, from the beginning, and for good
    "tcp_congestion_control": "reno",  # always there, and it fills a queue that drops nothing
    "tcp_slow_start_after_idle": "0",
    "tcp_rmem": "4096 4194304 16777216",
    "tcp_wmem": "4096 4194304 16777216",
}
AHEAD_S = 1000  # each host's clock is so far ahead of the one before


def mac(number: int) -> bytes:
    """A host's."""
    return bytes([2, 0, 0, 0, 0, number + 1])


def why_not() -> str:
    """Why there can be no hosts here; "" if there can."""
    name = f"distlab-try-{os.getpid()}"
    for command in (f"ip netns add {name}", f"ip netns del {name}", "unshare -T true"):
        try:
            done = subprocess.run(command.split(), capture_output=True, text=True)
        except FileNotFoundError:
            return f"{command}: it is not installed"
        if done.returncode:
            return f"{command}: {done.stderr.strip()}"
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as error:
        return f"/dev/net/tun: {error}"
    return ""


class Hosts:
    """`size` hosts on one switch.

    Args:
        latency_s: from host to host.
        bits_per_s: of each interface, in each direction.
    """

    def __init__(self, size: int, *, latency_s: float, bits_per_s: float) -> None:
        self.size, self._name = size, f"distlab-{os.getpid()}"
        settings = json.dumps({"names": self.names, "latency_s": latency_s, "bytes_per_s": bits_per_s / 8})
        for name in self.names:
            run("ip", "netns", "add", name)
        self._switch = subprocess.Popen(
            [sys.executable, __file__, settings], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._ask("ready")
        for i, name in enumerate(self.names):
            inside = ["ip", "netns", "exec", name]
            run("ip", "link", "set", f"dl{i}-{os.getpid()}", "netns", name)
            run(*inside, "ip", "link", "set", f"dl{i}-{os.getpid()}", "name", "eth0")
            run(*inside, "ip", "link", "set", "eth0", "address", mac(i).hex(":"), "mtu", str(MTU))
            run(*inside, "ip", "address", "add", f"{self.address(i)}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                run(*inside, "ip", "link", "set", interface, "up")
            for setting, value in TUNING.items():
                run(*inside, "sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{setting}")

    @property
    def names(self) -> list[str]:
        """Of their namespaces."""
        return [f"{self._name}-{i}" for i in range(self.size)]

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *_: object) -> None:
        self._switch.kill()
        self._switch.wait()
        for name in self.names:
            run("ip", "netns", "del", name)

    def address(self, number: int) -> str:
        """A host's."""
        return f"10.77.0.{number + 1}"

    def on(self, number: int) -> list[str]:
        """What a command begins with, to run on a host, by the host's own clock."""
        clock = ["unshare", "-T", "--monotonic", str(AHEAD_S * number), "--fork", "--kill-child"]
        return ["ip", "netns", "exec", self.names[number], *clock]

    def cut(self, number: int) -> None:
        """Pull a host's cable."""
        self._ask("cut", number)

    def mend(self, number: int) -> None:
        """Put it back."""
        self._ask("mend", number)

    def sent(self) -> list[int]:
        """The bytes that each host has sent so far, as frames."""
        return self._ask("sent")

    def _ask(self, *words: Any) -> Any:
        assert self._switch.stdin is not None
        assert self._switch.stdout is not None
        print(json.dumps(words), file=self._switch.stdin)
        return json.loads(self._switch.stdout.readline())


def run(*command: str) -> None:
    """Do it, or say why not."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


class Switch:
    """The process between the hosts."""

    def __init__(self, names: list[str], latency_s: float, bytes_per_s: float) -> None:
        self.latency_s, self.bytes_per_s = latency_s, bytes_per_s
        self.ends = [tap(f"dl{i}-{os.getppid()}") for i in range(len(names))]
        self.number = {end: i for i, end in enumerate(self.ends)}
        self.sending_s, self.receiving_s = [0.0] * len(names), [0.0] * len(names)  # until when each is busy
        self.sent, self.is_cut = [0] * len(names), [False] * len(names)
        self.way: list[tuple[float, int, int, bytes, bool]] = []
        self.count = itertools.count()

    def run(self) -> None:
        """Until nobody asks any more."""
        poll = select.poll()
        for end in (*self.ends, 0):
            poll.register(end, select.POLLIN)
        while True:
            wait_s = max(0.0, self.way[0][0] - time.monotonic()) if self.way else 1.0
            for end, _ in poll.poll(wait_s * 1000):
                if end:
                    self.take(self.number[end])
                elif not self.answer(sys.stdin.readline()):
                    return
            self.deliver()

    def take(self, source: int) -> None:
        """All frames that a host has sent."""
        while True:
            try:
                frame = os.read(self.ends[source], FRAME_BYTES)
            except BlockingIOError:
                return
            self.sent[source] += len(frame)
            others = [i for i in range(len(self.ends)) if i != source and frame[:6] in (mac(i), BROADCAST)]
            for target in others:
                self.send(source, target, frame)

    def send(self, source: int, target: int, frame: bytes) -> None:
        """It leaves when all before it have left."""
        begins_s = max(time.monotonic(), self.sending_s[source])
        self.sending_s[source] = begins_s + len(frame) / self.bytes_per_s
        if not self.is_cut[source]:
            heapq.heappush(self.way, (begins_s + self.latency_s, next(self.count), target, frame, False))

    def deliver(self) -> None:
        """What has arrived by now, with its first byte and, once all before it have, with its last."""
        while self.way and self.way[0][0] <= time.monotonic():
            at_s, _, target, frame, is_whole = heapq.heappop(self.way)
            if self.is_cut[target]:
                continue
            if is_whole:
                with suppress(OSError):  # its host is not up, or gone
                    os.write(self.ends[target], frame)
            else:
                begins_s = max(at_s, self.receiving_s[target])
                self.receiving_s[target] = begins_s + len(frame) / self.bytes_per_s
                heapq.heappush(self.way, (self.receiving_s[target], next(self.count), target, frame, True))

    def answer(self, line: str) -> bool:
        """Do what was asked."""
        if not line:
            return False
        word, *number = json.loads(line)
        if word in ("cut", "mend"):
            self.is_cut[number[0]] = word == "cut"
        print(json.dumps(self.sent), flush=True)
        return True


def tap(name: str) -> int:
    """A new network interface, whose frames this process reads and writes."""
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", name.encode(), TAP | NO_HEADER))
    return end


if __name__ == "__main__":
    Switch(**json.loads(sys.argv[1])).run()
