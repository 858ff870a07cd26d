"""Check that plain results are replicated: in a simulation a plain result that differs by rank is an error.

A value that does not depend on the rank has no batch dimension at the axis's vmap. So the check is exact there: an
unbatched result is provably equal on all ranks. Ranks in lockstep are compared by value when they return.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fzero import tree
from fzero._notice import trouble_link
from fzero._torch import allow_in_graph, storage_id
from fzero._torch.levels import unwrap
from fzero._tracebacks import api_boundary
from fzero.axes._bound_axes import bound_axes
from fzero.axes._scope import Axis, varying_axes
from fzero.axes.lockstep import are_equal, is_lockstep, rendezvous
from fzero.tree import Tree

__all__ = ["DiffersByRankError", "assume_replicated", "check_inputs_replicated", "check_replicated", "differs_message"]


class DiffersByRankError(ValueError):
    """A value differs by rank, and its layout or its use says that it is equal on all ranks.

    Attributes:
        result_path: the path of the value among the results of a rank program; None if it is not a result.

    Example:
        >>> import torch
        >>> import fzero
        >>> mesh = fzero.mesh(dp=2)
        >>> try:
        ...     mesh.spmd(lambda x: {"loss": x.sum()})(mesh.split(torch.arange(4.0)))
        ... except fzero.errors.DiffersByRankError as error:
        ...     print(str(error).split(",")[0])
        result leaf 'loss' differs by rank
    """

    def __init__(self, message: str, result_path: str | None = None) -> None:
        super().__init__(message)
        self.result_path = result_path


DiffersByRankError.__module__ = "fzero.errors"  # where a pickle finds it


class _ReplicatedIdentity(torch.autograd.Function):
    """The identity on a value that is equal on all ranks; else an error, or rank 0's value if the message is empty."""

    @staticmethod
    def forward(x: torch.Tensor, token: torch.Tensor, group: str, message: str) -> torch.Tensor:
        if not is_lockstep(group):
            return x.view_as(x)

        def take_first(ranks: Sequence[Sequence[torch.Tensor]], _: bool) -> list[torch.Tensor]:
            if message and not all(are_equal(ranks[0][0], x_r) for (x_r,) in ranks):
                raise DiffersByRankError(message)
            return [ranks[0][0].clone() for _ in ranks]  # equal or not, all ranks continue with rank 0's value

        name = "a check that a value is replicated" if message else "assume_replicated"
        return rendezvous(group, int(token), name, [x], take_first)

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
            return _ReplicatedIdentity.apply(x, token, group, message), in_dims[0]
        if in_dims[0] is None:
            return x.view_as(x), None
        if not message:
            return x.select(in_dims[0], 0).clone(), None
        raise DiffersByRankError(message)


@allow_in_graph
def _as_replicated(
    x: torch.Tensor, token: torch.Tensor, group: str, message: str, result_path: str | None = None
) -> torch.Tensor:
    try:
        return _ReplicatedIdentity.apply(x, token, group, message)  # pyright: ignore[reportReturnType]
    except DiffersByRankError as error:
        error.result_path = result_path
        raise


@api_boundary
def assume_replicated(x: Tree) -> Tree:
    """Declare that a tree of tensors is equal on all ranks, for a reason that fzero cannot see.

    A simulation takes a value for replicated if none of its inputs differs by rank, or if a collective made it equal.
    So `batch.new_zeros(())` seems to differ. After this call a simulation uses rank 0's value, and a distributed run
    each rank's own: if the declaration is wrong, their results differ.

    Example:
        >>> import fzero
        >>> m = fzero.mesh(dp=2)
        >>> m.spmd(lambda x: assume_replicated(x.new_ones(())))(m.split(torch.zeros(4)))
        tensor(1.)
    """
    for axis in bound_axes():
        x = tree.map(lambda leaf, axis=axis: _as_replicated(leaf, axis.token, axis.group, ""), x)
    return x


def check_replicated(
    axes: Sequence[Axis], paths: Sequence[str], leaves: Sequence[Any], varies: Sequence[tuple[str, ...]]
) -> list[Any]:
    """Check that results differ only along the axes that their boxes name; tied results stay tied."""
    checks: dict[tuple[Any, tuple[str, ...]], Any] = {}
    results = []
    for path, x, names in zip(paths, leaves, varies, strict=True):
        if not isinstance(x, torch.Tensor):
            results.append(x)
            continue
        key = (tree.identity(x), names)
        if key not in checks:
            checks[key] = x
            for axis in axes:
                if axis.name not in names:
                    along = f" along {axis.name!r}" if len(axes) > 1 else ""
                    message = differs_message(path, names, along)
                    checks[key] = _as_replicated(checks[key], axis.token, axis.group, message, path)
        results.append(checks[key])
    return results


def _gradient_would_be_summed(where: str, axis: str) -> str:
    return (
        f"value_and_grad: {where} differs by rank along {axis!r}, and the gradient of a plain tensor is summed over "
        "the ranks: pass fzero.PerRank(x) instead to get each rank's own gradient, or make it replicated with "
        "fzero.collectives.pmean"
    )


def check_inputs_replicated(
    name: str,
    axes: Sequence[Axis],
    paths: Sequence[str],
    leaves: Sequence[Any],
    message: Callable[[str, str], str] = _gradient_would_be_summed,
) -> None:
    """Check that the plain tensors of an argument are equal on all ranks of `axes`.

    A simulation detects every tensor that is not. A process detects only tensors in the memory of a `PerRank` argument.

    Args:
        name: the name of the argument.
        axes: the axes along which its tensors must be equal.
        paths: the paths of its leaves.
        leaves: its leaves.
        message: returns the error message, given the name of the tensor and of the axis.

    Raises:
        DiffersByRankError: if a tensor differs by rank.
    """
    checked_ids: set[Any] = set()
    for path, x in zip(paths, leaves, strict=True):
        if not isinstance(x, torch.Tensor) or tree.identity(x) in checked_ids:
            continue
        checked_ids.add(tree.identity(x))
        where = name + (f", leaf {path!r}" if path else "")
        own_axes = () if torch.compiler.is_dynamo_compiling() else varying_axes(storage_id(unwrap(x)))
        for axis in axes:
            text = message(where, axis.name)
            if axis.name in own_axes:
                raise DiffersByRankError(text)
            if not axis.group or is_lockstep(axis.group):
                _as_replicated(x, axis.token, axis.group, text)


def differs_message(path: str, names: tuple[str, ...], how: str = "") -> str:
    """Return the error message for a result that differs by rank although its layout says that it does not."""
    if names:
        return (
            f"{tree.leaf_name('result', path.removesuffix('.0'))} differs by rank{how}, and its box says that it "
            f"differs along {', '.join(names)} only. If it is a parameter: name it in split= if each rank has its own "
            "part of it, else call fzero.collectives.pvary where a replicated value first meets a value that differs "
            "by rank. If it is a PerRank: reduce it over the other axes, or name them in the box"
        )
    return (
        f"{tree.leaf_name('result', path)} differs by rank{how}, and a plain result must be replicated: reduce it with "
        "fzero.collectives.pmean or fzero.collectives.psum, wrap it in fzero.PerRank to get every rank's value, or, "
        "if it is equal on all ranks for a reason that fzero cannot see, return fzero.axes.assume_replicated(x)"
        + trouble_link("a-result-that-differs-by-rank")
    )
