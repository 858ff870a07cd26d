"""Each example once, in order, and the mean over batches of unequal size."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from fzero import tree
from fzero._tracebacks import api_boundary
from fzero.axes import AxisName
from fzero.data._loading import BatchTarget, check_options, check_padding, check_sized, load_batches
from fzero.data._padding import Padding
from fzero.ranks import Mesh
from fzero.sharding import PerRank

__all__ = ["epoch", "mean"]


@api_boundary
def mean(totals: Iterable[tuple[Any, torch.Tensor]]) -> Any:
    """Return the mean over all examples of all batches, as Python numbers.

    The sums stay on their device, in double precision, until the last batch, so that no batch waits for the device.

    Args:
        totals: a pair for each batch, as a program of `fzero.evaluate` returns it: a tree of sums over the batch's
            examples, and the sum of their weights.

    Returns:
        The tree, with a float for each sum.

    Raises:
        ValueError: if there are no batches, or the weights add up to 0.

    Example:
        >>> mean([({"loss": torch.tensor(6.0)}, torch.tensor(4)), ({"loss": torch.tensor(1.0)}, torch.tensor(1))])
        {'loss': 1.4}
    """
    sums: Any = None
    for batch, weight in totals:
        batch_sums = tree.map(torch.Tensor.double, (batch, weight))
        sums = batch_sums if sums is None else tree.map(torch.add, sums, batch_sums)
    if sums is None:
        raise ValueError("fzero.data.mean: there are no batches to take the mean of")
    total, weight = sums
    if weight.item() == 0:
        raise ValueError("fzero.data.mean: the weights of all examples add up to 0")
    return tree.map(lambda x: (x / weight).item(), total)


@api_boundary
def epoch(
    dataset: Any,
    mesh: Mesh,
    *,
    global_batch: int,
    axis: AxisName = None,
    collate: Callable[[list[Any]], Any] | None = None,
    pad: Padding | None = None,
    **loader: Any,
) -> Iterator[tuple[PerRank, torch.Tensor]]:
    """Load each example of a data set once, in order, for `fzero.evaluate` and `fzero.predict`.

    All batches have one size, so that a jitted program is traced once. The last batch repeats its last example.

    Args:
        dataset: the data set, as `fzero.data.batches` takes it.
        mesh: the ranks.
        global_batch: the examples of one batch over all ranks.
        axis: the axes along which ranks get different examples; by default all.
        collate: makes a tree of tensors `[examples, ...]` from examples; by default torch's `default_collate`.
        pad: how to pad examples of unequal lengths, from `fzero.data.padding`.
        **loader: options of `torch.utils.data.DataLoader`.

    Returns:
        An iterator of pairs: a batch, as a `PerRank`, and the number of its examples without repetitions, over all
        ranks, as a 0-d int64 tensor.

    Raises:
        TypeError: if the data set has no length.
        ValueError: if `global_batch` is not a multiple of the ranks, or `pad` was made for another data set or batch.

    Example:
        >>> import fzero
        >>> for batch, rows in epoch(torch.arange(5), fzero.mesh(dp=2), global_batch=4):
        ...     print(batch.value.tolist(), int(rows))
        [[0, 1], [2, 3]] 4
        [[4, 4], [4, 4]] 1
    """
    check_sized(dataset)
    check_options(global_batch, mesh, axis, collate, loader)
    check_padding(pad, dataset, global_batch)
    length = len(dataset)
    starts = range(0, length, global_batch)
    indices = ([min(i, length - 1) for i in range(start, start + global_batch)] for start in starts)
    rows = (torch.tensor(min(global_batch, length - start), device="cpu") for start in starts)
    return zip(
        load_batches(dataset, indices, target=BatchTarget(mesh, axis), collate=collate, pad=pad, options=loader),
        rows,
        strict=True,
    )
