"""Trees: all of fzero flattens them here, so the order of leaves is the same everywhere.

A tree is a value that torch.func flattens: dicts, lists, tuples, NamedTuples, and nodes registered with torch's pytree.
`None` is an empty node, as in JAX. A leaf's path is its keys joined by dots: `"blocks.0.attn.weight"`.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fzero._arguments import check_callable
from fzero._donated import check_not_donated
from fzero._format import format_tensor
from fzero._names import missing_names
from fzero._notice import trouble_link
from fzero._torch import apply_to_groups, can_group, children_without_names, pytree, storage_id
from fzero._tracebacks import api_boundary

__all__ = ["Tree", "flatten", "flatten_with_paths", "map", "map_with_path", "numel", "tensors", "unflatten"]

Tree = Any
"""A pytree: nested containers with tensors, boxes or other values as leaves. Python has no type for it."""

_MOST_SHOWN = 100  # characters of a value in a message


class LayoutError(ValueError):
    """A tree has another layout than a step takes, or than another tree: full, sharded otherwise, or for another mesh.

    Example:
        >>> import fzero, torch
        >>> opt = fzero.optim.sgd(0.1)
        >>> step = fzero.shard(lambda p, s, x: (p, s), stage=3, mesh=fzero.mesh(dp=2))
        >>> try:
        ...     step({"w": torch.ones(4)}, (), step.mesh.split(torch.ones(2)))
        ... except fzero.errors.LayoutError as error:
        ...     print(str(error)[:66])
        argument 0 (parameters) is plain, and stage 3 takes it sharded: pa
    """


LayoutError.__module__ = "fzero.errors"  # where a pickle finds it


def flatten(tree: Tree, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Any]:
    """Flatten a tree into its leaves (including `None`s) and its structure.

    Raises:
        DonatedError: if a leaf was donated to a jitted step.
    """
    _check_is_leaf(is_leaf)
    leaves, structure = pytree.tree_flatten(tree, is_leaf)
    _check_leaves(leaves)
    return leaves, structure


def unflatten(structure: Any, leaves: list[Any]) -> Any:
    """Build a tree from its structure and its leaves."""
    return pytree.tree_unflatten(leaves, structure)


def _key_name(key: Any) -> str:
    if isinstance(key, pytree.SequenceKey):
        return str(key.idx)
    return str(key.name) if isinstance(key, pytree.GetAttrKey) else str(key.key)


def _check_is_leaf(is_leaf: Callable[[Any], bool] | None) -> None:
    if is_leaf is not None:
        check_callable("is_leaf", is_leaf, "a function of a node that returns a bool")


def _check_leaves(leaves: list[Any]) -> None:
    if not torch.compiler.is_compiling():
        check_not_donated(leaves)


def flatten_with_paths(tree: Tree, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[str], list[Any], Any]:
    """Flatten a tree into the dotted paths of its leaves, its leaves, and its structure."""
    _check_is_leaf(is_leaf)
    try:
        pairs, structure = pytree.tree_flatten_with_path(tree, is_leaf)
    except ValueError:  # a node registered without names for its children
        pairs, (_, structure) = _flatten_without_names(tree, is_leaf), flatten(tree, is_leaf)
    _check_leaves([x for _, x in pairs])
    return (
        [".".join([_key_name(k) for k in keys]) for keys, _ in pairs],
        [x for _, x in pairs],
        structure,
    )


def _flatten_without_names(tree: Any, is_leaf: Callable[[Any], bool] | None) -> list[tuple[tuple[Any, ...], Any]]:
    """Flatten a tree into pairs of the keys of a leaf and the leaf; children without names have numbers as keys."""

    def stops(x: Any) -> bool:
        return (is_leaf is not None and is_leaf(x)) or children_without_names(x) is not None

    pairs: list[tuple[tuple[Any, ...], Any]] = []
    for keys, x in pytree.tree_flatten_with_path(tree, stops)[0]:
        children = None if is_leaf is not None and is_leaf(x) else children_without_names(x)
        if children is None:
            pairs.append((keys, x))
        for i, child in enumerate(children or []):
            pairs += [
                ((*keys, pytree.SequenceKey(i), *below), y) for below, y in _flatten_without_names(child, is_leaf)
            ]
    return pairs


def identity(x: Any) -> Any:
    """Return a key that identifies an object: its id.

    torch.compile guards on ids, and Dynamo of torch 2.11 knows none of computed tensors and numbers. So under
    torch.compile the key of a tensor is the tensor, and that of a number its type and value.
    """
    if torch.compiler.is_compiling():
        if isinstance(x, torch.Tensor):
            return x
        if isinstance(x, bool | int | float):
            return type(x), x
    return id(x)


def index_tensors(leaves: Sequence[Any]) -> tuple[list[int], list[int | None]]:
    """Index the distinct tensors among leaves. A tied tensor, which is several leaves, has one index.

    Returns:
        The position of each distinct tensor's first leaf; and the number of each leaf, None if it is not a tensor.
    """
    key_of = identity if torch.compiler.is_compiling() else id
    positions: list[int] = []
    indices: list[int | None] = []
    index_of: dict[Any, int] = {}
    for position, x in enumerate(leaves):
        if not isinstance(x, torch.Tensor):
            indices.append(None)
            continue
        index = index_of.setdefault(key_of(x), len(positions))
        if index == len(positions):
            positions.append(position)
        indices.append(index)
    return positions, indices


def tensors(tree: Tree) -> list[torch.Tensor]:
    """List the tensors of a tree."""
    return [x for x in flatten(tree)[0] if isinstance(x, torch.Tensor)]


def numel(tree: Tree) -> int:
    """Count the elements of a tree's full leaves, an equal number at every stage. Tied leaves count once.

    Example:
        >>> import fzero, torch
        >>> step = fzero.shard(lambda params, opt_state, batch: (params, opt_state), stage=3, mesh=fzero.mesh(dp=4))
        >>> params, _ = step.init({"w": torch.ones(3, 5), "b": torch.ones(3)}, fzero.optim.sgd(0.1))
        >>> fzero.tree.numel(params)
        18
    """
    leaves = {id(x): x for x in flatten(tree, is_box)[0]}
    return sum(x.full_numel() if is_box(x) else x.numel() for x in leaves.values() if hasattr(x, "numel") or is_box(x))


@api_boundary
def map(f: Callable[..., Any], tree: Tree, *rest: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Apply `f` to the corresponding leaves of trees of one structure; `None` stays `None`.

    Tied leaves, which are one tensor object in each tree, get one result, so they stay tied. `f` must be pure.

    Args:
        f: called with a leaf of `tree` and the corresponding nodes of `rest`.
        tree: the tree that gives the structure.
        *rest: trees with that structure, or deeper.
        is_leaf: a function that returns whether to treat a node as a leaf.

    Returns:
        A tree of the results.

    Raises:
        ValueError: if a tree of `rest` has another structure. The message names the first path that differs.

    Example:
        >>> map(lambda x, y: x + y, {"a": 1, "b": None}, {"a": 2, "b": None})
        {'a': 3, 'b': None}
    """
    check_callable("f", f, "a function of leaves, as in fzero.tree.map(f, tree)")
    leaves, structure = flatten(tree, is_leaf)
    columns = [leaves_up_to(tree, other, is_leaf, ("tree", f"rest[{i}]")) for i, other in enumerate(rest)]
    results: dict[tuple[Any, ...], Any] = {}
    out = []
    for xs in zip(leaves, *columns, strict=True):
        if not isinstance(xs[0], torch.Tensor):
            out.append(None if xs[0] is None else f(*xs))
            continue
        key = tuple([identity(x) for x in xs])
        if key not in results:
            results[key] = f(*xs)
        out.append(results[key])
    return unflatten(structure, out)


