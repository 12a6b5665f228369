"""Lesson 03, "who applies the update?": a model that counts its updates, and the check of the exercise.

The exercise: workers run the optimizer, the server keeps the parameters, and yet no update shall be lost.
What does a worker send, and what does the server make of it? The check plays both functions through schedules
of pulls and writes on one parameter x, with loss x²/2 and learning rate 1/4, so that every value is exact.
"""

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from distlab.exercises import Exercise
from distlab.task import Task

Send = Callable[[float, float], Any]
Serve = Callable[[float, Any], Any]
Schedule = Sequence[tuple[int, str]]

START, RATE = 64.0, 0.25
ALONE: Schedule = [(0, "pull"), (0, "write")] * 2
TWO: Schedule = [(0, "pull"), (1, "pull"), (0, "write"), (1, "write")]


class Counter(nn.Module):
    """One parameter, at first 0, whose value does not depend on the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.count.expand(len(inputs))


def counting_task() -> Task:
    """A model that counts: every gradient is -1, every update adds exactly 1.

    >>> counting_task().build().count.tolist()
    [0.0]
    """
    nothing = torch.zeros(16, 1)
    return Task(
        model=Counter,
        train=(nothing, nothing),
        loss=_minus,
        optimizer=partial(torch.optim.SGD, lr=1.0),
        batch_size=1,
        name="counting",
    )


def _minus(outputs: Tensor, targets: Tensor) -> Tensor:
    return -outputs.mean()


def play(schedule: Schedule, send: Send, serve: Serve) -> float:
    """The server's parameter after `schedule`; each worker's optimizer makes x - x/4 of the x that it read.

    >>> play(TWO, lambda read, new: new, lambda held, message: message)  # writing back loses one
    48.0
    """
    held, read = START, dict[int, float]()
    for worker, does in schedule:
        if does == "pull":
            read[worker] = held
        else:
            held = serve(held, send(read[worker], read[worker] - RATE * read[worker]))
    return held


def shuffled(seed: int, workers: int = 4, writes: int = 12) -> Schedule:
    """Workers that pull and write in a random order, each its own pull before its own write."""
    draw, has_read, schedule = random.Random(seed), set[int](), list[tuple[int, str]]()
    while sum(does == "write" for _, does in schedule) < writes:
        worker = draw.randrange(workers)
        schedule.append((worker, "write" if worker in has_read else "pull"))
        has_read ^= {worker}
    return schedule


SCHEDULES = [ALONE, TWO, *map(shuffled, range(8))]

#: What attempts tend to believe: how it would send, how it would serve, and what is wrong with it.
MISREADINGS: list[tuple[tuple[Send, Serve], str]] = [
    ((lambda read, new: new, lambda held, message: message),
     "the server still keeps only the last write. That is `WorkerApplies`: whatever others wrote since the "
     "pull is gone. What did *this* worker change?"),
    ((lambda read, new: new, lambda held, message: (held + message) / 2),
     "an average of old and new keeps half of each change: already one worker alone falls behind. Send what "
     "changed, not what it became."),
    ((lambda read, new: new, lambda held, message: held + message),
     "the server adds whole parameters to whole parameters. Only the *change* may be added."),
    ((lambda read, new: new - read, lambda held, message: message),
     "the message is right, but the server throws its parameters away and keeps a change."),
    ((lambda read, new: read - new, lambda held, message: held + message),
     "the size is right, the sign is not: the loss goes up. Which of `read` and `new` is subtracted?"),
    ((lambda read, new: new, lambda held, message: held - RATE * held),
     "the server took a step at its *own* parameters. It has no data: only a worker knows the gradient, and "
     "knows it at what it had read."),
]  # fmt: skip

RIGHT: tuple[Send, Serve] = (lambda read, new: new - read, lambda held, message: held + message)
WHY = (
    "changes add up in any order and none overwrites another; whole parameters do not. It is `AsyncPS` but for "
    "one thing: the optimizer's state (momentum, Adam's averages) now lies with the workers, a copy each, and "
    "the copies differ."
)


def lose_nothing(to_send: Send, at_server: Serve) -> list[float]:
    """Where each schedule ends; without a lost update it is where a server that applies gradients ends."""
    return [float(play(schedule, to_send, at_server)) for schedule in SCHEDULES]


def _case(index: int, wanted: float, got: float) -> str:
    when = "one worker pulls and writes, twice", "two workers pull, then both write", "four workers take random turns"
    return f"when {when[min(index, 2)]}, x should go from {START:g} to {wanted:g}; yours ends at {got:g}."


#: (to_send, at_server): (read, new) -> message, on the worker; (held, message) -> new parameters, on the server.
check = Exercise(play=lose_nothing, right=RIGHT, why=WHY, misreadings=MISREADINGS, cases=_case).check
