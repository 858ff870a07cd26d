"""Patterns in Python's syntax: one capital letter stands for any name or expression, `...` for any number of them.

`A(B, ..., dim=1) is A` finds `f(x, y, dim=1) is f`, however it is laid out. A letter that comes twice stands twice for
the same. Where arguments have a `...`, further arguments with names may be there, too. What replaces the found may use
its letters, and its `...` in their order.
"""

import ast
import copy
from collections.abc import Iterator
from typing import NamedTuple

SKIPPED = {"ctx", "kind", "type_comment", "type_ignores"}  # fields that say nothing of the meaning

Syntax = ast.AST | list | str | None


class Match(NamedTuple):
    """The code that the letters of a pattern stand for, and that its `...` stand for, in their order."""

    letters: dict[str, ast.AST | str]
    gaps: tuple[list[ast.AST], ...] = ()


def parse(text: str) -> ast.AST:
    """Read an expression or a statement."""
    body = ast.parse(text).body
    if len(body) != 1:
        raise ValueError(f"{text!r} is not one expression or statement")
    return body[0].value if isinstance(body[0], ast.Expr) else body[0]


def is_letter(word: object) -> bool:
    """Say whether a word stands for any other."""
    return isinstance(word, str) and len(word) == 1 and "A" <= word <= "Z"


def is_gap(pattern: object) -> bool:
    """Say whether a part of a pattern is `...`."""
    node = pattern.value if isinstance(pattern, ast.Expr) else pattern
    return isinstance(node, ast.Constant) and node.value is ...


def find_match(pattern: Syntax, node: Syntax, match: Match) -> Match | None:
    """Return what a pattern's letters stand for in a node, in addition to what was found; None if it does not fit."""
    if isinstance(pattern, ast.Name) and is_letter(pattern.id):
        return _bound(pattern.id, node, match) if isinstance(node, ast.expr) else None
    if isinstance(pattern, list):
        return _sequence(pattern, node, match) if isinstance(node, list) else None
    if isinstance(pattern, ast.Constant) and isinstance(node, ast.Constant):
        same = type(pattern.value) is type(node.value) and repr(pattern.value) == repr(node.value)
        return match if same else None
    if isinstance(pattern, str) and isinstance(node, str) and is_letter(pattern):
        return _bound(pattern, node, match)
    if not isinstance(pattern, ast.AST):
        return match if pattern == node else None
    if not isinstance(node, ast.AST) or type(pattern) is not type(node):
        return None
    if isinstance(pattern, ast.Call) and isinstance(node, ast.Call) and any(map(is_gap, pattern.args)):
        return _call(pattern, node, match)
    return _fields(pattern, node, match)


def fill(template: ast.AST, match: Match) -> ast.AST:
    """Put what was found into a copy of a template.

    Raises:
        LookupError: A letter of the template stands for nothing.
    """
    return _Filling(match).visit(copy.deepcopy(template))


def letters(template: ast.AST) -> set[str]:
    """List the letters of a pattern."""
    return {word for node in ast.walk(template) for _, word in _words(node) if is_letter(word)}


def _fields(pattern: ast.AST, node: ast.AST, match: Match | None) -> Match | None:
    """Fit the fields of two nodes of one kind."""
    for name in pattern._fields:
        any_decorators = name == "decorator_list" and not getattr(pattern, name)
        if match is not None and name not in SKIPPED and not any_decorators:
            match = find_match(getattr(pattern, name, None), getattr(node, name, None), match)
    return match


def _bound(letter: str, node: ast.AST | str, match: Match) -> Match | None:
    """Let a letter stand for a node, or check that it stands for the same as before."""
    known = match.letters.get(letter)
    if known is None:
        return match._replace(letters={**match.letters, letter: node})
    return match if _text(known) == _text(node) else None


def _text(node: ast.AST | str) -> str:
    """Write what a letter stands for."""
    return node if isinstance(node, str) else ast.unparse(node)


def _sequence(patterns: list, nodes: list, match: Match) -> Match | None:
    """Fit patterns to nodes, one to one; a `...` takes as few as it can."""
    if not patterns:
        return match if not nodes else None
    first, *rest = patterns
    if is_gap(first):
        for n in range(len(nodes) + 1):
            taken = match._replace(gaps=(*match.gaps, nodes[:n]))
            if (fits := _sequence(rest, nodes[n:], taken)) is not None:
                return fits
        return None
    fits = find_match(first, nodes[0], match) if nodes else None
    return None if fits is None else _sequence(rest, nodes[1:], fits)


def _call(pattern: ast.Call, node: ast.Call, match: Match) -> Match | None:
    """Fit a call that has a `...`: the first one takes the arguments with other names."""
    function = find_match(pattern.func, node.func, match)
    fits = None if function is None else _sequence(pattern.args, node.args, function)
    if function is None or fits is None:
        return None
    others = list(node.keywords)
    for keyword in pattern.keywords:
        same = next((k for k in others if find_match(keyword, k, fits) is not None), None)
        fits = None if same is None else find_match(keyword, same, fits)
        if fits is None:
            return None
        others = [k for k in others if k is not same]
    first = len(function.gaps)
    return fits._replace(gaps=(*fits.gaps[:first], [*fits.gaps[first], *others], *fits.gaps[first + 1 :]))


def _words(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the words of a node that are names, and the fields in which they are."""
    if not isinstance(node, ast.Constant):
        yield from ((name, word) for name, word in ast.iter_fields(node) if isinstance(word, str))


class _Filling(ast.NodeTransformer):
    """Puts what was found in place of letters and `...`."""

    def __init__(self, match: Match) -> None:
        self.letters, self.gaps = match.letters, iter(match.gaps)

    def value(self, letter: str) -> ast.AST | str:
        """Return a copy of what a letter stands for."""
        if letter not in self.letters:
            raise LookupError(f"the letter {letter} stands for nothing")
        return copy.deepcopy(self.letters[letter])

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """Put in what a letter stands for."""
        if not is_letter(node.id):
            return node
        value = self.value(node.id)
        return ast.Name(value, ast.Load()) if isinstance(value, str) else value

    def visit_Constant(self, node: ast.Constant) -> ast.AST | list[ast.AST]:
        """Put in what a `...` has taken."""
        return copy.deepcopy(next(self.gaps, [node])) if is_gap(node) else node

    def visit_Expr(self, node: ast.Expr) -> ast.AST | list[ast.AST]:
        """Put in the statements that a `...` has taken."""
        if is_gap(node):
            return copy.deepcopy(next(self.gaps, [node]))
        return self.generic_visit(node)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Put words in place of letters, and sort arguments with names behind those without."""
        super().generic_visit(node)
        for name, word in list(_words(node)):
            if is_letter(word):
                setattr(node, name, _text(self.value(word)))
        if isinstance(node, ast.Call):
            node.keywords = [*[a for a in node.args if isinstance(a, ast.keyword)], *node.keywords]
            node.args = [a for a in node.args if not isinstance(a, ast.keyword)]
        return node
