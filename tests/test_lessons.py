"""The lessons: built from their sources, whole, small, and with exercises whose checks can fail."""

import importlib.util
import re
import runpy
from functools import cache
from pathlib import Path

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

from distlab.exercises import pictures, who_applies

ROOT = Path(__file__).parents[1]
SOURCES = {path.stem: path for path in sorted((ROOT / "lessons" / "source").glob("*.py"))}
#: What the cell tagged "parameters" holds in a test: every lesson has one.
SMALL = {"03_who_applies_the_update": "num_updates, worker_counts = 40, (1, 2)"}

each_lesson = pytest.mark.parametrize("name", SOURCES)


def load_build():
    spec = importlib.util.spec_from_file_location("build", ROOT / "lessons" / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = load_build()


def path_of(name: str) -> Path:
    return ROOT / "lessons" / f"{name}.ipynb"


@cache
def cells(name: str) -> list:
    return nbformat.read(path_of(name), as_version=4).cells


def code(name: str) -> list:
    return [cell for cell in cells(name) if cell.cell_type == "code"]


def outputs(name: str) -> list:
    return [output for cell in code(name) for output in cell.outputs]


def prose(name: str) -> str:
    return "\n\n".join(cell.source for cell in cells(name) if cell.cell_type == "markdown")


def test_every_notebook_has_a_source():
    assert {path.stem for path in (ROOT / "lessons").glob("*.ipynb")} == set(SOURCES)
    assert SOURCES


@each_lesson
def test_notebook_was_built_from_the_source_as_it_is(name):
    assert build.is_current(SOURCES[name], path_of(name)), "run make lessons"


@each_lesson
def test_notebook_is_small_and_holds_no_widgets(name):
    assert path_of(name).stat().st_size <= 300_000
    assert "jupyter.widget" not in path_of(name).read_text()


@each_lesson
def test_notebook_fails_where_it_should_and_nowhere_else(name):
    for cell in code(name):
        failed = any(output.output_type == "error" for output in cell.outputs)
        assert failed == ("raises-exception" in cell.metadata.get("tags", [])), cell.source
    assert not [o.text for o in outputs(name) if o.output_type == "stream" and o.name == "stderr"]


@each_lesson
def test_cells_that_draw_left_a_picture(name):
    draws = re.compile(r"plots\.|pictures\.|trial\(|dl\.Explorer\(")
    drawing = [cell for cell in code(name) if draws.match(cell.source.split("\n")[-1])]
    assert len(drawing) >= 3
    assert not [c.source for c in drawing if not any("image/png" in o.get("data", {}) for o in c.outputs)]


@each_lesson
def test_sentences_with_numbers_hold_numbers(name):
    said = [o.data["text/markdown"] for o in outputs(name) if "text/markdown" in o.get("data", {})]
    assert said
    assert not [text for text in said if re.search(r"\b(nan|inf|None)\b", text)]


@each_lesson
def test_lesson_keeps_the_frame(name):
    text, setup = prose(name), code(name)[0].source.split("\n")
    assert re.match(r"# .+\?\n", text), "the title is a question"
    assert re.search(r"\d+ minutes", text)
    assert setup[0] == "%matplotlib inline"
    assert len(setup) < 7
    assert "my_guess = None" in [cell.source for cell in code(name)]
    parts = ("Predict", "Experiment", "Break it", "Try it", "Exercise", "What real systems do", "Recap")
    places = [text.find(f"## {part}") for part in parts]
    assert -1 not in places
    assert places == sorted(places)


@each_lesson
def test_links_of_a_lesson_lead_somewhere(name):
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", prose(name))
    assert f"solutions/{name}.py" in links
    assert not [link for link in links if not (ROOT / "lessons" / link).exists()]


@each_lesson
def test_lesson_runs_with_small_parameters(name):
    small = build.execute(SOURCES[name], SMALL[name])
    assert SMALL[name] in [cell.source for cell in small.cells], "no cell is tagged parameters"
    assert [c.execution_count for c in small.cells if c.cell_type == "code"] == list(range(1, len(code(name)) + 1))


def test_build_notices_an_exception_behind_a_slider(tmp_path):
    source = tmp_path / "01_broken.py"
    source.write_text("# %%\nfrom ipywidgets import interact\nsliders = interact(lambda x: 1 / x, x=0)\n")
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        build.execute(source)


def test_build_shows_an_explorer_as_its_first_picture(tmp_path):
    source = tmp_path / "01_explorer.py"
    draw = "def draw(workers=3):\n    return plots.blank(workers, 1)[0]\n\ndl.Explorer(draw, workers=(1, 8))\n"
    source.write_text(f"# %%\nimport distlab as dl\nfrom distlab import plots\n\n{draw}")
    (output,) = build.execute(source).cells[0].outputs
    assert set(output.data) == {"image/png", "text/plain"}
    assert output.data["text/plain"] == "Explorer(draw, workers=3)"


def test_build_notices_an_exception_in_an_explorer(tmp_path):
    source = tmp_path / "01_broken.py"
    source.write_text("# %%\nimport distlab as dl\n\ndl.Explorer(lambda x: 1 / x, x=(0, 1))\n")
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        build.execute(source)


def test_build_keeps_no_process_ids_and_no_folders(tmp_path):
    source = tmp_path / "01_traces.py"
    source.write_text(f"# %%\nprint('worker 0 (pid 4711) in', {str(ROOT / 'distlab')!r})\n")
    text = build.build(source, tmp_path).read_text()
    assert "worker 0 (pid ...) in distlab" in text
    assert str(ROOT) not in text


def lines(figure) -> dict:
    return {line.get_label(): line.get_xydata().tolist() for line in figure.axes[0].lines}


def test_guess_is_drawn_beside_measurement_and_closed_form():
    figure = pictures.by_workers({"it": {1: 1.0, 2: 0.6}}, {"1/P": lambda p: 1 / p}, ylabel="share", guess=0.8)
    drawn = lines(figure)
    assert drawn["your guess"] == [[4, 0.8]]
    assert drawn["it, measured"] == [[1, 1.0], [2, 0.6]]
    assert drawn["1/P"][-1] == [2, 0.5]


def test_no_guess_draws_none():
    assert "your guess" not in lines(pictures.by_workers({"it": {1: 1.0}}, {}, ylabel="share", guess=None))


def test_guess_in_words_is_refused_where_a_number_belongs():
    with pytest.raises(TypeError, match="a guess is a number, or None for no guess; got 'half'"):
        pictures.by_workers({"it": {1: 1.0}}, {}, ylabel="share", guess="half")


def test_space_time_picture_numbers_five_events_and_leaves_one_open():
    texts = " ".join(text.get_text() for text in pictures.space_time().axes[0].texts)
    assert [texts.count(number) for number in "①②③④⑤"] == [1, 1, 1, 2, 1]


def attempt(send, serve):
    return who_applies.check(send, serve).outcome, who_applies.check(send, serve).why


def test_stub_of_the_exercise_is_not_attempted():
    stub = next(cell.source for cell in code("03_who_applies_the_update") if "def to_send" in cell.source)
    names: dict = {}
    exec(stub, names)
    assert attempt(names["to_send"], names["at_server"]) == ("not attempted", "`to_send` still returns nothing.")


def test_half_an_attempt_names_the_missing_half():
    outcome, why = attempt(lambda read, new: new - read, lambda held, message: None)
    assert (outcome, why) == ("not attempted", "`at_server` still returns nothing.")


def test_solution_of_the_exercise_is_correct():
    solution = runpy.run_path(str(ROOT / "lessons" / "solutions" / "03_who_applies_the_update.py"))
    outcome, why = attempt(solution["to_send"], solution["at_server"])
    assert outcome == "correct"
    assert "changes add up in any order" in why


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


def test_verdict_shows_its_outcome_in_text_and_markdown():
    verdict = who_applies.check(*who_applies.RIGHT)
    assert repr(verdict).startswith("Correct: changes")
    assert verdict._repr_markdown_().startswith("**Correct.** Changes")
