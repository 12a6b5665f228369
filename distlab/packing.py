"""State as bytes, or as JSON beside tensors: numbers and words in dicts and lists, and nothing that could run."""

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def packed(value: Any) -> Tensor:
    """`value` as bytes (n,), uint8.

    >>> unpacked(packed({"version": 3, "params": torch.ones(2)}))
    {'version': 3, 'params': tensor([1., 1.])}
    """
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)


def unpacked(data: Tensor) -> Any:
    """What `packed` made bytes of. Anything but tensors and plain values is refused."""
    return torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)


def to_bytes(value: Any) -> bytes:
    """`packed`, for a pipe."""
    return packed(value).numpy().tobytes()


def from_bytes(data: bytes) -> Any:
    """`to_bytes` undone."""
    return unpacked(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def apart(value: Any, tensors: dict[str, Tensor], name: str = "") -> Any:
    """`value` as JSON knows it; its tensors go into `tensors`, by the way that leads to them.

    >>> found = {}
    >>> apart({1: [True, torch.ones(2)]}, found)
    {'dict': [[1, {'list': [True, {'tensor': '/1/1'}]}]]}
    >>> together(apart({1: [True, torch.ones(2)]}, found), found)
    {1: [True, tensor([1., 1.])]}
    """
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": [[key, apart(part, tensors, f"{name}/{key}")] for key, part in value.items()]}
    if isinstance(value, (list, tuple)):
        return {"list": [apart(part, tensors, f"{name}/{number}") for number, part in enumerate(value)]}
    return value


def together(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """`apart` undone; tuples have become lists."""
    if not isinstance(tree, dict):
        return tree
    if "tensor" in tree:
        return tensors[tree["tensor"]]
    if "list" in tree:
        return [together(part, tensors) for part in tree["list"]]
    return {key: together(part, tensors) for key, part in tree["dict"]}
