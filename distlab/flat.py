"""A model as one flat vector of which its parameters are views.

A pull, a push and an all-reduce are then one message each, whatever the number of layers, and a shard is a
slice. The hard idea: the vector does not *copy* the parameters, it *is* them. Write into it and the model has
changed; run ``backward`` and the gradient vector is filled.

>>> model = torch.nn.Linear(3, 2)
>>> flat = Flat(model)
>>> _ = flat.params.fill_(1.0)
>>> model.bias.tolist()
[1.0, 1.0]
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

Ranges = tuple[tuple[int, int], ...]
ALIGN = 16  # elements: each view starts where torch itself would have put it, so matmuls give the same bits
TAIL = 16  # elements behind the gradient that travel with it: counts, votes


class Vector:
    """Tensors of one dtype, laid out in one vector.

    Attributes:
        params: (size,) all of them, each padded to a multiple of 16 elements.
        among: the shapes of a whole model's tensors, and which of them these are; None: there are no others, or these
            are no whole ones.
    """

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        dtype: torch.dtype,
        among: tuple[Sequence[torch.Size], list[int]] | None = None,
        ranges: Ranges = (),
    ) -> None:
        self.shapes, self.dtype, self.among, self._ranges = shapes, dtype, among, ranges
        self.size = sum(padded(shape.numel()) for shape in shapes)
        self.params = torch.zeros(self.size, dtype=dtype)

    @property
    def ranges(self) -> Ranges:
        """Where these are in a whole model's vector, (start, stop) each."""
        if self.among is None:
            return self._ranges or ((0, self.size),)
        ends = list(accumulate((padded(shape.numel()) for shape in self.among[0]), initial=0))
        return tuple((ends[i], ends[i + 1]) for i in self.among[1])

    def views(self, vector: Tensor) -> list[Tensor]:
        """The parts of `vector` (size,) in the shapes of the tensors; no copies."""
        views, start = [], 0
        for shape in self.shapes:
            views.append(vector[start : start + shape.numel()].view(shape))
            start += padded(shape.numel())
        return views


class Flat(Vector):
    """One vector of parameters and one of gradients, and the model's own tensors as views of them.

    Tied weights are laid out once. Parameters with ``requires_grad=False`` and buffers stay outside: they are
    local to whoever holds the model.

    Args:
        model: changed in place: its trainable parameters become views.

    Attributes:
        names, parameters: of the model, those that are trained.
        params: (size,) all of them, each padded to a multiple of 16 elements.
        grads: (size,) their gradients; every ``p.grad`` is a view.
        message: (size + 16,) `grads` and a tail for small numbers that travel in the same message.

    Raises:
        ValueError: no trainable parameter, or parameters of several dtypes.
    """

    def __init__(self, model: nn.Module) -> None:
        named = trainable(model)
        super().__init__([p.shape for _, p in named], named[0][1].dtype)
        self.names = [n for n, _ in named]
        self.parameters = [p for _, p in named]
        self.message = torch.zeros(self.size + TAIL, dtype=self.dtype)
        self.grads, self.tail = self.message[: self.size], self.message[self.size :]
        for (_, p), view, grad in zip(named, self.views(self.params), self.views(self.grads), strict=True):
            view.copy_(p.data)
            p.data, p.grad = view, grad
        self._grad_views = [p.grad for p in self.parameters]

    def check_grads(self) -> None:
        """RuntimeError if somebody has put another gradient in a view's place: what it holds would be lost."""
        for name, parameter, view in zip(self.names, self.parameters, self._grad_views, strict=True):
            if parameter.grad is not view:
                raise RuntimeError(
                    f"the gradient of {name} was replaced in the middle of a step, as model.zero_grad() does: leave "
                    f"that to distlab, which clears the gradients itself"
                )


def padded(numel: int) -> int:
    """`numel` rounded up to the alignment."""
    return -(-numel // ALIGN) * ALIGN


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that training changes, by name; ValueError if there are none or of several dtypes."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise ValueError(f"the model ({type(model).__name__}) has no trainable parameter")
    dtypes = {p.dtype for _, p in named}
    if len(dtypes) > 1:
        kinds = {p.dtype: n for n, p in named}
        raise ValueError(f"all trainable parameters must have one dtype, got {kinds}")
    return named


def local_state(model: nn.Module) -> dict[str, Tensor]:
    """What is local to one process: buffers (BatchNorm's statistics) and frozen parameters, by name."""
    kept = {n for n, p in model.named_parameters() if p.requires_grad}
    tied = {id(p) for p in model.parameters() if p.requires_grad}
    state = model.state_dict(keep_vars=True)
    local = {n: t for n, t in state.items() if isinstance(t, Tensor) and n not in kept and id(t) not in tied}
    return {n: t.detach() for n, t in local.items()}
