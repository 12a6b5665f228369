"""Explorer without a browser: controls are moved from Python, pictures are looked at as pixels."""

import base64
import io
import threading

import ipywidgets as widgets
import numpy as np
import pytest
import torch
from PIL import Image

import distlab as dl
from distlab.plots import blank


def draw(workers: int = 4, lr: float = 0.1, strategy: str = "sync", log: bool = False):
    """A bar as high as there are workers, of 16."""
    if lr > 0.9:
        raise ArithmeticError(f"<lr> of {lr:g} is too large")
    figure, axes = blank(2, 1)
    axes.set_axis_off()
    axes.bar([0], [workers], color="black" if strategy == "sync" else "red")
    axes.set_ylim(0, 16)
    return figure


def explorer(**choices) -> dl.Explorer:
    return dl.Explorer(draw, **(choices or {"workers": (1, 16)}))


def pixels(of: dl.Explorer) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(of.image.value)).convert("RGB"))


def blackness(of: dl.Explorer) -> float:
    return (pixels(of).sum(axis=2) == 0).mean()


def move(of: dl.Explorer, name: str, value) -> None:
    of.controls[name].value = value
    of.figure()


def test_a_choice_becomes_its_control():
    kinds = explorer(workers=(1, 16), lr=(0.01, 1.0), strategy=["sync", "async"], log=True).controls
    wanted = [widgets.IntSlider, widgets.FloatSlider, widgets.Dropdown, widgets.Checkbox]
    assert [type(widget) for widget in kinds.values()] == wanted
    assert (kinds["workers"].min, kinds["workers"].max, kinds["lr"].min, kinds["lr"].max) == (1, 16, 0.01, 1.0)


def test_controls_begin_where_the_function_does():
    e = explorer(workers=(1, 16), lr=(0.01, 1.0), strategy=["async", "sync"], log=True)
    assert e.values == {"workers": 4, "lr": 0.1, "strategy": "sync", "log": True}
    assert repr(e) == "Explorer(draw, workers=4, lr=0.1, strategy='sync', log=True)"


def test_controls_without_a_default_begin_with_the_lowest_or_first():
    def bare(workers, lr, strategy):
        return draw(workers, lr, strategy)

    e = dl.Explorer(bare, workers=(2, 16), lr=(0, 0.5), strategy=["async", "sync"])
    assert e.values == {"workers": 2, "lr": 0.0, "strategy": "async"}


def bar(data):
    """As high as the sum of the data."""
    return draw(int(data.sum()))


@pytest.mark.parametrize("kind", [torch.tensor, np.array], ids=["tensors", "arrays"])
def test_menu_of_what_cannot_be_compared(kind):
    data = [kind([1.0, 3.0]), kind([4.0, 4.0]), kind([1.0, 2.0, 5.0]), kind([4.0, 4.0])]
    e = dl.Explorer(bar, data=data)
    assert e.controls["data"].options[0][0] == str(data[0])
    assert e.values["data"] is data[0]
    low = blackness(e)
    for place in (3, 1, 2, 0):
        e.controls["data"].index = place  # as the browser does
        e.figure()
        assert e.values["data"] is data[place]
        assert blackness(e) == pytest.approx(low * float(data[place].sum()) / 4, rel=0.15)
    move(e, "data", data[2])
    assert e.values["data"] is data[2]
    assert "Explorer(bar, data=" in repr(e)


def test_menu_begins_with_a_default_that_cannot_be_compared():
    data = [torch.ones(2), torch.full((2,), 4.0)]

    def begins(data=data[1]):
        return bar(data)

    assert dl.Explorer(begins, data=data).values["data"] is data[1]
    with pytest.raises(ValueError, match="begins begins with data=tensor"):
        dl.Explorer(begins, data=[torch.ones(2), torch.ones(3)])


def test_equal_options_and_equal_labels_are_told_apart():
    e = explorer(workers=[1, "4", 4, True, "4"])
    assert [label for label, _ in e.controls["workers"].options] == ["1", "4", "4 (2)", "True", "4 (3)"]
    assert e.controls["workers"].index == 2
    assert e.values == {"workers": 4}
    before = e.image.value
    for place, value in ((3, True), (0, 1), (4, "4"), (2, 4)):
        e.controls["workers"].index = place
        assert [(type(v), v) for v in e.values.values()] == [(type(value), value)]
    e.figure()
    assert e.image.value == before
    move(e, "workers", True)
    assert e.controls["workers"].index == 3


def test_ready_widget_is_taken_as_it_is():
    slider = widgets.IntSlider(3, min=1, max=5, step=2)
    e = explorer(workers=slider)
    slider.value = 5
    e.figure()
    assert e.controls["workers"] is slider
    assert e.values == {"workers": 5}


def test_picture_follows_the_controls():
    e = explorer(workers=(1, 16), strategy=["sync", "async"])
    before = blackness(e)
    move(e, "workers", 16)
    assert blackness(e) == pytest.approx(4 * before, rel=0.15)
    move(e, "strategy", "async")
    assert blackness(e) == 0
    assert (pixels(e) == (255, 0, 0)).all(axis=2).mean() > 0.3


def test_only_the_latest_of_many_moves_is_drawn():
    begun, may_go, seen = threading.Event(), threading.Event(), []

    def slow(workers=1):
        seen.append(workers)
        if workers == 2:
            begun.set()
            assert may_go.wait(30)
        return draw(workers)

    e = dl.Explorer(slow, workers=(1, 16))
    e.controls["workers"].value = 2
    assert begun.wait(30)
    for workers in range(3, 17):
        e.controls["workers"].value = workers
    may_go.set()
    e.figure()
    assert seen == [1, 2, 16]
    assert blackness(e) == blackness(dl.Explorer(draw, workers=widgets.IntSlider(16)))


