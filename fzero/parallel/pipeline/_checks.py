"""What a pipeline is given, checked: blocks that are alike, one batch for all ranks; and the rule for blocks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fzero import tree
from fzero.axes import Axis, SplitRule, Stacked, axis_names, axis_size, check_inputs_replicated, data_axes
from fzero.parallel.pipeline._model import Placement
from fzero.parallel.schedules import Schedule, check, check_name
from fzero.sharding import is_box

__all__ = [
    "PipelineSplit",
    "blocks_of",
    "check_alike",
    "check_arguments",
    "check_depth",
    "check_schedule",
    "check_shared",
    "check_untied",
    "map_blocks",
]

# What a pipeline is given: blocks among the parameters, which are alike, and one batch for all its ranks.


def check_arguments(functions: Mapping[str, Any], counts: Mapping[str, Any]) -> None:
    """Check arguments of `fzero.pipeline`, by name: those that are functions, and those that count something.

    Raises:
        TypeError: if one is no function.
        ValueError: if one is no int, or less than 1.
    """
    for name, f in functions.items():
        if not callable(f):
            raise TypeError(f"fzero.pipeline: {name}={f!r}: expected a function")
    for name, n in counts.items():
        if not _is_count(n, 1):
            raise ValueError(f"fzero.pipeline: {name}={n!r}: expected an int, at least 1")


def check_schedule(schedule: Any, micro_batches: int, stages: int) -> None:
    """Check that a schedule is a name, for so many stages a rank, or a table that can run, for so many micro-batches.

    Raises:
        TypeError: if it is neither a name nor a table.
        ValueError: if no schedule has the name, or a table cannot run, or is for another number of micro-batches.
    """
    if isinstance(schedule, Schedule):
        check(schedule)
        if schedule.micro_batches != micro_batches:
            raise ValueError(
                f"fzero.pipeline: micro_batches={micro_batches}, and the schedule {schedule.name!r} has "
                f"{schedule.micro_batches}"
            )
    else:
        check_name(schedule, stages)


def check_depth(depth: Any) -> int | tuple[int, ...]:
    """Return the number of blocks, or those of each stage.

    Raises:
        ValueError: if it is neither.
    """
    several = isinstance(depth, Iterable)
    counts = tuple(depth) if several else (depth,)
    if not all(_is_count(n, 0) for n in counts) or sum(counts) < 1:
        raise ValueError(
            f"fzero.pipeline: depth={depth!r}: expected the number of blocks, an int, at least 1; or how many each "
            "stage has, some of which may be 0"
        )
    return counts if several else counts[0]


def _is_count(n: Any, least: int) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and n >= least


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


def map_blocks(f: Callable[[Mapping[str, Any]], Sequence[Any]], values: Any, name: str) -> Any:
    """Put `f(params)` in the place of the blocks of each dict of parameters in a tree, such as a state's moments.

    Raises:
        ValueError: if there is none. A tuple, as a state without moments is, need not have one.
    """

    def has_blocks(x: Any) -> bool:
        return isinstance(x, Mapping) and isinstance(x.get(name), list | tuple)

    def type_of(x: Any) -> type:
        return tuple if isinstance(x[name], tuple) else list

    nodes, structure = tree.flatten(values, has_blocks)
    if not any(map(has_blocks, nodes)) and not isinstance(values, tuple):
        blocks_of(values, name)  # says what is missing
    nodes = [{**x, name: type_of(x)(f(x))} if has_blocks(x) else x for x in nodes]
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


def check_untied(params: Mapping[str, Any], name: str) -> None:
    """Check that no leaf of a block is tied to one of another block, or to one outside: stacked they would part.

    Raises:
        ValueError: if one is. Names both places.
    """
    home: dict[int, tuple[str, int | None]] = {}  # by leaf, its path, and the block that has it
    items = [(f"{name}.{i}", i, block) for i, block in enumerate(params[name])]
    for where, number, values in [*items, *[(key, None, x) for key, x in params.items() if key != name]]:
        for path, x in zip(*tree.flatten_with_paths(values, is_box)[:2], strict=True):
            if not isinstance(x, torch.Tensor):
                continue
            place = f"{where}.{path}" if path else where
            other, block = home.setdefault(id(x), (place, number))
            if block != number:
                raise ValueError(
                    f"fzero.pipeline: leaves {other!r} and {place!r} are tied, one parameter: blocks are stacked "
                    "by rank, and each would train a copy of its own. What several use is no leaf of a block"
                )


def check_shared(batch: Any, axis: Axis) -> None:
    """Check that the ranks along a pipeline's axis are given one batch.

    Raises:
        ValueError: if a leaf is known to differ. The message names it.
    """
    others = tuple([a.name for a in data_axes() if a.name != axis.name])
    wanted = f"split it over the others, mesh.split(batch, {others!r})" if others else "give it as it is"

    def says(where: str, name: str) -> str:
        return f"fzero.pipeline: {where} differs by rank along {name!r}, whose ranks work on one batch: {wanted}"

    paths, leaves, _ = tree.flatten_with_paths(batch)
    check_inputs_replicated("the batch", [axis] if axis.size > 1 else [], paths, leaves, says)


# The rule by which a pipeline's parameters are cut: blocks are split along its axis.


@dataclass(frozen=True)
class PipelineSplit:
    """A rule for `fzero.shard(..., split=)`, of a `Pipeline`.

    Attributes:
        axis: the pipeline's.
        blocks: the key of the blocks among the parameters.
        placed: says where blocks lie, given the ranks along the axis and how many slots each has.
        rule: how leaves are split along further axes, by their paths without a mesh.
    """

    axis: str
    blocks: str
    placed: Callable[[int, int], Placement]
    rule: SplitRule | None = None

    @property
    def apart(self) -> tuple[str, ...]:
        """The axes along which ranks have work of their own, and no data of their own."""
        return (self.axis,)

    def __call__(self, path: str, leaf: torch.Tensor) -> Mapping[str, int] | None:
        """Say how a leaf is split: stacked blocks along the pipeline's axis, dimension 0.

        Raises:
            ValueError: if a leaf of a block is not stacked.
        """
        stacked = self._is_of_a_block(path) and self.axis in axis_names()  # else blocks are not stacked
        if stacked and (not leaf.ndim or leaf.shape[0] != axis_size(self.axis)):
            raise ValueError(
                f"fzero.pipeline: leaf {path!r} is {tree.show(leaf)}, and blocks are stacked by rank, "
                f"[{axis_size(self.axis)}, ...]: give loss.stack(params, mesh)"
            )
        further = {} if self.rule is None else dict(self.rule(path, leaf[0] if stacked else leaf) or {})
        if not stacked:
            return further or None
        return {self.axis: 0, **{axis: dim + 1 if dim >= 0 else dim for axis, dim in further.items()}}

    def stacked(self, paths: Sequence[str], sizes: Mapping[str, int]) -> Mapping[str, Stacked]:
        """Say which block each rank has in each place of the stacked list.

        Args:
            paths: of the leaves of a tree of parameters.
            sizes: the ranks along each axis.

        Raises:
            ValueError: if the list has more or fewer places than blocks take on so many ranks.
        """
        depth = len(self.blocks.split("."))
        places = {path.split(".")[depth] for path in paths if self._is_of_a_block(path)}
        if not places or self.axis not in sizes:
            return {}
        by_rank = self.placed(sizes[self.axis], len(places)).blocks
        return {self.axis: Stacked(self.blocks, tuple(zip(*by_rank, strict=True)))}

    def _is_of_a_block(self, path: str) -> bool:
        return path.startswith(f"{self.blocks}.")
