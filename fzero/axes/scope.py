"""Named axes: what a collective's axis name is bound to while a rank program runs.

An axis is bound to a *token*, its rank index. In a vmap simulation the token is `arange(n)` mapped by the axis's own
vmap, so a collective that is handed the token can tell that vmap from a user's: the token is batched there and
nowhere else. In a distributed run, and in lockstep, the token is a constant and the axis has a group.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

__all__ = [
    "DEFAULT_RULES",
    "Axis",
    "Rules",
    "Scope",
    "axis_index",
    "axis_names",
    "axis_size",
    "bound",
    "data_axes",
    "in_micro_batch",
    "joint",
    "lookup",
    "micro_batch",
    "resolve",
    "rules_in_scope",
    "scope_here",
    "within",
]

AxisName = str | tuple[str, ...] | None
UnitRule = Callable[[str, torch.Tensor], str | None]
OverRule = Callable[[str, torch.Tensor], AxisName]
DtypeRule = Callable[[str, torch.Tensor], torch.dtype]
SplitRule = Callable[[str, torch.Tensor], Mapping[str, int] | None]


class Axis(NamedTuple):
    """A bound axis: its name, size, group ("" under vmap), this process's rank on it, and token.

    An axis may stand for several, such as "dp,ep"; one without a name is not recorded.
    """

    name: str
    size: int
    group: str
    rank: int
    token: torch.Tensor

    @property
    def meta(self) -> tuple[str, str, int, int, int]:
        """Everything but the token: constants, which a traced collective can carry (see `fzero.linear_maps.Meta`)."""
        return (self.name, self.group, self.size, self.rank, 1)


class Rules(NamedTuple):
    """How a tree is cut, given the path and the leaf.

    Attributes:
        units: names the leaf's unit; None for the default rule.
        over: lists the axes that the unit is sharded over; None for all those of the step.
        split: says which further axes cut the leaf itself, and along which dimension; None for none.
        dtype: the dtype that the leaf is about to be cast to, which its unit is to have; None for its own.
    """

    units: UnitRule | None = None
    over: OverRule | None = None
    split: SplitRule | None = None
    dtype: DtypeRule | None = None


DEFAULT_RULES = Rules()


class Scope(NamedTuple):
    """What a running rank program sees.

    Attributes:
        axes: the bound axes, in the mesh's order.
        default: the axes that `axis=None` means; None for the only one.
        rules: how trees are cut.
        joint: axes that stand for several: groups of the product of some bound axes.
        micro_batch: which micro-batch of the step is being differentiated.
    """

    axes: tuple[Axis, ...]
    default: tuple[str, ...] | None = None
    rules: Rules = DEFAULT_RULES
    joint: tuple[Axis, ...] = ()
    micro_batch: int = 0


class _Scopes(threading.local):
    """The scopes of this thread's running rank programs. Not a ContextVar, which Dynamo cannot trace."""

    def __init__(self) -> None:
        self.stack: list[Scope] = []


_SCOPES = _Scopes()


def within(scope: Scope, f: Callable[..., Any], *args: Any) -> Any:
    """Call `f(*args)` with the axes of `scope` bound, and unbind them whatever happens.

    A token that outlives its vmap would fail later with "Cannot access storage of BatchedTensorImpl".
    """
    _SCOPES.stack.append(scope)
    try:
        return f(*args)
    finally:
        _SCOPES.stack.pop()


def in_micro_batch(index: int, f: Callable[..., Any], *args: Any) -> Any:
    """Call `f(*args)` as what a step does with its micro-batch `index`."""
    scope = _SCOPES.stack[-1] if _SCOPES.stack else Scope((), default=())
    return within(scope._replace(micro_batch=index), f, *args)


def micro_batch() -> int:
    """Return which micro-batch of the step is being differentiated; 0 where there is none."""
    return _SCOPES.stack[-1].micro_batch if _SCOPES.stack else 0


def scope_here() -> Scope | None:
    """Return what the running rank program sees; None outside any."""
    return _SCOPES.stack[-1] if _SCOPES.stack else None


