"""Checks of a pipeline's arguments."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from fzero import tree
from fzero._arguments import check_callable, check_int, check_remat, is_int
from fzero.axes import Axis, check_inputs_replicated, loss_axes
from fzero.parallel.pipeline._model import BLOCK_KEYWORDS
from fzero.parallel.schedules import PipelineSchedule, check, check_name
from fzero.sharding import is_box

__all__ = [
    "check_alike",
    "check_arguments",
    "check_depth",
    "check_rules",
    "check_schedule",
    "check_shared",
    "check_untied",
    "find_block_list",
    "map_blocks",
]


def check_arguments(functions: Mapping[str, Any], counts: Mapping[str, Any]) -> None:
    """Check the arguments of `fzero.pipeline` that are functions, and those that are counts, by name.

    Raises:
        TypeError: if one is not a function.
        ValueError: if a count is not an int, or is less than 1.
    """
    for name, f in functions.items():
        check_callable(f"fzero.pipeline: {name}", f)
        _check_takes(name, f)
    for name, n in counts.items():
        check_int(f"fzero.pipeline: {name}", n)


_TAKEN = {"block": ("p", "x"), "first": ("rest", "batch"), "last": ("rest", "x", "batch")}


def _check_takes(name: str, f: Callable[..., Any]) -> None:
    """Check that a part of the model takes the arguments that it will get, as far as its signature is known."""
    try:
        signature = inspect.signature(f)
    except (TypeError, ValueError):  # a builtin
        return
    options = [key for key in BLOCK_KEYWORDS if name == "block" and key in signature.parameters]
    try:
        signature.bind(*_TAKEN[name], **dict.fromkeys(options))
    except TypeError:
        optional_text = ", and index= or batch= if it names them" if name == "block" else ""
        raise TypeError(
            f"fzero.pipeline: {name} takes {signature}: expected a function ({', '.join(_TAKEN[name])}){optional_text}"
        ) from None


def check_rules(remat: Any, split: Any) -> None:
    """Check the arguments of `fzero.pipeline` that may be functions.

    Raises:
        TypeError: if `split` is not a rule.
        ValueError: if `remat` is not a value for `fzero.remat(save=)`.
    """
    check_remat("fzero.pipeline: remat", remat)
    if split is not None:
        check_callable("fzero.pipeline: split", split, "a rule, a function (path, leaf) -> {axis: dimension}")


def check_schedule(schedule: Any, micro_batches: int, stages_per_rank: int) -> None:
    """Check a schedule: a name that supports this number of stages per rank, or a table for these micro-batches.

    Raises:
        TypeError: if it is neither a name nor a table.
        ValueError: if no schedule has the name, a table cannot run, or a table has another number of micro-batches.
    """
    if isinstance(schedule, PipelineSchedule):
        check(schedule)
        if schedule.micro_batches != micro_batches:
            raise ValueError(
                f"fzero.pipeline: micro_batches={micro_batches}, but the schedule {schedule.name!r} has "
                f"{schedule.micro_batches}: use the same number"
            )
    else:
        check_name(schedule, stages_per_rank)


def check_depth(depth: Any) -> int | tuple[int, ...]:
    """Return the number of blocks, or the numbers of blocks per stage.

    Raises:
        ValueError: if `depth` is neither.
    """
    is_list = isinstance(depth, Iterable)
    counts = tuple(depth) if is_list else (depth,)
    if not all(is_int(n) and n >= 0 for n in counts) or sum(counts) < 1:
        raise ValueError(
            f"fzero.pipeline: depth={depth!r}: expected the number of blocks, an int, at least 1; or one number per "
            "stage, some of which may be 0"
        )
    return counts if is_list else counts[0]


def find_block_list(params: Any, name: str) -> Sequence[Any]:
    """Return the list of blocks in a dict of parameters.

    Raises:
        ValueError: if the dict has no list of this name.
    """
    blocks = params.get(name) if isinstance(params, Mapping) else None
    if not isinstance(blocks, list | tuple) or not blocks:
        raise ValueError(
            f"fzero.pipeline: expected a dict of parameters with a list of blocks at {name!r}, but got "
            f"{type(params).__name__}" + (f" of {sorted(params)}" if isinstance(params, Mapping) else "")
        )
    return blocks


def map_blocks(f: Callable[[Mapping[str, Any]], Sequence[Any]], values: Any, name: str) -> Any:
    """Replace the blocks of each dict of parameters in a tree by `f(params)`. The tree may be an optimizer's state.

    Raises:
        ValueError: if the tree holds no such dict. A tuple need not hold one, such as a state without moments.
    """

    def has_blocks(x: Any) -> bool:
        return isinstance(x, Mapping) and isinstance(x.get(name), list | tuple)

    def block_list_type(x: Any) -> type:
        return tuple if isinstance(x[name], tuple) else list

    nodes, structure = tree.flatten(values, has_blocks)
    if not any(map(has_blocks, nodes)) and not isinstance(values, tuple):
        find_block_list(values, name)  # raises, and names the missing list
    nodes = [{**x, name: block_list_type(x)(f(x))} if has_blocks(x) else x for x in nodes]
    return tree.unflatten(structure, nodes)


def check_alike(blocks: Sequence[Any], name: str) -> None:
    """Check that blocks can be stacked: all need the same structure, and leaves of the same shapes and dtypes.

    Raises:
        ValueError: if a block differs from the first. The message names the block and the leaf.
    """
    paths, leaves, structure = tree.flatten_with_paths(blocks[0], is_box)
    for i, block in enumerate(blocks[1:], 1):
        block_leaves, block_structure = tree.flatten(block, is_box)
        if block_structure != structure:
            raise ValueError(
                f"fzero.pipeline: {name}[{i}] is not like {name}[0], {tree.structure_error(blocks[0], block)}: "
                "a pipeline stacks its blocks by rank, so all need the same structure"
            )
        for path, x, y in zip(paths, leaves, block_leaves, strict=True):
            if tree.show(x) != tree.show(y):
                raise ValueError(
                    f"fzero.pipeline: {tree.leaf_name(f'{name}[{i}]', path)} is {tree.show(y)}, but in {name}[0] it is "
                    f"{tree.show(x)}: a pipeline stacks its blocks by rank, so all need leaves of the same shapes"
                )


def check_untied(params: Mapping[str, Any], name: str) -> None:
    """Check that no leaf of a block is tied to a leaf outside it. Stacking would make two parameters of the one.

    Raises:
        ValueError: if such a leaf is tied. The message names both leaves.
    """
    owners: dict[int, tuple[str, int | None]] = {}  # by the id of a leaf: its path, and the block that holds it
    items = [(f"{name}.{i}", i, block) for i, block in enumerate(params[name])]
    for prefix, index, values in [*items, *[(key, None, x) for key, x in params.items() if key != name]]:
        for path, x in zip(*tree.flatten_with_paths(values, is_box)[:2], strict=True):
            if not isinstance(x, torch.Tensor):
                continue
            label = f"{prefix}.{path}" if path else prefix
            first_label, block = owners.setdefault(id(x), (label, index))
            if block != index:
                raise ValueError(
                    f"fzero.pipeline: leaves {first_label!r} and {label!r} are tied, one parameter: blocks are stacked "
                    "by rank, and each would train its own copy. Move a parameter that several blocks use out of them"
                )


def check_shared(batch: Any, axis: Axis) -> None:
    """Check that the ranks along a pipeline's axis receive the same batch.

    Raises:
        ValueError: if a leaf is known to differ by rank. The message names the leaf.
    """
    rest = tuple([a.name for a in loss_axes() if a.name != axis.name])
    advice = f"split it over the other axes, mesh.split(batch, {rest!r})" if rest else "do not split it"

    def message(label: str, name: str) -> str:
        return f"fzero.pipeline: {label} differs by rank along {name!r}, whose ranks share one batch: {advice}"

    paths, leaves, _ = tree.flatten_with_paths(batch)
    check_inputs_replicated("the batch", [axis] if axis.size > 1 else [], paths, leaves, message)
