"""A small part of `make faults`: each row once, really and virtually."""

import importlib.util
from pathlib import Path

import pytest
from click.testing import CliRunner

from distlab.fabric import Peer

PATH = Path(__file__).parents[1] / "benchmarks" / "faults.py"
spec = importlib.util.spec_from_file_location("faults_table", PATH)
faults = importlib.util.module_from_spec(spec)
spec.loader.exec_module(faults)


@pytest.mark.parametrize("name", faults.ROWS)
def test_nothing_hangs_and_nothing_is_lost_that_is_promised(name):
    done = CliRunner().invoke(faults.main, ["--rounds", "1", "--only", name], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    strategy, who = faults.ROWS[name]
    if who != faults.ANY:  # where all may be dead for a moment
        role, index = who.split()
        assert strategy.survives(Peer(role, int(index))) != ("ends, named" in done.output)


def test_row_that_hangs_or_does_not_balance_fails_the_command(monkeypatch):
    for row in ({"what happened": "1 HUNG"}, {"what happened": "1 goes on", "ledger balances": "0/1"}):
        whole = {"ledger balances": "1/1", "replayed to the bit": "1/1"} | row
        monkeypatch.setattr(faults, "table", lambda *_, whole=whole: [whole])
        assert CliRunner().invoke(faults.main, []).exit_code == 1
