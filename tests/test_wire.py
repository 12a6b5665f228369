"""A message on the wire: it comes back as it was, and anything else is a BadMessage, never a crash."""

import math
import struct

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from distlab.errors import BadMessage
from distlab.fabric import Kind, Message, Peer, wire

ME, TOKEN = Peer("worker", 2), 1234567890123456789
FIELDS = (
    "magic",
    "kind",
    "role",
    "index",
    "version",
    "step",
    "samples",
    "batch",
    "sent_ns",
    "count",
    "loss",
    "token",
    "sum",
)
INT64 = st.integers(-(2**63), 2**63 - 1)
INTEGERS = [t for t in wire.DTYPES if not (t.is_floating_point or t.is_complex or t == torch.bool)]


def packed(*tensors: torch.Tensor, room: int = 4096, **header) -> torch.Tensor:
    """A buffer with a message in it."""
    buffer = torch.zeros(max(room, wire.size(tensors)), dtype=torch.uint8)
    wire.encode(buffer, Message(**{"kind": Kind.PUSH, "tensors": tensors} | header), ME, TOKEN)
    return buffer


def altered(buffer: torch.Tensor, **fields) -> torch.Tensor:
    """The same buffer with some numbers of its header changed."""
    view = memoryview(buffer.numpy())
    values = dict(zip(FIELDS, wire.HEADER.unpack_from(view, 0), strict=True)) | fields
    wire.HEADER.pack_into(view, 0, *values.values())
    return signed(buffer, values["count"])


def signed(buffer: torch.Tensor, count: int = 1) -> torch.Tensor:
    """The same buffer with a checksum that fits, as a forger would send it."""
    view = memoryview(buffer.numpy())
    wire.SUM.pack_into(
        view, wire.HEADER.size - wire.SUM.size, wire.checksum(view, min(max(count, 0), wire.MAX_TENSORS))
    )
    return buffer


def described(code: int, ndim: int, *dims: int) -> torch.Tensor:
    """A message whose one tensor is said to be this."""
    buffer = packed(torch.ones(3))
    wire.LINE.pack_into(memoryview(buffer.numpy()), wire.HEADER.size, code, ndim, *dims, *(0,) * (8 - len(dims)))
    return signed(buffer)


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(wire.DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=8).filter(lambda s: math.prod(s) < 500))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    return (torch.rand(shape, generator=generator) * 200 - 100).to(dtype)


@settings(deadline=None, max_examples=150)
@given(
    sent=st.lists(tensors(), max_size=4),
    version=INT64,
    step=INT64,
    samples=INT64,
    loss=st.floats(),
    kind=st.sampled_from(Kind),
)
def test_message_comes_back_as_it_was(sent, version, step, samples, loss, kind):
    buffer = packed(*sent, kind=kind, version=version, step=step, samples=samples, loss=loss)
    got = wire.decode(buffer, ME, TOKEN)
    assert (got.kind, got.version, got.step, got.samples) == (kind, version, step, samples)
    assert got.loss == loss or (math.isnan(got.loss) and math.isnan(loss))
    assert got.num_bytes == wire.size(sent)
    assert [(t.dtype, t.shape) for t in got.tensors] == [(t.dtype, t.shape) for t in sent]
    assert all(mine.equal(theirs) for mine, theirs in zip(got.tensors, sent, strict=True))


def test_tensor_that_is_not_contiguous_arrives_right():
    sent = torch.arange(12.0).view(3, 4).t()
    assert wire.decode(packed(sent), ME, TOKEN).values.equal(sent)


