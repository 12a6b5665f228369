"""Compression: what is left out is kept, so that nothing is lost, only late."""

import pytest
import torch
from torch import nn
from toys import Scalar, linear, moved, regression, slope, train

import distlab as dl
from distlab.compression import Feedback
from distlab.fabric import wire
from distlab.flat import TAIL


class Sign:
    """The example of the module's docstring."""

    def __repr__(self):
        return "Sign()"

    def compress(self, values):
        return [values.sign().to(torch.int8), values.abs().mean()]

    def restore(self, sent, like):
        return sent[0].to(like.dtype) * sent[1]


class Crooked(Sign):
    """Restores another shape."""

    def restore(self, sent, like):
        return sent[0].to(like.dtype)[1:]


class Narrow(Sign):
    """Restores another dtype."""

    def restore(self, sent, like):
        return sent[0].float()


class Pair(nn.Module):
    """Two weights; the gradient of its output is `slopes`, whatever they are."""

    def __init__(self, *slopes: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.slopes = torch.tensor(slopes, dtype=torch.float64)

    def forward(self, x):
        return (self.weight @ self.slopes).expand(len(x))


ONE_OF_16 = dl.TopK(share=1 / 16)  # elements: a small tensor is padded to so many
each_compression = pytest.mark.parametrize("compression", [dl.TopK(share=0.1), ONE_OF_16, Sign()], ids=str)


def weights(slopes: tuple[float, float], num_updates: int, compression=ONE_OF_16) -> list[float]:
    """Both, from 0, after so many updates at a rate of 1."""
    task = linear(model=lambda: Pair(*slopes))
    strategy = dl.AllReduce(compression=compression)
    return train(task, strategy, dl.SimulatedCluster(2), num_updates).params[:2].tolist()


@pytest.mark.parametrize(("num_updates", "expected"), [(1, [-3, 0]), (2, [-3, -4]), (3, [-9, -4]), (4, [-9, -8])])
def test_what_is_left_out_is_sent_later_by_hand(num_updates, expected):
    """Gradient (3, 2), one element a step. Kept and new: (3, 2) sends 3, (3, 4) sends 4, (6, 2) sends 6, (3, 4) 4."""
    assert weights((3.0, 2.0), num_updates) == expected


def test_element_that_is_never_the_largest_is_sent_in_the_end():
    """1 against 10.5: ten steps leave 10 behind, and the eleventh 11."""
    assert weights((10.5, 1.0), 10) == [-105, 0]
    assert weights((10.5, 1.0), 11) == [-105, -11]


@each_compression
@pytest.mark.parametrize("seed", range(5))
def test_all_that_was_sent_and_the_error_are_all_gradients(compression, seed):
    generator = torch.Generator().manual_seed(seed)
    gradients = torch.randn(200, 48, dtype=torch.float64, generator=generator)
    feedback, sent = Feedback(compression, gradients[0]), torch.zeros(48, dtype=torch.float64)
    for gradient in gradients:
        sent += feedback.restore(feedback.compress(gradient))
    torch.testing.assert_close(sent + feedback.error, gradients.sum(0), rtol=0, atol=1e-10)
    assert feedback.error.norm() > 1e-3


@each_compression
def test_a_run_has_moved_by_all_mean_gradients_but_for_the_mean_error(compression):
    made = []

    class Kept(dl.AllReduce):
        def exchange(self, flat):
            made.append(super().exchange(flat))
            return made[-1]

    task = linear()
    run = train(task, Kept(compression=compression), dl.SimulatedCluster(3), 40)
    means = [torch.stack([slope(task, w, s, 3) for w in range(3)]).mean(0) for s in range(40)]
    error = torch.stack([exchange._feedback.error for exchange in made]).mean(0)[:5]
    torch.testing.assert_close(moved(task, run), error - sum(means), rtol=0, atol=1e-10)
    assert error.norm() > 1e-3


@pytest.mark.parametrize("num_workers", [2, 4])
def test_reduce_sends_what_is_kept_to_every_other_rank(num_workers):
    """Of 9,984 numbers a hundredth is sent: 8 bytes each and 4 for its place, the tail, and at most 512 bytes more."""
    task = regression(
        model=lambda: nn.Linear(9_984, 1, bias=False).double(), train=(torch.ones(16, 9_984).double(),) * 2
    )
    task = task.but(loss=lambda outputs, targets: outputs.mean())
    run = train(task, dl.AllReduce(compression=dl.TopK(share=0.01)), dl.SimulatedCluster(num_workers), 3)
    [each] = set(run.trace.select("reduce")["bytes"].tolist())
    parts = [torch.zeros(100).double(), torch.zeros(100).int(), torch.zeros(TAIL).double()]
    assert each == (num_workers - 1) * wire.size(parts)
    assert 0 <= wire.size(parts) - 100 * (8 + 4) - TAIL * 8 <= 512


@pytest.mark.parametrize("compression", [dl.TopK(share=0.2), Sign()], ids=str)
def test_compression_of_ones_own_is_the_same_on_real_processes_and_on_a_virtual_clock(three, compression):
    runs = [
        train(regression("momentum"), dl.AllReduce(compression=compression), cluster, 15)
        for cluster in (three, dl.SimulatedCluster(3))
    ]
    assert runs[0].params.equal(runs[1].params)
    assert all(params.equal(runs[0].params) for params in runs[0].replicas.values())
    assert runs[0].replay().params.equal(runs[0].params)


def test_sign_moves_every_weight_as_far_by_hand():
    """Kept and new (3, 2) of 16 elements: the mean magnitude is 5/16 for both."""
    assert weights((3.0, 2.0), 1, Sign()) == [-5 / 16, -5 / 16]


def test_compression_changes_the_updates(two):
    """Or the equalities above would hold of a compression that is not used."""
    runs = [train(regression(), dl.AllReduce(compression=c), two, 10) for c in (None, dl.TopK(share=0.1))]
    assert (runs[0].params - runs[1].params).abs().max() > 1e-3


def test_error_of_a_worker_whose_data_is_used_up_still_arrives():
    """Two workers, gradient (3, 2), one element a step. Worker 0 sends 3; then it has no data, but 2 to send."""
    task, strategy = linear(model=lambda: Pair(3.0, 2.0)), dl.AllReduce(compression=ONE_OF_16)
    run = dl.train(task, strategy, dl.SimulatedCluster(2), num_batches=(1, 2), progress=False)
    assert run.params[:2].tolist() == [-3, -(2 + 4)]


@pytest.mark.parametrize(
    ("compression", "told"),
    [
        (Crooked(), r"compression restored \(79,\) torch.float64 from a gradient of \(80,\) torch.float64"),
        (Narrow(), r"compression restored \(80,\) torch.float32 from a gradient of \(80,\) torch.float64"),
    ],
    ids=["shape", "dtype"],
)
def test_compression_that_restores_something_else_says_so(two, compression, told):
    with pytest.raises(ValueError, match=told):
        train(regression(), dl.AllReduce(compression=compression), two, 3)


@pytest.mark.parametrize(
    ("compression", "told"),
    [
        (dl.TopK, r"must have methods compress and restore, such as TopK\(share=0.01\): write TopK\(...\)"),
        (Sign, r": write Sign\(...\)"),
        (0.01, "must have methods compress and restore"),
        ("topk", "must have methods compress and restore"),
        (Scalar(0.0), "must have methods compress and restore"),
    ],
    ids=str,
)
def test_something_that_cannot_compress_is_refused(compression, told):
    with pytest.raises(TypeError, match=told):
        dl.AllReduce(compression=compression)


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"share": 0}, ValueError, "share must be"),
        ({"share": 1.5}, ValueError, "share must be at most 1, all elements, got 1.5"),
        ({"share": float("nan")}, ValueError, "share must be"),
        ({"share": "1"}, TypeError, "share must be"),
        ({"share": True}, TypeError, "share must be"),
        ({"shares": 0.1}, TypeError, "TopK has no option 'shares': did you mean 'share'"),
    ],
    ids=str,
)
def test_bad_share_is_refused(options, error, told):
    with pytest.raises(error, match=told):
        dl.TopK(**options)


@pytest.mark.parametrize(("share", "kept"), [(1e-9, 1), (0.25, 12), (1.0, 48)])
def test_top_k_sends_at_least_one_element_and_the_largest_ones(share, kept):
    values = torch.randn(48, generator=torch.Generator().manual_seed(3))
    sent, at = dl.TopK(share=share).compress(values)
    assert len(sent) == len(at) == kept
    assert sent.equal(values[at])
    assert sent.abs().min() >= values.abs().sort(descending=True).values[kept - 1]
