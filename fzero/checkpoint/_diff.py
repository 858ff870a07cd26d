"""What differs between two checkpoints, whatever ranks and stages wrote them: read one leaf of each at a time."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from fzero.checkpoint._cut import ShardedTree
from fzero.checkpoint._files import Files, files_at
from fzero.checkpoint._folder import read_whole
from fzero.checkpoint._look import fill_leaf
from fzero.checkpoint._manifest import Manifest

__all__ = ["Difference", "differences"]

_AT_ONCE = 1 << 20  # elements that are compared at a time


class Difference(NamedTuple):
    """A leaf or value that differs.

    Attributes:
        path: of it.
        one: what it is in the first checkpoint; empty if it is not there.
        other: what it is in the second.
        count: elements whose bits differ; None if there is nothing to compare element by element.
        largest: absolute difference of two elements; NaN if one of them is.
    """

    path: str
    one: str
    other: str
    count: int | None = None
    largest: float | None = None


def differences(
    one: Any, other: Any, progress: Callable[[int, int], None] = lambda done, total: None
) -> Iterator[Difference]:
    """Yield what differs between two checkpoints, in the order of paths.

    Args:
        one: the folder, or URL, of the first.
        other: that of the second.
        progress: called after each leaf with the bytes of it and of those before, and those of all.

    Raises:
        CheckpointError: if one of them is no whole checkpoint, or a leaf of it is damaged.
    """
    files = files_at(one), files_at(other)
    manifests = read_whole(files[0]), read_whole(files[1])
    texts = _texts(manifests[0].cut), _texts(manifests[1].cut)
    known: dict[tuple[int, int], tuple[int, float]] = {}
    done, total = 0, sum(x.nbytes for x in manifests[0].cut.leaves)
    for path in sorted({*texts[0], *texts[1]}):
        a, b = texts[0].get(path, ""), texts[1].get(path, "")
        numbers = manifests[0].cut.number.get(path), manifests[1].cut.number.get(path)
        if a != b or numbers[0] is None or numbers[1] is None:
            if a != b:
                yield Difference(path, a, b)
            continue
        pair = (numbers[0], numbers[1])
        if pair not in known:  # tied leaves are read once
            known[pair] = _compared(files, manifests, pair)
            done += manifests[0].cut.leaves[pair[0]].nbytes
            progress(min(done, total), total)
        count, largest = known[pair]
        if count:
            yield Difference(path, a, b, count, largest)


def _texts(cut: ShardedTree) -> dict[str, str]:
    """Describe each leaf and value by its path; a value by all of it."""
    leaves = {path: f"{cut.leaves[i]}{' per rank' if cut.leaves[i].per_rank else ''}" for path, i in cut.number.items()}
    return {**leaves, **{path: f"the value {value!r}" for path, value in cut.values.items()}}


def _compared(
    files: tuple[Files, Files], manifests: tuple[Manifest, Manifest], numbers: tuple[int, int]
) -> tuple[int, float]:
    """Return how many elements of two leaves differ in their bits, and the largest difference of two."""
    a, b = [_leaf(f, m, i) for f, m, i in zip(files, manifests, numbers, strict=True)]
    count, largest = 0, 0.0
    for at in range(0, a.numel(), _AT_ONCE):
        x, y = a[at : at + _AT_ONCE], b[at : at + _AT_ONCE]
        bits = [z.view(torch.uint8).view(z.numel(), -1) for z in (x, y)]
        differ = bits[0].ne(bits[1]).any(1)
        if differ.any():
            count, largest = count + int(differ.sum()), max(largest, _largest(x[differ], y[differ]), key=_nan_last)
    return count, largest


def _largest(x: torch.Tensor, y: torch.Tensor) -> float:
    """Return the largest difference of two elements; of integers it is exact as far as a float is."""
    if not (x.is_floating_point() or x.is_complex()):
        return float(max(abs(a - b) for a, b in zip(x.tolist(), y.tolist(), strict=True)))
    wide = torch.complex128 if x.is_complex() else torch.float64
    return float((x.to(wide) - y.to(wide)).abs().max())


def _leaf(files: Files, manifest: Manifest, number: int) -> torch.Tensor:
    leaf = manifest.cut.leaves[number]
    return fill_leaf(files, manifest, number, torch.empty(leaf.shape, dtype=leaf.dtype)).view(-1)


def _nan_last(x: float) -> tuple[bool, float]:
    return x != x, x
