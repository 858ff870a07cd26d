"""Places in a file's syntax tree: the symbols, what stands within them, and how one is written anew."""

import ast
import builtins
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Place(NamedTuple):
    """Where a node stands: the nodes above it from the root on, its field of the last, and its index there."""

    above: tuple[ast.AST, ...]
    field: str
    index: int | None

    @property
    def node(self) -> ast.AST:
        """The node that stands here."""
        value = getattr(self.above[-1], self.field)
        return value if self.index is None else value[self.index]

    @property
    def of_entry(self) -> bool:
        """Return whether the place stands for an entry of a dictionary: the key does."""
        return isinstance(self.above[-1], ast.Dict) and self.field == "keys" and self.index is not None

    def put(self, new: Sequence[ast.AST]) -> None:
        """Let nodes stand here instead; none or several only in a list."""
        parent = self.above[-1]
        if self.index is None:
            setattr(parent, self.field, new[0])
            return
        if self.of_entry and isinstance(parent, ast.Dict) and new and isinstance(new[0], ast.Dict):
            self._replace(field="values").put(new[0].values)
            new = [key for key in new[0].keys if key]
        fields = ("keys", "values") if isinstance(parent, ast.Dict) and not new else (self.field,)
        for field in fields:  # an entry of a dictionary goes as a whole
            items = getattr(parent, field)
            setattr(parent, field, [*items[: self.index], *new, *items[self.index + 1 :]])


class Edit(NamedTuple):
    """Other text for a stretch of a file's bytes."""

    start: int
    end: int
    text: str


@functools.cache
def tree_of(text: str) -> ast.Module:
    """Parse a file. The tree is shared: who changes it puts back what was there."""
    return ast.parse(text)


def within(above: tuple[ast.AST, ...], closed: Any = ()) -> list[Place]:
    """List the places within a node, given with all above it; none within nodes of a closed class."""
    results: list[Place] = []
    _add_within(above, closed, results)
    return results


def _add_within(above: tuple[ast.AST, ...], closed: Any, results: list[Place]) -> None:
    for field, value in ast.iter_fields(above[-1]):
        nodes = enumerate(value) if isinstance(value, list) else ((None, value),)
        for index, node in nodes:
            if isinstance(node, ast.AST) and not isinstance(node, ast.expr_context):
                results.append(Place(above, field, index))
                if not isinstance(node, closed):
                    _add_within((*above, node), closed, results)


def names(node: ast.AST) -> list[str]:
    """List what a definition or an assignment gives a value to; an overload declares types only."""
    if isinstance(node, Scope):
        return [] if any(ast.unparse(d) == "overload" for d in getattr(node, "decorator_list", ())) else [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]


@functools.cache
def symbols(tree: ast.Module) -> dict[str, list[Place]]:
    """Find the functions, methods and classes of a file, and what its modules and classes assign, by qualified name."""
    results: dict[str, list[Place]] = {}
    for place in within((tree,), ast.expr):  # no definition stands in an expression
        around = [node for node in place.above if isinstance(node, Scope)]
        if isinstance(place.node, Scope) or not around or isinstance(around[-1], ast.ClassDef):
            for name in names(place.node):
                results.setdefault(".".join([*[node.name for node in around], name]), []).append(place)
    return results


@functools.cache
def places(text: str, symbol: str) -> list[Place]:
    """List the places of a symbol, in the order of the text; those of the whole file if it is empty.

    Raises:
        LookupError: The file has no such symbol, or several.
    """
    tree = tree_of(text)
    if not symbol:
        return sorted(within((tree,)), key=position)
    results = symbols(tree).get(symbol, [])
    if len(results) != 1:
        raise LookupError(f"has {len(results) or 'no'} {symbol!r}: no one function, class or assignment of this name")
    return sorted([*results, *within((*results[0].above, results[0].node))], key=position)


def names_bound(node: ast.AST) -> list[str]:
    """List the names that a node, without those below it, gives a value to."""
    if isinstance(node, ast.Name):
        return [node.id] if isinstance(node.ctx, ast.Store) else []
    if isinstance(node, ast.alias):
        return [(node.asname or node.name).split(".")[0]]
    word = getattr(node, "name", None) or getattr(node, "arg", None)
    return [word] if isinstance(word, str) and not isinstance(node, ast.keyword) else []


