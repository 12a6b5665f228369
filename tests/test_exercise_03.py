"""The exercise of lesson 03: what its check says of answers, right and wrong."""

import pytest

from distlab.exercises import who_applies


def attempt(send, serve):
    return who_applies.check(send, serve).outcome, who_applies.check(send, serve).why


def test_half_an_attempt_names_the_missing_half():
    def at_server(held, message): ...

    outcome, why = attempt(lambda read, new: new - read, at_server)
    assert (outcome, why) == ("not attempted", "`at_server` still returns nothing.")


@pytest.mark.parametrize(
    ("send", "serve"),
    [
        (lambda read, new: read - new, lambda held, message: held - message),
        (lambda read, new: (read, new), lambda held, message: held + message[1] - message[0]),
    ],
)
def test_other_right_answers_are_correct_too(send, serve):
    assert attempt(send, serve)[0] == "correct"


@pytest.mark.parametrize(
    ("send", "serve", "misconception"),
    [
        (lambda read, new: new, lambda held, message: message, "keeps only the last write"),
        (lambda read, new: new, lambda held, message: 0.5 * held + 0.5 * message, "half of each change"),
        (lambda read, new: new, lambda held, message: held + message, "adds whole parameters"),
        (lambda read, new: new - read, lambda held, message: message, "throws its parameters away"),
        (lambda read, new: read - new, lambda held, message: held + message, "the sign is not"),
        (lambda read, new: 0.0, lambda held, message: 0.75 * held, "It has no data"),
        (lambda read, new: new - read, lambda held, message: held + message / 4, "from 64 to 36; yours ends at"),
        (lambda read, new: new, min, "two workers pull, then both write, x should go from 64 to 32; yours ends at 48"),
        (lambda read, new: new - read, lambda held, message: max(30, held + message), "four workers take random turns"),
        (lambda read, new: new - read, lambda held, message: held + message["change"], "raised TypeError"),
        (lambda read, new: unknown, lambda held, message: held, "raised NameError: name 'unknown'"),  # noqa: F821
    ],
)
def test_wrong_answer_is_told_what_it_believes(send, serve, misconception):
    outcome, why = attempt(send, serve)
    assert outcome == "not yet"
    assert misconception in why