def bound() -> tuple[Axis, ...]:
    """List the axes that are bound here; none outside a rank program."""
    return _SCOPES.stack[-1].axes if _SCOPES.stack else ()


def rules_in_scope() -> Rules:
    """Return the rules given to `fzero.shard`, if its step is running."""
    return _SCOPES.stack[-1].rules if _SCOPES.stack else DEFAULT_RULES


def lookup(name: str) -> Axis:
    """Return the axis bound to `name`.

    Raises:
        ValueError: if no axis of that name is bound here.
    """
    for axis in bound():
        if axis.name == name:
            return axis
    names = ", ".join([repr(axis.name) for axis in bound()])
    raise ValueError(
        f"axis {name!r} is not bound here: "
        + (f"the bound axes are {names}" if names else "no rank program is running, see mesh.spmd and fzero.shard")
    )


def resolve(axis: AxisName) -> tuple[Axis, ...]:
    """Return the bound axes that `axis` means.

    `None` means the axes given to `fzero.shard`, else the only bound axis; outside any mesh it means no axis, so
    that a train step runs unsharded as it stands. `()` means no axis.

    Raises:
        ValueError: if an axis is not bound, or if `None` is ambiguous.
    """
    if axis is not None:
        return tuple([lookup(name) for name in ((axis,) if isinstance(axis, str) else axis)])
    if not _SCOPES.stack:
        return ()
    scope = _SCOPES.stack[-1]
    if scope.default is not None:
        return tuple([lookup(name) for name in scope.default])
    if len(scope.axes) > 1:
        names = [a.name for a in scope.axes]
        raise ValueError(f"axis=None is ambiguous: {names} are bound here; name the axis")
    return scope.axes


def joint(axes: Sequence[Axis]) -> tuple[Axis, ...]:
    """Return the axes that a collective over `axes` runs over, the slowest first.

    One, if there is a group of their product; else one after the other, and the first stands for all in records.
    """
    if len(axes) < 2:
        return tuple(axes)
    name = ",".join([a.name for a in axes])
    for a in _SCOPES.stack[-1].joint:
        if a.name == name:
            return (a,)
    return (axes[0]._replace(name=name), *[a._replace(name="") for a in axes[1:]])


def axis_names() -> tuple[str, ...]:
    """List the axes that are bound here; none outside a rank program.

    For models that run with and without an axis: a collective over `()` is the identity.

    Example:
        >>> import fzero, torch
        >>> def total(x):
        ...     return fzero.psum_invariant(x.sum(), "tp" if "tp" in fzero.axis_names() else ())
        >>> total(torch.ones(4))
        tensor(4.)
        >>> mesh = fzero.mesh(tp=2)
        >>> mesh.spmd(total)(mesh.split(torch.ones(4)))
        tensor(4.)
    """
    return tuple([axis.name for axis in bound()])


def data_axes() -> tuple[Axis, ...]:
    """List the axes along which data differs, as far as is known: those of the running step, else all."""
    scope = _SCOPES.stack[-1] if _SCOPES.stack else Scope(())
    return scope.axes if scope.default is None else tuple([lookup(name) for name in scope.default])


def axis_index(axis: AxisName = None) -> torch.Tensor:
    """Return this rank's index along `axis`: an int64 tensor of shape []; 0 outside any mesh.

    For a tuple of axes the first is the slowest, as in JAX.

    Args:
        axis: an axis name or a tuple of names; `None` for the axes of the running step.

    Raises:
        ValueError: if an axis is not bound.

    Example:
        >>> import fzero
        >>> fzero.mesh(dp=3).spmd(lambda: fzero.PerRank(fzero.axis_index("dp")))().value
        tensor([0, 1, 2])
    """
    index = torch.zeros((), dtype=torch.int64)
    for a in resolve(axis):
        index = index * a.size + a.token
    return index


def axis_size(axis: AxisName = None) -> int:
    """Return the number of ranks along `axis` (a tuple: their product); 1 outside any mesh.

    Raises:
        ValueError: if an axis is not bound.

    Example:
        >>> axis_size()
        1
    """
    size = 1
    for a in resolve(axis):
        size *= a.size
    return size
