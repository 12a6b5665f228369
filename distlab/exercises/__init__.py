"""The checks of the lessons' exercises. Each answers with one of three outcomes, and with the reason.

>>> not_yet("the server keeps only the last write")
Not yet: the server keeps only the last write
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, repr=False)
class Verdict:
    """What a check found.

    Attributes:
        outcome: "not attempted", "not yet" or "correct".
        why: in Markdown; the misconception that an attempt seems to hold, or the reason why it works.
    """

    outcome: Literal["not attempted", "not yet", "correct"]
    why: str

    def __repr__(self) -> str:
        return f"{self.outcome.capitalize()}: {self.why}"

    def _repr_markdown_(self) -> str:
        return f"**{self.outcome.capitalize()}.** {self.why[:1].upper()}{self.why[1:]}"


def not_attempted(why: str) -> Verdict:
    """The stub is as it was."""
    return Verdict("not attempted", why)


def not_yet(why: str) -> Verdict:
    """An attempt that fails, and what it seems to believe."""
    return Verdict("not yet", why)


def correct(why: str) -> Verdict:
    """It works, and this is why."""
    return Verdict("correct", why)
