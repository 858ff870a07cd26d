"""Which arguments may be donated, and which result is written into which of them."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from fzero._torch import holders, storage_id
from fzero.graph.trace._arguments import Arguments, places_of

__all__ = ["check_separate", "pairs"]


def check_separate(arguments: Arguments, donated: Sequence[int], captured: Sequence[Any]) -> None:
    """Check that what is written into a donated tensor changes no other tensor.

    Args:
        arguments: of the call.
        donated: the numbers of the donated tensors.
        captured: what the step holds on to beside its arguments.

    Raises:
        ValueError: if a donated tensor was made under inference mode, or shares memory with another argument or a
            captured tensor. Also if a view, its base, `.detach()`, `.numpy()` or an autograd graph of it lives
            elsewhere. The message names it.
    """
    tensors = [*arguments.tensors, *[x for x in captured if isinstance(x, torch.Tensor)]]
    if not torch.is_inference_mode_enabled():
        _check_writable(arguments, donated)
    _check_apart(arguments, tensors, donated)
    _check_unshared(arguments, tensors, donated)


def _check_writable(arguments: Arguments, donated: Sequence[int]) -> None:
    for i in donated:
        if arguments.tensors[i].is_inference():
            raise ValueError(
                f"{arguments.places[i]} was made under torch.inference_mode and cannot be written into, and it is "
                "donated: make it outside, or jit with donate=()"
            )


def _check_apart(arguments: Arguments, tensors: Sequence[torch.Tensor], donated: Sequence[int]) -> None:
    """Check that no argument and no captured tensor overlaps with a donated one."""
    chosen = set(donated)
    spans = []
    for i, x in enumerate(tensors):
        if x.numel():
            start = x.data_ptr()
            spans.append((start, start + _extent(x), i))
    spans.sort()
    reach, owner = 0, 0
    for start, stop, i in spans:
        if start < reach and (i in chosen or owner in chosen):
            a, b = [_named(arguments, k) for k in sorted((owner, i))]
            raise ValueError(
                f"{a} and {b} share memory, and one is donated to fzero.jit: what is written into one would change "
                "the other. Clone one, or jit with donate=()"
            )
        if stop > reach:
            reach, owner = stop, i


def _named(arguments: Arguments, number: int) -> str:
    places = arguments.places
    return str(places[number]) if number < len(places) else "a tensor that the step captures"


def _check_unshared(arguments: Arguments, tensors: Sequence[torch.Tensor], donated: Sequence[int]) -> None:
    """Check that no tensor beside those of the call holds on to the memory of a donated one."""
    held = holders([arguments.tensors[i] for i in donated])
    if max(held) <= 1:
        return
    given = Counter([storage_id(x) for x in tensors])
    for i, n in zip(donated, held, strict=True):
        if n > given[storage_id(arguments.tensors[i])]:
            raise ValueError(
                f"{arguments.places[i]} shares its memory with something that is no argument (a view of it, what "
                "it is a view of, its .detach() or .numpy(), an autograd graph, a leaf that lay beside it; perhaps a "
                "variable that a loop left), and it is donated to fzero.jit: that would see the new values. Let it go "
                "(del) or clone it before the call, or jit with donate=()"
            )


def pairs(arguments: Arguments, positions: Sequence[int], out: Any, leaves: Sequence[Any]) -> dict[int, int]:
    """Match results with the donated tensors that they may be written into.

    A result goes where the argument at its own position has the same path, shape and dtype. The others go to any
    donated tensor of their shape and dtype.

    Args:
        arguments: of the call.
        positions: of the donated arguments.
        out: the results.
        leaves: their leaves.

    Returns:
        A mapping from the number of a result's leaf to that of a distinct tensor.
    """
    tensors = arguments.tensors
    free = {i for i, p in enumerate(arguments.places) if p.position in positions and _dense(tensors[i])}
    by_path: dict[tuple[str, str], int] = {}  # of a shard in two pieces, each by its memory, too
    for place, i in zip(arguments.leaf_places, arguments.index, strict=True):
        if i is not None and i in free:
            by_path[place.path.split(".", 1)[1], place.space] = i
    results = places_of(out)
    single = not isinstance(out, tuple)
    into: dict[int, int] = {}
    taken: dict[int, int] = {}  # tensor -> id of the value that it takes
    for k, (place, x) in enumerate(zip(results, leaves, strict=True)):
        i = by_path.get((("0." + place.path).rstrip(".") if single else place.path, place.space))
        if i is not None and _fits(x, tensors[i]) and taken.setdefault(i, id(x)) == id(x):
            into[k] = i
    values = {id(leaves[k]) for k in into}
    for k, x in enumerate(leaves):
        if k not in into and id(x) not in values:
            alike = [i for i in sorted(free - taken.keys()) if arguments.places[i].space == results[k].space]
            i = next((i for i in alike if _fits(x, tensors[i])), None)
            if i is not None:
                into[k], taken[i] = i, id(x)
    return into


def _fits(x: Any, y: torch.Tensor) -> bool:
    alike = isinstance(x, torch.Tensor) and (x.shape, x.dtype) == (y.shape, y.dtype)
    return alike and (y.device.type == "meta" or x.device == y.device)


def _extent(x: torch.Tensor) -> int:
    if x.is_contiguous():
        return x.nbytes
    return (1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))) * x.element_size()


def _dense(x: torch.Tensor) -> bool:
    """Return whether a tensor can be written into: no two elements share memory, as an expanded one's do."""
    reach = 1
    for stride, size in sorted((s, n) for n, s in zip(x.shape, x.stride(), strict=True) if n > 1):
        if stride < reach:
            return False
        reach = stride * size
    return True
