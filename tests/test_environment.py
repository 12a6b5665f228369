"""Three files say what distlab needs: pyproject.toml, environment.yml, constraints.txt. They must agree."""

import re
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
CONDA_NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base", "playwright": "playwright-python"}


def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirements() -> list[Requirement]:
    """Core and extras, without the extra that names another one of distlab."""
    project = pyproject()
    extras = project["optional-dependencies"].values()
    lines = chain(project["dependencies"], *extras)
    return [r for r in map(Requirement, lines) if r.name != "distlab"]


def environment() -> list[str]:
    """The entries of environment.yml, down to its pip section; flat enough to need no YAML library."""
    text = (ROOT / "environment.yml").read_text().split("dependencies:")[1].split("- pip:")[0]
    return re.findall(r"^  - (.+?)\s*$", text, re.MULTILINE)


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pins}


def test_environment_has_the_packages_and_lower_bounds_of_pyproject():
    wanted = {f"{CONDA_NAMES.get(r.name, r.name)} {r.specifier}" for r in requirements()}
    wanted |= {f"python {pyproject()['requires-python']}", "pip"}
    assert set(environment()) == wanted


def test_environment_names_each_package_once():
    names = [entry.split()[0] for entry in environment()]
    assert len(names) == len(set(names))


def test_environment_takes_conda_forge_alone():
    text = (ROOT / "environment.yml").read_text()
    assert re.findall(r"channels:\n((?:  - .+\n)+)", text) == ["  - conda-forge\n  - nodefaults\n"]
    assert text.endswith("  - pip:\n      - -e .\n")


@pytest.mark.parametrize("requirement", requirements(), ids=lambda r: r.name)
def test_requirement_is_pinned_within_its_bounds(requirement):
    version = pinned().get(canonicalize_name(requirement.name))
    assert version, f"{requirement.name} is not in constraints.txt"
    assert requirement.specifier.contains(version)


def test_torch_stays_within_reach_of_conda_forge():
    torch = next(r for r in requirements() if r.name == "torch")
    assert torch.specifier.contains("2.12.0"), "conda-forge ends at 2.12"


def test_constraints_hold_no_local_versions_or_folders():
    assert len(pinned()) > 100
    assert not [v for v in pinned().values() if re.search(r"[+@/ ]", v)]
