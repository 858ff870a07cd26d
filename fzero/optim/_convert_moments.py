"""Convert the moments of an optimizer's state from one kind to another."""

from typing import Any

import torch

from fzero import tree
from fzero._tracebacks import api_boundary
from fzero.optim._adam import AdamState
from fzero.optim._base import OptState
from fzero.optim._one_moment import LionState
from fzero.optim.matrices import MuonState
from fzero.optim.moments import map_moments, moment_elements, moment_kind
from fzero.sharding import is_box
from fzero.tree import Tree

__all__ = ["convert_moments"]

# the fields of states that are moments -> whether they may be negative
_MOMENTS: dict[type, dict[str, bool]] = {
    AdamState: {"mu": True, "nu": False},
    LionState: {"mu": True},
    MuonState: {"momentum": True},
}


@api_boundary
def convert_moments(opt_state: OptState, like: OptState) -> OptState:
    """Return an optimizer's state with its moments stored as in another state: in 8 bits, in bfloat16, or in neither.

    So a checkpoint of one kind goes on as another kind: load it into a state of its own kind, and convert that. Fewer
    bits lose what `fzero.optim.Moments` says; back from them nothing more is lost.

    Args:
        opt_state: a state, on any layout. On shards call it in a rank program: `mesh.spmd(optim.convert_moments)`.
        like: a state of the same parameters in the same layout, such as `step.init(params, opt)` returns. Only its
            kinds, dtypes and scales' shapes are read.

    Returns:
        A state with the numbers of `opt_state`.

    Raises:
        ValueError: if the states differ in more than their moments' kinds.

    Example:
        >>> from fzero import optim
        >>> params, grads = {"w": torch.ones(64, 64)}, {"w": torch.full((64, 64), 0.5)}
        >>> exact, small = optim.adamw(1e-3), optim.adamw(1e-3, moments="int8")
        >>> _, state = exact.update(grads, exact.init(params), params)
        >>> state = convert_moments(state, like=small.init(params))
        >>> state.mu.codes["w"].dtype, state.mu.scales["w"][0]
        (torch.uint8, tensor(0.0500))
    """
    states, structure = tree.flatten(opt_state, _has_moments)
    like_entries, other_structure = tree.flatten(like, _has_moments)
    if structure != other_structure or [type(x) for x in states] != [type(x) for x in like_entries]:
        raise tree.structure_error(opt_state, like, names=("opt_state", "like"))
    return tree.unflatten(structure, [_convert_state(x, y) for x, y in zip(states, like_entries, strict=True)])


def _has_moments(x: Any) -> bool:
    return is_box(x) or type(x) in _MOMENTS


def _convert_state(state: Any, like: Any) -> Any:
    fields = _MOMENTS.get(type(state), {})
    new = {name: _convert_moment(getattr(state, name), getattr(like, name), sign) for name, sign in fields.items()}
    return state._replace(**new) if new else state


def _convert_moment(moment: Tree, like: Tree, signed: bool) -> Tree:
    """Return a moment in the kind of `like`: widened, rounded or both."""
    actual, expected = moment_kind(moment), moment_kind(like)
    if actual is not None:
        if actual == expected and _scale_shapes(moment[1]) == _scale_shapes(like[1]):
            return moment  # a second rounding would lose more

        def widen(x: torch.Tensor, m: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return m.to(x.dtype) if expected is None else m, m

        moment = map_moments(widen, [signed], moment_elements(like), [moment])[0]
    if expected is not None:
        moment = map_moments(lambda x, m: (x, x.to(m.dtype)), [signed], moment, [like])[1][0]
    return moment


def _scale_shapes(numbers: Tree) -> list[Any]:
    """Return the shapes of a moment's scales, or of its leaves in full precision: they say how it is stored."""
    return [None if x is None else x.shape for x in tree.flatten(numbers, is_box)[0]]
