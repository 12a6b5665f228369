"""The small data sets that come with distlab: each is one file, and only the file it should be is read.

A run is evidence only if everybody trains on the same numbers, so the checksums stand here, in the code,
and not beside the files, where whoever alters one could alter the other. Sources, licences and how each
file was built: datasets/README.md.

    images, labels = load("digits").values()
"""

import hashlib
import io
from pathlib import Path

import numpy as np
import torch

from distlab.errors import DistlabError
from distlab.options import nearest

SHA256 = {
    "digits.npz": "aa64e930663d6e9271e1566601d65e70236553f73ec6cb041a4ab37167cf1d04",
}


class BadDataset(DistlabError):
    """A data set's file is missing or is not the one that distlab was tested with."""


def load(name: str) -> dict[str, torch.Tensor]:
    """The tensors of data set `name`, read from the disk: no network, no scikit-learn.

    Args:
        name: "digits" (1797 scans of handwritten digits).

    Returns:
        For "digits": "images", uint8 (1797, 8, 8), 0 (paper) to 16 (ink); "labels", uint8 (1797,), 0 to 9.
        They are as stored: scaling, dtype and the split into training and test data are the task's.

    Raises:
        ValueError: there is no such data set; names the nearest.
        BadDataset: the file is missing, or its sha256 is not the expected one.

    >>> load("digits")["images"].shape
    torch.Size([1797, 8, 8])
    """
    file = f"{name}.npz"
    if file not in SHA256:
        known = [Path(file).stem for file in SHA256]
        raise ValueError(f"no data set {name!r} among {', '.join(known)}: {nearest(str(name), known)}")
    content = _checked(_find(file))
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays.files}


def _find(file: str) -> Path:
    """Where `file` lies: in an installed package, else in the checkout that the package is part of."""
    package = Path(__file__).resolve().parent
    places = [package / "_data" / file, package.parent / "datasets" / file]
    for place in places:
        if place.is_file():
            return place
    raise BadDataset(f"{file} is neither {places[0]} nor {places[1]}: restore it, or install distlab again")


def _checked(path: Path) -> bytes:
    """The content of `path`, read once, so that what was checked is what is used."""
    content = path.read_bytes()
    got, expected = hashlib.sha256(content).hexdigest(), SHA256[path.name]
    if got != expected:
        raise BadDataset(
            f"{path} is not the file that distlab was tested with: expected sha256 {expected}, got {got}. "
            f"Restore it (git checkout -- datasets, or install distlab again), or build it anew: "
            f"datasets/README.md says how"
        )
    return content
