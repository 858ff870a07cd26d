"""Check donated arguments, and match each with a result that may be written into it."""

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from fzero._torch import count_holders, storage_id
from fzero.graph.trace._call_arguments import Arguments, list_leaf_names

__all__ = ["check_separate", "match_results"]

# A thread of gloo holds the tensors of a collective for about a millisecond after its wait has returned.
_RELEASE_SECONDS = 0.2


def check_separate(arguments: Arguments, donated: Sequence[int], constants: Sequence[Any]) -> None:
    """Check that a write into a donated tensor changes no other tensor.

    Args:
        arguments: the arguments of the call.
        donated: the indices of the donated tensors.
        constants: the tensors and other values that the step captures.

    Raises:
        ValueError: if a donated tensor was made under inference mode, or shares memory with another argument or a
            captured tensor. Also if a view, its base, `.detach()`, `.numpy()` or an autograd graph of it lives
            elsewhere. The message names the tensor.
    """
    tensors = [*arguments.tensors, *[x for x in constants if isinstance(x, torch.Tensor)]]
    if not torch.is_inference_mode_enabled():
        _check_writable(arguments, donated)
    _check_apart(arguments, tensors, donated)
    _check_unshared(arguments, tensors, donated)


def _check_writable(arguments: Arguments, donated: Sequence[int]) -> None:
    for i in donated:
        if arguments.tensors[i].is_inference():
            raise ValueError(
                f"{arguments.tensor_names[i]} was made under torch.inference_mode and cannot be written into, and it "
                "is donated: make it outside, or jit with donate=()"
            )


def _check_apart(arguments: Arguments, tensors: Sequence[torch.Tensor], donated: Sequence[int]) -> None:
    """Check that no argument and no captured tensor overlaps with a donated one."""
    donated_indices = set(donated)
    spans = []
    for i, x in enumerate(tensors):
        if x.numel():
            start = x.data_ptr()
            spans.append((start, start + _extent_bytes(x), i))
    spans.sort()
    reach, holder = 0, 0
    for start, stop, i in spans:
        if start < reach and (i in donated_indices or holder in donated_indices):
            a, b = [_name_of(arguments, k) for k in sorted((holder, i))]
            raise ValueError(
                f"{a} and {b} share memory, and one is donated to fzero.jit: a write into one would change the other. "
                "Clone one, or jit with donate=()"
            )
        if stop > reach:
            reach, holder = stop, i


def _name_of(arguments: Arguments, index: int) -> str:
    names = arguments.tensor_names
    return str(names[index]) if index < len(names) else "a tensor that the step captures"


def _check_unshared(arguments: Arguments, tensors: Sequence[torch.Tensor], donated: Sequence[int]) -> None:
    """Check that only the call's tensors and the captured ones refer to the memory of a donated tensor."""
    deadline = time.monotonic() + _RELEASE_SECONDS
    while (i := _find_shared(arguments, tensors, donated)) is not None:
        if time.monotonic() > deadline:
            raise ValueError(
                f"{arguments.tensor_names[i]} is donated to fzero.jit and shares its memory with something that is not "
                "an argument: a view or its base, a .detach() or .numpy(), an autograd graph or a leaf beside it, "
                "perhaps a variable that a loop left over. It would see the new values: delete it (del) or replace it "
                "by a clone before the call, or jit with donate=()"
            )
        time.sleep(0.001)


def _find_shared(arguments: Arguments, tensors: Sequence[torch.Tensor], donated: Sequence[int]) -> int | None:
    """Return the number of the first donated tensor whose memory something else than `tensors` holds, or None."""
    references = count_holders([arguments.tensors[i] for i in donated])
    if max(references) > 1:
        known_references = Counter([storage_id(x) for x in tensors])
        for i, n in zip(donated, references, strict=True):
            if n > known_references[storage_id(arguments.tensors[i])]:
                return i
    return None


def match_results(
    arguments: Arguments, donated_argnums: Sequence[int], out: Any, leaves: Sequence[Any]
) -> dict[int, int]:
    """Match results with the donated tensors that they may be written into.

    A result is written into the tensor with its path in the argument at its own position, if shape and dtype agree.
    Other results are written into any free donated tensor of their shape and dtype.

    Args:
        arguments: the arguments of the call.
        donated_argnums: the positions of the donated arguments.
        out: the results.
        leaves: the leaves of the results.

    Returns:
        A mapping from the number of a result's leaf to the number of a distinct tensor.
    """
    tensors = arguments.tensors
    donated = [i for i, name in enumerate(arguments.tensor_names) if name.arg_index in donated_argnums]
    free = {i for i in donated if _is_dense(tensors[i])}
    by_path: dict[tuple[str, str], int] = {}  # and by space, for shards in two pieces
    for name, i in zip(arguments.leaf_names, arguments.tensor_indices, strict=True):
        if i is not None and i in free:
            by_path[name.path.split(".", 1)[1], name.space] = i
    results = list_leaf_names(out)
    single = not isinstance(out, tuple)
    matches: dict[int, int] = {}
    value_in_tensor: dict[int, int] = {}  # tensor -> id of the value that is written into it
    for k, (name, x) in enumerate(zip(results, leaves, strict=True)):
        i = by_path.get((("0." + name.path).rstrip(".") if single else name.path, name.space))
        if i is not None and _is_alike(x, tensors[i]) and value_in_tensor.setdefault(i, id(x)) == id(x):
            matches[k] = i
    values = {id(leaves[k]) for k in matches}
    for k, x in enumerate(leaves):
        if k not in matches and id(x) not in values:
            candidates = [
                i for i in sorted(free - value_in_tensor.keys()) if arguments.tensor_names[i].space == results[k].space
            ]
            i = next((i for i in candidates if _is_alike(x, tensors[i])), None)
            if i is not None:
                matches[k], value_in_tensor[i] = i, id(x)
    return matches


def _is_alike(x: Any, y: torch.Tensor) -> bool:
    is_alike = isinstance(x, torch.Tensor) and (x.shape, x.dtype) == (y.shape, y.dtype)
    return is_alike and (y.device.type == "meta" or x.device == y.device)


def _extent_bytes(x: torch.Tensor) -> int:
    if x.is_contiguous():
        return x.nbytes
    return (1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))) * x.element_size()


def _is_dense(x: torch.Tensor) -> bool:
    """Return whether a tensor can be written into: no two elements share memory, as in an expanded tensor."""
    reach = 1
    for stride, size in sorted((s, n) for n, s in zip(x.shape, x.stride(), strict=True) if n > 1):
        if stride < reach:
            return False
        reach = stride * size
    return True
