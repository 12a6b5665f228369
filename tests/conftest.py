"""Clusters that all tests share, and functions of test files that travel as a notebook's would."""

import sys

import browser
import cloudpickle
import pytest
import torch
import toys

import distlab as dl
from distlab.clusters import home

torch.set_num_threads(1)  # with two, the last bits of plain training differ


def pytest_collection_finish(session: pytest.Session) -> None:
    """What a test file defines goes to the workers by value: they need not import pytest."""
    for name in {item.module.__name__ for item in session.items if hasattr(item, "module")}:
        cloudpickle.register_pickle_by_value(sys.modules[name])
    cloudpickle.register_pickle_by_value(toys)


@pytest.fixture
def no_process_starts(monkeypatch):
    """Fails the test as soon as a process would start."""

    def start(*args):
        raise AssertionError("a process was about to start")

    monkeypatch.setattr(home, "start", start)


@pytest.fixture(scope="session")
def clusters():
    """Clusters by their number of workers."""
    made = {n: dl.LocalCluster(num_workers=n) for n in (1, 2, 3, 4)}
    yield made
    for cluster in made.values():
        cluster.close()


@pytest.fixture(scope="session")
def one(clusters):
    return clusters[1]


@pytest.fixture(scope="session")
def two(clusters):
    return clusters[2]


@pytest.fixture(scope="session")
def three(clusters):
    return clusters[3]


@pytest.fixture(scope="session")
def four(clusters):
    return clusters[4]


@pytest.fixture(scope="session")
def padded():
    """Four workers, each as if it had a device of its own: a gradient takes 5 ms."""
    with dl.LocalCluster(num_workers=4, compute_time_s=0.005) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A private JupyterLab with a browser beside it (see browser.py); skips where there is no browser.

    No longer than a module: while Playwright is there, the event loop of this thread is its own."""
    if why := browser.absent():
        pytest.skip(why)
    with browser.start_lab(tmp_path_factory.mktemp("lab")) as running:
        yield running
