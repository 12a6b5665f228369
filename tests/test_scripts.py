"""Scripts of their own: what `__main__` defines reaches the workers; Ctrl-C and SIGKILL leave nothing behind."""

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from toys import DEADLINE_S, Watched, until

ROOT = Path(__file__).parents[1]
DEFINITIONS = """
import torch
import distlab as dl

SCALE = 2.0

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

task = dl.Task(
    model=Net, train=(torch.ones(12, 3), torch.ones(12, 1)), loss=squared, batch_size=4,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
)
print("once")
"""
TRAIN = """
run = dl.train(task, Mine(), dl.LocalCluster(num_workers=2), num_updates=6, progress=False)
print(run.version, run.who_applied, type(run.model).__name__)
"""
GUARDED = "if __name__ == '__main__':\n" + "\n".join("    " + line for line in TRAIN.splitlines())
ENDLESS = """
def talkative(outputs, targets):
    print("computing", flush=True)
    return squared(outputs, targets)

def forever(strategy):
    cluster = dl.LocalCluster(num_workers=2)
    dl.train(task.but(loss=talkative), strategy, cluster, num_updates=10**9, progress=False)
"""
AGAIN = """
try:
    forever(dl.AllReduce())
except KeyboardInterrupt:
    pass
run = dl.train(task, dl.AllReduce(), dl.LocalCluster(num_workers=2), num_updates=3, progress=False)
print("again", run.version)
"""


@pytest.fixture
def script(tmp_path):
    """Start a script; its processes, and theirs, can be told by a variable in their environment."""
    started = []

    def start(text: str, *, as_file: bool = True) -> subprocess.Popen:
        (tmp_path / "script.py").write_text(text)
        args = ["script.py"] if as_file else ["-c", text]
        mark = uuid.uuid4().hex
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"DISTLAB_TEST_MARK": mark, "PYTHONPATH": path}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        process = subprocess.Popen([sys.executable, *args], cwd=tmp_path, env=environment, **pipes)
        process.mark = mark
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen) -> tuple[int, str, str]:
    """Exit code, what was printed, what was complained about."""
    out, err = process.communicate(timeout=DEADLINE_S)
    return process.returncode, out, err


def family(process: subprocess.Popen) -> list[int]:
    """The script's process and all that came from it."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if process.mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            pass  # gone meanwhile, or not ours
    return found


def computing(process: subprocess.Popen) -> Watched:
    """Wait until both workers compute; returns all processes there are then."""
    heard: set[str] = set()
    until(lambda: heard.add(process.stdout.readline().strip()) or len(heard & LABELLED) == 2)
    processes = Watched(family(process))
    assert len(processes.pids) >= 1 + 1 + 2, "script, fork server, workers"
    return processes


LABELLED = {"[worker 0] computing", "[worker 1] computing"}


@pytest.mark.parametrize("guard", [TRAIN, GUARDED], ids=["without a guard", "with a guard"])
def test_script_may_define_everything_in_main(script, guard):
    process = script(DEFINITIONS + guard)
    assert ended(process) == (0, "once\n6 ['server 0'] Net\n", "")
    assert family(process) == []


def test_command_line_may_define_everything_too(script):
    assert ended(script(DEFINITIONS + TRAIN, as_file=False)) == (0, "once\n6 ['server 0'] Net\n", "")


@pytest.mark.parametrize("strategy", ["AsyncPS", "AllReduce", "InGraph"])
def test_interrupt_ends_script_and_processes(script, strategy):
    if strategy == "InGraph":  # its client computes the loss, so let the replicas talk
        text = DEFINITIONS + ENDLESS.replace("talkative(outputs, targets)", "talkative(model, inputs)").replace(
            "squared(outputs, targets)", "model(inputs)", 1
        ).replace("loss=talkative", "forward=talkative")
    else:
        text = DEFINITIONS + ENDLESS
    process = script(text + f"\nforever(dl.{strategy}())")
    if strategy == "InGraph":
        heard: set[str] = set()
        until(lambda: "[replica 1] computing" in (heard.add(process.stdout.readline().strip()) or heard))
        processes = Watched(family(process))
    else:
        processes = computing(process)
    os.killpg(process.pid, signal.SIGINT)
    code, _, complaint = ended(process)
    assert code == -signal.SIGINT
    assert complaint.strip().endswith("KeyboardInterrupt")
    assert processes.alive() == []


def test_interrupted_script_can_train_again(script):
    process = script(DEFINITIONS + ENDLESS + AGAIN)
    processes = computing(process)
    process.send_signal(signal.SIGINT)
    code, out, _ = ended(process)
    assert (code, out.splitlines()[-1]) == (0, "again 3")
    assert processes.alive() == []


@pytest.mark.parametrize("strategy", ["AsyncPS", "AllReduce"])
def test_killed_script_leaves_no_process(script, strategy):
    process = script(DEFINITIONS + ENDLESS + f"\nforever(dl.{strategy}())")
    processes = computing(process)
    process.kill()
    assert processes.alive() == []


def test_killed_script_leaves_no_folder(script, tmp_path):
    """The rendezvous lies in a temporary folder; an ordinary end and an interrupt take it away."""
    text = f"import tempfile\ntempfile.tempdir = {str(tmp_path)!r}\n" + DEFINITIONS + ENDLESS + AGAIN
    process = script(text)
    computing(process)
    assert len(list(tmp_path.glob("distlab-*"))) == 1
    process.send_signal(signal.SIGINT)
    assert ended(process)[0] == 0
    assert list(tmp_path.glob("distlab-*")) == []
