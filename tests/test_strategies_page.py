"""The page that says, for each strategy, who applies, what is dropped and what a death does; and that it is true."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from toys import FAMILY, PLAIN, regression

import distlab as dl
from distlab.__main__ import STRATEGIES, main

PAGE = Path(__file__).parents[1] / "STRATEGIES.md"
APPLIERS = {"the server": "server", "the client": "client", "the one client": "client"}


def section(name: str) -> str:
    return PAGE.read_text().split(f"## {name}\n")[1].split("\n## ")[0]


def test_page_is_what_the_docstrings_say():
    assert CliRunner().invoke(main, ["strategies"]).output == PAGE.read_text(), "python -m distlab strategies"


@pytest.mark.parametrize("kind", STRATEGIES.values(), ids=lambda kind: kind.__name__)
def test_every_strategy_says_who_applies_what_is_dropped_and_what_a_death_does(kind):
    text = section(kind.__name__)
    assert all(f"- **{head}**:" in text for head in ("Who applies", "What is dropped", "Assumes"))
    for role in kind().layout(3).counts:
        assert f" {role} " in "".join(line for line in text.splitlines() if line.startswith("- **If "))


@pytest.mark.parametrize("strategy", [*PLAIN, *FAMILY], ids=repr)
def test_who_applies_is_who_the_page_says(strategy):
    made = dl.train(regression(), strategy, dl.SimulatedCluster(4, seed=1), num_updates=8, progress=False)
    said = section(type(strategy).__name__).split("**Who applies**: ")[1]
    role = next((role for words, role in APPLIERS.items() if said.startswith(words)), "worker")
    assert role in {who.split()[0] for who in made.who_applied}


@pytest.mark.parametrize("strategy", [*PLAIN, *FAMILY], ids=repr)
def test_a_run_goes_on_without_a_worker_where_the_page_says_so(strategy):
    """Worker 1 dies in the middle. SingleWorker and InGraph do without one, or know no worker of that number."""
    cluster = dl.SimulatedCluster(4, compute=0.1, seed=1).kill(worker=1, at_s=1.05)
    deaths = [line for line in section(type(strategy).__name__).splitlines() if line.startswith("- **If ")]
    spare = getattr(strategy, "num_backup_workers", None)
    goes_on = ("others go on" in "".join(deaths) and spare != 0) or isinstance(strategy, dl.SingleWorker)
    live = dl.start(regression(), strategy, cluster, num_updates=40)
    if goes_on:
        assert live.wait().num_updates == 40
    else:
        with pytest.raises((dl.ProcessLost, dl.PeerLost), match=r"(worker|replica) 1"):
            live.wait()
