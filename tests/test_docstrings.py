"""Docstrings and comments of fzero: the names in them exist, and a long function has one."""

import ast
import contextlib
import importlib
import re
from typing import Any

from tests.sources import nodes_of, python_files, text_of


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
