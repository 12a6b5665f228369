"""A model as one vector: views, not copies."""

import pytest
import torch
from torch import nn

from distlab.flat import Flat, local_state


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        return self.norm(self.second(self.first(self.frozen(x))))


def test_flattening_leaves_the_model_as_it_was():
    model = Tied()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    Flat(model)
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())


def test_backward_fills_the_gradient_vector():
    torch.manual_seed(0)
    model, reference, x = Tied(), Tied(), torch.randn(5, 3)
    reference.load_state_dict(model.state_dict())
    flat = Flat(model)
    for m in (model, reference):
        m(x).square().sum().backward()
    wanted = [p.grad for p in reference.parameters() if p.requires_grad]
    assert all(view.equal(grad) for view, grad in zip(flat.views(flat.grads), wanted, strict=True))
    assert flat.grads.data_ptr() == model.first.weight.grad.data_ptr()


def test_tied_weights_are_laid_out_once():
    assert Flat(Tied()).names == ["first.weight", "first.bias", "second.bias", "norm.weight", "norm.bias"]


def test_views_start_where_torch_would_put_them():
    flat = Flat(Tied())
    assert all((view.data_ptr() - flat.params.data_ptr()) % 64 == 0 for view in flat.views(flat.params))


def test_local_state_is_what_training_does_not_share():
    frozen, buffers = ["frozen.bias", "frozen.weight"], ["num_batches_tracked", "running_mean", "running_var"]
    assert sorted(local_state(Tied())) == frozen + [f"norm.{name}" for name in buffers]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_vector_has_the_models_dtype(dtype):
    assert Flat(Tied().to(dtype)).params.dtype == dtype