def test_message_is_a_copy():
    sent = torch.ones(3)
    buffer = packed(sent)
    sent.zero_()
    assert wire.decode(buffer, ME, TOKEN).values.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"magic": 0}, "a message on the link to worker 2 is not from this run"),
        ({"token": TOKEN + 1}, "a message on the link to worker 2 is not from this run"),
        ({"index": 1}, "says it is from role 0, number 1"),
        ({"role": 1}, "says it is from role 1, number 2"),
        ({"role": 99}, "says it is from role 99, number 2"),
        ({"role": -1}, "says it is from role -1"),
        ({"kind": 0}, "a message from worker 2 has kind 0 and 1 tensors"),
        ({"kind": 99}, "has kind 99"),
        ({"count": -1}, "has kind 3 and -1 tensors"),
        ({"count": wire.MAX_TENSORS + 1}, "has kind 3 and 257 tensors"),
        ({"count": 200}, "announces 200 tensors, more than the agreed size holds"),
    ],
    ids=str,
)
def test_header_that_was_not_agreed_is_refused(fields, told):
    with pytest.raises(BadMessage, match=told):
        wire.decode(altered(packed(torch.ones(3)), **fields), ME, TOKEN)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ((99, 1, 3), "describes a tensor of dtype 99 and 1 dimensions"),
        ((-1, 1, 3), "dtype -1"),
        ((0, 9, 3), "9 dimensions"),
        ((0, -1, 3), "-1 dimensions"),
        ((0, 1, -3), "describes a tensor of dtype 0"),
        ((0, 1, 1 << 20), r"announces a tensor \[1048576\], 4194304 bytes: more than was agreed"),
        ((0, 3, 1 << 62, 1 << 62, 1 << 62), "more than was agreed"),
    ],
    ids=str,
)
def test_tensor_that_was_not_agreed_is_refused(line, told):
    with pytest.raises(BadMessage, match=told):
        wire.decode(described(*line), ME, TOKEN)


def decodes_or_is_refused(buffer: torch.Tensor) -> None:
    try:
        got = wire.decode(buffer, ME, TOKEN)
    except BadMessage:
        return
    assert all(t.numel() * t.element_size() <= buffer.numel() for t in got.tensors)


@settings(deadline=None, max_examples=200)
@given(st.binary(min_size=wire.HEADER.size, max_size=1024))
def test_random_bytes_are_refused(content):
    with pytest.raises(BadMessage, match="is not from this run"):
        wire.decode(torch.frombuffer(bytearray(content), dtype=torch.uint8), ME, TOKEN)


@settings(deadline=None, max_examples=300)
@given(
    code=st.integers(-2, 14),
    ndim=st.integers(-2, 10),
    dims=st.lists(st.integers(-1, 5) | INT64, min_size=8, max_size=8),
)
@example(code=0, ndim=7, dims=[0, 0, 3, 4, 440504, 440934, 3957173, 0])  # empty, but its strides overflow
def test_random_descriptions_of_tensors_never_crash(code, ndim, dims):
    decodes_or_is_refused(described(code, ndim, *dims))


@settings(deadline=None, max_examples=300)
@given(
    kind=INT64 | st.integers(0, 12),
    count=INT64 | st.integers(-1, 300),
    role=INT64 | st.just(0),
    index=INT64 | st.just(2),
    rest=st.binary(max_size=900),
)
def test_random_headers_of_this_run_never_crash(kind, count, role, index, rest):
    buffer = torch.zeros(1024, dtype=torch.uint8)
    view = memoryview(buffer.numpy())
    wire.HEADER.pack_into(view, 0, wire.MAGIC, kind, role, index, 0, 0, 0, 0, 0, count, 0.0, TOKEN, 0)
    view[wire.HEADER.size : wire.HEADER.size + len(rest)] = rest
    decodes_or_is_refused(signed(buffer, count))


@settings(deadline=None, max_examples=1000)
@given(place=st.integers(0, 10**9), flip=st.integers(1, 255), count=st.integers(0, 3))
def test_frame_with_a_byte_of_its_head_changed_is_never_accepted(place, flip, count):
    """Not a version, not a shape, not a loss: a thousand mutants."""
    buffer = packed(*[torch.arange(4.0)] * count, version=7, step=3, samples=8, loss=0.5)
    buffer[place % (wire.HEADER.size + count * wire.LINE.size)] ^= flip
    with pytest.raises(BadMessage):
        wire.decode(buffer, ME, TOKEN)


