"""Differences between two checkpoints, whatever ranks and stages wrote them.

One leaf of each is in memory at a time.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from fzero.checkpoint._files import Files, files_at
from fzero.checkpoint._folder import read_complete
from fzero.checkpoint._inspect import fill_leaf
from fzero.checkpoint.layout import Manifest, TreeLayout

__all__ = ["differences"]

_AT_ONCE = 1 << 20  # elements compared at a time


class _Difference(NamedTuple):
    """A leaf or value that differs between two checkpoints.

    Attributes:
        path: its path.
        one: its description in the first checkpoint; empty if it is missing there.
        other: its description in the second checkpoint.
        count: elements whose bits differ; None if the two cannot be compared element by element.
        largest: the largest absolute difference of two elements; NaN if one of them is NaN.
    """

    path: str
    one: str
    other: str
    count: int | None = None
    largest: float | None = None


def differences(
    one: Any, other: Any, progress: Callable[[int, int], None] = lambda nbytes, total: None
) -> Iterator[_Difference]:
    """Yield the differences between two checkpoints, sorted by path.

    Args:
        one: the folder or URL of the first checkpoint.
        other: the folder or URL of the second checkpoint.
        progress: called after each leaf with the bytes compared so far and the bytes of all leaves.

    Raises:
        CheckpointError: if one of them is not a complete checkpoint, or one of its leaves is damaged.
    """
    files = files_at(one), files_at(other)
    manifests = read_complete(files[0]), read_complete(files[1])
    texts = _describe_entries(manifests[0].layout), _describe_entries(manifests[1].layout)
    results: dict[tuple[int, int], tuple[int, float]] = {}
    nbytes, total = 0, sum(x.nbytes for x in manifests[0].layout.leaves)
    for path in sorted({*texts[0], *texts[1]}):
        a, b = texts[0].get(path, ""), texts[1].get(path, "")
        indices = manifests[0].layout.leaf_index.get(path), manifests[1].layout.leaf_index.get(path)
        if a != b or indices[0] is None or indices[1] is None:
            if a != b:
                yield _Difference(path, a, b)
            continue
        pair = (indices[0], indices[1])
        if pair not in results:  # tied leaves are read once
            results[pair] = _compare_leaves(files, manifests, pair)
            nbytes += manifests[0].layout.leaves[pair[0]].nbytes
            progress(min(nbytes, total), total)
        count, largest = results[pair]
        if count:
            yield _Difference(path=path, one=a, other=b, count=count, largest=largest)


def _describe_entries(layout: TreeLayout) -> dict[str, str]:
    """Describe each leaf by its dtype and shape and each value in full, by path."""
    leaves = {
        path: f"{layout.leaves[i]}{' per rank' if layout.leaves[i].per_rank else ''}"
        for path, i in layout.leaf_index.items()
    }
    return {**leaves, **{path: f"the value {value!r}" for path, value in layout.values.items()}}


def _compare_leaves(
    files: tuple[Files, Files], manifests: tuple[Manifest, Manifest], indices: tuple[int, int]
) -> tuple[int, float]:
    """Return how many elements of two leaves differ in their bits, and the largest difference."""
    a, b = [_read_leaf(f, m, i) for f, m, i in zip(files, manifests, indices, strict=True)]
    count, largest = 0, 0.0
    for start in range(0, a.numel(), _AT_ONCE):
        x, y = a[start : start + _AT_ONCE], b[start : start + _AT_ONCE]
        bits = [z.view(torch.uint8).view(z.numel(), -1) for z in (x, y)]
        differ = bits[0].ne(bits[1]).any(1)
        if differ.any():
            count += int(differ.sum())
            largest = max(largest, _largest_difference(x[differ], y[differ]), key=_nan_last)
    return count, largest


def _largest_difference(x: torch.Tensor, y: torch.Tensor) -> float:
    """Return the largest difference of two elements. For integers it is exact up to the rounding to a float."""
    if not (x.is_floating_point() or x.is_complex()):
        return float(max(abs(a - b) for a, b in zip(x.tolist(), y.tolist(), strict=True)))
    wide_dtype = torch.complex128 if x.is_complex() else torch.float64
    return float((x.to(wide_dtype) - y.to(wide_dtype)).abs().max())


def _read_leaf(files: Files, manifest: Manifest, index: int) -> torch.Tensor:
    leaf = manifest.layout.leaves[index]
    return fill_leaf(files, manifest, index, torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")).view(-1)


def _nan_last(x: float) -> tuple[bool, float]:
    return x != x, x
