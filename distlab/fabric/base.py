"""The interface between a strategy and the world it runs in.

A strategy is plain blocking code: it sends, receives, computes, locks and waits. It does all of that through
the `Fabric` of its process, and so cannot tell whether the other end is a process with a wall clock or a
greenlet with a virtual one. The hard idea is what is *not* here: no tensors that two ends share (but for `shared`,
which only one host can give), no time that passes unseen, no thread primitive. A message that was sent is a copy;
waiting is always `recv` or `until`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from distlab.errors import BadMessage, DistlabError
from distlab.fabric.membership import Membership, Peer
from distlab.fabric.saver import Saver
from distlab.flat import Vector
from distlab.randomness import set_states, states
from distlab.trace import Recorder

NUM_COUNTS = 8  # of `Shared`
ALWAYS = object()  # for `Fabric.timed`: to be done even where nothing is computed, as messages or versions depend on it


class Kind(IntEnum):
    """What a message says."""

    INIT = 1  # chief to server: the first parameters
    PULL = 2  # worker to server: send me parameters
    PUSH = 3  # worker to server: here is a gradient
    PARAMS = 4  # server to worker: parameters of a version
    DROPPED = 12  # the same, and the news that the gradient which it answers was not used
    GRADIENT = 5  # server to worker, or replica to client: a gradient
    STORE = 6  # worker to server: parameters that the worker has changed itself
    STOP = 7  # the run is over
    DATA = 8  # a client's part of a batch, or a collective's piece
    FORWARD = 13  # client to replica: inputs alone, for modules whose parameters are there
    OUTPUTS = 9  # replica to client: what its modules said
    BACKWARD = 10  # client to replica: the gradient of the loss by those outputs
    APPLY = 14  # client to replica: make an update of your gradients
    GONE = 15  # this end will be used no more (handled by the link)
    GROW = 11  # the next message is longer than any before (handled by the link)


class Message(NamedTuple):
    """One message. Its tensors may be used until the next `recv` on the same link; copy what must live longer."""

    kind: Kind
    tensors: Sequence[Tensor] = ()
    version: int = -1
    step: int = -1
    samples: int = 0
    loss: float = math.nan
    batch: int = -1
    num_bytes: int = 0
    sent_s: float = math.nan

    @property
    def values(self) -> Tensor:
        """The one tensor of a message that carries one."""
        assert len(self.tensors) == 1, f"a {self.kind.name} message with {len(self.tensors)} tensors"
        return self.tensors[0]


class Link(ABC):
    """A two-way connection to one peer. Messages arrive whole and in order."""

    peer: Peer

    @abstractmethod
    def put(self, message: Message) -> int:
        """Start to send a copy of `message`; returns the bytes. At most one at a time is under way: the next one
        waits for it."""

    @abstractmethod
    def flush(self) -> None:
        """Wait until what was posted has left; PeerLost if the peer is gone."""

    @abstractmethod
    def hang_up(self, largest_bytes: int = 0) -> None:
        """Use this link no more: whoever waits at either end, now or later, gets PeerLost.

        Args:
            largest_bytes: of a message that may still be on its way here.
        """

    @abstractmethod
    def recv(self) -> Message:
        """Wait for the next message; PeerLost if the peer is gone, BadMessage if it is not what was agreed."""

    def post(self, kind: Kind, tensors: Sequence[Tensor] = (), **header: Any) -> int:
        """Start to send a message of these parts; returns the bytes."""
        return self.put(Message(kind, tensors, **header))

    def lend(self, tensor: Tensor) -> int:
        """Start to send `tensor` (1-d) itself, which must not change before `flush`: for `recv_into` at the other end.
        Large ones are then not copied on the way."""
        return self.post(Kind.DATA, [tensor])

    def expect(self, tensor: Tensor, *, into: bool = False) -> None:  # noqa: B027
        """Be ready for what will be lent after all that is expected already: for `recv_into` that tensor, which nobody
        may use until then, or for `recv_lent` one like it. No more than two at a time."""

    def recv_lent(self, like: Tensor) -> Tensor:
        """Wait for what the other end has lent, of the shape and dtype of `like` (1-d); good until the next receive."""
        values = self.recv().values
        if (values.shape, values.dtype) != (like.shape, like.dtype):
            raise BadMessage(f"{self.peer} lent {values.dtype} of shape {tuple(values.shape)}, not {tuple(like.shape)}")
        return values

    def recv_into(self, tensor: Tensor) -> None:
        """The same, and let `tensor` be that."""
        tensor.copy_(self.recv_lent(tensor))

    def send(self, kind: Kind, tensors: Sequence[Tensor] = (), **header: Any) -> int:
        """Post, and wait until it has left."""
        num_bytes = self.put(Message(kind, tensors, **header))
        self.flush()
        return num_bytes


@dataclass(frozen=True)
class Shared:
    """Memory that several processes of one host see.

    Attributes:
        values: (numel,) zeros at first. What one process writes the others see, in no promised order.
        counts: (8,) int64, zeros at first, for tickets and versions.
        lock: keeps the other processes out. Held for a few instructions, never across a blocking call.
    """

    values: Tensor
    counts: Tensor
    lock: AbstractContextManager[Any]


class Running(ABC):
    """A task that `Fabric.spawn` started."""

    @abstractmethod
    def join(self) -> None:
        """Wait until it has ended."""


@dataclass
class Parts:
    """Parts of a computation that are of use before the whole is done, such as the gradients of the last layers.

    Whoever computes calls `say(number)` when a part is there. Where computing takes no time of its own (a virtual
    clock, emulated compute), the fabric says it instead, in order, each at its share of the time.

    Attributes:
        shares: what share of the whole time is over when each part is there, ascending.
        ready: called with a part's number.
    """

    shares: Sequence[float]
    ready: Callable[[int], None]
    _silent: bool = field(default=False, init=False)

    def say(self, number: int) -> None:
        """This part is there."""
        if not self._silent:
            self.ready(number)

    def spread(self, function: Callable[[], Any], pass_time: Callable[[float], None]) -> Any:
        """Do `function` at once, and then say each part when its share of the time has passed."""
        self._silent = True
        value = function()
        self._silent = False
        for number, share in enumerate(self.shares):
            pass_time(share)
            self.ready(number)
        return value


@dataclass
class Timed:
    """What `Fabric.timed` measured."""

    value: Any
    start_s: float
    end_s: float
    cancelled: bool = False


@dataclass
class Fabric(ABC):
    """One process's view of a run.

    Attributes:
        parallel: can two tasks of a process be inside `timed` at once?
        me: role and number.
        counts: how many processes each role has.
        record: writes an event of this process into the trace.
        stopping: true once somebody asked the run to stop early.
        leaving: true once somebody asked this process to leave the run.
        parted: true once it has.
        rate: what this process was told to multiply the task's learning rate by.
        step: the batch that this process is at, for whoever must name it; -1 before the first.
        computed: the last step of which there is a gradient, by this process or the one whose place it has taken.
        flat: the parameters that this process holds, for whoever looks into a paused run.
        chief: who evaluates and logs on this process, for whoever ends it.
        members: who takes part, as far as this process has been told.
        saver: what this process hands over for checkpoints, and what it goes on from.
    """

    parallel: ClassVar[bool] = True
    me: Peer
    counts: dict[str, int]
    record: Recorder
    stopping: bool = field(default=False, init=False)
    leaving: bool = field(default=False, init=False)
    parted: bool = field(default=False, init=False)
    rate: float = field(default=1.0, init=False)
    step: int = field(default=-1, init=False)
    computed: int = field(default=-1, init=False)
    flat: Vector | None = field(default=None, init=False)
    chief: Any = field(default=None, init=False)
    members: Membership = field(default_factory=Membership, init=False)
    saver: Saver = field(default_factory=Saver, init=False)

    def __post_init__(self) -> None:
        self.hand_over: Callable[[], None] = self.record.flush  # what this process has recorded so far

    @abstractmethod
    def now(self) -> float:
        """Seconds on this world's clock."""

    @abstractmethod
    def seed(self, number: int) -> None:
        """Seed the random numbers (torch, numpy, random) that user code on this process will draw."""

    def random_states(self) -> dict[str, Any]:
        """Where those are; see `randomness.states`."""
        return states()

    def set_random_states(self, kept: dict[str, Any]) -> None:
        """Let them be where they were."""
        set_states(kept)

    @abstractmethod
    def link(self, role: str, index: int) -> Link:
        """The link to one process."""

    def links(self, role: str) -> list[Link]:
        """The links to every process of a role but this one, by index."""
        return [self.link(*peer) for peer in self.linked(role)]

    def linked(self, role: str) -> list[Peer]:
        """Those of a role that this process has a link to; those that are gone, or have just come, are left out."""
        return [peer for peer in self.members.present(self.others(role)) if self.has_link(peer)]

    @abstractmethod
    def has_link(self, peer: Peer) -> bool:
        """Is there a link to this process?"""

    def others(self, role: str) -> list[Peer]:
        """Every process of a role but this one, by index, there or not."""
        return [Peer(role, i) for i in range(self.counts[role]) if (role, i) != self.me]

    @abstractmethod
    def relink(self, peers: Sequence[Peer], *, tag: int, unless: Callable[[], bool]) -> None:
        """Make new links to `peers`, and wait for them: they do the same, under the same `tag`.

        Raises:
            PeerLost: `unless` holds before they have come. It must read only the membership.
        """

    def tell(self, what: str, peer: Peer) -> None:
        """Hear a change of the membership. One that comes may be more than there were."""
        self.counts = {**self.counts, peer.role: max(self.counts[peer.role], peer.index + 1)}
        self.members.tell(what, peer)
        self.wake()

    def over(self) -> None:  # noqa: B027
        """Say that the last update is made: whoever does not come to its end soon now is stuck."""

    @abstractmethod
    def wake(self) -> None:
        """Let whoever waits in `until` look again."""

    @abstractmethod
    def spawn(self, function: Callable[..., None], *args: Any) -> Running:
        """Run `function` beside this code; an exception in it ends this process's part of the run."""

    @abstractmethod
    def lock(self, name: str = "") -> AbstractContextManager[Any]:
        """The lock called `name`; leaving it lets every waiting `until` look again."""

    @abstractmethod
    def shared(self, name: str, numel: int, dtype: torch.dtype) -> Shared:
        """The memory called `name`: every process that asks for it sees the same. One host only, and the one
        exception to "no tensors that two ends share".

        Raises:
            DistlabError: the run may span several hosts.
        """

    @abstractmethod
    def until(self, condition: Callable[[], bool], what: str = "a change of its own state") -> None:
        """Wait until `condition` holds: `what` says so in words. It must read only what is changed inside a `lock`."""

    @abstractmethod
    def timed(
        self, kind: str, function: Callable[[], Any], share: float = 1.0, idle: Any = None, unless: Link | None = None,
        parts: Parts | None = None,
    ) -> Timed:  # fmt: skip
        """Do `function` and say when. The one door for user code and for work that takes time: a simulated world
        charges its law for `kind` ("compute", "load", "apply", "dispatch", "loss", "evaluate"), a real one measures;
        `share` says which part of a whole gradient this is. A world that computes nothing returns `idle`, unless that
        is ALWAYS. It is cancelled (a simulated world only) if a message comes on the link `unless` meanwhile. Others
        hear of its `parts` on the way."""

    def default_group(self) -> None:
        """Make torch.distributed's own default group of the processes of this role, for its own tools (DDP).

        Raises:
            DistlabError: this world has no such group.
        """
        raise DistlabError(f"{self.me} asked for torch.distributed's default group: only real processes have one")
