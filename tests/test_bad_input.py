"""Bad input is refused before any process starts, with what was asked, what was got and what to do."""

import threading

import pytest
import torch
from torch import nn
from toys import countdown, regression

import distlab as dl
from distlab.clusters import local


@pytest.fixture(autouse=True)
def no_process_starts(monkeypatch):
    def start(*args):
        raise AssertionError("a process was about to start")

    monkeypatch.setattr(local, "start", start)


def refused(error: type[Exception], match: str, *, task=None, strategy=None, cluster=None, **options) -> None:
    """`train` and `start` refuse alike."""
    parts = task or countdown(), strategy or dl.AsyncPS(), cluster or dl.LocalCluster(num_workers=2)
    for call in (dl.train, dl.start):
        with pytest.raises(error, match=match):
            call(*parts, **(options or {"num_updates": 5}))


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


@pytest.mark.parametrize("data", [(torch.zeros(0, 5), torch.zeros(0)), {"x": torch.zeros(0)}, []], ids=str)
def test_empty_data_is_refused(data):
    refused((ValueError, TypeError), "the training data is empty", task=regression(train=data))


def test_batch_larger_than_the_data_is_refused():
    told = "batch_size is 62, but there are only 61 samples"
    refused(ValueError, told, task=regression(batch_size=62))


@pytest.mark.parametrize(("size", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError)])
def test_batch_size_is_a_positive_int(size, error):
    refused(error, "batch_size must be", task=regression(batch_size=size))


def test_data_of_unequal_lengths_is_refused():
    told = r"data tensors must be of one length, got \[3, 4\]"
    refused(ValueError, told, task=regression(train=(torch.zeros(3, 5), torch.zeros(4, 1))))


def test_data_that_is_no_data_is_refused():
    told = r"tensors or a map-style dataset \(len\(data\) and data\[i\]\), got generator"
    refused(TypeError, told, task=regression(train=(i for i in range(3))))


@pytest.mark.parametrize("made", [None, 3, torch.zeros(2)], ids=repr)
def test_model_factory_that_returns_no_module_is_refused(made):
    told = f"the model factory must return an nn.Module, it returned {type(made).__name__}"
    refused(TypeError, told, task=regression(model=lambda: made))


def test_module_in_place_of_its_factory_is_refused():
    told = r"every process builds its own: write model=lambda: Linear\(...\)"
    refused(TypeError, told, task=regression(model=nn.Linear(5, 1)))


@pytest.mark.parametrize("model", [nn.ReLU, lambda: nn.Linear(5, 1).requires_grad_(False)])
def test_model_without_trainable_parameter_is_refused(model):
    refused(ValueError, r"the model \((ReLU|Linear)\) has no trainable parameter", task=regression(model=model))


def test_parameters_of_two_dtypes_are_refused():
    model = lambda: nn.Sequential(nn.Linear(5, 5).double(), nn.Linear(5, 1))  # noqa: E731
    refused(
        ValueError, "must have one dtype, got .*float64: '0.bias', .*float32: '1.bias'", task=regression(model=model)
    )


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (lambda outputs, targets: outputs - targets, r"shape \(4, 1\)"),
        (lambda outputs, targets: 0.5, "float"),
        (lambda outputs, targets: None, "NoneType"),
    ],
)
def test_loss_that_is_no_scalar_is_refused(loss, got):
    told = rf"the loss must be a scalar tensor \(a mean over the batch\), got {got}"
    refused(ValueError, told, task=regression(loss=loss))


def test_optimizer_factory_that_returns_none_is_refused():
    told = "the optimizer factory must return a torch.optim.Optimizer"
    refused(TypeError, told, task=regression().but(optimizer=lambda params: None))


def test_schedule_that_is_not_finite_is_refused():
    told = r"lr_schedule\(0\) must be a finite factor, got inf"
    refused(ValueError, told, task=regression(lr_schedule=lambda version: float("inf")))


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        (r"task.loss \(its variable 'lock'\) \(lock\)", "loss"),
        (r"task.train\['lock'\] \(lock\)", "train"),
        (r"task.forward.lock \(lock\)", "forward"),
    ],
)
def test_unpicklable_object_is_named(path, changes):
    class Forward:
        def __init__(self) -> None:
            self.lock = lock

        def __call__(self, model, inputs):
            return model(inputs)

    class Data(dict):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, i):
            return torch.zeros(5).double(), torch.zeros(1).double()

    lock = threading.Lock()
    made = {
        "loss": lambda outputs, targets: outputs.mean() if lock else None,
        "train": Data(lock=lock),
        "forward": Forward(),
    }
    told = rf"the task cannot be sent to a worker process: {path}: cannot pickle '_thread.lock' object"
    refused(TypeError, told, task=regression(**{changes: made[changes]}))


def misspelt_task():
    x, y = regression().train
    dl.Task(model=nn.Linear, train=(x, y), loss=len, optimiser=len)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: dl.LocalCluster(num_worker=4), "LocalCluster has no option 'num_worker': did you mean 'num_workers'"),
        (lambda: dl.AsyncPS(lock="server"), "AsyncPS has no option 'lock': did you mean 'locking'"),
        (lambda: dl.SyncPS(backups=1), "SyncPS has no option 'backups': there is none"),
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
        ({"num_updates": None}, ValueError, "say how long: num_updates=... or num_samples=..., one of them"),
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


def test_exception_while_checking_arrives_as_itself():
    refused(
        RuntimeError,
        "mat1 and mat2 shapes cannot be multiplied",
        task=regression(model=lambda: nn.Linear(4, 1).double()),
    )
