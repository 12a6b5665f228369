"""A live run under control: who reads its lines, who waits for it, and how it is paused, paced and stepped."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
from toys import Watched, countdown, regression, until

import distlab as dl

LONG = 10_000_000


def start(cluster: dl.Cluster, strategy: dl.Strategy | None = None, num_updates: int = LONG, **options) -> dl.LiveRun:
    return dl.start(countdown(), strategy or dl.AsyncPS(), cluster, num_updates=num_updates, **options)


def lines(live: dl.LiveRun) -> list[str]:
    return live._listener.lines


def loud(outputs, targets):
    print("loud")
    return outputs.mean()


@pytest.fixture(params=["real", "simulated"])
def cluster(request, two):
    return dl.SimulatedCluster(2, compute=0.02) if request.param == "simulated" else two


# Lines


def test_every_reader_of_lines_reads_all_of_them(two, capsys):
    live = dl.start(countdown(loss=loud), dl.SyncPS(), two, num_updates=3)
    capsys.readouterr()  # checking the task prints too
    until(lambda: len(lines(live)) >= 2)
    seen = lines(live)[:2]
    live.wait()
    told = capsys.readouterr().out.splitlines()
    assert told[:2] == seen
    assert told == lines(live)
    assert len(told) == 6, "two workers, three gradients each"


def test_second_wait_prints_nothing_again(one, capsys):
    live = dl.start(countdown(loss=loud), dl.SingleWorker(), one, num_updates=3)
    live.wait()
    capsys.readouterr()
    live.wait()
    assert capsys.readouterr().out == ""


# Await


def test_awaited_run_leaves_the_event_loop_free(two, capsys):
    async def main() -> tuple[dl.Run, int]:
        live, turns = start(two), 0

        async def other() -> None:
            nonlocal turns
            while live.version < 20:
                turns += 1
                await asyncio.sleep(0)
            live._listener.say("said while it was awaited")
            live.stop()

        beside = asyncio.create_task(other())
        run = await live
        await beside
        assert run is await live
        return run, turns

    run, turns = asyncio.run(main())
    assert 20 <= run.num_updates < LONG
    assert turns > 1
    assert "said while it was awaited" in capsys.readouterr().out


def test_awaited_run_raises_the_error_of_its_own_code(two):
    async def main() -> None:
        await dl.start(countdown(loss=broken), dl.SyncPS(), dl.SimulatedCluster(2), num_updates=5)

    calls = []

    def broken(outputs, targets):
        calls.append(0)
        if len(calls) > 4:  # and not while the task is checked
            raise RuntimeError("mine")
        return outputs.mean()

    with pytest.raises(RuntimeError, match="mine") as ended:
        asyncio.run(main())
    assert isinstance(ended.value.run, dl.Run)


def test_cancelled_await_ends_the_processes(two):
    async def main() -> Watched:
        live = start(two)
        processes = Watched(live.launched.pids.values())
        task = asyncio.ensure_future(live)
        while not live.version:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert live.launched.wait(0) is not None
        return processes

    assert asyncio.run(main()).alive(within_s=0) == []


def test_await_lets_a_paused_run_go_on_unless_it_is_shown():
    async def main(shown: bool) -> None:
        live = dl.start(regression(), dl.SyncPS(), dl.SimulatedCluster(2), num_updates=3, paused=True)
        live._has_buttons = shown
        waits = asyncio.ensure_future(live)
        if shown:
            for _ in range(20):
                await asyncio.sleep(0)
            assert live.paused
            live.resume()
        assert (await waits).num_updates == 3

    asyncio.run(main(shown=False))
    asyncio.run(main(shown=True))


# What strikes nobody says so


def told(live: dl.LiveRun, line: str) -> bool:
    return any(line in said for said in lines(live))


def test_kill_of_a_dead_worker_says_that_it_is_dead(cluster):
    live = start(cluster)
    live.kill(worker=1)
    until(lambda: len(live.trace.select("death")) == 1)
    assert not told(live, "nothing was killed")
    live.kill(worker=1)
    until(lambda: told(live, "[worker 1] worker 1 is dead already: nothing was killed"))
    live.stop()
    assert len(live.wait().trace.select("death")) == 1


def test_revive_of_a_live_worker_says_so_once_and_comes_true_at_its_death(cluster):
    live = start(cluster)
    until(lambda: live.version > 0)
    live.revive(worker=1)
    until(lambda: told(live, "[worker 1] worker 1 lives: another takes its place as soon as it is dead"))
    live.revive(worker=1)
    until(lambda: told(live, "another takes the place of worker 1 already"))
    live.kill(worker=1)
    until(lambda: len(live.trace.select("revive")) == 1)
    live.stop()
    run = live.wait()
    assert len(run.trace.select("revive")) == len(run.trace.select("death")) == 1, "and not a second time"
    assert sum("worker 1 lives" in line for line in lines(live)) == 1


def test_revive_of_a_worker_that_was_just_killed_does_not_call_it_alive(cluster):
    live = start(cluster)
    until(lambda: live.version > 0)
    live.kill(worker=1)
    live.revive(worker=1)
    until(lambda: len(live.trace.select("revive")) == 1)
    live.stop()
    live.wait()
    assert not told(live, "lives")


def test_worker_that_has_ended_is_neither_killed_nor_replaced(cluster):
    live = dl.start(countdown(), dl.AsyncPS(), cluster, num_batches=(LONG, 3))
    until(lambda: len(live.trace.select("apply", worker=1)) == 3)

    def said(line: str, again) -> bool:
        again(worker=1)
        return told(live, line)

    until(lambda: said("worker 1 has ended: nobody takes its place", live.revive))
    until(lambda: said("worker 1 has ended already: nothing was killed", live.kill))
    live.kill()


# The pace of a virtual clock


def test_paced_clock_waits_for_the_next_event_and_obeys_at_once():
    """At a millionth of the speed, the next event would come in hours."""
    live = start(dl.SimulatedCluster(2, compute=0.02), paused=True)
    live.resume(speed=1e-6)
    until(lambda: live.launched.events > 0)
    live.kill(worker=1)
    until(lambda: len(live.trace.select("death")) == 1)
    assert live.version == 0
    assert 0 < live.now_s < 0.02
    live.pause()
    assert live.paused
    live.resume()
    until(lambda: live.version > 20)
    live.stop()
    assert live.wait().version > 20


def test_paced_clock_is_never_ahead_of_its_pace():
    live = start(dl.SimulatedCluster(2, compute=0.02), paused=True)
    began_s = time.monotonic()
    live.resume(speed=0.5)
    until(lambda: live.version >= 6)
    took_s = time.monotonic() - began_s
    assert live.launched.world.env.now <= 0.5 * took_s
    live.resume(speed=1e9)
    until(lambda: live.version >= 1000)
    live.resume(speed=1e-6)
    live.stop()
    assert live.wait().version >= 1000


def test_wait_keeps_the_pace_and_a_kill_ends_it():
    live = start(dl.SimulatedCluster(2, compute=0.02), paused=True)
    live.resume(speed=1e-6)

    def wait() -> None:
        with pytest.raises(dl.ProcessLost):
            live.wait()

    waits = threading.Thread(target=wait)
    waits.start()
    until(lambda: live.launched.events > 0)
    live.kill()
    waits.join()
    assert live.now_s < 0.02


@pytest.mark.parametrize("speed", [0, -1, float("inf"), float("nan")])
def test_speed_is_checked(speed):
    live = start(dl.SimulatedCluster(2), paused=True)
    with pytest.raises(ValueError, match="speed must be positive and finite"):
        live.resume(speed=speed)
    assert live.paused
    live.kill()


def test_step_returns_when_its_events_have_happened():
    live = start(dl.SimulatedCluster(2, compute=0.02), paused=True)
    for n in range(1, 200):
        assert live.step() == live.now_s
        assert live.launched.events == n
    assert live.paused
    live.kill()
    assert not live.paused


# Real processes that stand still


def states(live: dl.LiveRun) -> set[str]:
    """What the kernel says of each process: T is stopped."""
    return {Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] for pid in live.launched.pids.values()}


@pytest.mark.parametrize("links", ["memory", "gloo"])
def test_paused_real_run_stands_still_however_long_and_goes_on(links):
    with dl.LocalCluster(num_workers=2, links=links, failure_timeout_s=0.3) as cluster:
        live = start(cluster)
        until(lambda: live.version > 5)
        live.pause()
        assert live.paused
        until(lambda: states(live) == {"T"})
        live.kill(worker=1)
        began_s, at_s, version = time.monotonic(), live.now_s, live.version
        until(lambda: time.monotonic() - began_s > 0.7)
        version = live.version
        assert states(live) == {"T"}, "nobody was taken for dead, and no line has struck"
        assert live.now_s == at_s
        live.resume()
        assert not live.paused
        until(lambda: len(live.trace.select("death")) == 1)
        until(lambda: live.version > version + 20)
        assert live.now_s > at_s
        live.stop()
        assert live.wait().ledger.balances


def test_real_run_is_stepped_update_by_update(two):
    live = start(two)
    seen = [0]
    for _ in range(4):
        assert live.step(3) == live.now_s
        until(lambda: states(live) == {"T"})
        seen.append(live.version)
    assert all(b - a >= 3 for a, b in pairwise(seen))
    live.stop()
    assert live.wait().version >= 12


def test_awaited_and_waited_runs_go_on_and_kill_ends_one_that_stands_still(two):
    live = start(two, num_updates=2_000)
    live.pause()
    assert live.wait().version == 2_000
    live = start(two)
    live.pause()
    live.kill()
    assert not live.paused
    with pytest.raises(dl.ProcessLost, match=r"LiveRun.kill\(\)"):
        live.wait()


def test_process_that_dies_while_all_stand_still_is_replaced_when_they_go_on(two):
    live = start(two)
    live.pause()
    os.kill(live.launched.pids["worker 1"], signal.SIGKILL)
    until(lambda: len(live.trace.select("death")) == 1)
    live.revive(worker=1)
    live.resume()
    until(lambda: len(live.trace.select("revive")) == 1)
    live.pause()
    until(lambda: states(live) == {"T"})
    live.stop()
    live.wait()


def test_worker_that_a_scenario_has_stopped_stays_so_and_can_be_killed(two):
    live = start(two)
    until(lambda: live.version > 0)
    live.pause(worker=1, for_s=1000)
    pid = live.launched.pids["worker 1"]
    until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "T")
    live.pause()
    version = live.version
    live.resume()
    until(lambda: live.version > version + 20)
    assert Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "T"
    live.kill(worker=1)
    until(lambda: len(live.trace.select("death")) == 1)
    live.stop()
    live.wait()


def test_real_processes_have_one_speed(two):
    live = start(two)
    with pytest.raises(dl.DistlabError, match=r"real processes go at their own speed, which is 1, got speed=2"):
        live.resume(speed=2)
    live.resume(speed=1)
    live.kill()


SCRIPT = """
import distlab as dl, torch
task = dl.Task(model=lambda: torch.nn.Linear(1, 1), train=(torch.zeros(9, 1), torch.zeros(9, 1)),
    loss=torch.nn.functional.mse_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), batch_size=3)
live = dl.start(task, dl.AsyncPS(), dl.LocalCluster(num_workers=2), num_updates=10**9)
live.pause()
print(*live.launched.pids.values(), flush=True)
input()
"""


def test_processes_that_stand_still_end_with_their_caller():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", SCRIPT], text=True, **pipes) as caller:
        processes = Watched(map(int, caller.stdout.readline().split()))
        caller.kill()
    assert len(processes.pids) == 3
    assert processes.alive(within_s=20) == []
