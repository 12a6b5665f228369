"""Bad options are refused before any process starts, and a misspelt one names its neighbour."""

import pytest
from torch import nn
from toys import countdown, refused, regression

import distlab as dl

pytestmark = pytest.mark.usefixtures("no_process_starts")


def test_good_input_would_start_a_process():
    refused(AssertionError, "a process was about to start")


@pytest.mark.parametrize(
    ("num_workers", "error", "told"),
    [
        (0, ValueError, "num_workers must be at least 1, got 0"),
        (-3, ValueError, "num_workers must be at least 1, got -3"),
        (2.0, TypeError, r"num_workers must be a whole number, got 2.0 \(float\)"),
        ("4", TypeError, r"num_workers must be a whole number, got '4' \(str\)"),
        (True, TypeError, r"num_workers must be a whole number, got True \(bool\)"),
    ],
)
def test_number_of_workers_is_a_positive_int(num_workers, error, told):
    with pytest.raises(error, match=told):
        dl.LocalCluster(num_workers=num_workers)


@pytest.mark.parametrize(
    ("compute_time_s", "error"),
    [(-1, ValueError), (float("inf"), ValueError), (float("nan"), ValueError), ("1", TypeError)],
)
def test_padding_is_a_finite_time(compute_time_s, error):
    with pytest.raises(error, match=r"compute_time_s must be a (finite )?number of seconds"):
        dl.LocalCluster(num_workers=1, compute_time_s=compute_time_s)


def misspelt_task():
    x, y = regression().train
    dl.Task(model=nn.Linear, train=(x, y), loss=len, optimiser=len)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: dl.LocalCluster(num_worker=4), "LocalCluster has no option 'num_worker': did you mean 'num_workers'"),
        (lambda: dl.AsyncPS(lock="server"), "AsyncPS has no option 'lock': did you mean 'locking'"),
        (lambda: dl.SyncPS(backups=1), "SyncPS has no option 'backups': there is distinct, late, num_backup_workers"),
        (misspelt_task, "Task has no option 'optimiser': did you mean 'optimizer'"),
        (lambda: regression().but(batchsize=3), "Task has no option 'batchsize': did you mean 'batch_size'"),
        (lambda: dl.tasks.digits(hiden=3), "digits has no option 'hiden': did you mean 'hidden'"),
        (
            lambda: dl.train(countdown(), dl.AsyncPS(), dl.LocalCluster(num_workers=2), num_update=5),
            "train has no option 'num_update': did you mean 'num_updates'",
        ),
        (
            lambda: dl.start(countdown(), dl.AsyncPS(), dl.LocalCluster(num_workers=2), samples=5),
            "start has no option 'samples': did you mean 'num_samples'",
        ),
    ],
)
def test_misspelt_option_names_its_neighbour(call, told):
    with pytest.raises(TypeError, match=told):
        call()


def test_misspelt_value_names_its_neighbour():
    with pytest.raises(ValueError, match="locking='serve': did you mean 'server'"):
        dl.AsyncPS(locking="serve")


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"num_updates": 0}, ValueError, "num_updates must be at least 1, got 0"),
        ({"num_updates": 1.5}, TypeError, "num_updates must be a whole number, got 1.5"),
        ({"num_samples": 0}, ValueError, "num_samples must be at least 1, got 0"),
        (
            {"num_updates": None},
            ValueError,
            "say how long: num_updates=..., num_samples=... or num_batches=..., one of them",
        ),
        ({"num_updates": 1, "num_samples": 1}, ValueError, "say how long"),
    ],
)
def test_length_of_a_run_is_one_positive_int(options, error, told):
    refused(error, told, **options)


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ({"strategy": dl.SyncPS}, r"strategy must be a Strategy, got .*: write SyncPS\(\)"),
        ({"cluster": 4}, "cluster must be a Cluster, got 4"),
        ({"task": nn.Linear(2, 2)}, "task must be a Task, got Linear"),
    ],
)
def test_something_else_in_place_of_a_part_is_refused(parts, told):
    refused(TypeError, told, **parts)
