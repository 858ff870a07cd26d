"""The type check of replicated results: in a simulation a plain result that differs by rank is an error.

A value that no rank made different has no batch dimension at the axis's vmap, so the check is exact there: what comes
out unbatched is provably equal on all ranks.
"""

from typing import Any

import torch

from fzero import tree
from fzero._torch import allow_in_graph
from fzero.world import bound

__all__ = ["assume_replicated", "check_replicated"]


class _Replicated(torch.autograd.Function):
    """The identity on a value that does not differ by rank; on one that does an error, or with `assume` rank 0's."""

    @staticmethod
    def forward(x: torch.Tensor, token: torch.Tensor, path: str, assume: bool) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tangents[0]

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, token: torch.Tensor, path: str, assume: bool) -> Any:
        if in_dims[1] is None:  # a user's vmap
            return _Replicated.apply(x, token, path, assume), in_dims[0]
        if in_dims[0] is None:
            return x.view_as(x), None
        if assume:
            return x.select(in_dims[0], 0).clone(), None
        raise ValueError(
            f"{tree.place('result', path)} differs by rank, and a plain result must be replicated: reduce it with "
            "fzero.pmean or fzero.psum, wrap it in fzero.PerRank to get every rank's, or, if it is equal on all ranks "
            "for a reason that fzero cannot see, return fzero.assume_replicated(x)"
        )


@allow_in_graph
def _as_replicated(x: torch.Tensor, token: torch.Tensor, path: str, assume: bool) -> torch.Tensor:
    return _Replicated.apply(x, token, path, assume)  # pyright: ignore[reportReturnType]


def assume_replicated(x: Any) -> Any:
    """Declare that a tree of tensors is equal on all ranks, for a reason that fzero cannot see.

    A simulation takes a value for replicated if no input of it differs by rank, or a collective made it equal:
    `batch.new_zeros(())` looks as if it differed. A simulation then keeps rank 0's value, a distributed run each
    rank's own, so a wrong declaration makes the two differ.

    Example:
        >>> import fzero
        >>> m = fzero.mesh(dp=2)
        >>> m.spmd(lambda x: assume_replicated(x.new_ones(())))(m.split(torch.zeros(4)))
        tensor(1.)
    """
    for axis in bound():
        x = tree.map(lambda leaf, axis=axis: _as_replicated(leaf, axis.token, "", True), x)
    return x


def check_replicated(
    token: torch.Tensor, paths: list[str], leaves: list[Any], varies: list[bool]
) -> list[torch.Tensor]:
    """Check the plain results; one tensor at several paths stays one."""
    checked: dict[int, torch.Tensor] = {}
    out = []
    for path, x, v in zip(paths, leaves, varies, strict=True):
        if isinstance(x, torch.Tensor) and not v:
            if id(x) not in checked:
                checked[id(x)] = _as_replicated(x, token, path, False)
            out.append(checked[id(x)])
    return out
