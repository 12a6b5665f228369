"""Modules on other devices: forward and backward go there, and come back.

The client's model has a `Placed` where the modules were. Calling it sends its inputs to the device and returns what
comes back; backward sends the outputs' gradients there, and goes on from those of the inputs. The hard idea is who
holds the parameters. If the device does (`stays`), only activations travel. If several hold copies of the same modules,
the client does: they travel with the inputs, and their gradients with those of the inputs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from distlab.fabric import Kind, Message
from distlab.flat import Flat
from distlab.options import nearest


@dataclass(frozen=True)
class Piece:
    """Modules that run on one device, one after the other, in one call.

    Attributes:
        names: in the model; ("",) is all of it.
        device: which of a replica's devices.
    """

    names: tuple[str, ...]
    device: int

    def holds(self, parameter: str) -> bool:
        """Is a parameter (or buffer) of this name in it?"""
        return any(name in ("", parameter) or parameter.startswith(f"{name}.") for name in self.names)

    def module(self, model: nn.Module) -> nn.Module:
        """What it computes."""
        modules = [model.get_submodule(name) for name in self.names]
        return modules[0] if len(modules) == 1 else nn.Sequential(*modules)


def pieces_of(model: nn.Module, place: Mapping[str, int] | None) -> list[Piece]:
    """The pieces that `place` (module name -> device) makes of `model`, in the model's order. Neighbours in a
    Sequential that share a device are one piece.

    Raises:
        ValueError: no such module, one inside another, or weights that are tied across pieces.
    """
    if place is None:
        return [Piece(("",), 0)]
    names = [name for name, _ in model.named_modules()]
    for name in place:
        if name not in names or not name:
            raise ValueError(f"place has {name!r}, but the model has no such module: {nearest(name, names[1:])}")
    made: list[Piece] = []
    for name in (n for n in names if n in place):
        if outer := next((other for other in place if name.startswith(f"{other}.")), None):
            raise ValueError(f"place has {name!r}, which is inside {outer!r}: place one of them")
        if made and made[-1].device == place[name] and follows(model, made[-1].names[-1], name):
            made[-1] = Piece((*made[-1].names, name), place[name])
        else:
            made.append(Piece((name,), place[name]))
    check_not_tied(model, made)
    return made


def follows(model: nn.Module, name: str, other: str) -> bool:
    """Is module `other` what a Sequential calls next after `name`?"""
    parent = name.rpartition(".")[0]
    if parent != other.rpartition(".")[0] or type(model.get_submodule(parent)) is not nn.Sequential:
        return False
    children = [child for child, _ in model.get_submodule(parent).named_children()]
    return children.index(other.rpartition(".")[2]) == children.index(name.rpartition(".")[2]) + 1


def check_not_tied(model: nn.Module, pieces: Sequence[Piece]) -> None:
    """Raise ValueError if a parameter belongs to two pieces, or to one and to the client."""
    owners: dict[int, tuple[str, int]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = next((i for i, piece in enumerate(pieces) if piece.holds(name)), -1)
        other = owners.setdefault(id(parameter), (name, owner))
        if other[1] != owner:
            raise ValueError(f"{other[0]} and {name} are one tensor: place both modules on one device, in one piece")


class Ask(NamedTuple):
    """What a client wants of a device: a message, to be answered by one."""

    device: int
    kind: Kind
    tensors: Sequence[Tensor]


class Placed(nn.Module):
    """The client's stand-in for a piece: call it as the modules that it stands for.

    What comes back is cut off from what was sent: the client goes backward through one crossing after the other. An
    autograd Function that waits for its device would be shorter, but several of them under way in one thread hang
    torch's engine, and one after the other the replicas would not compute at the same time.

    Args:
        number: which piece it is.
        ask: sends what it is given to the device, and returns the answer.
        cross: told of every crossing that backward has to come back to.
        values, grads: (n,) the piece's parameters and their gradients, if the client holds them.
    """

    def __init__(
        self, piece: Piece, number: int, ask: Callable[[Ask], Message], cross: "Callable[[Crossing], None]",
        values: Tensor | None = None, grads: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.piece, self.number, self.values, self.grads = piece, number, values, grads
        self._ask, self._cross, self._calls, self._inside = ask, cross, 0, 0

    def forward(self, *inputs: Any, **others: Any) -> Any:
        """What the device says to `inputs`."""
        if others or not all(isinstance(value, Tensor) for value in inputs):
            got = [type(value).__name__ for value in inputs] + [f"{name}=" for name in others]
            raise TypeError(f"{self.said} was called with {', '.join(got)}: a placed module takes tensors, by position")
        self.check_inside()
        self._calls, remember = self._calls + 1, torch.is_grad_enabled()
        call, needs = self._calls, [remember and value.requires_grad for value in inputs]
        plan = torch.tensor([self.number, call, self.training, remember, *needs])
        with torch.no_grad():
            answer = self._send(Kind.FORWARD if self.values is None else Kind.DATA, self.values, *inputs, plan)
        ends = [
            t.detach().requires_grad_(remember and (t.is_floating_point() or t.is_complex())) for t in answer.tensors
        ]
        if remember:
            edges = [get_gradient_edge(value) for value, need in zip(inputs, needs, strict=True) if need]
            self._cross(Crossing(self, call, edges, ends))
        outputs = tuple(end.clone() for end in ends)  # which the client may change in place
        return outputs[0] if answer.samples == BARE else outputs

    def backward(self, call: int, grads: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of the inputs that need one, from the outputs' `grads`; the parameters' are added up."""
        answer = self._send(Kind.BACKWARD, *grads, torch.tensor([self.number, call]))
        found = list(answer.tensors)
        if self.grads is not None:
            self.grads.add_(found.pop())
        return [tensor.clone() for tensor in found]

    def _send(self, kind: Kind, *tensors: Tensor | None) -> Message:
        return self._ask(Ask(self.piece.device, kind, [t for t in tensors if t is not None]))

    @property
    def said(self) -> str:
        """Its modules, for errors."""
        return " + ".join(self.piece.names) or "the model"

    def install(self, model: nn.Module) -> None:
        """Stand where the modules were. Whoever holds one of them in another way, in a list say, finds this too."""
        self.training = self.piece.module(model).training
        for i, name in enumerate(self.piece.names):
            parent, _, child = name.rpartition(".")
            within, module = model.get_submodule(parent), model.get_submodule(name)
            within._modules[child] = stand_in = Rest(self.check_inside) if i else self
            if next(module.parameters(), None) is not None:  # one without may be used elsewhere as well
                module.forward = stand_in.forward
        if len(self.piece.names) > 1:
            within.register_forward_pre_hook(lambda *_: self._step_in(1))
            within.register_forward_hook(lambda *_: self._step_in(-1))

    def check_inside(self) -> None:
        """Raise TypeError if one of several modules is called, but not by the Sequential that they are in."""
        if len(self.piece.names) > 1 and not self._inside:
            raise TypeError(
                f"{self.said} run as one, as neighbours in a Sequential on one device, but one of them was called by "
                f"itself: hold them in a ModuleList"
            )

    def _step_in(self, change: int) -> None:
        self._inside += change


