"""Borders: compiled code is given what lies as it was compiled for.

What a segment makes has the strides that were traced (`_torch.inductor`). An operation between segments may lay its
result out otherwise than its stand-in says. Then a copy goes over the border.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from fzero._torch import have_equal_strides
from fzero.graph.ir import COPY, is_input
from fzero.graph.run._compile import Runs
from fzero.graph.run._cut import source_of

__all__ = ["within_borders"]


def within_borders(runs: Runs, graph: Graph, fakes: Sequence[Any]) -> Runs:
    """Make a function that copies those arguments which do not lie as their stand-ins.

    Which these are is seen at the first call: strides do not depend on values.

    Args:
        runs: the code of a segment.
        graph: the segment.
        fakes: stand-ins of its arguments.
    """
    odd: list[int] | None = None

    def run(args: list[Any]) -> Sequence[Any]:
        nonlocal odd
        if odd is None:
            odd = _odd(args, fakes)
            _check_not_written(graph, odd)
        for i in odd:
            fake = fakes[i]
            args[i] = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=args[i].device).copy_(
                args[i]
            )
        return runs(args)

    return run


def _odd(args: Sequence[Any], fakes: Sequence[Any]) -> list[int]:
    pairs = enumerate(zip(args, fakes, strict=True))
    return [i for i, (x, fake) in pairs if isinstance(fake, torch.Tensor) and not have_equal_strides(x, fake)]


def _check_not_written(graph: Graph, odd: Sequence[int]) -> None:
    """Check that no write would go to a copy.

    Raises:
        RuntimeError: if one would.
    """
    inputs = [n for n in graph.nodes if is_input(n)]
    written: set[Node] = {source_of(n.all_input_nodes[0]) for n in graph.nodes if n.target is COPY}
    if any(inputs[i] in written for i in odd):
        raise RuntimeError(
            "fzero.jit: an argument that the step writes into does not lie as when it was traced; please report it. "
            'backend="fx" runs without a compiler'
        )
