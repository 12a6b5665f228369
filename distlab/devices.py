"""`on`: a module on another device, or in another process, in a training loop of your own.

    with dl.Device() as far:
        model = nn.Sequential(dl.on(far, nn.Linear(5, 4)), nn.Tanh(), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...  # loss.backward() goes through the other process; the optimizer knows nothing of it

The hard idea is that the device remembers nothing but what backward needs: parameters, buffers and training modes go
there with the inputs, and come back with the outputs and the gradients. So every optimizer, hook and checkpoint works
as if the module were here. `InGraph(place=...)` keeps parameters on their device instead. What does not travel:
attributes that are no tensors (a dropout's `p` is the one it had when it was put there), and whether a parameter was
used at all: an unused one has a gradient of zeros, not None.
"""

import os
import threading
from itertools import count
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from distlab.clusters import member
from distlab.clusters.process import told_of
from distlab.errors import ProcessLost
from distlab.fabric import Kind, Message
from distlab.flat import Vector
from distlab.roles.placed import BARE, Served
from distlab.train import check_picklable


class Device:
    """A process that computes the modules that are put `on` it. A context manager; it ends with this process, too.

    Args:
        seed: of the random numbers that modules (dropout) draw there.
    """

    def __init__(self, *, seed: int = 0) -> None:
        member.warm()
        self._pipe, theirs = member.CONTEXT.Pipe()
        self._process = member.launch(serve, (theirs, seed), "device")
        theirs.close()
        self.pid, self._lock, self._asked = self._process.pid, threading.Lock(), 0
        self.calls = count(1)  # of whatever is on it

    def __enter__(self) -> "Device":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"device (pid {self.pid})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "Device":
        return self  # a copy of a module on it is on it as well

    def __reduce__(self) -> Any:
        raise TypeError(f"{self!r} is a process, which cannot be saved: save the state_dict of what is on it")

    def close(self) -> None:
        """End the process. Modules on it cannot be called any more."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def ask(self, *request: Any) -> Any:
        """Send a request, and wait for its answer.

        Raises: what the module raised there; ProcessLost if the process has ended.
        """
        with self._lock:
            self._asked += 1
            try:
                self._pipe.send_bytes(cloudpickle.dumps((self._asked, request)))
                number, answer = cloudpickle.loads(self._pipe.recv_bytes())
                while number != self._asked:  # the answer to a call that was interrupted
                    number, answer = cloudpickle.loads(self._pipe.recv_bytes())
            except (OSError, EOFError) as error:
                raise ProcessLost(f"{self!r} was lost, or closed: what was on it cannot be computed") from error
        if isinstance(answer, Failure):
            raise member.rebuild(repr(self), answer.said, trusted=True)
        return answer


class Failure(NamedTuple):
    """An exception on its way from a device."""

    said: dict[str, Any]


def on(device: Device | str | torch.device, module: nn.Module) -> nn.Module:
    """`module`, computed on `device`.

    Args:
        device: a `Device`, that is, another process; or one of torch's, such as "cuda:1", of this process. There the
            parameters live on it and outputs stay on it; inputs are brought to it.
        module: for a `Device`, one that takes tensors by position, and returns one or a tuple of them.

    Returns: a module to call in its place. Its parameters are `module`'s own, and `module` itself is `.module`.

    Raises:
        TypeError: `module` is none, or cannot be sent to another process.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"on takes a device and a module, got {module!r}")
    if isinstance(device, Device):
        check_picklable("the module", module, "module")
        return There(device, module)
    return Here(torch.device(device), module)


class Here(nn.Module):
    """A module on one of this process's devices."""

    def __init__(self, device: torch.device, module: nn.Module) -> None:
        super().__init__()
        self.device, self.module = device, module.to(device)

    def forward(self, *inputs: Any, **others: Any) -> Any:
        """The module's outputs, on its device."""
        moved = [value.to(self.device) if isinstance(value, Tensor) else value for value in inputs]
        named = {name: v.to(self.device) if isinstance(v, Tensor) else v for name, v in others.items()}
        return self.module(*moved, **named)