class Rest(nn.Module):
    """Stands for the further modules of a piece: what comes by has been through them."""

    def __init__(self, check: Callable[[], None]) -> None:
        super().__init__()
        self._check = check

    def forward(self, value: Any) -> Any:
        """The value itself."""
        self._check()
        return value


class Crossing(NamedTuple):
    """A call of a placed piece: what went there (and needs a gradient), and what came back."""

    placed: Placed
    call: int
    inputs: Sequence[GradientEdge]  # the client may since have changed the tensors themselves
    outputs: Sequence[Tensor]


def go_back(output: Tensor, grad: Tensor, crossings: Sequence[Crossing]) -> None:
    """Backward from `output` through all `crossings`, which happened in this order."""
    if output.requires_grad:
        output.backward(grad, retain_graph=True)  # two pieces may have been given what one part of the client made
    for placed, call, inputs, outputs in reversed(crossings):
        grads = [torch.zeros_like(out) if out.grad is None else out.grad for out in outputs]
        found = placed.backward(call, grads)
        if inputs:
            torch.autograd.backward(inputs, found, retain_graph=True)


BARE = -1  # in an answer: one tensor, not a tuple of one


class Served:
    """A piece where it is computed.

    Args:
        module: what holds its parameters and its mode.
        said: its name, for errors.
        compute: inputs -> outputs, if it is not the module's own call.

    Attributes:
        flat: its trainable parameters; None if there are none.
        num_outputs: of the last call, or BARE.
    """

    def __init__(self, module: nn.Module, said: str, compute: Callable[..., Any] | None = None) -> None:
        self.module, self.compute, self.said, self.num_outputs = module, compute or module, said, BARE
        self.flat = Flat(module) if any(p.requires_grad for p in module.parameters()) else None
        self._calls: dict[int, tuple[list[Tensor], list[Tensor]]] = {}

    def forward(self, message: Message) -> list[Tensor]:
        """The outputs of a call."""
        *tensors, plan = message.tensors
        _, call, training, remember, *needs = plan.tolist()
        if message.kind is Kind.DATA and self.flat is not None:
            self.flat.params.copy_(tensors.pop(0))
        inputs = [t.detach().requires_grad_(bool(n)) for t, n in zip(tensors, needs, strict=True)]
        if self.module.training != bool(training):  # or a model that keeps a part of itself in eval mode could not
            self.module.train(bool(training))
        with torch.set_grad_enabled(bool(remember)):
            outputs = self.compute(*[t.clone() for t in inputs])  # the message's memory is used again
        several = [outputs] if isinstance(outputs, Tensor) else outputs
        if not isinstance(several, (tuple, list)) or not all(isinstance(t, Tensor) for t in several):
            kind = type(outputs).__name__
            raise TypeError(f"{self.said} returned a {kind}: on a device it must be a tensor, or a tuple of tensors")
        self.num_outputs = BARE if isinstance(outputs, Tensor) else len(several)
        if remember:
            self._calls[call] = inputs, list(several)
        return [t.detach() for t in several]

    def forget(self, calls: Sequence[int]) -> None:
        """Backward will not come back to these."""
        for call in calls:
            self._calls.pop(call, None)

    def backward(self, message: Message) -> list[Tensor]:
        """The gradients of the inputs that need one; those of the parameters are added to `flat.grads`."""
        *grads, plan = message.tensors
        call = int(plan[1])
        if call not in self._calls:
            raise RuntimeError(f"backward went through {self.said} a second time: what it had saved is gone")
        inputs, outputs = self._calls.pop(call)
        ways = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if out.requires_grad]
        if ways:
            torch.autograd.backward([out for out, _ in ways], [grad for _, grad in ways])
        return [t.grad if t.grad is not None else torch.zeros_like(t) for t in inputs if t.requires_grad]
