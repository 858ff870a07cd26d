"""Blocks in a program that all ranks run: there a block's number is a tensor, and each rank's block another one.

Blocks that call the same torch functions on the same arguments are of one kind, whatever their attributes. One of them
runs for all, with the constants and masks of the rank's own. Where kinds differ, each runs, and the rank's is chosen.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero.nn._listening import Calls, calls_of, same_calls

__all__ = ["OneOf", "choose"]


class OneOf(NamedTuple):
    """The number of a block that only running ranks know.

    Attributes:
        indices: the numbers that it may be.
        which: a place in `indices`: an integer tensor without dimensions, such as `fzero.axis_index("pp")`.
    """

    indices: tuple[int, ...]
    which: torch.Tensor


def select(values: Sequence[torch.Tensor], which: torch.Tensor) -> torch.Tensor:
    """Choose one of some tensors, by a number that is a tensor."""
    if all(x is values[0] for x in values):
        return values[0]
    return torch.stack(list(values)).index_select(0, which.reshape(1)).squeeze(0)


Run = Callable[[int, Any, dict[str, torch.Tensor], torch.Tensor, Any], torch.Tensor]
Seen = dict[Any, Calls | None]


def choose(
    run: Run, seen: Seen, params: Any, constants: Sequence[Any], x: torch.Tensor, given: Sequence[Any], index: OneOf
) -> torch.Tensor:
    """Run the block that `index` means.

    Args:
        run: `(number of a block, params, constants, x, given) -> x`.
        seen: what blocks called, from earlier calls; it is added to.
        params: of this rank's block.
        constants: by block.
        x: what the block before returned.
        given: by block.
        index: the number of this rank's block.
    """
    kinds = _kinds(run, seen, params, constants, x, given, index)
    out: torch.Tensor | None = None
    for members in kinds:
        own = [i if i in members else members[0] for i in index.indices]
        mine = _selected([constants[i] for i in own], index.which), _selected([given[i] for i in own], index.which)
        y = run(members[0], params, mine[0], x, mine[1])
        if out is None:
            out = y
        else:
            is_mine = torch.tensor([i in members for i in index.indices], device=index.which.device)
            out = torch.where(select(list(is_mine), index.which), y, out)
    assert out is not None, "no index is possible"
    return out


def _kinds(
    run: Run, seen: Seen, params: Any, constants: Sequence[Any], x: torch.Tensor, given: Sequence[Any], index: OneOf
) -> list[list[int]]:
    """Return the possible blocks by kind: those of one kind are one function of their arguments."""
    kinds: list[tuple[Calls | None, list[int]]] = []
    for i in sorted(set(index.indices)):
        known = (i, _facts((params, constants[i], x, given[i])))
        if known not in seen:
            seen[known] = calls_of(lambda *args, i=i: run(i, *args), params, constants[i], x, given[i])
        calls = None if seen[known] is None else [known[1], *(seen[known] or [])]
        same = next((members for other, members in kinds if same_calls(other, calls)), None)
        if same is None:
            kinds.append((calls, [i]))
        else:
            same.append(i)
    return [members for _, members in kinds]


def _facts(args: Any) -> Any:
    leaves, structure = tree.flatten(args)
    return structure, tuple([(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x for x in leaves])


def _selected(trees: Sequence[Any], which: torch.Tensor) -> Any:
    """Choose one of some trees of one structure, leaf by leaf."""
    columns = [tree.flatten(t)[0] for t in trees]
    structure = tree.flatten(trees[0])[1]
    leaves = [select(xs, which) if isinstance(xs[0], torch.Tensor) else xs[0] for xs in zip(*columns, strict=True)]
    return tree.unflatten(structure, leaves)
