"""`on`: a module in another process, under plain torch."""

import copy
import os
import pickle
import signal

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import distlab as dl


@pytest.fixture(scope="module")
def far():
    with dl.Device() as device:
        yield device


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()


def trained(model: nn.Module, optimizer=lambda params: torch.optim.Adam(params, lr=0.05), steps: int = 8) -> dict:
    """Its parameters and buffers after some steps of a loop that knows nothing of devices."""
    x = torch.linspace(-1, 1, 60, dtype=torch.float64).view(12, 5)
    made = optimizer(model.parameters())
    for _ in range(steps):
        made.zero_grad()
        F.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        made.step()
    return {name.replace("module.", ""): value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("where", [[0], [1], [0, 1, 3], [2, 3]])
def test_module_on_a_device_trains_as_if_it_were_here(far, where):
    model, here = network(), trained(network())
    for i in where:
        model[i] = dl.on(far, model[i])
    there = trained(model)
    assert there.keys() == here.keys()
    for name, value in here.items():
        torch.testing.assert_close(there[name], value, rtol=0, atol=1e-12)


def test_module_computes_in_the_other_process(far):
    class Pid(nn.Module):
        def forward(self, x):
            return x + os.getpid()

    assert dl.on(far, Pid())(torch.zeros(1)).item() == far.pid != os.getpid()


def test_gradient_of_the_inputs_comes_back(far):
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    model = network()[0]
    (expected,) = torch.autograd.grad(model(x).pow(2).sum(), x)
    (got,) = torch.autograd.grad(dl.on(far, model)(x).pow(2).sum(), x)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_module_may_be_called_twice_in_a_step_and_without_a_backward(far):
    layer = nn.Linear(4, 4).double()
    x = torch.randn(2, 4, dtype=torch.float64)
    expected = torch.autograd.grad(layer(layer(x)).sum(), layer.weight)[0]
    there = dl.on(far, layer)
    for _ in range(3):
        there(x)
    assert len(there.done) == 1  # what nobody can go back to is told with the next call
    assert torch.equal(torch.autograd.grad(there(there(x)).sum(), layer.weight)[0], expected)


def test_modes_are_those_of_the_module_here(far):
    there = dl.on(far, nn.Dropout(0.5))
    x = torch.ones(1000)
    assert 300 < (there(x) == 0).sum() < 700
    assert there.eval()(x).equal(x)
    with torch.no_grad():
        assert not dl.on(far, nn.Linear(1000, 1))(x).requires_grad


def test_tuples_of_tensors_come_back_as_tuples(far):
    class Both(nn.Module):
        def forward(self, x):
            return x + 1, x.long()

    first, second = dl.on(far, Both())(torch.zeros(2))
    assert first.tolist() == [1, 1]
    assert second.dtype == torch.int64


def test_exception_of_the_module_arrives_as_itself(far):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        dl.on(far, nn.Linear(3, 1))(torch.zeros(1, 5))
    assert caught.value.__notes__ == [f"raised on {far!r}"]
    assert dl.on(far, nn.Linear(5, 1))(torch.zeros(1, 5)).shape == (1, 1)


def test_copy_of_a_module_on_a_device_is_on_it_as_well(far):
    there = dl.on(far, nn.Linear(3, 1))
    twin, x = copy.deepcopy(there), torch.ones(2, 3)
    one, two = there(x).sum(), twin(x).pow(2).sum()
    one.backward()
    two.backward()
    assert there.module.weight.grad.tolist() == [[2, 2, 2]]
    torch.testing.assert_close(twin.module.weight.grad, 4 * twin(torch.ones(1, 3)).detach().expand(1, 3))


def test_module_on_a_device_may_change_its_dtype(far):
    there = dl.on(far, nn.Linear(3, 1)).double()
    assert torch.equal(there(torch.ones(3).double()), there.module(torch.ones(3).double()))


def test_module_on_a_device_is_saved_by_its_state(far):
    there, here = dl.on(far, nn.Linear(3, 1)), nn.Linear(3, 1)
    here.load_state_dict(there.module.state_dict())
    assert torch.equal(there(torch.ones(3)), here(torch.ones(3)))
    with pytest.raises(TypeError, match="is a process, which cannot be saved: save the state_dict"):
        pickle.dumps(there)


def test_second_backward_is_refused(far):
    loss = dl.on(far, nn.Linear(3, 1))(torch.zeros(1, 3)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward went through Linear a second time"):
        loss.backward()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda far: dl.on(far, 3), "on takes a device and a module, got 3"),
        (lambda far: dl.on(far, nn.Linear(3, 1))(torch.zeros(3), 2), "Linear was called with Tensor, int"),
        (lambda far: dl.on(far, nn.Linear(3, 1))(input=torch.zeros(3)), "Linear was called with input=: in another"),
    ],
)
def test_bad_calls_say_what_was_wrong(far, call, text):
    with pytest.raises(TypeError, match=text):
        call(far)


