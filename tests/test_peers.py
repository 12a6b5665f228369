"""What other systems do when something dies, hangs or is run again: each line of this table is held by a test.

Here are the tests of what no other file holds, and a check that those which are named are there.
"""

import ast
import os
import signal
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path

import pytest
import torch
from toys import Watched, countdown, failure, regression, train, until

import distlab as dl

HERE = Path(__file__).parent

#: What a peer does -> the tests that would fail if it happened here.
HELD = {
    "pytorch's parameter-server example: two trainers fail or hang": [
        "test_async_ps.test_200_updates_make_versions_1_to_200_once_each"
    ],
    "nbdistributed, TF2's coordinator: workers outlive the kernel": [
        "test_scripts.test_killed_script_leaves_no_process"
    ],
    "jupyter-distributed: an interrupt does not break a collective that one rank never joins": [
        "test_peers.test_interrupt_breaks_a_collective_that_one_rank_never_joins"
    ],
    "gloo: its error names a port": ["test_deaths.test_killed_process_ends_the_run_and_is_named"],
    "NCCL, gloo: a timeout does not say who was missing": [
        "test_membership.test_process_that_gives_no_sign_of_life_is_ended_and_named"
    ],
    "torch RPC: one death breaks the shutdown of all": [
        "test_membership.test_the_others_go_on_without_a_worker_that_dies"
    ],
    "mp.spawn: a function of a cell cannot be sent": [
        "test_scripts.test_script_defines_everything_in_main_without_a_guard"
    ],
    "TF1: a server's process never exits": ["test_live_run.test_finished_run_leaves_no_process"],
    "TF1: asynchronous training diverges and says nothing": [
        "test_stability.test_asynchronous_run_past_the_limit_is_told_in_numbers"
    ],
    "TF1: a worker waits for a dead server for ever": [
        "test_deaths.test_killed_process_ends_the_run_and_is_named",
        "test_scenario.test_one_of_two_shards_that_dies_ends_the_run_with_its_name",
    ],
    "DDP: uneven data hangs": ["test_uneven_data.test_real_run_ends_by_itself_when_all_data_is_used"],
    "DDP: an exception on one rank freezes the others": [
        "test_failures.test_exception_ends_the_others_even_if_they_are_busy"
    ],
    "everywhere: the address is in use at the second run": [
        "test_peers.test_ten_runs_one_after_the_other",
        "test_peers.test_two_programs_at_once",
    ],
    "Horovod: below the minimum and back, samples are lost or come twice": [
        "test_membership.test_worker_that_comes_back_goes_on_where_it_was"
    ],
    "everywhere: prints of the ranks are lost": ["test_live_run.test_prints_of_workers_arrive_labelled"],
    "TF1: who asks before the chief has initialised sleeps 30 s": [
        "test_peers.test_worker_that_asks_before_the_chief_waits_no_longer_than_it_must"
    ],
    "TF1 sync: 2 of 3 begin without the third": ["test_sync_ps.test_each_version_has_one_gradient_from_each_worker"],
    "TF1 async: a death is told to nobody": ["test_membership.test_death_from_outside_is_noticed_within_a_second"],
    "TF1 with a spare: one worker supplies both gradients of a step": [
        "test_membership.test_worker_that_comes_back_never_counts_twice"
    ],
    "TF1 sync without a spare: a death hangs silently": ["test_membership.test_run_that_is_to_stop_names_who_died"],
    "TF1: without the chief nobody evaluates any more": ["test_membership.test_another_becomes_chief_and_evaluates"],
    "TF1: a chief that is restarted restores an old checkpoint over live servers": [
        "test_membership.test_chief_that_comes_back_does_not_undo_what_was_learnt"
    ],
    "TF1: a server that is restarted starts from nothing, silently": [
        "test_peers.test_server_is_never_restarted_in_silence"
    ],
    "TF1 in-graph: the session hangs, then 49 lines": ["test_scenario.test_server_and_client_can_be_killed"],
    "RPC, DDP: what has died cannot come back": ["test_membership.test_worker_that_comes_back_takes_part_again"],
}


@cache
def functions_of(module: str) -> set[str]:
    """The names of the test functions in a file."""
    tree = ast.parse((HERE / f"{module}.py").read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("what", HELD)
def test_each_line_is_held_by_a_test_that_is_there(what):
    for name in HELD[what]:
        module, function = name.split(".")
        assert function in functions_of(module), name


@pytest.mark.parametrize("links", ["memory", "gloo"])
def test_interrupt_breaks_a_collective_that_one_rank_never_joins(links):
    def loss(outputs, targets):
        if os.getpid() != me and torch.initial_seed() % 1_000_003 == 1:  # worker 1
            time.sleep(3600)
        return outputs.mean()

    def interrupt() -> None:
        until(lambda: len(live.trace.select("compute", worker=0)) > 0)
        signal.pthread_kill(main, signal.SIGINT)

    me, main = os.getpid(), threading.main_thread().ident
    with dl.LocalCluster(num_workers=2, links=links) as cluster:
        live = dl.start(countdown(loss=loss), dl.AllReduce(), cluster, num_updates=100)
        processes = Watched(live.launched.pids.values())
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            live.wait()
        assert processes.alive(within_s=0) == []
        assert train(countdown(), dl.AllReduce(), cluster, 5).params[0] == -5, (
            "and the same cluster can be used at once"
        )


def test_ten_runs_one_after_the_other(two):
    for _ in range(10):
        assert train(countdown(), dl.AllReduce(), two, 3).params[0] == -3


SCRIPT = """
import sys; sys.path.insert(0, {here!r})
from toys import countdown, train
import distlab as dl
for _ in range(3):
    print(train(countdown(), dl.AsyncPS(locking="server"), dl.LocalCluster(num_workers=2), 20).params[0].item())
"""


def test_two_programs_at_once():
    words = [sys.executable, "-c", SCRIPT.format(here=str(HERE))]
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0].split() for process in both] == [["-20.0"] * 3] * 2


def test_worker_that_asks_before_the_chief_waits_no_longer_than_it_must():
    """The chief's first message is under way for a second; the others have it as soon as the server does."""
    run = train(regression(), dl.AsyncPS(), dl.SimulatedCluster(3, compute=0.1).delay(worker=0, by_s=1.0, to_s=0.5), 20)
    begins = [run.trace.select("compute", worker=w)["start_s"].min() for w in range(3)]
    assert begins[1:] == pytest.approx([1.0, 1.0], abs=0.01)
    assert run.applies["version"].tolist() == list(range(1, 21))


def test_server_is_never_restarted_in_silence(two):
    """It ends the run, with what was measured; nobody trains on from nothing."""
    live = dl.start(countdown(), dl.AsyncPS(locking="server"), two, num_updates=10**7)
    until(lambda: live.version > 10)
    live.kill(server=0)
    error = failure(live)
    assert str(error).startswith("server 0 (pid ")
    assert error.run.num_updates > 10
    assert error.run.params is None
