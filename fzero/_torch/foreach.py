"""Torch's foreach operations: on an accelerator one launch serves many tensors, by the numbers of a launch for each."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fzero._torch.accelerator import is_accelerator
from fzero._torch.running_transforms import in_transform

__all__ = ["apply_to_groups", "can_group"]

_c: Any = torch

_GROUP_BYTES = 32 * 2**20  # of a group's first column: a launch of more takes longer than it takes to start another


class _TensorList:
    """Tensors of one dtype that are computed together.

    The other operand is a number, a 0-d tensor, or a list of as many tensors of the same shapes.
    """

    def __init__(self, tensors: list[torch.Tensor] | tuple[torch.Tensor, ...]) -> None:
        self.tensors = tensors
        self.dtype = tensors[0].dtype

    def __mul__(self, other: Any) -> "_TensorList":
        return _TensorList(_c._foreach_mul(self.tensors, _unwrap_list(other)))

    def __add__(self, other: Any) -> "_TensorList":
        return _TensorList(_c._foreach_add(self.tensors, _unwrap_list(other)))

    def __sub__(self, other: "_TensorList") -> "_TensorList":
        return _TensorList(_c._foreach_sub(self.tensors, other.tensors))

    def __truediv__(self, other: Any) -> "_TensorList":
        return _TensorList(_c._foreach_div(self.tensors, _unwrap_list(other)))

    __rmul__, __radd__ = __mul__, __add__

    def sqrt(self) -> "_TensorList":
        return _TensorList(_c._foreach_sqrt(self.tensors))

    def to(self, dtype: torch.dtype) -> "_TensorList":
        return self if dtype == self.dtype else _TensorList([x.to(dtype) for x in self.tensors])


def _unwrap_list(x: Any) -> Any:
    return x.tensors if isinstance(x, _TensorList) else x


def can_group(leaves: Sequence[Any]) -> bool:
    """Return whether some tensors may be computed together: not where transforms and modes see single operations."""
    if in_transform() or _get_current_dispatch_mode_stack():
        return False
    return any(isinstance(x, torch.Tensor) and is_accelerator(x.device) for x in leaves)


def apply_to_groups(f: Callable[..., Any], rows: Mapping[Any, Sequence[Any]]) -> dict[Any, torch.Tensor]:
    """Apply an elementwise function to groups of rows; the rows that fit into no group are left out.

    Args:
        f: it computes with the operators and methods of `_TensorList`.
        rows: its arguments, by any key.

    Returns:
        The results of the rows in groups, by their keys.
    """
    results: dict[Any, torch.Tensor] = {}
    for keys in _group_rows(rows):
        columns = zip(*[rows[key] for key in keys], strict=True)
        out = f(*[_TensorList(xs) if isinstance(xs[0], torch.Tensor) else xs[0] for xs in columns])
        results.update(zip(keys, out.tensors, strict=True))
    return results


def _group_rows(rows: Mapping[Any, Sequence[Any]]) -> Iterator[list[Any]]:
    """Yield the keys of rows that can be computed together, at least two."""
    kinds: dict[Any, list[list[Any]]] = {}
    room: dict[Any, int] = {}
    for key, row in rows.items():
        kind = _group_key(row)
        if kind is None:
            continue
        room[kind] = room.get(kind, 0) - row[0].nbytes
        if room[kind] < 0:
            kinds.setdefault(kind, []).append([])
            room[kind] = _GROUP_BYTES - row[0].nbytes
        kinds[kind][-1].append(key)
    for groups in kinds.values():
        yield from [keys for keys in groups if len(keys) > 1]


def _group_key(row: Sequence[Any]) -> Any:
    """Return the common key of the rows of a group, or None for a row that is computed alone."""
    first_leaf, tensors = row[0], [x for x in row if isinstance(x, torch.Tensor)]
    if not is_accelerator(first_leaf.device) or not first_leaf.is_floating_point():
        return None
    for x in tensors:
        if type(x) is not torch.Tensor or not x.is_contiguous():
            return None
        if (x.shape, x.dtype, x.device) != (first_leaf.shape, first_leaf.dtype, first_leaf.device):
            return None
    return first_leaf.dtype, first_leaf.device, tuple([None if isinstance(x, torch.Tensor) else x for x in row])