def test_module_that_cannot_travel_is_refused(far):
    layer = nn.Linear(1, 1)
    layer.lines = (number for number in range(3))
    with pytest.raises(TypeError, match=r"the module cannot be sent .* module.lines \(generator\)"):
        dl.on(far, layer)


def test_death_of_a_device_is_named():
    device = dl.Device()
    there = dl.on(device, nn.Linear(3, 1))
    os.kill(device.pid, signal.SIGKILL)
    with pytest.raises(dl.ProcessLost, match=rf"device \(pid {device.pid}\) was lost"):
        there(torch.zeros(1, 3))
    device.close()


def test_torchs_own_devices_hold_their_parameters_and_outputs():
    there = dl.on("meta", nn.Linear(3, 1))
    assert {p.device.type for p in there.parameters()} == {"meta"}
    assert there(torch.zeros(2, 3)).device.type == "meta"


# What changes after a module was put there


def both(far, module: nn.Module) -> tuple[nn.Module, nn.Module]:
    """A copy that stays, and one on the device."""
    return copy.deepcopy(module), dl.on(far, module)


INPUTS = torch.linspace(-1, 1, 20, dtype=torch.float64).view(4, 5)


def test_frozen_parameters_that_change_later_travel_too(far):
    """As when a checkpoint is loaded into a model of which a part is frozen."""
    here, there = both(far, nn.Sequential(nn.Linear(5, 5).requires_grad_(False), nn.Linear(5, 3)).double())
    state = {name: torch.full_like(value, 0.5) for name, value in here.state_dict().items()}
    here.load_state_dict(state)
    there.module.load_state_dict(state)
    torch.testing.assert_close(there(INPUTS), here(INPUTS), rtol=0, atol=1e-12)


def test_part_of_a_module_can_be_in_eval_mode(far):
    here, there = both(far, network())
    for model in (here, there.module):
        model[1].eval()
    torch.testing.assert_close(there(INPUTS), here(INPUTS), rtol=0, atol=1e-12)
    assert there.module[1].num_batches_tracked == 0


def test_other_parameters_can_be_trained_later(far):
    """Gradual unfreezing: of two equal layers first the one learns, then the other, then both."""
    here, there = both(far, nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)).double())
    for first, second in ((True, False), (False, True), (True, True)):
        for model in (here, there.module):
            model[0].requires_grad_(first)
            model[1].requires_grad_(second)
            model.zero_grad()
        for model in (here, there):
            model(INPUTS).pow(2).sum().backward()
        for mine, theirs in zip(here.parameters(), there.module.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
            if mine.grad is not None:
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("training", [False, True])
def test_module_with_buffers_can_be_called_twice_before_backward(far, training):
    here, there = both(far, nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)).double().train(training))
    if training:  # autograd saves BatchNorm's statistics in eval mode alone
        grads = [torch.autograd.grad((m(INPUTS) + m(2 * INPUTS)).sum(), list(m.parameters())) for m in (here, there)]
    else:
        grads = [torch.autograd.grad(m(m(INPUTS)).sum(), list(m.parameters())) for m in (here, there)]
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_parameter_that_changes_between_forward_and_backward_is_refused(far):
    there = dl.on(far, nn.Linear(5, 5).double())
    outputs = there(INPUTS)
    with torch.no_grad():
        there.module.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="a parameter on a Device has been changed between forward and backward"):
        outputs.sum().backward()


def test_autocast_is_refused(far):
    there = dl.on(far, nn.Linear(5, 5))
    with torch.autocast("cpu"), pytest.raises(RuntimeError, match="autocast does not reach another process"):
        there(INPUTS.float())