class There(nn.Module):
    """A module in another process."""

    def __init__(self, device: Device, module: nn.Module) -> None:
        super().__init__()
        self.module, self.device = module, device
        self._hold()
        self.done: list[int] = []  # calls that backward will not come back to

    def _hold(self) -> None:
        self.trained = [name for name, p in self.module.named_parameters() if p.requires_grad]
        self.number = self.device.ask("hold", self.module)

    def forward(self, *inputs: Any, **others: Any) -> Any:
        """The module's outputs, as if it were here."""
        if others or not all(isinstance(value, Tensor) for value in inputs):
            got = [type(value).__name__ for value in inputs] + [f"{name}=" for name in others]
            kind = type(self.module).__name__
            raise TypeError(
                f"{kind} was called with {', '.join(got)}: in another process it takes tensors, by position"
            )
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("autocast does not reach another process: leave it for what is on a Device")
        if self.trained != [name for name, p in self.module.named_parameters() if p.requires_grad]:
            self._hold()  # others are to be trained now
        held = [p for p in self.module.parameters() if p.requires_grad]
        return Call.apply(self, torch.is_grad_enabled(), len(inputs), *inputs, *held)

    def _apply(self, *args: Any, **kwargs: Any) -> "There":
        super()._apply(*args, **kwargs)
        self._hold()  # of another dtype now, perhaps
        return self

    def ask(self, kind: Kind, *tensors: Tensor) -> Any:
        """Ask the device."""
        done, self.done = self.done, []
        modes = [module.training for module in self.module.modules()]
        return self.device.ask("compute", self.number, kind, tensors, untrained(self.module), modes, done)


def untrained(module: nn.Module) -> dict[str, Tensor]:
    """Buffers, and parameters that are frozen, by name."""
    frozen = {name: p.detach() for name, p in module.named_parameters() if not p.requires_grad}
    return dict(module.named_buffers()) | frozen


class Ticket:
    """Says that a call is over when nobody can go backward through it any more."""

    def __init__(self, there: There, call: int) -> None:
        self.there, self.call = there, call

    def __del__(self) -> None:
        self.there.done.append(self.call)


class Call(torch.autograd.Function):
    """One call of a module that is there, as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, there: There, remember: bool, num_inputs: int, *tensors: Tensor) -> Any:
        """Send parameters and inputs, and take outputs and buffers."""
        inputs, held = tensors[:num_inputs], tensors[num_inputs:]
        ctx.ticket, ctx.layout = Ticket(there, next(there.device.calls)), None
        ctx.needs = ctx.needs_input_grad[3 : 3 + num_inputs]
        values: list[Tensor] = []
        if held:
            ctx.layout = Vector([p.shape for p in held], held[0].dtype)
            values = [ctx.layout.params]
            for view, parameter in zip(ctx.layout.views(values[0]), held, strict=True):
                view.copy_(parameter)
        plan = torch.tensor([there.number, ctx.ticket.call, there.module.training, remember, *ctx.needs])
        ctx.held, ctx.versions = held, [p._version for p in held]
        outputs, count, buffers = there.ask(Kind.DATA if held else Kind.FORWARD, *values, *inputs, plan)
        for name, buffer in there.module.named_buffers():
            if not torch.equal(buffer, buffers[name]):  # else what autograd has saved of it stays good
                buffer.copy_(buffers[name])
        return outputs[0] if count == BARE else tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Send the outputs' gradients, and take those of inputs and parameters."""
        there, call = ctx.ticket.there, ctx.ticket.call
        if ctx.versions != [p._version for p in ctx.held]:
            raise RuntimeError("a parameter on a Device has been changed between forward and backward")
        found, values = there.ask(Kind.BACKWARD, *grads, torch.tensor([there.number, call]))
        inputs = iter(found)
        held = [] if ctx.layout is None else ctx.layout.views(values)
        return None, None, None, *[next(inputs) if needed else None for needed in ctx.needs], *held


def serve(pipe: Connection, seed: int) -> None:
    """A device's process: answer until the other end is gone."""
    os.setsid()  # an interrupt of the caller's must not reach this process
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    served: list[Served] = []
    while True:
        try:
            number, request = cloudpickle.loads(pipe.recv_bytes())
            try:
                answer = answered(served, *request)
            except Exception as error:
                answer = Failure(told_of(error, -1))
            pipe.send_bytes(cloudpickle.dumps((number, answer)))
        except (OSError, EOFError):
            os._exit(0)


def answered(served: list[Served], what: str, *details: Any) -> Any:
    """The answer to a request."""
    if what == "hold":
        served.append(Served(details[0], type(details[0]).__name__))
        return len(served) - 1
    number, kind, tensors, values, modes, done = details
    piece, message = served[number], Message(kind, tensors)
    piece.forget(done)
    if kind is Kind.BACKWARD:
        if piece.flat is not None:
            piece.flat.grads.zero_()
        return piece.backward(message), None if piece.flat is None else piece.flat.grads
    for name, tensor in untrained(piece.module).items():
        if not torch.equal(tensor, values[name]):
            tensor.copy_(values[name])
    for module, mode in zip(piece.module.modules(), modes, strict=True):
        module.training = mode
    return piece.forward(message), piece.num_outputs, dict(piece.module.named_buffers())
