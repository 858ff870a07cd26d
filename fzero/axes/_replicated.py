"""The type check of replicated results: in a simulation a plain result that differs by rank is an error.

A value that no rank made different has no batch dimension at the axis's vmap. So the check is exact there: an unbatched
result is provably equal on all ranks. (Ranks in lockstep are compared by value, when they return.)
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fzero import tree
from fzero._torch import allow_in_graph, storage_id
from fzero._torch.levels import unwrapped
from fzero.axes._axis import Axis
from fzero.axes._scope import bound, differs_along
from fzero.axes.lockstep import is_lockstep, meet, same
from fzero.tree import Tree

__all__ = ["assume_replicated", "check_inputs_replicated", "check_replicated", "differs"]


class _Replicated(torch.autograd.Function):
    """The identity on a value that does not differ by rank; on one that does an error, or with `assume` rank 0's."""

    @staticmethod
    def forward(x: torch.Tensor, token: torch.Tensor, group: str, message: str) -> torch.Tensor:
        if not is_lockstep(group):
            return x.view_as(x)

        def first(ranks: Sequence[Sequence[torch.Tensor]], _: bool) -> list[torch.Tensor]:
            if message and not all(same(ranks[0][0], other) for (other,) in ranks):
                raise ValueError(message)
            return [ranks[0][0].clone() for _ in ranks]  # equal or not, all ranks go on with the first one's

        what = "a check that a value is replicated" if message else "assume_replicated"
        return meet(group, int(token), what, [x], first)

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
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, token: torch.Tensor, group: str, message: str) -> Any:
        if in_dims[1] is None:  # a user's vmap, or another axis's
            return _Replicated.apply(x, token, group, message), in_dims[0]
        if in_dims[0] is None:
            return x.view_as(x), None
        if not message:
            return x.select(in_dims[0], 0).clone(), None
        raise ValueError(message)


@allow_in_graph
def _as_replicated(x: torch.Tensor, token: torch.Tensor, group: str, message: str) -> torch.Tensor:
    return _Replicated.apply(x, token, group, message)  # pyright: ignore[reportReturnType]


def assume_replicated(x: Tree) -> Tree:
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
        x = tree.map(lambda leaf, axis=axis: _as_replicated(leaf, axis.token, axis.group, ""), x)
    return x


def check_replicated(
    axes: Sequence[Axis], paths: Sequence[str], leaves: Sequence[Any], varies: Sequence[tuple[str, ...]]
) -> list[Any]:
    """Check that results differ only along the axes that their boxes name; one tensor at several paths stays one."""
    checked: dict[tuple[int, tuple[str, ...]], Any] = {}
    out = []
    for path, x, names in zip(paths, leaves, varies, strict=True):
        key = (id(x), names)
        if key not in checked:
            checked[key] = x
            for axis in axes if isinstance(x, torch.Tensor) else ():
                if axis.name not in names:
                    along = f" along {axis.name!r}" if len(axes) > 1 else ""
                    checked[key] = _as_replicated(checked[key], axis.token, axis.group, differs(path, names, along))
        out.append(checked[key])
    return out


def _gradient_would_be_summed(where: str, axis: str) -> str:
    return (
        f"value_and_grad: {where} differs by rank along {axis!r}, and the gradient of a plain tensor is summed over "
        "the ranks: give it fzero.PerRank(x) in the tensor's place for the gradient of each rank's own, or make it "
        "replicated with fzero.collectives.pmean"
    )


def check_inputs_replicated(
    name: str,
    axes: Sequence[Axis],
    paths: Sequence[str],
    leaves: Sequence[Any],
    says: Callable[[str, str], str] = _gradient_would_be_summed,
) -> None:
    """Check that the plain tensors of an argument are equal on all ranks of `axes`.

    A simulation finds each that is not; a process those that lie in the memory of a `PerRank` argument.

    Args:
        name: of the argument.
        axes: along which its tensors are to be equal.
        paths: of its leaves.
        leaves: its leaves.
        says: gives the message, of what differs, and along which axis.

    Raises:
        ValueError: if one is not.
    """
    checked: set[Any] = set()
    for path, x in zip(paths, leaves, strict=True):
        if not isinstance(x, torch.Tensor) or tree.identity(x) in checked:
            continue
        checked.add(tree.identity(x))
        where = name + (f", leaf {path!r}" if path else "")
        known = () if torch.compiler.is_dynamo_compiling() else differs_along(storage_id(unwrapped(x)))
        for axis in axes:
            message = says(where, axis.name)
            if axis.name in known:
                raise ValueError(message)
            if not axis.group or is_lockstep(axis.group):
                _as_replicated(x, axis.token, axis.group, message)


def differs(path: str, names: tuple[str, ...], how: str = "") -> str:
    """Say what is wrong with a result that differs by rank where its layout says that it does not."""
    if names:
        return (
            f"{tree.place('result', path.removesuffix('.0'))} differs by rank{how}, and its box says that it differs "
            f"along {', '.join(names)} only. If it is a parameter: name it in split= if each rank has its own part of "
            "it, else put fzero.collectives.pvary where a replicated value first meets what is this rank's "
            "own. If it is a "
            "PerRank: reduce it over the other axes, or name them in the box"
        )
    return (
        f"{tree.place('result', path)} differs by rank{how}, and a plain result must be replicated: reduce it with "
        "fzero.collectives.pmean or fzero.collectives.psum, wrap it in fzero.PerRank to get every rank's, or, "
        "if it is equal on all ranks "
        "for a reason that fzero cannot see, return fzero.axes.assume_replicated(x)"
    )
