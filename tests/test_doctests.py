"""The examples in the docstrings print what they say."""

import doctest
import importlib
import pkgutil

import pytest

import distlab

MODULES = sorted(m.name for m in pkgutil.walk_packages(distlab.__path__, "distlab.") if not m.name.endswith("__main__"))


@pytest.mark.parametrize("name", MODULES)
def test_examples_print_what_they_say(name):
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder()
    tests = [t for name in MODULES for t in finder.find(importlib.import_module(name)) if t.examples]
    assert len(tests) >= 6
