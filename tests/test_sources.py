"""A traceback from a worker quotes the line of the cell or script that defined the function."""

import subprocess
import sys

from distlab.clusters.sources import with_source

SCRIPT = """
import os
import distlab as dl

caller = os.getpid()

def loss(outputs, targets):
    if os.getpid() != caller:
        raise KeyError("on a worker")  # the line that fails
    return outputs.sum()

task = dl.tasks.digits().but(loss=loss)
dl.train(task, dl.AsyncPS(), dl.LocalCluster(1), num_updates=5, progress=False)
"""


def test_remote_traceback_quotes_the_script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert (
        'File "<dynamic-code>", line 9, in loss\n    raise KeyError("on a worker")  # the line that fails\n'
        in done.stderr
    )
    assert done.stderr.rstrip().splitlines()[-2].startswith("KeyError")
    assert "raised on worker 0 (pid" in done.stderr


def test_text_of_other_files_is_left_alone():
    text = (
        '  File "/x/y.py", line 3, in f\n    g()\n  File "<dynamic-code>", line 1, in nobody_knows_this\nValueError\n'
    )
    assert with_source(text) == text
