"""The lessons: built from their sources, whole, small, and with exercises whose checks can fail."""

import importlib.util
import re
from functools import cache
from pathlib import Path

import jupytext
import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

from distlab.exercises import pictures

ROOT = Path(__file__).parents[1]
SOURCES = {path.stem: path for path in sorted((ROOT / "lessons" / "source").glob("*.py"))}
#: A number that somebody typed: it has a unit, and so it was measured or published, or is a parameter.
TYPED = re.compile(r"\d[\d,.]*[\s*_]*(?:%|per cent|percent|[mµn]?s\b|sec|[kMG]?B\b|bytes|[MG]?bits?\b|×|times\b|-fold)")

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


@cache
def source_cells(name: str) -> list:
    return jupytext.read(SOURCES[name], fmt="py:percent").cells


def small(name: str) -> str:
    """What takes the place of the cell tagged "parameters" in a test: it stands beside that cell's tags."""
    (cell,) = [cell for cell in source_cells(name) if "parameters" in cell.metadata.get("tags", ())]
    return cell.metadata["small"]


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
def test_no_number_in_prose_was_typed_without_a_reason(name):
    for cell in source_cells(name):
        typed = TYPED.findall(cell.source) if cell.cell_type == "markdown" else []
        reason = cell.metadata.get("numbers", "")
        assert bool(typed) == bool(reason), f"{typed}, reason {reason!r}, in\n{cell.source}"


@pytest.mark.parametrize("words", ["5 ms", "**3** %", "1.5 MB", "3 times", "12,000 bytes", "4×", "0.2 s.", "10 Gbit/s"])
def test_numbers_with_units_are_found(words):
    assert TYPED.search(f"It took {words} then")


@pytest.mark.parametrize("words", ["3 workers", "version 41", "Chen et al. 2016", "step 5 starts", "section 3.3"])
def test_numbers_without_units_may_be_typed(words):
    assert not TYPED.search(f"It is {words} then")


@each_lesson
def test_links_of_a_lesson_lead_somewhere(name):
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", prose(name))
    assert f"solutions/{name}.py" in links
    assert not [link for link in links if not (ROOT / "lessons" / link).exists()]


@each_lesson
def test_lesson_runs_with_small_parameters(name):
    executed = build.execute(SOURCES[name], small(name))
    assert small(name) in [cell.source for cell in executed.cells]
    assert [c.execution_count for c in executed.cells if c.cell_type == "code"] == list(range(1, len(code(name)) + 1))


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
    figure = pictures.against({"it": {1: 1.0, 2: 0.6}}, {"1/P": lambda p: 1 / p}, ylabel="share", guess=0.8)
    drawn = lines(figure)
    assert drawn["your guess"] == [[4, 0.8]]
    assert drawn["it, measured"] == [[1, 1.0], [2, 0.6]]
    assert drawn["1/P"][-1] == [2, 0.5]


def test_no_guess_draws_none():
    assert "your guess" not in lines(pictures.against({"it": {1: 1.0}}, {}, ylabel="share", guess=None))


def test_guess_in_words_is_refused_where_a_number_belongs():
    with pytest.raises(TypeError, match="a guess is a number, or None for no guess; got 'half'"):
        pictures.against({"it": {1: 1.0}}, {}, ylabel="share", guess="half")


def test_space_time_picture_numbers_five_events_and_leaves_one_open():
    texts = " ".join(text.get_text() for text in pictures.space_time().axes[0].texts)
    assert [texts.count(number) for number in "①②③④⑤"] == [1, 1, 1, 2, 1]


def test_bars_hold_measurement_closed_form_and_guess():
    how = {"ylabel": "time (s)", "closed": {"b": 1.5}, "guess": 3.0, "guess_at": "b"}
    figure = pictures.bars({"a": 1.0, "b": 2.0}, **how)
    assert [bar.get_height() for bar in figure.axes[0].patches] == [1.0, 2.0]
    assert lines(figure)["your guess"] == [[1, 3.0]]
    (form,) = figure.axes[0].collections
    assert form.get_segments()[0][:, 1].tolist() == [1.5, 1.5]


def test_sketch_draws_every_box_arrow_and_note():
    figure = pictures.sketch(
        ["client", "replica"],
        [("replica", 1, 2, "compute")],
        [("client", 0, "replica", 1, "pull")],
        [("client", 0, "①")],
    )
    (box,) = figure.axes[0].patches
    assert (box.get_x(), box.get_width(), box.get_y() + box.get_height() / 2) == (1, 1, 0)
    arrow, note = figure.axes[0].texts
    assert (arrow.xy, arrow.xyann) == ((1, 0), (0, 1))
    assert note.get_text() == "①"


def test_check_names_simulated_cells_that_come_out_differently(tmp_path):
    source = tmp_path / "01_chance.py"
    source.write_text(
        '# %%\nimport random\n\n# %% tags=["real"]\nrandom.random()\n\n# %%\n1 + random.random()\n\n# %%\n2\n'
    )
    notebook = build.build(source, tmp_path)
    assert build.changed(source, notebook) == ["1 + random.random()"]
