"""Checkpoints: all that a run needs to go on, in two files that hold no code.

A folder such as ``version-00000200`` has ``tensors.safetensors`` and ``checkpoint.json``, which holds the digests of
both. It is written under another name and then renamed, so that what bears the name is whole. What belongs to the
parameters is laid out by the names of the model's own tensors, whoever held which shard of them: another number of
servers or workers can go on from there.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distlab.errors import DistlabError
from distlab.flat import Flat, Ranges, Vector
from distlab.packing import apart, together
from distlab.shards import Shard
from distlab.task import Task, model_of

FORMAT = 1
KEPT = 5  # checkpoints of a folder; older ones are removed
WORDS, TENSORS, PREFIX, MAKING = "checkpoint.json", "tensors.safetensors", "version-", ".making-"
FACTS = ("names", "shapes", "dtype", "optimizer", "num_samples", "seed", "strategy")


class BadCheckpoint(DistlabError):
    """A checkpoint that cannot be used: damaged, or of something else."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """One moment of a run.

    Attributes:
        facts: of what: the names and shapes of the trained parameters, the optimizer, the data, the strategy.
        common: what there is once: the version, vectors laid out as the parameters are ("params" among them), and what
            the optimizer knows beside.
        own: what each process had for itself, by its name.
        path: where it was read from.
        task: for `model` and `evaluate`.
    """

    facts: Mapping[str, Any]
    common: Mapping[str, Any]
    own: Mapping[str, Mapping[str, Any]]
    path: str = ""
    task: Task | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        return f"Checkpoint(version {self.version} of {self.facts['strategy']}, {self.path!r})"

    @property
    def version(self) -> int:
        """How many updates are in it."""
        return int(self.common["version"])

    @property
    def params(self) -> Tensor:
        """(size,) the parameters, flat."""
        return self.common["vectors"]["params"]

    @property
    def local(self) -> dict[str, Tensor]:
        """The chief's buffers and frozen parameters; in-graph, those of the first replica's devices."""
        whose = sorted((name.split()[0], int(name.split()[1])) for name, own in self.own.items() if "worker" in own)
        workers = [f"{role} {index}" for role, index in whose if role == "worker"]
        names = workers[:1] or [f"{role} {index}" for role, index in reversed(whose)]
        return {name: tensor for who in names for name, tensor in self.own[who]["worker"]["local"].items()}

    @property
    def model(self) -> nn.Module:
        """A module with these parameters and buffers; a new one on each call, in eval mode."""
        if self.task is None:
            raise DistlabError("a checkpoint has no task of its own: load it with load_checkpoint(path, task)")
        return model_of(self.task, self.params, self.local).eval()

    def evaluate(self, samples: Any = None) -> dict[str, float]:
        """Mean loss and metrics of `model` on the task's validation data, or on `samples`."""
        model = self.model
        assert self.task is not None
        return self.task.evaluate(model, samples)

    def portion(self, ranges: Ranges) -> dict[str, Any]:
        """What is common, of these parts of the vectors alone; copies."""
        shard = Shard(ranges, (), self.params.dtype)
        vectors = {name: shard.take(vector).clone() for name, vector in self.common["vectors"].items()}
        return {**self.common, "vectors": vectors}

    def position(self, index: int, num_workers: int, batch_size: int) -> int:
        """The next batch of a worker. If the samples were dealt to others, all begin with a round of their own that
        holds no sample which has been handed out, but for those of the last round begun."""
        dealt = [own["place"] for own in self.own.values() if "place" in own]
        for kept in dealt:
            if (kept["index"], kept["num_workers"], kept["batch_size"]) == (index, num_workers, batch_size):
                return int(kept["position"])
        used = sum(kept["position"] * kept["batch_size"] for kept in dealt)
        return used // (num_workers * batch_size)

    def dealt(self, batch_size: int) -> int:
        """The first place, for batches of such a size, at which nothing has been handed out, where all go in step."""
        return max(-(-own["place"]["dealt"] // batch_size) for own in self.own.values() if "place" in own)


def facts_of(task: Task, strategy: str, optimizer: Callable[..., Any] | None) -> dict[str, Any]:
    """What a checkpoint says of its run. `optimizer`: a factory of the one that makes the versions, if there is one."""
    flat = Flat(task.build())
    made = None if optimizer is None else type(optimizer(flat.parameters))
    return {
        "names": flat.names,
        "shapes": [list(shape) for shape in flat.shapes],
        "dtype": str(flat.dtype).removeprefix("torch."),
        "optimizer": made and f"{made.__module__}.{made.__qualname__}",
        "num_samples": task.num_samples,
        "seed": task.seed,
        "strategy": strategy,
    }


def united(parts: Sequence[tuple[Ranges, Mapping[str, Any]]], size: int) -> dict[str, Any] | None:
    """What is common, put together from its parts; None unless they make up a whole vector of `size` elements."""
    if sum(stop - start for ranges, _ in parts for start, stop in ranges) != size:
        return None
    vectors: dict[str, Tensor] = {}
    for ranges, state in parts:
        for name, values in state["vectors"].items():
            whole = vectors.setdefault(name, torch.zeros(size, dtype=values.dtype))
            Shard(ranges, (), values.dtype).put(values, whole)
    others = {number: kept for _, state in parts for number, kept in state["others"].items()}
    version = min(state["version"] for _, state in parts)
    return {"version": version, "vectors": vectors, "others": others, "settings": parts[0][1]["settings"]}


def write(checkpoint: Checkpoint, folder: Path) -> Path:
    """Write `checkpoint` into `folder`, and remove all but the newest few that are there."""
    from safetensors.torch import save

    layout, tensors = layout_of(checkpoint.facts), {}  # type: Vector, dict[str, Tensor]
    for vector, values in checkpoint.common["vectors"].items():
        for name, view in zip(checkpoint.facts["names"], layout.views(values), strict=True):
            tensors[f"{vector}/{name}"] = view
    rest = {"own": checkpoint.own} | {name: checkpoint.common[name] for name in ("version", "others", "settings")}
    words = {"format": FORMAT, **checkpoint.facts, "rest": apart(rest, tensors, "rest")}
    words["vectors"] = sorted(checkpoint.common["vectors"])
    data = save({name: tensor.contiguous().clone() for name, tensor in tensors.items()})
    target = folder / f"{PREFIX}{checkpoint.version:08}"
    made = Path(tempfile.mkdtemp(prefix=MAKING, dir=folder))
    for name, content in ((TENSORS, data), (WORDS, sealed(words | {"tensors": digest(data)}).encode())):
        with open(made / name, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    made.rename(target)
    sync(folder)
    for old in checkpoints(folder)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def sync(folder: Path) -> None:
    """Let the names in `folder` reach the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest(data: bytes) -> str:
    """What tells whether a byte has changed."""
    return hashlib.sha256(data).hexdigest()


def sealed(words: Mapping[str, Any]) -> str:
    """`words` as JSON, with their own digest."""
    text = json.dumps(words, sort_keys=True)
    return json.dumps({**words, "digest": digest(text.encode())}, sort_keys=True)


def checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints in a folder, the oldest first."""
    return sorted(path for path in Path(folder).glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdecimal())


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The newest checkpoint in `folder`; None if there is none, or no such folder. A script that may have been cut off
    goes on with ``train(..., checkpoint_dir=folder, resume=latest_checkpoint(folder))``."""
    return next(iter(checkpoints(folder)[::-1]), None)


def load_checkpoint(path: str | os.PathLike[str], task: Task | None = None) -> Checkpoint:
    """Read a checkpoint, or the newest one in a folder of them. With its `task`, `model` and `evaluate` work too.

    Raises:
        FileNotFoundError: there is none.
        BadCheckpoint: it is damaged, or no checkpoint of this format, or not one of `task`: the message says why.
    """
    folder = Path(path)
    if not (folder / WORDS).exists() and not folder.name.startswith(PREFIX):
        newest = latest_checkpoint(folder)
        if newest is None:
            raise FileNotFoundError(f"there is no checkpoint in {folder}")
        folder = newest
    try:
        made = replace(_read(folder), path=str(folder), task=task)
    except (BadCheckpoint, OSError) as error:
        good = [other for other in checkpoints(folder.parent) if other != folder and is_whole(other)]
        hint = f"; the newest good one beside it is {good[-1]}" if good else ""
        raise BadCheckpoint(f"{folder} cannot be used: {error}{hint}") from error
    if task is not None:
        check_task(made, task)
    return made


def is_whole(folder: Path) -> bool:
    """Can it be read?"""
    try:
        _read(folder)
    except (BadCheckpoint, OSError):
        return False
    return True


def check_task(checkpoint: Checkpoint, task: Task) -> None:
    """BadCheckpoint if it is of another model, or of other data."""
    mine = facts_of(task, "", None)
    for name in ("names", "shapes", "dtype", "num_samples", "seed"):
        if mine[name] != checkpoint.facts[name]:
            raise BadCheckpoint(
                f"{checkpoint.path} is of another task: its {name} {short(checkpoint.facts[name])}, "
                f"this task's {short(mine[name])}"
            )


def short(value: Any) -> str:
    """`value` for a message."""
    text = repr(value)
    return text if len(text) < 200 else f"{text[:200]}..."


def layout_of(facts: Mapping[str, Any]) -> Vector:
    """Room for the parameters that a checkpoint names."""
    return Vector([torch.Size(shape) for shape in facts["shapes"]], getattr(torch, facts["dtype"]))


def _read(folder: Path) -> Checkpoint:
    from safetensors import SafetensorError
    from safetensors.torch import load

    text, data = (folder / WORDS).read_bytes(), (folder / TENSORS).read_bytes()
    words = _opened(text)
    if digest(data) != words["tensors"]:
        raise BadCheckpoint(f"{TENSORS} is not the file that {WORDS} tells of ({len(data)} bytes)")
    try:
        tensors = load(data)
        layout, rest = layout_of(words), together(words["rest"], tensors)
        vectors = {name: _vector(name, words["names"], layout, tensors) for name in words["vectors"]}
        common = {name: rest[name] for name in ("version", "others", "settings")} | {"vectors": vectors}
        return Checkpoint({name: words[name] for name in FACTS}, common, rest["own"])
    except (SafetensorError, LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise BadCheckpoint(f"its parts do not fit together ({type(error).__name__}: {error})") from error


def _opened(text: bytes) -> dict[str, Any]:
    """The words, if they are a checkpoint's and unchanged."""
    try:
        words = json.loads(text)
        del words["digest"]
        if sealed(words).encode() != text:
            raise BadCheckpoint(f"{WORDS} has been altered")
        if words["format"] != FORMAT:
            raise BadCheckpoint(f"it has format {words['format']!r}, this version of distlab reads {FORMAT}")
        return words
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise BadCheckpoint(f"{WORDS} does not hold a checkpoint ({type(error).__name__}: {error})") from error


def _vector(vector: str, names: Sequence[str], layout: Vector, tensors: Mapping[str, Tensor]) -> Tensor:
    parts = [tensors[f"{vector}/{name}"] for name in names]
    whole = torch.zeros(layout.size, dtype=parts[0].dtype)
    for view, part in zip(layout.views(whole), parts, strict=True):
        if view.shape != part.shape:
            raise ValueError(f"{vector} has shape {tuple(part.shape)} where {tuple(view.shape)} belongs")
        view.copy_(part)
    return whole
