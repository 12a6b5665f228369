"""Sliders in front of a function that draws.

The hard idea is that moves come faster than pictures. A move only notes that there is something to draw; one thread
draws, and reads the controls when it begins. So the picture of where a slider stopped is always the last one, what it
passed in the meantime is left out, and the kernel stays free to hear of the next move.
"""

import base64
import html
import inspect
import io
import math
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

import ipywidgets as widgets
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from distlab.options import check_options

KINDS = "a pair of numbers, a list, True or False, or a widget"
FEW_STEPS = 100  # of a slider over floats


class Option:
    """Something in a menu that == does not tell from the rest, such as a tensor: itself, and equal to nothing else."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Explorer:
    """Shows the Figure of a function beside controls for its arguments, and draws anew when one of them moves.

    As the last expression of a cell it shows itself. A saved notebook keeps no widgets; where the environment
    variable DISTLAB_HEADLESS is set, as for the lessons that are built, it is a plain picture instead.

    Args:
        function: takes the chosen arguments by name, and returns a matplotlib Figure. It runs in a thread.
        choices: for each argument a pair of ints or floats (a slider from the one to the other), a list (a menu), True
            or False (a box to tick, which begins so), or a widget that has a value. An argument begins with the
            function's own default, or with the lowest or first value if it has none.

    What the function raises is shown below the picture until it draws again; where DISTLAB_HEADLESS is set, the
    first picture raises it.

    Raises:
        TypeError: the function does not take such an argument, lacks one, or a choice is of no known kind.
        ValueError: a choice is empty, or the function's default is not in it.

    >>> from distlab import plots
    >>> def draw(workers=4, law="1/P"):
    ...     figure, axes = plots.blank()
    ...     axes.set_title(f"{workers} workers, {law}")
    ...     return figure
    >>> explorer = Explorer(draw, workers=(1, 16), law=["1/P", "P + 1"])
    >>> explorer.controls["workers"].value = 8
    >>> explorer.values, explorer.figure().axes[0].get_title()
    ({'workers': 8, 'law': '1/P'}, '8 workers, 1/P')
    """

    def __init__(self, function: Callable[..., Figure], /, **choices: Any) -> None:
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__)
        defaults = check_choices(function, self.name, choices)
        self.controls = {name: control(self.name, name, choice, defaults) for name, choice in choices.items()}
        self.image = widgets.Image(format="png", layout=widgets.Layout(max_width="100%", object_fit="contain"))
        self.problem = widgets.HTML()
        self.box = widgets.VBox([*self.controls.values(), self.image, self.problem])
        self._error: BaseException | None = None
        self._figure: Figure | None = None
        self._moves = self._drawn = 0
        self._drawing = False
        self._changed = threading.Condition()
        self._draw()
        if headless():
            self.figure()  # or raise what the function raised
        for widget in self.controls.values():
            widget.observe(self._move, "value")

    @property
    def values(self) -> dict[str, Any]:
        """The arguments as the controls are now."""
        values = {name: widget.value for name, widget in self.controls.items()}
        return {name: value.value if isinstance(value, Option) else value for name, value in values.items()}

    def figure(self, timeout_s: float = 60.0) -> Figure:
        """Wait for the Figure of the present values, and return it; raises what the function raised.

        Raises:
            TimeoutError: it is not drawn after `timeout_s`.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._drawing, timeout_s):
                raise TimeoutError(f"{self.name} has been drawing for more than {timeout_s:g} s")
            if self._error is not None:
                raise self._error
            assert self._figure is not None
            return self._figure

    def _move(self, _: Any) -> None:
        with self._changed:
            self._moves += 1
            if not self._drawing:
                self._drawing = True
                threading.Thread(target=self._draw_latest, name="distlab-explorer", daemon=True).start()

    def _draw_latest(self) -> None:
        while True:
            with self._changed:
                if self._drawn == self._moves:
                    self._drawing = False
                    self._changed.notify_all()
                    return
                self._drawn = self._moves
            self._draw()

    def _draw(self) -> None:
        try:
            figure = self.function(**self.values)
            if not isinstance(figure, Figure):
                raise TypeError(f"{self.name} must return a matplotlib Figure, and returned {figure!r:.80}")
            self.image.value = png(figure)
            self._figure, self._error = figure, None
        except KeyboardInterrupt:  # of the first picture, which the cell draws itself
            raise
        except BaseException as error:  # in a thread nobody would see it
            self._error = error
        self.image.layout.display = None if self.image.value else "none"
        self.problem.value = "" if self._error is None else told(self._error)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        picture = base64.b64encode(self.image.value).decode()  # bytes would become a list of numbers
        shown = {"text/plain": repr(self), "image/png": picture}
        return shown if headless() else {**self.box._repr_mimebundle_(), **shown}

    def __repr__(self) -> str:
        return f"Explorer({', '.join([self.name, *(f'{name}={value!r}' for name, value in self.values.items())])})"


