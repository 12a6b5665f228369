"""What a reader sees: notebooks in a real JupyterLab and a real browser."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from toys import Watched

pytestmark = pytest.mark.timeout(180)

LESSONS = Path(__file__).parents[1] / "lessons"
FUNCTION = """
%matplotlib inline
import distlab as dl
from distlab.plots import blank

def draw(workers=4, log=False):
    figure, axes = blank(5, 2)
    if log:
        raise ArithmeticError("<no> logarithm")
    axes.barh(range(workers), range(workers))
    return figure
"""
TASK = "import distlab as dl\ntask = dl.tasks.digits()"
DEAD = "{event.who for event in live.trace.where('death')}"
EXPLORER = "explorer = dl.Explorer(draw, workers=(1, 16), log=False)\nexplorer"


@pytest.mark.skipif(sys.platform != "linux", reason="a process can be tied to its parent on Linux alone")
@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL], ids=lambda by: by.name)
def test_jupyterlab_ends_with_a_test_process_that_is_killed(by, tmp_path):
    pytest.importorskip("jupyterlab")
    script = "import browser, pathlib, sys\nwith browser.jupyter(pathlib.Path(sys.argv[1])): print(), input()"
    tests = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command, pipe = [sys.executable, "-uc", script, str(tmp_path)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=tests) as caller:
        caller.stdout.readline()
        server = Watched(json.loads(path.read_text())["pid"] for path in tmp_path.glob("runtime/jpserver-*.json"))
        caller.send_signal(by)
    assert len(server.pids) == 1
    left = server.alive()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


@pytest.fixture(scope="module")
def explorer(lab):
    """A page with an Explorer in cell 1."""
    page = lab.open(lab.write("explorer.ipynb", [FUNCTION, EXPLORER]))
    page.run_all()
    yield page
    page.close()


def test_slider_moves_the_picture(explorer):
    before = explorer.picture(1)
    explorer.press("workers", "ArrowRight", times=3)
    after = explorer.wait_for_new_picture(1, before)
    assert before != after
    explorer.wait_for_text(r"workers\s+7")
    assert explorer.value("len(explorer.figure().axes[0].patches)") == "7"
    assert explorer.value("explorer.values") == "{'workers': 7, 'log': False}"
    explorer.screenshot("explorer")
    assert explorer.errors() == []
    assert explorer.status() == "idle"


def test_exception_is_seen_below_the_picture_until_the_next_one(explorer):
    box = explorer.page.get_by_role("checkbox", name="log")
    box.check()
    told = explorer.page.get_by_text("ArithmeticError: <no> logarithm")
    told.wait_for()
    explorer.screenshot("explorer_exception")
    box.uncheck()
    told.wait_for(state="detached")
    assert explorer.value("len(explorer.figure().axes[0].patches)") == explorer.value("explorer.values['workers']")


@pytest.fixture
def watched(lab):
    """A page whose cell 1 shows a real run."""
    start = "live = dl.start(task, dl.AsyncPS(), dl.LocalCluster(3), num_updates=1_000_000)\nlive.dashboard()"
    page = lab.open(lab.write("watched.ipynb", [TASK, start, "live.version", "run = await live\nrun.error", "6 * 7"]))
    page.run(0)
    page.run(1)
    yield page
    page.close()


def test_dashboard_of_a_real_run_kills_and_stops_and_leaves_the_kernel_free(watched):
    pictures = [watched.picture(1)]
    for _ in range(2):
        pictures.append(watched.wait_for_new_picture(1, pictures[-1]))
    assert len(set(pictures)) == 3
    watched.run(2)
    assert watched.text(2).isdigit()

    watched.run(3, wait=False)
    watched.choose("worker 1")
    watched.click("Kill")
    watched.wait_for_value(DEAD, "{'worker 1'}")
    watched.wait_for_value(f"live.version > {watched.value('live.version')}", "True")
    watched.wait_for_value("live._dashboards[0].view.tally.gone", "{'worker 1'}")
    watched.wait_for_new_picture(1, watched.picture(1))
    watched.screenshot("dashboard_killed")
    assert watched.is_running(3)

    watched.click("Stop")
    watched.wait_for_cell(3)
    watched.run(4)
    assert (watched.text(3), watched.text(4)) == ("''", "42")
    assert watched.errors() == []
    watched.screenshot("dashboard_stopped")
    assert watched.picture(1).startswith("data:image/png")
    kept = [output.get("data", {}) for output in watched.save().cells[1].outputs]
    assert any("image/png" in data for data in kept)
    assert not any("widget-view" in kind for data in kept for kind in data)


def test_simulated_run_steps_and_plays(lab):
    start = "live = dl.start(task, dl.AsyncPS(), dl.SimulatedCluster(2), num_updates=30, paused=True)\nlive.dashboard()"
    page = lab.open(lab.write("simulated.ipynb", [TASK, start, "run = await live\nrun.num_updates"]))
    page.run(0)
    page.run(1)
    page.run(2, wait=False)
    page.wait_for_text("paused, version 0 of 30")
    page.click("Step")
    page.wait_for_value("live.launched.events", "1")
    page.click("Step")
    page.wait_for_value("live.launched.events", "2")
    assert page.value("live.state") == "'paused'"
    assert page.is_running(2)
    page.screenshot("dashboard_paused")
    page.click("Play")
    page.wait_for_cell(2)
    assert page.text(2) == "30"
    assert any("image/png" in output.get("data", {}) for output in page.save().cells[1].outputs)
    page.close()


def test_lesson_03_runs_in_the_browser(lab):
    page = lab.open(lab.copy(LESSONS / "03_who_applies_the_update.ipynb"))
    page.clear()
    first = page.code_cells()[:6]
    assert page.outputs(first[-1]) == []
    for index in first:
        page.run(index)
    assert page.errors() == []
    assert page.picture(first[2]).startswith("data:image/png")
    assert page.picture(first[5]) != page.picture(first[2])
    page.screenshot("lesson_03")
    page.close()
