"""The changes of which faults are made. Each finds one place within a symbol by a pattern (`tests.mutants.patterns`).

| change | what it does |
|---|---|
| `skipped("A.sort()")` | a statement is not run |
| `dropped("not A")` | an operand of `and`, `or`, an argument, an element, an entry, a filter, a decorator is left out |
| `always("A < B")`, `never("A < B")`, `negated("A < B")` | a condition, or an operand of `and` or `or`, is decided |
| `swapped("<", "<=")`, `swapped("A < 1", "<=")` | another operator |
| `bare("A * B")`, `bare("B(A, ...)")` | an expression becomes its part A |
| `constant(1, 2)` | another constant |
| `returns("None")` | another value is returned |
| `before("return A", "B()")`, `after("A = 1", "A += 1")` | further statements |
| `renamed("g")` | a function or a class has another name |
| `becomes("A * B", "B / A")` | the general one: an expression or a statement becomes another, or several |

Where several places fit, `at="2 of 3"` says which, and how many there are; `at="all"` changes each.
"""

import ast
import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tests.mutants.patterns import Match, fill, find_match, is_letter, letters, parse
from tests.mutants.places import Edit, Place, Scope, apply, edit, known_names, names_bound, places

OPERATORS: dict[str, type[ast.AST]] = {
    **{"+": ast.Add, "-": ast.Sub, "*": ast.Mult, "@": ast.MatMult, "/": ast.Div, "//": ast.FloorDiv, "%": ast.Mod},
    **{"**": ast.Pow, "<<": ast.LShift, ">>": ast.RShift, "|": ast.BitOr, "&": ast.BitAnd, "^": ast.BitXor},
    **{"==": ast.Eq, "!=": ast.NotEq, "<": ast.Lt, "<=": ast.LtE, ">": ast.Gt, ">=": ast.GtE, "is": ast.Is},
    **{"is not": ast.IsNot, "in": ast.In, "not in": ast.NotIn, "and": ast.And, "or": ast.Or},
}
PARTS = {
    ast.Call: ("args", "keywords"),
    ast.BoolOp: ("values",),
    ast.comprehension: ("ifs",),
    ast.Dict: ("keys", "values"),
}
PARTS |= dict.fromkeys((ast.List, ast.Tuple, ast.Set), ("elts",))
PARTS |= {ast.FunctionDef: ("decorator_list",), ast.ClassDef: ("decorator_list",)}


class Change(NamedTuple):
    """A change: the place that `is_one` allows and a pattern of `old` fits becomes what `new` makes of it."""

    words: str
    is_one: Callable[[Place], bool]
    old: tuple[ast.AST, ...]
    new: Callable[[Place, Match], list[ast.AST]]
    at: str = ""
    symbol: str | None = None
    uses: frozenset[str] = frozenset()  # the names in what is new

    def plant(self, text: str, symbol: str) -> str:
        """Return a file's text with the change in a symbol.

        Raises:
            LookupError: No place fits, or several do, or what is new uses a name that is not known there.
        """
        where = symbol if self.symbol is None else self.symbol
        among = places(text, where)
        if self.uses and (unknown := self.uses - known_names(text, among[0] if where else None)):
            raise LookupError(f"knows no {', '.join(sorted(unknown))} in {where!r}, which {self.words} uses")
        return apply(text, [self.edit(text, *match) for match in self.choose(among, where)])

    def edit(self, text: str, place: Place, match: Match) -> Edit:
        """Write one place anew."""
        new, parent = self.new(place, match), place.above[-1]
        if new or not (isinstance(parent, ast.BoolOp) and len(parent.values) == 2):
            return edit(text, place, new)
        (other,) = [value for value in parent.values if value is not place.node]
        return edit(text, _place_of(parent, place.above), [other])

    def choose(self, among: list[Place], where: str) -> list[tuple[Place, Match]]:
        """Find the places to change."""
        fits = [(place, match) for place in among if self.is_one(place) for match in self.matches(place)]
        nth, _, count = self.at.partition(" of ")
        if fits and self.at == "all":
            return fits
        if len(fits) == int(count or 1) >= int(nth or 1):
            return [fits[int(nth or 1) - 1]]
        remedy = f': at="1 of {len(fits)}" takes the first, at="all" each' if len(fits) > 1 else ""
        raise LookupError(f"has {len(fits)} places for {self.words} in {where!r}{remedy}")

    def matches(self, place: Place) -> Iterator[Match]:
        """Yield what the pattern's letters stand for at a place that it fits."""
        node, parent = place.node, place.above[-1]
        if self.is_one in (_is_part, _is_entry) and isinstance(parent, ast.Dict) and place.index is not None:
            node = ast.Dict([parent.keys[place.index]], [parent.values[place.index]])
        if not self.old:
            yield Match({})
        for old in self.old:
            if (match := find_match(old, node, Match({}))) is not None:
                yield match
                return


