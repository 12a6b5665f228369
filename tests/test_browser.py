"""What a reader sees: notebooks in a real JupyterLab and a real browser."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(180)

LESSONS = Path(__file__).parents[1] / "lessons"
FUNCTION = """
%matplotlib inline
import distlab as dl
from distlab.plots import blank

def draw(workers=4, log=False):
    figure, axes = blank(5, 2)
    if log:
        raise ArithmeticError("<no> logarithm")
    axes.barh(range(workers), range(workers))
    return figure
"""
EXPLORER = "explorer = dl.Explorer(draw, workers=(1, 16), log=False)\nexplorer"


@pytest.fixture(scope="module")
def explorer(lab):
    """A page with an Explorer in cell 1."""
    page = lab.open(lab.write("explorer.ipynb", [FUNCTION, EXPLORER]))
    page.run_all()
    yield page
    page.close()


def test_slider_moves_the_picture(explorer):
    before = explorer.picture(1)
    explorer.press("workers", "ArrowRight", times=3)
    after = explorer.wait_for_new_picture(1, before)
    assert before != after
    explorer.wait_for_text(r"workers\s+7")
    assert explorer.value("len(explorer.figure().axes[0].patches)") == "7"
    assert explorer.value("explorer.values") == "{'workers': 7, 'log': False}"
    explorer.screenshot("explorer")
    assert explorer.errors() == []
    assert explorer.status() == "idle"


def test_exception_is_seen_below_the_picture_until_the_next_one(explorer):
    box = explorer.page.get_by_role("checkbox", name="log")
    box.check()
    told = explorer.page.get_by_text("ArithmeticError: <no> logarithm")
    told.wait_for()
    explorer.screenshot("explorer_exception")
    box.uncheck()
    told.wait_for(state="detached")
    assert explorer.value("len(explorer.figure().axes[0].patches)") == explorer.value("explorer.values['workers']")


def test_lesson_03_runs_in_the_browser(lab):
    page = lab.open(lab.copy(LESSONS / "03_who_applies_the_update.ipynb"))
    cells = page.cells()
    first = [i for i in page.code_cells() if "sweep" not in cells[i]["source"]][:6]
    for index in first:
        page.run(index)
    assert page.errors() == []
    assert page.picture(first[-1] if "plot" in cells[first[-1]]["source"] else first[2])
    page.screenshot("lesson_03")
    page.close()
