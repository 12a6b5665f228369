"""Scripts of their own: what `__main__` defines reaches the workers; Ctrl-C and SIGKILL leave nothing behind.

A script takes seconds to load torch, twice; so two of them live through several scenes each.
"""

import os
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest
from toys import DEADLINE_S, Watched, until

ROOT = Path(__file__).parents[1]
SCRIPT = """
import os
import torch
import distlab as dl

SCALE, CALLER = 2.0, os.getpid()

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, x):
        return self.layer(x) * SCALE

def squared(outputs, targets):
    return helper(outputs - targets).mean()

def helper(x):
    return x ** 2

class Mine(dl.AsyncPS):
    def serve(self, server, worker):
        for gradient in worker.pushes():
            server.apply(gradient)
            worker.reply()

def talkative(model, inputs):
    if os.getpid() != CALLER:  # checking a task computes too
        print("computing")
    return model(inputs)

def forever(strategy):
    dl.train(task.but(forward=talkative), strategy, cluster, num_updates=10**9, progress=False)

task = dl.Task(
    model=Net, train=(torch.ones(12, 3), torch.ones(12, 1)), loss=squared, batch_size=4,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
)
print("once")
cluster = dl.LocalCluster(num_workers=2)
"""
STUCK = """
import time

def stuck(model, inputs):
    if os.getpid() == CALLER:
        return model(inputs)
    print("computing")
    time.sleep(3600)

dl.train(task.but(forward=stuck), dl.AllReduce(), cluster, num_updates=1)
"""
SCENES = """
run = dl.train(task, Mine(), cluster, num_updates=6, progress=False)
print("trained", run.version, run.who_applied, type(run.model).__name__)
for strategy in (dl.AsyncPS(), dl.InGraph()):
    try:
        forever(strategy)
    except KeyboardInterrupt:
        print("interrupted")
print("again", dl.train(task, dl.AllReduce(), cluster, num_updates=3, progress=False).version)
forever(dl.AllReduce())
"""


def start(text: str, folder: Path) -> subprocess.Popen:
    """Start a script; its processes, and theirs, can be told by a variable in their environment."""
    (folder / "script.py").write_text(text)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    mark = uuid.uuid4().hex
    environment = os.environ | {"TEST_MARK": mark, "PYTHONPATH": path, "TMPDIR": str(folder)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    process = subprocess.Popen([sys.executable, "-u", "script.py"], cwd=folder, env=environment, **pipes)
    process.mark = mark
    return process


def family(process: subprocess.Popen) -> set[int]:
    """The script's process and all that came from it."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if process.mark.encode() in (folder / "environ").read_bytes():
                found.add(int(folder.name))
        except OSError:
            pass  # gone meanwhile, or not ours
    return found


def hear(process: subprocess.Popen, *lines: str) -> list[str]:
    """Read what the script prints until it has said each of `lines`; returns all of it."""
    heard, missing = [], set(lines)
    while missing:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        heard.append(line.strip())
        missing.discard(heard[-1])
    return heard


def interrupt(process: subprocess.Popen, role: str) -> Watched:
    """When two processes of `role` compute, press Ctrl-C; returns the workers of that run."""
    hear(process, *(f"[{role} {i}] computing" for i in (0, 1)))
    group = {pid for pid in family(process) if os.getsid(pid) == pid and pid != process.pid}
    assert len(group) >= 2
    processes = Watched(group)
    os.killpg(process.pid, signal.SIGINT)
    return processes


@pytest.fixture(scope="module")
def story():
    """What a script said and left, from its definitions to its last interrupt."""
    told = {}
    with tempfile.TemporaryDirectory() as folder:
        process = start(SCRIPT + SCENES, Path(folder))
        try:
            told["beginning"] = hear(process, "once") + hear(process, "trained 6 ['server 0'] Net")
            told["left"] = [interrupt(process, role).alive() for role in ("worker", "replica")]
            told["after"] = hear(process, "again 3")
            last = interrupt(process, "worker")
            _, told["complaint"] = process.communicate(timeout=DEADLINE_S)
            told["left"].append(last.alive())
            told["code"] = process.returncode
            until(lambda: not family(process))
            told["folders"] = list(Path(folder).glob("distlab-*"))
        finally:
            process.kill()
            process.communicate()
    return told


def test_script_defines_everything_in_main_without_a_guard(story):
    assert story["beginning"] == ["once", "trained 6 ['server 0'] Net"], "once: no worker runs the script again"


def test_interrupt_ends_every_process_of_the_run(story):
    assert story["left"] == [[], [], []]


def test_interrupted_script_can_train_again_at_once(story):
    assert story["after"][-1] == "again 3"
    assert "interrupted" in story["after"]


def test_interrupt_ends_the_script_as_python_does(story):
    assert story["code"] == -signal.SIGINT
    assert story["complaint"].strip().endswith("KeyboardInterrupt")
    assert story["complaint"].count("Traceback") == 1


def test_ended_script_leaves_no_folder(story):
    """Where its processes met."""
    assert story["folders"] == []


def test_killed_script_leaves_no_process(tmp_path):
    """Not even one that does nothing and so notices nothing."""
    process = start(SCRIPT + STUCK, tmp_path)
    hear(process, "[worker 0] computing", "[worker 1] computing")
    processes = Watched(family(process))
    assert len(processes.pids) >= 4, "the script, its fork server, two workers"
    assert len(list(tmp_path.glob("distlab-*"))) == 1, "where its processes meet"
    process.kill()
    assert processes.alive() == []
    process.communicate()
