"""Each lesson's exercise: its stub, its solution, and the misreadings that it names."""

import re
import runpy
from importlib import import_module
from pathlib import Path

import jupytext
import pytest

from distlab.exercises import Exercise, who_applies

ROOT = Path(__file__).parents[1]
NAMES = [path.stem for path in sorted((ROOT / "lessons" / "source").glob("*.py"))]
CALL = re.compile(r"(\w+)\.check\(([\w, ]+)\)")

each_lesson = pytest.mark.parametrize("name", NAMES)


def exercise_of(name: str) -> tuple[Exercise, list[str], str]:
    """A lesson's exercise, the names of its functions, and the stub."""
    code = [c.source for c in jupytext.read(ROOT / "lessons" / "source" / f"{name}.py").cells if c.cell_type == "code"]
    ((module, functions),) = [call.groups() for cell in code if (call := CALL.fullmatch(cell))]
    names = functions.split(", ")
    (stub,) = [cell for cell in code if f"def {names[0]}(" in cell and "..." in cell]
    return import_module(f"distlab.exercises.{module}").check.__self__, names, stub


def functions_of(code: str, names: list[str]) -> list:
    space: dict = {}
    exec(code, space)
    return [space[name] for name in names]


@each_lesson
def test_stub_is_not_attempted(name):
    exercise, names, stub = exercise_of(name)
    verdict = exercise.check(*functions_of(stub, names))
    assert (verdict.outcome, verdict.why) == ("not attempted", f"`{names[0]}` still returns nothing.")


@each_lesson
def test_solution_is_correct(name):
    exercise, names, _ = exercise_of(name)
    solution = runpy.run_path(str(ROOT / "lessons" / "solutions" / f"{name}.py"))
    verdict = exercise.check(*[solution[name] for name in names])
    assert (verdict.outcome, verdict.why) == ("correct", exercise.why)


@each_lesson
def test_each_misreading_is_named(name):
    exercise, _, _ = exercise_of(name)
    assert len(exercise.misreadings) >= 3
    for wrong, why in exercise.misreadings:
        verdict = exercise.check(*wrong)
        assert (verdict.outcome, verdict.why) == ("not yet", why)


def test_check_of_something_that_is_no_function_says_so():
    assert "takes your 2 function(s)" in who_applies.check(48.0, 16.0).why
    assert "takes your 2 function(s)" in who_applies.check(abs).why


def test_numbers_of_another_shape_are_told():
    exercise = Exercise(play=lambda f: f(), right=(lambda: [1.0],), why="", misreadings=[])
    assert "shape (1,) should come out; yours have (2,)" in exercise.check(lambda: [1.0, 2.0]).why


def test_number_that_is_wrong_is_told():
    exercise = Exercise(play=lambda f: f(), right=(lambda: [1.0, 2.0],), why="", misreadings=[])
    assert exercise.check(lambda: [1.0, float("nan")]).why == "number 1 should be 2; yours is nan."


def test_verdict_shows_its_outcome_in_text_and_markdown():
    verdict = who_applies.check(*who_applies.RIGHT)
    assert repr(verdict).startswith("Correct: changes")
    assert verdict._repr_markdown_().startswith("**Correct.** Changes")