@settings(deadline=None, max_examples=300)
@given(keep=st.integers(0, 500))
def test_frame_that_is_cut_off_is_never_accepted(keep):
    whole = packed(torch.arange(40.0), torch.arange(5))
    size = wire.size([torch.arange(40.0), torch.arange(5)])
    if keep < size - 24:  # what is left is less than the last tensor's five numbers
        with pytest.raises(BadMessage):
            wire.decode(whole[:keep].clone(), ME, TOKEN)


@settings(deadline=None, max_examples=300)
@given(places=st.lists(st.integers(0, 10**9), min_size=1, max_size=20), seed=st.integers(0, 255))
def test_frame_with_many_bytes_changed_never_crashes(places, seed):
    buffer = packed(torch.arange(40.0), torch.arange(5))
    for place in places:
        buffer[place % len(buffer)] ^= (place + seed) % 256
    decodes_or_is_refused(buffer)


def test_header_is_as_long_as_it_says():
    assert wire.HEADER.size == 13 * 8
    assert struct.calcsize(wire.LINE.format) == 10 * 8


def head(tensor: torch.Tensor, **fields) -> torch.Tensor:
    """The head of a message with this tensor, before which it travels alone."""
    buffer = torch.zeros(wire.HEAD_BYTES, dtype=torch.uint8)
    assert wire.encode_head(buffer, Message(Kind.DATA, [tensor]), ME, TOKEN) == wire.size([]) + wire.ALIGN
    return altered(buffer, **fields) if fields else buffer


@pytest.mark.parametrize("dtype", wire.DTYPES, ids=str)
def test_head_of_the_tensor_that_is_awaited_is_let_in(dtype):
    assert wire.check_head(head(torch.zeros(7).to(dtype)), torch.ones(7).to(dtype), ME, TOKEN) is None


def test_head_is_what_a_whole_message_begins_with():
    whole, part = packed(torch.ones(7), kind=Kind.DATA), head(torch.ones(7))
    size = wire.size([torch.ones(0)])
    assert altered(whole, sent_ns=0)[:size].equal(altered(part, sent_ns=0)[:size])


@pytest.mark.parametrize(
    "sent", [torch.zeros(6), torch.zeros(8), torch.zeros(7).double(), torch.zeros(7).int(), torch.zeros(7, 1)], ids=str
)
def test_head_of_another_tensor_is_refused(sent):
    with pytest.raises(BadMessage, match=r"worker 2 announces another tensor than the one of 7 x torch.float32"):
        wire.check_head(head(sent), torch.zeros(7), ME, TOKEN)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"magic": 0}, "a message on the link to worker 2 is not from this run"),
        ({"token": TOKEN + 1}, "a message on the link to worker 2 is not from this run"),
        ({"index": 1}, "says it is from role 0, number 1"),
        ({"kind": 99}, "has kind 99"),
        ({"kind": Kind.GROW}, "worker 2 announces another tensor"),
        ({"count": 2}, "worker 2 announces another tensor"),
        ({"count": 0}, "worker 2 announces another tensor"),
        ({"count": -1}, "-1 tensors"),
    ],
    ids=str,
)
def test_head_that_was_not_agreed_is_refused(fields, told):
    with pytest.raises(BadMessage, match=told):
        wire.check_head(head(torch.zeros(7), **fields), torch.zeros(7), ME, TOKEN)


@settings(deadline=None, max_examples=200)
@given(st.binary(min_size=wire.HEAD_BYTES, max_size=wire.HEAD_BYTES))
def test_random_head_is_refused(content):
    with pytest.raises(BadMessage):
        wire.check_head(torch.frombuffer(bytearray(content), dtype=torch.uint8), torch.zeros(7), ME, TOKEN)


def test_tensor_that_no_message_can_carry_is_refused_by_its_head():
    with pytest.raises(BadMessage, match="a message cannot carry 1 tensors"):
        head(torch.zeros(1, dtype=torch.uint16))
