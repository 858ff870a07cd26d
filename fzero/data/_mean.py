"""The mean over batches of unequal size."""

from collections.abc import Iterable
from typing import Any

import torch

from fzero import tree

__all__ = ["mean"]


def mean(totals: Iterable[tuple[Any, torch.Tensor]]) -> Any:
    """Return the mean over all examples of all batches, as Python numbers.

    The sums stay on their device, in double precision, until the last batch: so nothing waits for a batch.

    Args:
        totals: a pair for each batch, as a program of `fzero.evaluate` returns it: a tree of sums over the batch's
            examples, and the sum of their weights.

    Returns:
        The tree, with a float for each sum.

    Raises:
        ValueError: if there is no batch, or the weights add up to 0.

    Example:
        >>> mean([({"loss": torch.tensor(6.0)}, torch.tensor(4)), ({"loss": torch.tensor(1.0)}, torch.tensor(1))])
        {'loss': 1.4}
    """
    sums: Any = None
    for batch, weight in totals:
        now = tree.map(torch.Tensor.double, (batch, weight))
        sums = now if sums is None else tree.map(torch.add, sums, now)
    if sums is None:
        raise ValueError("fzero.data.mean: there is no batch to take the mean of")
    total, weight = sums
    if weight.item() == 0:
        raise ValueError("fzero.data.mean: the weights of all examples add up to 0")
    return tree.map(lambda x: (x / weight).item(), total)