def copy_shared(values: Any, others: Any) -> Any:
    """Copy the tensors of a tree that share memory with those of another."""
    storages = {storage_id(x) for x in tensors(others)}
    return map(lambda x: x.clone() if isinstance(x, torch.Tensor) and storage_id(x) in storages else x, values)


def elementwise(f: Callable[..., Any], tree: Tree, *rest: Any) -> Any:
    """Apply an elementwise `f` like `map`; on an accelerator one launch serves many small tensors.

    `f` computes with `+`, `-`, `*`, `/`, `sqrt` and `to`, on tensors or on a list of them. Its
    numbers are the same either way.
    """
    leaves = flatten(tree)[0]
    if not can_group(leaves):
        return map(f, tree, *rest)
    columns = [leaves, *[leaves_up_to(tree, x, names=("tree", f"rest[{i}]")) for i, x in enumerate(rest)]]
    rows = {
        tuple([identity(x) for x in xs]): xs for xs in zip(*columns, strict=True) if isinstance(xs[0], torch.Tensor)
    }
    results_by_group = apply_to_groups(f, rows)

    def result(*xs: Any) -> Any:
        key = tuple([identity(x) for x in xs])
        return results_by_group[key] if key in results_by_group else f(*xs)

    return map(result, tree, *rest)


