"""What old gradients do to gradient descent, on the one loss where everything is known: a quadratic.

Near a minimum every smooth loss is curvature/2 times a squared distance x, and gradient descent with gradients that
are `staleness` updates old is x ← x − lr · curvature · x[t − staleness]. The hard idea: only the product of learning
rate and curvature counts, and the older the gradient, the smaller it has to be.
"""

import math
from typing import Any

import numpy as np

from distlab.options import check_count, check_positive


def largest_stable_lr(staleness: int, *, curvature: float = 1.0, momentum: float = 0.0) -> float:
    """The learning rate from which on training diverges, if every gradient is `staleness` updates old.

    Twice the staleness costs about half of it. Staleness that varies from update to update has another limit.

    Args:
        staleness: updates between read and apply, constant.
        curvature: second derivative of the loss.
        momentum: of heavy ball, from 0 to below 1; with a momentum, the staleness must be 0 or 1.

    Returns: a learning rate, exact; every smaller positive one converges.

    Raises:
        ValueError: a negative staleness, a curvature that is not positive, or a momentum without a closed form.

    >>> [round(largest_stable_lr(staleness), 6) for staleness in (0, 1, 4)]
    [2.0, 1.0, 0.347296]

    Source: derived, and checked numerically.
    """
    check_count("staleness", staleness, least=0)
    check_positive("curvature", curvature)
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be from 0 to below 1, got {momentum}")
    if momentum and staleness > 1:
        raise ValueError(f"with momentum there is a closed form for staleness 0 and 1 only, got {staleness}")
    if momentum:
        return (1 - momentum if staleness else 2 * (1 + momentum)) / curvature
    return 2 * math.sin(math.pi / (2 * (2 * staleness + 1))) / curvature


def best_lr(staleness: int, *, curvature: float = 1.0) -> float:
    """The learning rate that converges fastest, if every gradient is `staleness` updates old.

    Args:
        staleness: updates between read and apply, constant.
        curvature: second derivative of the loss.

    Returns: a learning rate, exact.

    Raises:
        ValueError: a negative staleness, or a curvature that is not positive.

    >>> best_lr(staleness=1), round(best_lr(staleness=4), 6)
    (0.25, 0.08192)

    Source: derived, and checked numerically.
    """
    check_positive("curvature", curvature)
    return best_rate(staleness) ** staleness / (staleness + 1) / curvature


def best_rate(staleness: int) -> float:
    """The factor by which an update shrinks the distance to the minimum, in the long run, at `best_lr`.

    The number of updates to a given loss thus grows in proportion to staleness + 1: what P asynchronous workers win
    in time, old gradients can take back.

    Args:
        staleness: updates between read and apply, constant.

    Returns: from 0 (there in one update) to below 1.

    Raises:
        ValueError: a negative staleness.

    >>> best_rate(staleness=0), best_rate(staleness=4)
    (0.0, 0.8)

    Source: derived, and checked numerically.
    """
    return check_count("staleness", staleness, least=0) / (staleness + 1)


def stationary_variance(lr: float, *, staleness: int = 0, curvature: float = 1.0, noise_std: float = 1.0) -> float:
    """How far from the minimum noisy gradients keep the parameter: its variance, once training has settled.

    Args:
        lr: learning rate.
        staleness: updates between read and apply, 0 or 1.
        curvature: second derivative of the loss.
        noise_std: standard deviation of a gradient's noise.

    Returns: the variance of the parameter, in its unit squared.

    Raises:
        ValueError: a staleness without a closed form, or a learning rate at which training diverges.

    >>> round(stationary_variance(0.1) / 0.1**2, 6), round(stationary_variance(0.1, staleness=1) / 0.1**2, 6)
    (5.263158, 5.820106)

    Source: derived, and checked numerically.
    """
    if check_count("staleness", staleness, least=0) > 1:
        raise ValueError(f"there is a closed form for staleness 0 and 1 only, got {staleness}")
    limit = largest_stable_lr(staleness, curvature=check_positive("curvature", curvature))
    if check_positive("lr", lr) >= limit:
        raise ValueError(f"training diverges: lr must be below {limit:g} at this staleness and curvature, got {lr}")
    a = lr * curvature
    spread = (1 + a) / ((1 - a) * a * (2 + a)) if staleness else 1 / (2 * a - a * a)
    return (lr * check_positive("noise_std", noise_std)) ** 2 * spread


def implicit_momentum(num_workers: int) -> float:
    """The momentum that asynchrony adds by itself, when computing a gradient takes an exponentially long time.

    Averaged over many runs, the parameter moves as under heavy ball with this momentum and a learning rate of
    lr / num_workers. A single run does not, and of its stability this says nothing.

    Args:
        num_workers: asynchronous workers, equally fast.

    Returns: from 0 (one worker) to below 1.

    Raises:
        ValueError: fewer than one worker.

    >>> [implicit_momentum(workers) for workers in (1, 2, 4, 8)]
    [0.0, 0.5, 0.75, 0.875]

    Source: Mitliagkas et al. 2016, Theorem 5.
    """
    return 1 - 1 / check_count("num_workers", num_workers)


def local_sgd_limit(curvatures: Any, minima: Any, *, lr: float, every: int) -> np.ndarray:
    """Where local gradient descent comes to rest, if the workers' losses are different quadratics.

    With one local step it is the minimum of the mean loss. With more, a flat loss gets more say than it should:
    between two averages a worker with a steep loss arrives, and stops.

    Args:
        curvatures: (workers,), or (workers, size, size) Hessians.
        minima: (workers,), or (workers, size): where each worker's own loss is least.
        lr: learning rate; times the largest curvature it must be below 2.
        every: local steps between two averages.

    Returns: (size,), size 1 for numbers; exact up to rounding.

    Raises:
        ValueError: shapes that do not fit, or a learning rate at which a worker diverges.

    >>> [round(local_sgd_limit([1, 4], [1, 0], lr=0.1, every=steps).item(), 6) for steps in (1, 5)]
    [0.2, 0.307498]

    Source: derived, and checked numerically.
    """
    goals = np.asarray(minima, float).reshape(len(minima), -1)
    workers, size = goals.shape
    if np.size(curvatures) != workers * size * size:
        raise ValueError(f"{workers} minima of size {size} do not fit curvatures of shape {np.shape(curvatures)}")
    kept = np.eye(size) - check_positive("lr", lr) * np.asarray(curvatures, float).reshape(workers, size, size)
    if not (np.abs(np.linalg.eigvals(kept)) < 1).all():
        raise ValueError(f"lr={lr} times a curvature is not between 0 and 2: that worker does not converge")
    moved = np.eye(size) - np.linalg.matrix_power(kept, check_count("every", every))
    return np.linalg.solve(moved.sum(0), np.einsum("wij,wj->i", moved, goals))
