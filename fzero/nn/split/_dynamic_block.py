"""Blocks in a program that all ranks run. There the index of the rank's block is a tensor, which differs by rank.

Blocks that call the same torch functions on the same arguments are of one kind, even if their attributes differ.
One block of each kind runs, with the constants and masks of the rank's own block. If there are several kinds, all of
them run, and each rank selects the output of its own.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from fzero import tree
from fzero._torch import tensor_on
from fzero.random import call_with_key, key

__all__ = ["DynamicBlockCall", "DynamicIndex", "run_dynamic_block"]

_Calls = list[Any]
_CallCache = dict[Any, _Calls | None]


class _CallRecorder(TorchFunctionMode):
    """Records the calls of torch functions, with indices in place of tensors."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.calls: _Calls = []
        self.tensors: list[torch.Tensor] = list(inputs)  # kept alive, so that no id is used twice
        self.indices = {id(x): i for i, x in enumerate(self.tensors)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        leaves, structure = tree.flatten((args, kwargs or {}))
        outputs, out_structure = tree.flatten(out)
        self.calls.append((func, structure, [self.label(x) for x in leaves], out_structure))
        for x in outputs:
            if isinstance(x, torch.Tensor) and id(x) not in self.indices:
                self.indices[id(x)] = len(self.tensors)
                self.tensors.append(x)
        return out

    def label(self, x: Any) -> Any:
        """Return a tensor's index; a constant or an unknown tensor is returned itself."""
        return ("tensor", self.indices[id(x)]) if isinstance(x, torch.Tensor) and id(x) in self.indices else x


def _record_calls(f: Callable[..., Any], *args: Any) -> _Calls | None:
    """List the torch functions that `f(*args)` calls, run on meta tensors; None if it does not run on those."""
    leaves, structure = tree.flatten(args)
    meta_tensors = {
        id(x): torch.empty(x.shape, dtype=x.dtype, device="meta") for x in leaves if isinstance(x, torch.Tensor)
    }
    stand_ins = [meta_tensors.get(id(x), x) for x in leaves]
    recorder = _CallRecorder(list(meta_tensors.values()))

    def record() -> None:
        with recorder:
            out = f(*tree.unflatten(structure, stand_ins))
        recorder.calls.append(recorder.label(out))

    try:
        call_with_key(key(0), record)  # draws from a key of its own, so that the step's draws stay the same
    except Exception:
        return None  # such as data-dependent code
    return recorder.calls


def _are_same_calls(calls: _Calls | None, other_calls: _Calls | None) -> bool:
    """Return whether two lists of calls certainly belong to one function."""
    if calls is None or other_calls is None:
        return False
    return len(calls) == len(other_calls) and all(_are_same(a, b) for a, b in zip(calls, other_calls, strict=True))


def _are_same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return a is b
    if isinstance(a, tuple | list) and type(a) is type(b):
        return len(a) == len(b) and all(_are_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


class DynamicIndex(NamedTuple):
    """The index of a block that is known only while ranks run.

    Attributes:
        indices: the numbers that the index may be.
        position: a position in `indices`: a 0-d integer tensor, such as `fzero.axes.axis_index("pp")`.
    """

    indices: tuple[int, ...]
    position: torch.Tensor


def _select_at(values: Sequence[torch.Tensor], position: torch.Tensor) -> torch.Tensor:
    """Return `values[position]`, where `position` is a tensor."""
    if all(x is values[0] for x in values):
        return values[0]
    return torch.stack(list(values)).index_select(0, position.reshape(1)).squeeze(0)


class DynamicBlockCall(NamedTuple):
    """A call of one of several blocks.

    Attributes:
        run: `(number of a block, params, constants, x, arguments) -> x`.
        params: the parameters of this rank's block.
        constants: the constants of each block.
        x: the output of the previous block.
        arguments: the other arguments of each block.
    """

    run: Callable[[int, Any, dict[str, torch.Tensor], torch.Tensor, Any], torch.Tensor]
    params: Any
    constants: Sequence[Any]
    x: torch.Tensor
    arguments: Sequence[Any]


def run_dynamic_block(call: DynamicBlockCall, cache: _CallCache, index: DynamicIndex) -> torch.Tensor:
    """Run the block with number `index`.

    Args:
        call: the call.
        cache: the calls of torch functions by blocks that earlier runs recorded. New ones are added.
        index: the number of this rank's block.
    """
    kinds = _group_by_kind(call, cache, index.indices)
    out: torch.Tensor | None = None
    for members in kinds:
        indices = [i if i in members else members[0] for i in index.indices]
        inputs = (
            _select_tree([call.constants[i] for i in indices], index.position),
            _select_tree([call.arguments[i] for i in indices], index.position),
        )
        y = call.run(members[0], call.params, inputs[0], call.x, inputs[1])
        if out is None:
            out = y
        else:
            is_mine = tensor_on([i in members for i in index.indices], device=index.position.device)
            out = torch.where(_select_at(list(is_mine), index.position), y, out)
    assert out is not None, "no index is possible"
    return out


def _group_by_kind(call: DynamicBlockCall, cache: _CallCache, indices: Sequence[int]) -> list[list[int]]:
    """Group the possible blocks by kind. Blocks of one kind are the same function of their arguments."""
    kinds: list[tuple[_Calls | None, list[int]]] = []
    for i in sorted(set(indices)):
        inputs = (call.params, call.constants[i], call.x, call.arguments[i])
        cache_key = (i, _leaves_signature(inputs))
        if cache_key not in cache:
            cache[cache_key] = _record_calls(partial(call.run, i), *inputs)
        calls = None if cache[cache_key] is None else [cache_key[1], *(cache[cache_key] or [])]
        same_kind = next((members for kind_calls, members in kinds if _are_same_calls(kind_calls, calls)), None)
        if same_kind is None:
            kinds.append((calls, [i]))
        else:
            same_kind.append(i)
    return [members for _, members in kinds]


def _leaves_signature(args: Any) -> Any:
    leaves, structure = tree.flatten(args)
    return structure, tuple([(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x for x in leaves])


def _select_tree(trees: Sequence[Any], position: torch.Tensor) -> Any:
    """Select one of several trees of equal structure, leaf by leaf."""
    columns = [tree.flatten(t)[0] for t in trees]
    structure = tree.flatten(trees[0])[1]
    leaves = [
        _select_at(xs, position) if isinstance(xs[0], torch.Tensor) else xs[0] for xs in zip(*columns, strict=True)
    ]
    return tree.unflatten(structure, leaves)
