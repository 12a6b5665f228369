"""How a message lies in memory: a fixed header, a line per tensor, then the tensors.

Header and payload travel together, so a push is one message. gloo believes whatever size its peer sends; therefore
every field is checked here before anything uses it, and all of what comes before the tensors has a checksum: a version
or a shape that has changed on the way is refused, whatever it says. The tensors have none, which would cost more than
sending them: for those TCP has one, and memory needs none.
"""

import math
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from distlab.errors import BadMessage
from distlab.fabric import clock
from distlab.fabric.base import Kind, Message, Peer
from distlab.trace import ROLES

MAGIC = 0x6469_7374_6C61_6203  # "distlab", wire version 3
HEADER = struct.Struct(
    "<QqqqqqqqqqdQQ"
)  # magic kind role index version step samples batch sent_ns count loss token sum
SUM = struct.Struct("<Q")  # the last field of the header
LINE = struct.Struct("<10q")  # dtype, number of dimensions, up to 8 of them
ALIGN = 64
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
HEAD_BYTES = 256  # of a message with one tensor, which then comes apart
MAX_TENSORS, MAX_BYTES = 256, 1 << 36


def aligned(num_bytes: int) -> int:
    """`num_bytes` rounded up to the alignment of tensors in a message."""
    return -(-num_bytes // ALIGN) * ALIGN


def size(tensors: Sequence[Tensor]) -> int:
    """The bytes that a message with these tensors takes."""
    head = aligned(HEADER.size + LINE.size * len(tensors))
    return head + sum(aligned(t.numel() * t.element_size()) for t in tensors)


def encode(buffer: Tensor, message: Message, sender: Peer, token: int) -> int:
    """Write `message` into `buffer` (bytes, uint8); returns its size in bytes."""
    start = encode_head(buffer, message, sender, token)
    for tensor in message.tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        buffer[start : start + num_bytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        start += aligned(num_bytes)
    return start


def encode_head(buffer: Tensor, message: Message, sender: Peer, token: int) -> int:
    """Write what comes before the tensors; returns its size in bytes."""
    view, tensors = buffer.numpy(), message.tensors  # type: Any, Sequence[Tensor]
    head = (message.kind, ROLES.index(sender.role), sender.index, message.version, message.step, message.samples)
    HEADER.pack_into(view, 0, MAGIC, *head, message.batch, clock.now_ns(), len(tensors), message.loss, token, 0)
    for i, tensor in enumerate(tensors):
        shape = tuple(tensor.shape)
        if tensor.dtype not in DTYPES or len(shape) > 8 or len(tensors) > MAX_TENSORS:
            raise BadMessage(f"a message cannot carry {len(tensors)} tensors, one of {tensor.dtype} and shape {shape}")
        line = (DTYPES.index(tensor.dtype), len(shape), *shape, *(0,) * (8 - len(shape)))
        LINE.pack_into(view, HEADER.size + i * LINE.size, *line)
    SUM.pack_into(view, HEADER.size - SUM.size, checksum(view, len(tensors)))
    return aligned(HEADER.size + LINE.size * len(tensors))


def checksum(view: Any, count: int) -> int:
    """Of the header, but for its own place, and of `count` lines."""
    end = HEADER.size + count * LINE.size
    return zlib.crc32(view[HEADER.size : end], zlib.crc32(view[: HEADER.size - SUM.size]))


def is_goodbye(buffer: Tensor) -> bool:
    """Is this the message that says that a link is used no more?"""
    magic, kind, *_ = HEADER.unpack_from(buffer.numpy(), 0)  # type: ignore[arg-type]
    return magic == MAGIC and kind == Kind.GONE


def announced(buffer: Tensor) -> int:
    """The bytes of the larger messages that this one announces; 0 if it announces none."""
    magic, kind, _, _, num_bytes, *_ = HEADER.unpack_from(buffer.numpy(), 0)  # type: ignore[arg-type]
    return num_bytes if magic == MAGIC and kind == Kind.GROW and num_bytes <= MAX_BYTES else 0


def check_head(buffer: Tensor, like: Tensor, sender: Peer, token: int) -> None:
    """BadMessage unless `buffer` is the head of a message with one tensor (1-d) of the shape and dtype of `like`."""
    kind, count, *_ = _header(buffer, sender, token)
    view: Any = buffer.numpy()
    code, ndim, numel, *_ = LINE.unpack_from(view, HEADER.size)
    if (kind, count, code, ndim, numel) != (Kind.DATA, 1, DTYPES.index(like.dtype), 1, like.numel()):
        raise BadMessage(
            f"{sender} announces another tensor than the one of {like.numel()} x {like.dtype} awaited here"
        )


def _header(buffer: Tensor, sender: Peer, token: int) -> tuple[Any, ...]:
    """kind, number of tensors, and the other fields; BadMessage if it is not what `sender` may say."""
    if buffer.numel() < HEADER.size:
        raise BadMessage(f"a message on the link to {sender} is cut off after {buffer.numel()} bytes")
    view: Any = buffer.numpy()
    magic, kind, role, index, *rest, sent_ns, count, loss, its_token, its_sum = HEADER.unpack_from(view, 0)
    if magic != MAGIC or its_token != token:
        raise BadMessage(f"a message on the link to {sender} is not from this run")
    if not (0 <= role < len(ROLES) and Peer(ROLES[role], index) == sender):
        raise BadMessage(f"a message on the link to {sender} says it is from role {role}, number {index}")
    if kind not in Kind._value2member_map_ or not 0 <= count <= MAX_TENSORS:
        raise BadMessage(f"a message from {sender} has kind {kind} and {count} tensors")
    if its_sum != checksum(view, count):
        raise BadMessage(f"the header of a message from {sender} is not what was sent: its checksum is another")
    return kind, count, *rest, loss, sent_ns


def decode(buffer: Tensor, sender: Peer, token: int) -> Message:
    """The message in `buffer`; its tensors are views. BadMessage if it is not what `sender` may say."""
    kind, count, version, step, samples, batch, loss, sent_ns = _header(buffer, sender, token)
    view, start, tensors = buffer.numpy(), aligned(HEADER.size + LINE.size * count), []  # type: Any, int, list[Tensor]
    if start > buffer.numel():
        raise BadMessage(f"a message from {sender} announces {count} tensors, more than the agreed size holds")
    for i in range(count):
        line = LINE.unpack_from(view, HEADER.size + i * LINE.size)
        tensor, start = _tensor(buffer, start, line, sender)
        tensors.append(tensor)
    return Message(Kind(kind), tensors, version, step, samples, loss, batch, start, sent_ns * 1e-9)


def _tensor(buffer: Tensor, start: int, line: tuple[int, ...], sender: Peer) -> tuple[Tensor, int]:
    code, ndim, *dims = line
    if not (0 <= code < len(DTYPES) and 0 <= ndim <= 8 and all(d >= 0 for d in dims)):
        raise BadMessage(f"a message from {sender} describes a tensor of dtype {code} and {ndim} dimensions")
    shape, dtype = dims[:ndim], DTYPES[code]
    extent = math.prod(max(d, 1) for d in shape)  # bounded too: strides overflow even where nothing is stored
    num_bytes = 0 if 0 in shape else extent * dtype.itemsize
    if extent > MAX_BYTES or start + num_bytes > buffer.numel():
        raise BadMessage(f"a message from {sender} announces a tensor {shape}, {num_bytes} bytes: more than was agreed")
    return buffer[start : start + num_bytes].view(dtype).view(shape), start + aligned(num_bytes)
