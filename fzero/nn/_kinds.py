"""Blocks in a program that all ranks run: there a block's number is a tensor, and each rank's block another one.

Blocks that call the same torch functions on the same arguments are of one kind, whatever their attributes: one of them
runs for all, with the constants and masks of the rank's own. Where kinds differ, each runs, and the rank's is chosen.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from fzero import tree
from fzero.random._keys import key
from fzero.random._seeded import draw_from

__all__ = ["OneOf", "choose"]


class OneOf(NamedTuple):
    """The number of a block that only running ranks know.

    Attributes:
        indices: the numbers that it may be.
        which: a place in `indices`: an integer tensor without dimensions, such as `fzero.axis_index("pp")`.
    """

    indices: tuple[int, ...]
    which: torch.Tensor


Calls = list[Any]


class _Listening(TorchFunctionMode):
    """Takes down which torch functions are called, with numbers for tensors."""

    def __init__(self, known: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.calls: Calls = []
        self.kept: list[torch.Tensor] = list(known)  # alive, so that no id is used twice
        self.numbers = {id(x): i for i, x in enumerate(self.kept)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given, structure = tree.flatten((args, kwargs or {}))
        made, form = tree.flatten(out)
        self.calls.append((func, structure, [self.seen(x) for x in given], form))
        for x in made:
            if isinstance(x, torch.Tensor) and id(x) not in self.numbers:
                self.numbers[id(x)] = len(self.kept)
                self.kept.append(x)
        return out

    def seen(self, x: Any) -> Any:
        """Return a tensor's number; itself for a constant, or for a tensor that nothing is known of."""
        return ("tensor", self.numbers[id(x)]) if isinstance(x, torch.Tensor) and id(x) in self.numbers else x


def calls_of(f: Callable[..., Any], *args: Any) -> Calls | None:
    """List the torch functions that `f(*args)` calls, on stand-ins without memory; None where these do not do."""
    leaves, structure = tree.flatten(args)
    absent = {id(x): torch.empty(x.shape, dtype=x.dtype, device="meta") for x in leaves if isinstance(x, torch.Tensor)}
    stand_ins = [absent.get(id(x), x) for x in leaves]
    listening = _Listening(list(absent.values()))

    def listened() -> None:
        with listening:
            out = f(*tree.unflatten(structure, stand_ins))
        listening.calls.append(listening.seen(out))

    try:
        draw_from(key(0), listened)  # draws of its own: the step's go on as if nothing had been called
    except Exception:
        return None  # data-dependent code, say
    return listening.calls


def same_calls(first: Calls | None, second: Calls | None) -> bool:
    """Return whether two lists of calls are known to be one function."""
    if first is None or second is None:
        return False
    return len(first) == len(second) and all(_same(a, b) for a, b in zip(first, second, strict=True))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return a is b
    if isinstance(a, tuple | list) and type(a) is type(b):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


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
