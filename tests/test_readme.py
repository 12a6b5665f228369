"""The code of README, CHECKPOINTS and HOSTS runs and prints what it says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
PAGES = TEXT + (ROOT / "CHECKPOINTS.md").read_text() + (ROOT / "HOSTS.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", PAGES, re.DOTALL)


def test_pages_have_as_many_outputs_as_python_blocks():
    assert len(BLOCKS) == PAGES.count("```python") >= 2


@pytest.mark.parametrize(("code", "printed"), BLOCKS)
def test_block_prints_what_it_says(code, printed, tmp_path):
    script = tmp_path / "block.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, printed), done.stderr


def test_readme_links_lead_somewhere():
    targets = [t for t in re.findall(r"\]\(([^)#]+)\)", TEXT) if "://" not in t]
    assert len(targets) > 5
    assert not [t for t in targets if not (ROOT / t).exists()]


def test_readme_is_short():
    prose = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
    assert 300 <= len(prose.split()) <= 650


@pytest.mark.parametrize("line", re.findall(r"^python -m distlab (.+)$", TEXT, re.MULTILINE))
def test_readme_commands_exist(line):
    command, *options = line.split()
    done = subprocess.run(
        [sys.executable, "-m", "distlab", command, "--help"], capture_output=True, text=True, check=True
    )
    assert all(option in done.stdout for option in options if option.startswith("--"))
