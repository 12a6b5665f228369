"""The house of DESIGN.md: imports only go down, strategies stand side by side, and all of it stays small."""

import ast
import io
import math
import os
import re
import subprocess
import sys
import tokenize
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "distlab"

FLOORS = {
    0: {
        "options",
        "errors",
        "task",
        "data",
        "flat",
        "shards",
        "rules",
        "compression",
        "trace",
        "randomness",
        "packing",
        "checkpoint",
    },
    1: {"fabric"},
    2: {"collectives", "roles"},
    3: {"strategies"},
    4: {"clusters"},
    5: {"train", "live", "run", "saving"},
    5.5: {"devices", "reports", "check", "datasets", "tasks", "theory"},
    6: {"plots"},
    7: {"dashboard", "exercises"},
    7.5: {""},  # distlab/__init__.py: it names what is below, and nothing below imports it
    8: {"__main__"},
}
# Methods that open a door to a floor above, such as run.plot(): (who, whom), imported in the method only.
DOORS = {("run", "reports"), ("clusters", "reports"), ("live", "dashboard")}
SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
CORE_FLOORS, HEAVY = 5.5, {"matplotlib", "ipywidgets", "pandas", "sklearn", "tensorboard"}


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    dotted = {path.relative_to(ROOT).with_suffix(""): path for path in PACKAGE.rglob("*.py")}
    return {".".join(name.parts).removesuffix(".__init__"): path for name, path in sorted(dotted.items())}


def room(module: str) -> str:
    """The part of the package that has a floor: "fabric" of "distlab.fabric.wire"."""
    return f"{module}.".split(".")[1]


def floor(module: str) -> float:
    """Infinite for a module that has none: nobody may import it."""
    return next((number for number, rooms in FLOORS.items() if room(module) in rooms), math.inf)


def imports(module: str) -> list[tuple[str, bool]]:
    """What `module` imports, anywhere in its text, and whether late: in a function, or for types alone."""
    found: list[tuple[str, bool]] = []

    def visit(node: ast.AST, late: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend((alias.name, late) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.extend((name, late) for name in targets(module, node))
        late = late or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        late = late or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        for child in ast.iter_child_nodes(node):
            visit(child, late)

    visit(ast.parse(modules()[module].read_text()), False)
    return found


def targets(module: str, node: ast.ImportFrom) -> list[str]:
    """The modules that a ``from`` names: "from distlab import flat" is distlab.flat."""
    base = node.module or ""
    if node.level:
        is_package = modules()[module].name == "__init__.py"
        parts = module.split(".")
        above = parts[: len(parts) - node.level + is_package]
        base = ".".join(above + ([base] if base else []))
    names = [f"{base}.{alias.name}" for alias in node.names]
    return [name if name in modules() else base for name in names]


def own_imports() -> list[tuple[str, str, bool]]:
    """All imports of one part of distlab by another: (who, whom, late)."""
    every = ((who, whom, late) for who in modules() for whom, late in imports(who))
    return [(who, whom, late) for who, whom, late in every if whom.split(".")[0] == "distlab"]


def core() -> list[str]:
    return [m for m in modules() if floor(m) <= CORE_FLOORS]


def lines(of: list[str]) -> int:
    """Lines with code on them: what explains (docstrings, comments) and what sets apart (blanks) is free."""
    return sum(code_lines(modules()[module].read_text()) for module in of)


def code_lines(text: str) -> int:
    docs: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            docs.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    words = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type not in SILENT]
    return len({n for t in words for n in range(t.start[0], t.end[0] + 1)} - docs)


def test_lines_of_code_are_counted_without_docstrings_comments_and_blanks():
    text = '"""Doc\nstring."""\n\n# comment\ndef f(x):\n    """Doc."""\n    return (\n        x\n    )  # four\n'
    assert code_lines(text) == 4


def test_every_module_has_a_floor():
    assert not [m for m in modules() if floor(m) == math.inf], "give it a floor in DESIGN.md and here"


def test_imports_only_go_down():
    def allowed(who: str, whom: str, late: bool) -> bool:
        return floor(whom) <= floor(who) or (late and (room(who), room(whom)) in DOORS)

    assert len(own_imports()) > 10
    assert not [f"{a} imports {b}" for a, b, late in own_imports() if not allowed(a, b, late)]


def test_modules_do_not_import_each_other_in_a_circle():
    needs = {(a, b) for a, b, late in own_imports() if not late}
    waiting = {module for pair in needs for module in pair}
    while free := {m for m in waiting if not any(a == m and b in waiting for a, b in needs)}:
        waiting -= free
    assert not waiting


def test_no_strategy_imports_another():
    pairs = [(a, b) for a, b, _ in own_imports() if room(a) == room(b) == "strategies" and a.count(".") > 1]
    assert not [f"{a} imports {b}" for a, b in pairs if b != "distlab.strategies.base"]


@pytest.mark.parametrize("module", core())
def test_core_module_takes_heavy_libraries_late(module):
    assert not {name.split(".")[0] for name, late in imports(module) if not late} & HEAVY


def test_core_imports_where_the_heavy_libraries_are_absent():
    refuse = f"""
import importlib, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {HEAVY}:
            raise ModuleNotFoundError(f'{{name}} is absent')
sys.meta_path.insert(0, Refuse())
for module in {["distlab", *core()]}:
    importlib.import_module(module)
"""
    done = subprocess.run([sys.executable, "-c", refuse], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_floors_0_to_5_are_at_most_8000_lines_of_code():
    assert lines([m for m in core() if floor(m) <= 5]) <= 8000


def test_package_is_at_most_12000_lines_of_code_and_each_exercise_100():
    of_lessons = [module for module in modules() if room(module) == "exercises"]
    assert 500 < lines([module for module in modules() if module not in of_lessons]) <= 12000
    assert not {module: n for module in of_lessons if (n := lines([module])) > 100 and not module.endswith("pictures")}


def test_bare_make_lists_every_target_and_does_nothing_else(tmp_path):
    makefile = (ROOT / "Makefile").read_text()
    (tmp_path / "Makefile").write_text(makefile)
    outside = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}  # of `make test`
    listed = subprocess.check_output(["make"], cwd=tmp_path, env=outside, text=True)
    wanted = set(re.search(r"^\.PHONY: (.+)", makefile, re.MULTILINE)[1].split()) - {"help"}
    assert {line.split()[1] for line in listed.splitlines()} == wanted
    assert wanted >= {"lab", "test", "demo", "lessons", "lint", "clean"}
    assert all(len(line.split()) > 3 for line in listed.splitlines()), "a target without help"
    assert [path.name for path in tmp_path.iterdir()] == ["Makefile"]


def test_no_file_names_a_folder_of_the_machine_it_was_written_on():
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]
    foreign = re.compile(b"/(" + b"work|root" + b")/")
    assert len(files) > 20
    assert not [str(f.relative_to(ROOT)) for f in files if foreign.search(f.read_bytes())]