def test_figure_says_when_it_is_not_drawn_in_time():
    may_go = threading.Event()

    def stuck(workers=1):
        assert workers == 1 or may_go.wait(30)
        return draw(workers)

    e = dl.Explorer(stuck, workers=(1, 16))
    e.controls["workers"].value = 2
    with pytest.raises(TimeoutError, match=r"stuck has been drawing for more than 0\.01 s"):
        e.figure(timeout_s=0.01)
    may_go.set()
    e.figure()


def test_exception_is_shown_escaped_until_the_next_picture():
    e = explorer(lr=(0.01, 1.0))
    picture = e.image.value
    e.controls["lr"].value = 1.0
    with pytest.raises(ArithmeticError):
        e.figure()
    assert "ArithmeticError: &lt;lr&gt; of 1 is too large" in e.problem.value
    assert "raise ArithmeticError" in e.problem.value
    assert "dashboard/explorer.py" not in e.problem.value
    assert e.image.value == picture
    move(e, "lr", 0.5)
    assert e.problem.value == ""


def test_first_picture_may_fail_and_the_next_one_is_shown():
    e = dl.Explorer(lambda lr: draw(lr=lr), lr=widgets.FloatSlider(1.0, max=1.0))
    assert "too large" in e.problem.value
    assert e.image.layout.display == "none"
    move(e, "lr", 0.5)
    assert e.image.layout.display is None
    assert pixels(e).size


def test_function_that_returns_no_figure_is_told_so():
    e = dl.Explorer(lambda workers: "a bar", workers=(1, 2))
    assert (
        "TypeError: &lt;lambda&gt; must return a matplotlib Figure, and returned &#x27;a bar&#x27;" in e.problem.value
    )


def test_pyplot_forgets_a_figure_that_it_made():
    from matplotlib import pyplot

    def by_pyplot(workers=1):
        return pyplot.figure(figsize=(1, 1))

    e = dl.Explorer(by_pyplot, workers=(1, 3))
    move(e, "workers", 3)
    assert pyplot.get_fignums() == []


def test_notebook_gets_the_widgets_and_beside_them_the_picture(monkeypatch):
    monkeypatch.delenv("DISTLAB_HEADLESS", raising=False)
    e = explorer()
    bundle = e._repr_mimebundle_()
    assert bundle["application/vnd.jupyter.widget-view+json"]["model_id"] == e.box.model_id
    assert base64.b64decode(bundle["image/png"]) == e.image.value


def test_headless_notebook_gets_the_picture_alone(monkeypatch):
    monkeypatch.setenv("DISTLAB_HEADLESS", "1")
    e = explorer()
    picture = base64.b64encode(e.image.value).decode()
    assert e._repr_mimebundle_() == {"image/png": picture, "text/plain": "Explorer(draw, workers=4)"}


def test_headless_notebook_fails_where_the_first_picture_does(monkeypatch):
    monkeypatch.setenv("DISTLAB_HEADLESS", "1")
    with pytest.raises(ArithmeticError, match="too large"):
        dl.Explorer(lambda lr: draw(lr=lr), lr=(0.95, 1.0))


@pytest.mark.parametrize(
    ("choices", "kind", "said"),
    [
        ({"wokers": (1, 2)}, TypeError, "draw has no option 'wokers': did you mean 'workers'?"),
        ({"workers": (16, 1)}, ValueError, r"workers=\(16, 1\) is an empty range"),
        ({"workers": (4, 4)}, ValueError, "empty range"),
        ({"workers": (5, 16)}, ValueError, r"draw begins with workers=4, which is not in \(5, 16\)"),
        ({"strategy": ["async"]}, ValueError, r"draw begins with strategy='sync', which is not in \['async'\]"),
        ({"strategy": []}, ValueError, r"strategy=\[\] leaves nothing to choose"),
        ({"workers": 7}, TypeError, "workers=7: a choice is a pair of numbers, a list, True or False, or a widget"),
        ({"workers": (1, 16, 2)}, TypeError, "a pair of numbers"),
        ({"lr": (0.0, float("inf"))}, TypeError, "a pair of numbers"),
        ({"lr": (0, 1)}, ValueError, r"draw begins with lr=0\.1, which is not in \(0, 1\)"),
        ({"workers": widgets.VBox()}, TypeError, "workers: a VBox has no value that could move"),
    ],
)
def test_wrong_choice_is_refused_at_once(choices, kind, said):
    with pytest.raises(kind, match=said):
        explorer(**choices)


def test_argument_without_default_and_choice_is_named():
    def bare(workers, lr): ...

    with pytest.raises(TypeError, match="bare needs lr too: give each a choice"):
        dl.Explorer(bare, workers=(1, 2))


@pytest.mark.parametrize(
    ("function", "choices", "said"),
    [
        (lambda workers, /: draw(workers), {"workers": (1, 2)}, "has no option 'workers'"),
        (lambda workers, /: draw(workers), {}, "does not take workers by name: leave out the / behind it"),
        (lambda workers=1, /: draw(workers), {"workers": (1, 2)}, "has no option 'workers'"),
        (lambda *workers: draw(*workers), {"workers": (1, 2)}, "has no option 'workers'"),
    ],
)
def test_function_that_cannot_be_called_by_name_is_refused(function, choices, said):
    with pytest.raises(TypeError, match=said):
        dl.Explorer(function, **choices)
