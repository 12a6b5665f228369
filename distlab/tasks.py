"""Ready tasks on the data in ``datasets/``."""

import torch
from torch import nn
from torch.nn import functional as F

from distlab import datasets
from distlab.options import options
from distlab.task import Task, accuracy

NUM_VALIDATION = 500


@options
def digits(
    *,
    hidden: int = 64,
    lr: float = 0.2,
    batch_size: int = 32,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Task:
    """Handwritten digits, 8x8: 1,297 to train on, 500 to validate; a 64-`hidden`-10 network with ReLU and SGD.

    Args:
        hidden: width of the hidden layer.
        lr: learning rate.
        batch_size: samples per worker and step.
        seed: of the split, the model and the order of the data.
        dtype: of data and parameters.

    Source: UCI Optical Recognition of Handwritten Digits (Alpaydin & Kaynak 1998), see datasets/README.md.

    >>> digits()
    Task('digits', 1297 samples, batches of 32)
    """
    arrays = datasets.load("digits")
    images, labels = arrays["images"].reshape(-1, 64).to(dtype), arrays["labels"].long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    images, labels = images[order], labels[order]
    inputs, held_out = images[NUM_VALIDATION:], images[:NUM_VALIDATION]
    mean, spread = inputs.mean(0), inputs.std(0)
    std = torch.where(spread > 0, spread + 1e-3, 1.0)  # a pixel that is black in all that is trained on
    return Task(
        model=lambda: nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10)).to(dtype),
        train=((inputs - mean) / std, labels[NUM_VALIDATION:]),
        validation=((held_out - mean) / std, labels[:NUM_VALIDATION]),
        loss=F.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=lr),
        metrics={"accuracy": accuracy},
        batch_size=batch_size,
        seed=seed,
        name="digits",
    )


#: By the word of the command line.
READY = {"digits": digits}