@api_boundary
def map_with_path(f: Callable[[str, Any], Any], tree: Tree, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Apply `f(path, leaf)` to every leaf; `None` stays `None`."""
    check_callable("f", f, "a function (path, leaf), as in fzero.tree.map_with_path(f, tree)")
    paths, leaves, structure = flatten_with_paths(tree, is_leaf)
    return unflatten(structure, [None if x is None else f(p, x) for p, x in zip(paths, leaves, strict=True)])


def leaves_up_to(
    tree: Tree,
    other: Any,
    is_leaf: Callable[[Any], bool] | None = None,
    names: tuple[str, str] = ("the first", "the second"),
) -> list[Any]:
    """List the nodes of `other` that correspond to the leaves of `tree`. Messages call the two by `names`.

    Raises:
        ValueError: if `other` has another structure, or a box in place of a plain leaf. The message names the first
            path that differs.
    """
    leaves, structure = flatten(tree, is_leaf)
    try:
        nodes = structure.flatten_up_to(other)
    except (ValueError, TypeError) as error:
        raise structure_error(tree, other, is_leaf, names) from error
    for x, y in zip(leaves, nodes, strict=True):
        if is_box(y) and not is_box(x) and x is not None:
            raise structure_error(tree, other, is_leaf, names)
    return nodes


def structure_error(
    tree: Tree,
    other: Any,
    is_leaf: Callable[[Any], bool] | None = None,
    names: tuple[str, str] = ("the first", "the second"),
) -> ValueError:
    """Return an error that names the first difference of two trees: in structure, or in sharding a `LayoutError`."""
    paths, leaves, structure = flatten_with_paths(tree, is_box)
    other_paths, other_leaves, other_structure = flatten_with_paths(other, is_box)
    leaves_by_path = dict(zip(paths, leaves, strict=True))
    other_leaves_by_path = dict(zip(other_paths, other_leaves, strict=True))
    for path, x in leaves_by_path.items():
        if path not in other_leaves_by_path:
            return ValueError(
                f"trees differ in structure: {names[0]} has leaf {path!r} ({show(x)}), and {names[1]} has not"
            )
    for path, y in other_leaves_by_path.items():
        if path not in leaves_by_path:
            return ValueError(
                f"trees differ in structure: {names[1]} has leaf {path!r} ({show(y)}), and {names[0]} has not"
            )
    for path, x in leaves_by_path.items():
        y = other_leaves_by_path[path]
        if is_box(x) != is_box(y) or (is_leaf is None and is_box(x) and show(x) != show(y)):
            a, b = [repr(v) if is_box(v) else show(v) for v in (x, y)]
            if a == b:  # they differ in what a repr leaves out
                a, b = show(x), show(y)
            return LayoutError(
                f"trees are sharded differently at {path!r}: {a} against {b}. "
                "Both must come from one partition: make the state with step.init, or partition it the same way; "
                "convert a state of another stage by "
                "step.partition(other.gather(state), like=step.init(params, opt)[1]). A second tree of parameters in "
                "a step, such as a moving average, needs its position too: fzero.shard(..., param_argnums=(0, 2))"
                + trouble_link("trees-that-are-sharded-differently")
            )
    return ValueError(f"trees differ in structure: {structure} against {other_structure}")


def is_box(x: Any) -> bool:
    """Return whether a node is a box of fzero (`fzero.sharding._boxes`), which is shown and compared as one leaf."""
    return getattr(type(x), "is_box", False) is True


def check_is_tree(name: str, values: Any, call: str) -> None:
    """Check that a value is a tree, a tensor, a box or None, before a function that passes other leaves through.

    Args:
        name: the name of the argument.
        values: what the user gave for it.
        call: how the call is written.

    Raises:
        TypeError: if the value is one leaf of another type, such as a number or an optimizer.

    Example:
        >>> check_is_tree("params", 3, "fzero.gather(params)")
        Traceback (most recent call last):
        TypeError: params is 3: expected a tree of tensors, as in fzero.gather(params)
    """
    if values is None or isinstance(values, torch.Tensor) or is_box(values):
        return
    leaves = pytree.tree_leaves(values)
    if len(leaves) == 1 and leaves[0] is values:
        raise TypeError(f"{name} is {show(values)}: expected a tree of tensors, as in {call}")


def show(x: Any) -> str:
    """Describe a leaf, a box, or what was given in its place, in a message: a value with a long text by its type."""
    if is_box(x):
        return x.describe()
    if isinstance(x, torch.Tensor):
        return format_tensor(x.dtype, x.shape)
    text = repr(x)
    kind = type(x)
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    return text if len(text) <= _MOST_SHOWN else f"a {name}"


def not_a_tensor(label: str, path: str, x: Any) -> str:
    """Return an error message for a leaf of parameters that is not a tensor."""
    if inspect.isgenerator(x):
        return f"{label} is a generator: pass dict(model.named_parameters()), or the module itself"
    remedy = "register its class as a pytree node"
    if type(x).__module__ == "numpy" or isinstance(x, bool | int | float):
        remedy = "pass torch.as_tensor(x) of it"
    elif isinstance(x, str | bytes):
        remedy = "take it out, and let the step close over it"
    elif callable(x):
        remedy = "of apply, params, buffers = fzero.nn.functional(module) pass params"
    return f"{leaf_name(label, path)} is {show(x)}: expected a tensor; {remedy}"


def leaf_name(label: str, path: str) -> str:
    """Return the name of a leaf for messages: `leaf_name("result", "2.acc")` is `"result 2, leaf 'acc'"`."""
    first_key, _, inner_path = path.partition(".")
    if not first_key.isdigit() or label not in ("argument", "result"):
        return f"{label} leaf {path!r}" if path else label
    return f"{label} {first_key}" + (f", leaf {inner_path!r}" if inner_path else "")


_FOREIGN_NAMES = {  # names of other libraries
    "leaves": "fzero.tree.flatten(tree)[0]",
    "leaves_with_path": "fzero.tree.flatten_with_paths(tree)",
    "structure": "fzero.tree.flatten(tree)[1]",
    "tree_flatten": "fzero.tree.flatten",
    "tree_leaves": "fzero.tree.flatten(tree)[0]",
    "tree_map": "fzero.tree.map",
    "tree_map_with_path": "fzero.tree.map_with_path",
    "tree_unflatten": "fzero.tree.unflatten(structure, leaves)",
}

if not TYPE_CHECKING:  # a type checker finds a missing name itself
    __getattr__ = missing_names(__name__, __all__, _FOREIGN_NAMES)