def skipped(statement: str, at: str = "") -> Change:
    """Leave out a statement."""
    return Change(f"skipped({statement!r})", _is_statement, (_statement(statement),), lambda *_: [ast.Pass()], at)


def dropped(part: str, at: str = "") -> Change:
    """Leave out a part: of a condition, a call, a list, a tuple, a set, a dictionary, or a comprehension."""
    return Change(f"dropped({part!r})", _is_part, tuple(_part(part)), lambda *_: [], at)


def always(condition: str, at: str = "") -> Change:
    """Let a condition always hold."""
    return Change(f"always({condition!r})", _is_condition, (parse(condition),), _make("True"), at)


def never(condition: str, at: str = "") -> Change:
    """Let a condition never hold."""
    return Change(f"never({condition!r})", _is_condition, (parse(condition),), _make("False"), at)


def negated(condition: str, at: str = "") -> Change:
    """Let a condition hold where it does not."""

    def made(place: Place, _: Match) -> list[ast.AST]:
        assert isinstance(place.node, ast.expr)
        return [ast.UnaryOp(ast.Not(), place.node)]

    return Change(f"negated({condition!r})", _is_condition, (parse(condition),), made, at)


def swapped(old: str, new: str, at: str = "") -> Change:
    """Put another operator in place of one, or of that of an expression or statement: `A < c`, `A += 1`."""
    words = f"swapped({old!r}, {new!r})"
    if old in OPERATORS:
        return Change(words, _any, (OPERATORS[old](),), lambda *_: [OPERATORS[new]()], at)
    pattern = parse(old)
    if not isinstance(pattern, ast.Compare | ast.BinOp | ast.BoolOp | ast.AugAssign):
        raise ValueError(f"{old!r} is no operation")
    return Change(words, _any, (pattern,), lambda place, _: [_operate(place.node, OPERATORS[new]())], at)


def before(statement: str, new: str, at: str = "") -> Change:
    """Put new statements before one."""
    made = _make(new, expression=False)
    words = f"before({statement!r}, {new!r})"
    old = (_statement(statement),)
    return Change(words, _is_statement, old, lambda p, match: [*made(p, match), p.node], at, uses=_names_in(new))


def after(statement: str, new: str, at: str = "") -> Change:
    """Put new statements after one."""
    made = _make(new, expression=False)
    words = f"after({statement!r}, {new!r})"
    old = (_statement(statement),)
    return Change(words, _is_statement, old, lambda p, match: [p.node, *made(p, match)], at, uses=_names_in(new))


def constant(old: object, new: object, at: str = "") -> Change:
    """Put another constant in place of one."""
    return Change(f"constant({old!r}, {new!r})", _any, (parse(repr(old)),), _make(repr(new)), at)


def returns(value: str, at: str = "") -> Change:
    """Let a function return another value."""
    return Change(f"returns({value!r})", _is_returned, (parse("A"),), _make(value), at, uses=_names_in(value))


def bare(expression: str, at: str = "") -> Change:
    """Put the part A of an expression in its place: without what is done with it, or added to it."""
    pattern = parse(expression)
    if "A" not in letters(pattern):
        raise ValueError(f"{expression!r} has no part A")
    return Change(f"bare({expression!r})", _any, (pattern,), _make("A"), at)


def becomes(old: str, new: str, at: str = "") -> Change:
    """Put another expression in place of one, other statements in place of one, or another entry of a dictionary."""
    if _is_pair(old):
        pair = (parse(f"{{{old}}}"),)
        return Change(
            f"becomes({old!r}, {new!r})", _is_entry, pair, _make(f"{{{new}}}"), at, uses=_names_in(f"{{{new}}}")
        )
    pattern = parse(old)
    expressions = isinstance(pattern, ast.expr) and isinstance(ast.parse(new).body[0], ast.Expr) and ";" not in new
    if not expressions:
        pattern = _statement(old)
    unbound = {w for statement in ast.parse(new).body for w in letters(statement)} - letters(pattern)
    if unbound:
        raise ValueError(f"{', '.join(sorted(unbound))} stands for nothing in {old!r}")
    words = f"becomes({old!r}, {new!r})"
    return Change(words, _any, (pattern,), _make(new, expressions), at, uses=_names_in(new))


