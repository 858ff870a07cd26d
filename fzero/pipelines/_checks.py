"""What a pipeline is given: blocks among the parameters, which are alike, and one batch for all its ranks."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fzero import tree
from fzero.axes.axis import Axis
from fzero.axes.replicated import check_inputs_replicated
from fzero.axes.scope import data_axes
from fzero.layout.boxes import is_box

__all__ = ["blocks_of", "check_alike", "check_shared", "map_blocks"]


def blocks_of(params: Any, name: str) -> Sequence[Any]:
    """Return the blocks of a dict of parameters, that are its list of this name.

    Raises:
        ValueError: if it has none.
    """
    blocks = params.get(name) if isinstance(params, Mapping) else None
    if not isinstance(blocks, list | tuple) or not blocks:
        raise ValueError(
            f"fzero.pipeline: expected a dict of parameters with a list of blocks at {name!r}, and got "
            f"{type(params).__name__}" + (f" of {sorted(params)}" if isinstance(params, Mapping) else "")
        )
    return blocks


def map_blocks(f: Callable[[Sequence[Any]], Sequence[Any]], values: Any, name: str) -> Any:
    """Apply a function to the blocks of each dict of parameters in a tree, such as a state's moments.

    Raises:
        ValueError: if there is none. A tuple, as a state without moments is, need not have one.
    """

    def has_blocks(x: Any) -> bool:
        return isinstance(x, Mapping) and isinstance(x.get(name), list | tuple)

    nodes, structure = tree.flatten(values, has_blocks)
    if not any(map(has_blocks, nodes)) and not isinstance(values, tuple):
        blocks_of(values, name)  # says what is missing
    nodes = [{**x, name: f(blocks_of(x, name))} if has_blocks(x) else x for x in nodes]
    return tree.unflatten(structure, nodes)


def check_alike(blocks: Sequence[Any], name: str) -> None:
    """Check that blocks can be stacked: that they have one structure, and leaves of one shape and dtype.

    Raises:
        ValueError: if one differs from the first. Names the block and the leaf.
    """
    paths, leaves, structure = tree.flatten_with_paths(blocks[0], is_box)
    for i, block in enumerate(blocks[1:], 1):
        others, other = tree.flatten(block, is_box)
        if other != structure:
            raise ValueError(
                f"fzero.pipeline: {name}[{i}] is not like {name}[0], {tree.difference(blocks[0], block)}: blocks of a "
                "pipeline are stacked by rank, so all have one structure"
            )
        for path, x, y in zip(paths, leaves, others, strict=True):
            if tree.show(x) != tree.show(y):
                raise ValueError(
                    f"fzero.pipeline: {tree.place(f'{name}[{i}]', path)} is {tree.show(y)}, and that of {name}[0] is "
                    f"{tree.show(x)}: the blocks of a pipeline are stacked by rank, so all have leaves of one shape"
                )


def check_shared(batch: Any, axis: Axis) -> None:
    """Check that the ranks along a pipeline's axis are given one batch.

    Raises:
        ValueError: if a leaf is known to differ. Names it.
    """
    others = tuple([a.name for a in data_axes() if a.name != axis.name])
    wanted = f"split it over the others, mesh.split(batch, {others!r})" if others else "give it as it is"

    def says(where: str, name: str) -> str:
        return f"fzero.pipeline: {where} differs by rank along {name!r}, whose ranks work on one batch: {wanted}"

    paths, leaves, _ = tree.flatten_with_paths(batch)
    check_inputs_replicated("the batch", [axis] if axis.size > 1 else [], paths, leaves, says)
