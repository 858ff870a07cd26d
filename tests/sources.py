"""The files of the repository: each is read, parsed and walked once for all tests of the structure."""

import ast
import functools
import pathlib
import re
from collections.abc import Sequence
from typing import TypeVar

from tests.mutants.places import tree_of

ROOT = pathlib.Path(__file__).parents[1]
FOLDERS = ("fzero", "tests", "examples", "benchmarks", "docs")

Node = TypeVar("Node", bound=ast.AST)


@functools.cache
def python_files(*folders: str) -> list[pathlib.Path]:
    """List the Python files of folders of the repository, or of all that have any."""
    return [path for folder in folders or FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


@functools.cache
def text_of(path: pathlib.Path) -> str:
    """Read a file."""
    return path.read_text()


@functools.cache
def _nodes_by_class(path: pathlib.Path) -> dict[type, list[ast.AST]]:
    results: dict[type, list[ast.AST]] = {}
    for node in ast.walk(tree_of(text_of(path))):
        results.setdefault(type(node), []).append(node)
    return results


def nodes_of(path: pathlib.Path, kind: type[Node]) -> Sequence[Node]:
    """List a file's nodes of a class of syntax."""
    return _nodes_by_class(path).get(kind, [])  # pyright: ignore


_NAMES = r"[\w.]+(?: as \w+)?(?:, [\w.]+(?: as \w+)?)*"
_IMPORT = re.compile(rf"^[ \t]*((?:from [.\w]+ )?import (?:\([^)]*\)|{_NAMES})) *(?:[#;].*)?$", re.MULTILINE)


@functools.cache
def imports_of(path: pathlib.Path) -> list[ast.Import | ast.ImportFrom]:
    """List a file's imports, also those of scripts in its strings; the rest of the file is not parsed."""
    nodes = [node for text in _IMPORT.findall(text_of(path)) for node in tree_of(text).body]
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
