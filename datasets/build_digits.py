"""Builds digits.npz out of scikit-learn: 1797 scans of handwritten digits, 8x8 pixels of 0 to 16.

The file must be the same, byte for byte, whoever builds it, or its checksum would say nothing about the
data. So the archive is written here instead of by ``numpy.savez``, which stores the time of day.

    python datasets/build_digits.py [folder]
"""

import io
import sys
import zipfile
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits


def write_npz(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write `arrays` as a compressed npz that depends on their values alone, not on clock or user."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            buffer = io.BytesIO()
            np.lib.format.write_array(buffer, array, version=(1, 0), allow_pickle=False)
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            entry.create_system, entry.external_attr = 3, 0o644 << 16  # as on Unix, whatever the system
            archive.writestr(entry, buffer.getvalue(), zipfile.ZIP_DEFLATED, compresslevel=9)


def build(folder: Path) -> Path:
    """Write digits.npz into `folder`; returns its path."""
    digits = load_digits()
    images, labels = digits.images.astype(np.uint8), digits.target.astype(np.uint8)
    assert (images == digits.images).all(), "a pixel is not a whole number of 0 to 255"
    path = folder / "digits.npz"
    write_npz(path, {"images": images, "labels": labels})
    return path


if __name__ == "__main__":
    print(build(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent))
