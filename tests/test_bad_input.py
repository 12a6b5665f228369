"""A bad task is refused before any process starts, with what was asked, what was got and what to do."""

import threading

import pytest
import torch
from torch import nn
from toys import refused, regression

pytestmark = pytest.mark.usefixtures("no_process_starts")


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


@pytest.mark.parametrize("whole", [True, False])
def test_model_factory_that_returns_the_same_parameters_again_is_refused(whole):
    made = nn.Linear(5, 1).double()
    told = "the model factory returned the same parameters twice: it must make them anew on every call"
    refused(ValueError, told, task=regression(model=lambda: made if whole else nn.Sequential(made)))


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


def test_exception_while_checking_arrives_as_itself():
    refused(
        RuntimeError,
        "mat1 and mat2 shapes cannot be multiplied",
        task=regression(model=lambda: nn.Linear(4, 1).double()),
    )
