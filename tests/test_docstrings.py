"""Docstrings and comments of fzero: the names in them exist, and a long function has one."""

import ast
import contextlib
import importlib
import re
from typing import Any

from tests.sources import ROOT, nodes_of, python_files, text_of


def is_there(name: str) -> bool:
    """Return whether a dotted name leads from a module of fzero to a module, a function, a class or its attribute."""
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        with contextlib.suppress(ModuleNotFoundError):
            found: Any = importlib.import_module(".".join(parts[:n]))
            for part in parts[n:-1]:
                found = getattr(found, part, None)
            last = parts[-1]
            return n == len(parts) or hasattr(found, last) or last in getattr(found, "__annotations__", {})
    return False


def test_a_name_in_a_docstring_or_a_comment_is_there():
    for path in python_files("fzero"):
        for name in re.findall(r"`(fzero(?:\.\w+)+)", text_of(path)):
            assert is_there(name), f"{path} speaks of {name}, which is not there"
    assert not is_there("fzero.nn.split._shells.run_dynamic_block")


def test_a_function_of_twelve_lines_says_what_it_is_for():
    for path in python_files("fzero"):
        for f in nodes_of(path, ast.FunctionDef):
            lines = (f.body[-1].end_lineno or 0) - f.body[0].lineno + 1
            assert lines < 12 or ast.get_docstring(f), f"{path}:{f.lineno} {f.name}: say what it returns or does"


def attributes_of(c: type, source: str) -> set[str]:
    """Return the names that a class or its instances have: of its bodies, and those that its own methods set."""
    names = {*re.findall(r"\bself\.(\w+)\b", source)}
    for base in c.__mro__:
        names |= {*vars(base), *getattr(base, "__annotations__", {})}
    return names


def test_a_name_under_attributes_is_an_attribute():
    """A rename of a field leaves no stale name in the docstring, and a rename in the docstring no stale field."""
    for path in python_files("fzero"):
        for node in nodes_of(path, ast.ClassDef):
            section = re.search(r"Attributes:\n(.*?)(?:\n\n|\Z)", ast.get_docstring(node) or "", re.DOTALL)
            listed = re.findall(r"^    (\w+(?:, \w+)*):", section[1], re.MULTILINE) if section else []
            parts = path.relative_to(ROOT).with_suffix("").parts
            module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
            c = getattr(module, node.name, None)
            if listed and isinstance(c, type):
                source = ast.get_source_segment(text_of(path), node) or ""
                missing = {x for names in listed for x in names.split(", ")} - attributes_of(c, source)
                assert not missing, f"{path}:{node.lineno} {node.name} has no attribute {missing}"