def headless() -> bool:
    """True where nobody can move anything: a notebook that is executed for its pictures."""
    return bool(os.environ.get("DISTLAB_HEADLESS"))


def check_choices(function: Callable[..., Any], name: str, choices: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of `function`; TypeError unless it can be called with `choices` alone."""
    check_options(function, name, choices)
    parameters = inspect.signature(function).parameters.values()
    taken = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    lacking = [p.name for p in taken if p.default is p.empty and p.name not in choices]
    if unnamed := [p.name for p in taken if p.name in lacking and p.kind is p.POSITIONAL_ONLY]:
        raise TypeError(f"{name} does not take {', '.join(unnamed)} by name: leave out the / behind it")
    if lacking:
        raise TypeError(f"{name} needs {', '.join(lacking)} too: give each a choice, {KINDS}")
    return {p.name: p.default for p in taken if p.default is not p.empty}


def control(function: str, name: str, choice: Any, defaults: Mapping[str, Any]) -> Any:
    """The widget for one argument, at the default that `function` has for it."""
    if isinstance(choice, widgets.Widget):
        if not choice.has_trait("value"):
            raise TypeError(f"{name}: a {type(choice).__name__} has no value that could move")
        return choice
    look = {"description": name, "style": {"description_width": "initial"}}
    if isinstance(choice, bool):
        return widgets.Checkbox(value=choice, indent=False, **look)
    if isinstance(choice, list):
        if not choice:
            raise ValueError(f"{name}=[] leaves nothing to choose")
        start = defaults.get(name, choice[0])
        place = find(choice, start)
        check_default(place is not None, function, name, start, choice)
        return menu(choice, place, **look)
    if not (isinstance(choice, tuple) and len(choice) == 2 and all(is_number(end) for end in choice)):
        raise TypeError(f"{name}={choice!r}: a choice is {KINDS}")
    low, high = choice
    if not low < high:
        raise ValueError(f"{name}={choice!r} is an empty range: it goes from the lower to the higher number")
    whole = all(isinstance(end, Integral) for end in choice)
    start = defaults.get(name, low)
    fits = is_number(start) and low <= start <= high and (isinstance(start, Integral) or not whole)
    check_default(fits, function, name, start, choice)
    if whole:
        return widgets.IntSlider(start, min=low, max=high, **look)
    step = (high - low) / FEW_STEPS
    return widgets.FloatSlider(start, min=low, max=high, step=step, readout_format=".3g", **look)


def menu(choice: list[Any], place: int | None, **look: Any) -> widgets.Dropdown:
    """A menu that begins at `place`; options with the same label have a number."""
    labels = [str(value) for value in choice]
    numbers = [labels[:place].count(label) for place, label in enumerate(labels, 1)]
    labels = [f"{label} ({n})" if n > 1 else label for label, n in zip(labels, numbers, strict=True)]
    if all(same(a, b) is (i == j) for i, a in enumerate(choice) for j, b in enumerate(choice)):
        return widgets.Dropdown(options=list(zip(labels, choice, strict=True)), value=choice[place or 0], **look)
    options = [Option(value) for value in choice]

    def meant(option: Option, value: Any) -> bool:  # by who sets the menu's value
        return option is value if isinstance(value, Option) else options.index(option) == find(choice, value)

    return widgets.Dropdown(options=list(zip(labels, options, strict=True)), index=place, equals=meant, **look)


def find(choice: list[Any], value: Any) -> int | None:
    """Where `value` is: it itself, or else the first that is equal to it; None if it is nowhere.

    >>> find([1, True, "a"], True), find([1, True], 1.0), find([1, True], 2)
    (1, 0, None)
    """
    exact = [i for i, one in enumerate(choice) if one is value]
    return next(iter(exact + [i for i, one in enumerate(choice) if same(one, value)]), None)


def same(a: Any, b: Any) -> bool | None:
    """Are these equal? None where == has no plain answer, as between tensors."""
    try:
        return a is b or bool(a == b)
    except Exception:  # each kind of array has its own
        return None


def check_default(fits: bool, function: str, name: str, start: Any, choice: Any) -> None:
    """ValueError unless it `fits`."""
    if not fits:
        raise ValueError(f"{function} begins with {name}={start!r}, which is not in {choice!r}")


def is_number(value: Any) -> bool:
    """True for a finite int or float."""
    return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)


def png(figure: Figure) -> bytes:
    """The picture of `figure`, which pyplot then forgets, if it made it: or the cell would show it once more."""
    FigureCanvasAgg(figure)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", pil_kwargs={"compress_level": 1})
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        pyplot.close(figure)
    return picture.getvalue()


def told(error: BaseException) -> str:
    """The traceback of `error` as HTML, from the function on."""
    begin = error.__traceback__
    lines = traceback.format_exception(type(error), error, (begin and begin.tb_next) or begin)
    return f'<pre style="color: #B00020; line-height: 1.3">{html.escape("".join(lines))}</pre>'
