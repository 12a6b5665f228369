"""What can go wrong in a run, as exceptions that carry the case.

An exception raised in *your* code on a worker reaches the caller as itself, with a note that names the
worker and with the remote traceback as its cause; the classes here are for what distlab finds itself.
Every exception that ends a run has an attribute ``run``: what was measured until then.
"""

from collections.abc import Sequence


class DistlabError(Exception):
    """The common base, so that one ``except`` can catch what distlab itself raises."""


class NonFiniteLoss(DistlabError):
    """A worker computed a loss that is infinite or not a number; training on would only spread it."""

    def __init__(self, who: str, step: int, loss: float) -> None:
        super().__init__(
            f"the loss became {loss} on {who} at step {step}: the learning rate is too large for this "
            f"strategy (an asynchronous one stands less), or the data holds values that are not finite"
        )
        self.who, self.step, self.loss = who, step, loss

    def __reduce__(self):
        return type(self), (self.who, self.step, self.loss)


class DivergenceWarning(UserWarning):
    """A run's loss left the finite, or its learning rate is past the limit for gradients as old as its own."""


class PeerLost(DistlabError):
    """The other end of a link is gone."""

    def __init__(self, peer: str) -> None:
        super().__init__(f"{peer} was lost: its end of the link is closed")
        self.peer = peer

    def __reduce__(self):
        return type(self), (self.peer,)


class TooLate(DistlabError):
    """A process that came back found that all others have come to the end. It ends too; the run is as it was."""


class Deadlock(DistlabError):
    """Every task of a simulated run waits, and nothing will happen any more."""

    def __init__(self, waits: list[tuple[str, str]], lost: Sequence[str] = ()) -> None:
        """`waits`: who waits, and for what; `lost`: who has died."""
        reasons = {why: sorted({w for w, y in waits if y == why}) for _, why in waits}
        said = [f"{', '.join(who)} wait{'s' * (len(who) == 1)} for {why}" for why, who in reasons.items()]
        said += [f"{', '.join(lost)} {'was' if len(lost) == 1 else 'were'} lost"] if lost else []
        super().__init__("nothing can happen any more: " + "; ".join(said))
        self.waits, self.lost = waits, lost

    def __reduce__(self):
        return type(self), (self.waits, self.lost)


class BadMessage(DistlabError):
    """A message that is not what was agreed: foreign, of another size, of another shape or type."""


class ProcessLost(DistlabError):
    """A process of the run ended without being asked to."""


class RemoteError(DistlabError):
    """Stands for an exception of a worker that could not be sent to the caller as itself."""


class RemoteTraceback(Exception):
    """The traceback on the worker, as text: the cause of the exception that the caller sees."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""' if self.args else ""
