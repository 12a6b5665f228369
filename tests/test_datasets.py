"""The data that comes with distlab: is it what it says, and is anything else refused?"""

import importlib.util
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from distlab import datasets, tasks

FOLDER = Path(__file__).parents[1] / "datasets"
PER_CLASS = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def build_script(name: str):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_digits_are_bytes_of_8_by_8_pixels():
    images, labels = datasets.load("digits").values()
    assert images.shape == (1797, 8, 8)
    assert labels.shape == (1797,)
    assert images.dtype == labels.dtype == torch.uint8


def test_digits_span_their_ranges():
    images, labels = datasets.load("digits").values()
    assert (images.min(), images.max()) == (0, 16)
    assert labels.bincount().tolist() == PER_CLASS


def test_digits_are_labelled_as_scikit_learn_labels_them():
    from sklearn.datasets import load_digits

    images, labels = datasets.load("digits").values()
    assert np.array_equal(images.numpy(), load_digits().images)
    assert np.array_equal(labels.numpy(), load_digits().target)


def test_load_gives_fresh_tensors():
    datasets.load("digits")["images"].zero_()
    assert datasets.load("digits")["images"].max() == 16


def test_load_does_not_import_scikit_learn():
    code = "import sys; from distlab.datasets import load; load('digits'); sys.exit('sklearn' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=FOLDER.parent, check=True)


def test_altered_file_is_refused(tmp_path, monkeypatch):
    content = bytearray((FOLDER / "digits.npz").read_bytes())
    content[1000] ^= 1
    altered = tmp_path / "digits.npz"
    altered.write_bytes(content)
    monkeypatch.setattr(datasets, "_find", lambda file: altered)
    with pytest.raises(datasets.BadDataset) as refusal:
        datasets.load("digits")
    told = str(refusal.value)
    assert f"{altered} is not the file" in told
    assert f"expected sha256 {datasets.SHA256['digits.npz']}, got " in told
    assert "Restore it" in told


def test_missing_file_says_where_it_was_sought(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "__file__", str(tmp_path / "distlab" / "datasets.py"))
    with pytest.raises(datasets.BadDataset, match=r"digits.npz is neither .*_data.* nor .*restore it"):
        datasets.load("digits")


@pytest.mark.parametrize("name", ["digit", "Digits", "digits.npz"])
def test_unknown_name_names_its_neighbour(name):
    with pytest.raises(ValueError, match=f"no data set '{name}' among digits: did you mean 'digits'"):
        datasets.load(name)


def test_unknown_name_lists_what_there_is():
    with pytest.raises(ValueError, match="no data set 'cifar' among digits"):
        datasets.load("cifar")


def test_installed_package_reads_its_own_copy_first(tmp_path, monkeypatch):
    for folder in ("distlab/_data", "datasets"):  # site-packages may hold another package named datasets
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "digits.npz").touch()
    monkeypatch.setattr(datasets, "__file__", str(tmp_path / "distlab" / "datasets.py"))
    assert datasets._find("digits.npz") == tmp_path / "distlab" / "_data" / "digits.npz"


def test_checksum_file_says_what_the_code_says():
    lines = (FOLDER / "SHA256SUMS").read_text().splitlines()
    assert {file: sha for sha, file in map(str.split, lines)} == datasets.SHA256
    assert {path.name for path in FOLDER.glob("*.npz")} == set(datasets.SHA256)


def test_build_script_reproduces_the_numbers(tmp_path):
    built = np.load(build_script("build_digits").build(tmp_path), allow_pickle=False)
    for key, tensor in datasets.load("digits").items():
        assert np.array_equal(built[key], tensor.numpy())


@pytest.mark.skipif("ng" in zlib.ZLIB_RUNTIME_VERSION, reason="zlib-ng packs the same numbers differently")
def test_build_script_reproduces_the_checksum(tmp_path):
    content = build_script("build_digits").build(tmp_path).read_bytes()
    assert content == (FOLDER / "digits.npz").read_bytes()


def test_no_pixel_of_the_digits_outweighs_all_others():
    task = tasks.digits()
    largest = [inputs.abs().max().item() for inputs, _ in (task.train, task.validation)]
    assert max(largest) < 2 * min(largest), "one that is black in all that is trained on would be a thousand"
