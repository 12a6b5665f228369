"""Lines for the traceback of a function that was defined in a notebook cell.

Such a function travels by value, and Python on the worker has no file to quote. The caller still has its lines.
"""

import linecache
import re
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

QUOTED = re.compile(
    r'  File "(?:<dynamic-code>|<ipython-input[^"]*>|[^"]*ipykernel[^"]*)", line (\d+), in (\w+)\n(?!    )'
)


def with_source(text: str) -> str:
    """`text`, a traceback, with the line of code under each frame that was defined in the caller's ``__main__``."""

    def quote(match: re.Match[str]) -> str:
        for code in codes(vars(sys.modules["__main__"]).values()):
            if code.co_name == match[2] and (line := linecache.getline(code.co_filename, int(match[1])).strip()):
                return f"{match[0]}    {line}\n"
        return match[0]

    return QUOTED.sub(quote, text)


def codes(values: Any) -> Iterator[CodeType]:
    """The code of all functions and classes in `values`, with what is defined inside them."""
    for value in list(values):
        if isinstance(value, FunctionType):
            yield from nested(value.__code__)
        elif isinstance(value, type) and value.__module__ == "__main__":
            yield from codes(vars(value).values())


def nested(code: CodeType) -> Iterator[CodeType]:
    """A code object and those inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested(constant)