def known_names(text: str, place: Place | None) -> set[str]:
    """List the names that code at a place may use: those of the file and of the functions around the place."""
    tree = tree_of(text)
    own = tree if place is None else (*place.above, place.node)[1]
    return set(dir(builtins)) | _bound_in(tree) | _bound_below(own)


@functools.cache
def _bound_in(tree: ast.Module) -> set[str]:
    """List what a file binds outside of its functions and classes, and those."""
    return {name for place in within((tree,), Scope) for name in names_bound(place.node)}


@functools.cache
def _bound_below(node: ast.AST) -> set[str]:
    """List the names to which a node, or what is below it, gives a value."""
    return {name for n in ast.walk(node) for name in names_bound(n)}


def position(place: Place) -> tuple[int, int]:
    """Say where a place begins: line and column; that of what is around it, if it has none."""
    for node in (place.node, *reversed(place.above)):
        if isinstance(node, ast.stmt | ast.expr | ast.keyword | ast.excepthandler | ast.arg | ast.alias):
            return node.lineno, node.col_offset
    return 0, 0


def edit(text: str, place: Place, new: list[ast.AST]) -> Edit:
    """Write a place anew: the smallest expression or statement around it that has a text of its own."""
    chain, old = (*place.above, place.node), dict(ast.iter_fields(place.above[-1]))
    depth = len(chain) - 1
    fits = len(new) == 1 and isinstance(new[0], ast.expr) and not isinstance(new[0], ast.Starred | ast.Slice)
    fits = fits and not (place.of_entry and isinstance(new[0], ast.Dict))
    if not (_stands_alone(text, chain) and (fits or isinstance(place.node, ast.stmt))):
        depth -= 1
        while not _stands_alone(text, chain[: depth + 1]):
            depth -= 1
    start, end = _span(text, chain[depth])
    place.put(new)
    written = new if depth == len(chain) - 1 else [chain[depth]]
    column = getattr(chain[depth], "col_offset", 0)
    made = _write(written, column, text.encode()[start:end].count(b"\n"))
    for name, value in old.items():
        setattr(place.above[-1], name, value)
    return Edit(start, end, made)


def apply(text: str, edits: list[Edit]) -> str:
    """Return a text with edits in it, none of which may lie in another."""
    data, edits = text.encode(), sorted(edits)
    for one, other in itertools.pairwise(edits):
        if other.start < one.end:
            raise LookupError("would change a place within another: name one of them")
    for start, end, new in reversed(edits):
        data = data[:start] + new.encode() + data[end:]
    return data.decode()


def _write(nodes: list[ast.AST], column: int, lines: int) -> str:
    """Write nodes from a column on, in at least so many more lines: what follows then keeps its number."""
    for node in nodes:
        ast.fix_missing_locations(node)
    if isinstance(nodes[0], ast.expr):
        made = ast.unparse(nodes[0])
        return "(" + made + "\n" * max(0, lines - made.count("\n")) + ")"
    made = "\n".join(map(ast.unparse, nodes)).replace("\n", "\n" + " " * column)
    return made + "\n" * max(0, lines - made.count("\n"))


def _stands_alone(text: str, chain: tuple[ast.AST, ...]) -> bool:
    """Say whether the last node can be replaced by the text of another one, or by one in parentheses."""
    *above, node = chain
    if isinstance(node, ast.Module):
        return True
    if isinstance(node, ast.stmt):
        start, _ = _span(text, node)
        return not text.encode()[start:].startswith(b"elif")
    if not isinstance(node, ast.expr) or isinstance(node, ast.Starred | ast.Slice):
        return False
    if isinstance(node, ast.Tuple) and any(isinstance(x, ast.Slice | ast.Starred) for x in node.elts):
        return False
    named = isinstance(above[-1], ast.NamedExpr | ast.AnnAssign) and node is above[-1].target
    return not named and not any(isinstance(x, ast.JoinedStr) for x in above)


def _span(text: str, node: ast.AST) -> tuple[int, int]:
    """Say from which byte to which a node goes, with its decorators."""
    if not isinstance(node, ast.stmt | ast.expr):
        return 0, len(text.encode())
    lengths = [len(line) + 1 for line in text.encode().split(b"\n")]
    assert node.end_lineno is not None and node.end_col_offset is not None
    first = [node, *getattr(node, "decorator_list", [])]
    line = min(n.lineno for n in first)
    column = node.col_offset
    return sum(lengths[: line - 1]) + column, sum(lengths[: node.end_lineno - 1]) + node.end_col_offset