def renamed(new: str) -> Change:
    """Give a function or a class another name."""

    def made(place: Place, _: Match) -> list[ast.AST]:
        node = copy.copy(place.node)
        assert isinstance(node, Scope)
        node.name = new
        return [node]

    return Change(f"renamed({new!r})", _is_symbol, (), made)


def in_symbol(symbol: str, change: Change) -> Change:
    """Make a change in another symbol of the file."""
    return change._replace(symbol=symbol)


def _make(template: str, expression: bool = True) -> Callable[[Place, Match], list[ast.AST]]:
    """Return a function that fills a template with what was found."""
    body: list[ast.AST] = [parse(template)] if expression else [*ast.parse(template).body]
    return lambda place, match: [fill(node, match) for node in body]


def _is_pair(text: str) -> bool:
    """Say whether a text is an entry of a dictionary, and nothing else: `"a": 1`."""
    try:
        ast.parse(text)
    except SyntaxError:
        return True
    return False


def _names_in(template: str) -> frozenset[str]:
    """List the names that a template reads and does not bind itself."""
    nodes = [node for node in ast.walk(ast.parse(template)) if isinstance(node, ast.Name | ast.arg | ast.alias)]
    read = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and not is_letter(n.id)}
    bound = {name for node in nodes for name in names_bound(node)}
    return frozenset(read - bound)


def _statement(text: str) -> ast.AST:
    """Read a statement, which a letter alone is not."""
    (node,) = ast.parse(text).body
    wild = isinstance(node, ast.Expr) and isinstance(node.value, ast.Name) and is_letter(node.value.id)
    if wild:
        raise ValueError(f"{text!r} is no statement")
    return node


def _part(text: str) -> Iterator[ast.AST]:
    """Read a part as an expression, an argument with a name, and an entry of a dictionary: as what it can be."""
    for around in ("_({})", "{{{}}}"):
        try:
            node = parse(around.format(text))
        except SyntaxError:
            continue
        if isinstance(node, ast.Call):
            yield from [*node.args, *node.keywords][:1]
        elif isinstance(node, ast.Dict):
            yield node


def _operate(node: ast.AST, operator: ast.AST) -> ast.AST:
    """Return an operation with another operator."""
    changed = {"ops": [operator]} if isinstance(node, ast.Compare) else {"op": operator}
    fields: dict[str, Any] = {**dict(ast.iter_fields(node)), **changed}
    return type(node)(**fields)


def _place_of(node: ast.AST, above: tuple[ast.AST, ...]) -> Place:
    """Return the place of a node that stands above others."""
    around = above[: above.index(node)]
    for field, value in ast.iter_fields(around[-1]):
        if value is node:
            return Place(around, field, None)
        if isinstance(value, list) and any(x is node for x in value):
            return Place(around, field, next(i for i, x in enumerate(value) if x is node))
    raise AssertionError("a node stands in the one above it")


def _any(place: Place) -> bool:
    """Allow every place."""
    return True


def _is_entry(place: Place) -> bool:
    """Say whether a place stands for an entry of a dictionary."""
    return place.of_entry


def _is_symbol(place: Place) -> bool:
    """Say whether a function or a class stands here."""
    return isinstance(place.node, Scope)


def _is_statement(place: Place) -> bool:
    """Say whether a statement stands here."""
    return isinstance(place.node, ast.stmt)


def _is_part(place: Place) -> bool:
    """Say whether a place can be left out; an entry of a dictionary counts as its key, or as what `**` unpacks."""
    parent = place.above[-1]
    if isinstance(parent, ast.Dict) and place.field == "values" and place.index is not None:
        return parent.keys[place.index] is None
    return place.field in PARTS.get(type(place.above[-1]), ())


def _is_condition(place: Place) -> bool:
    """Say whether something is decided here: a test, a filter, an operand of `and`, `or` and `not`, or a comparison."""
    tested = place.field in ("test", "ifs", "guard") or isinstance(place.above[-1], ast.BoolOp)
    return tested or isinstance(place.node, ast.Compare | ast.BoolOp) or _is_not(place.node) or _is_not(place.above[-1])


def _is_not(node: ast.AST) -> bool:
    """Say whether a node is a `not`."""
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def _is_returned(place: Place) -> bool:
    """Say whether the value of a `return` stands here."""
    return isinstance(place.above[-1], ast.Return)
