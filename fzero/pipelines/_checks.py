"""What a pipeline checks of the blocks that it is given."""

from collections.abc import Sequence
from typing import Any

from fzero import tree
from fzero.layout.boxes import is_box

__all__ = ["check_alike"]


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
