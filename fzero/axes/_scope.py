"""The scope of a running rank program: the bound axes, the rules that shard trees, and the current micro-batch.

An axis is bound to a *token*, its rank index. In a vmap simulation the token is `arange(n)`, mapped by the axis's own
vmap. The token is batched only there, so a collective that takes it can distinguish this vmap from a user's. In a
distributed run, and in lockstep, the token is a constant and the axis has a group.

Each rank program runs within a `Scope`. The scopes of nested programs form a stack, and each thread has its own stack.
The functions here read its top. Outside any rank program they answer as if there were no axis.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fzero.axes._rules import DEFAULT_RULES, AxisName, LayoutRules

__all__ = [
    "PLANNED",
    "Axes",
    "Axis",
    "BatchSplit",
    "Binding",
    "InvariantLoss",
    "LossCollective",
    "PerRankMemory",
    "Scope",
    "averaged_axes",
    "axis_if_bound",
    "axis_index",
    "axis_names",
    "axis_size",
    "batch_splits",
    "bound_axes",
    "bound_axis",
    "call_as_invariant_loss",
    "call_in_micro_batch",
    "call_in_scope",
    "call_with_loss_scale",
    "current_device",
    "current_invariant_loss",
    "current_loss_scale",
    "current_rules",
    "current_scope",
    "in_loss",
    "index_on",
    "join_axes",
    "loss_axes",
    "micro_batch",
    "resolve_axes",
    "varying_axes",
]


PLANNED = "fzero.plan/"  # prefix of the names of groups whose ranks do not exist here


class Binding(NamedTuple):
    """The constants of a bound axis, which a traced collective can carry.

    Attributes:
        axis: the name of the axis; "" for an axis that is not recorded.
        group: the key of its process group or of its ranks in lockstep; "" under vmap.
        size: the number of ranks.
        rank: the index of this process, or of this thread in lockstep; 0 under vmap.
        mapped: the number of ranks of other simulated axes that a collective is mapped over.
    """

    axis: str
    group: str
    size: int
    rank: int
    mapped: int = 1


class Axis(NamedTuple):
    """A bound axis: its name, size, group ("" under vmap), this process's rank on it, and token.

    An axis may stand for several, such as "dp,ep". An axis with the name "" is not recorded.
    """

    name: str
    size: int
    group: str
    rank: int
    token: torch.Tensor

    @property
    def binding(self) -> Binding:
        """The constants of the axis: everything but the token."""
        return Binding(self.name, self.group, self.size, self.rank)

    @staticmethod
    def of(binding: Binding, token: torch.Tensor) -> "Axis":
        """Return the axis that has this binding and this token."""
        return Axis(binding.axis, binding.size, binding.group, binding.rank, token)


class Axes(NamedTuple):
    """The axes of a running rank program.

    Attributes:
        each: the bound axes, in the mesh's order.
        joint: axes that stand for several, whose groups are products of bound axes.
        default: the names of the axes that `axis=None` means; None for the only bound axis.
    """

    each: tuple[Axis, ...] = ()
    joint: tuple[Axis, ...] = ()
    default: tuple[str, ...] | None = None


class BatchSplit(NamedTuple):
    """How a batch was split over the ranks: what it is along which axis.

    Attributes:
        samples: the axes over which the samples were divided.
        tokens: the axis over which the tokens of each sample were divided, and its number of ranks; None if they are
            whole.
    """

    samples: tuple[str, ...] = ()
    tokens: tuple[str, int] | None = None


class PerRankMemory(NamedTuple):
    """The memory of an argument in a `PerRank` box, and the axes along which the argument differs by rank."""

    storage: int
    axes: tuple[str, ...]


class LossCollective(NamedTuple):
    """A collective called in a loss; every rank gets a copy of its result.

    Attributes:
        name: the name of the function that was called.
        axes: the axes along which the loss is invariant.
        source_line: the user's line, "file:line".
    """

    name: str
    axes: tuple[str, ...]
    source_line: str


class InvariantLoss:
    """A loss that is invariant along some axes: equal on their ranks, which share its work.

    Attributes:
        axes: these axes.
        calls: the collectives over these axes that were called on differentiated values.
        has_calls: whether any such collective was called, also on constants and in a rematerialised block.
    """

    def __init__(self, axes: tuple[str, ...]) -> None:
        self.axes = axes
        self.calls: list[LossCollective] = []
        self.has_calls = False


class Scope(NamedTuple):
    """The state that a running rank program sees.

    Attributes:
        axes: the axes that are bound.
        rules: the rules by which trees are sharded.
        micro_batch: the index of the micro-batch that is being differentiated; a 0-d tensor in a traced loop.
        in_loss: whether the loss function of a `value_and_grad` is running.
        per_rank_memory: the memory of a process that differs by rank; empty in a simulation, which needs no list.
        splits: for each argument in a `PerRank` box how it was split; None for one that a rank loaded itself.
        invariant_loss: the running loss, if it is invariant along some axes.
        loss_scale: the factor by which the loss's gradients are scaled, for half precision.
        device: the device of the program's ranks.
    """

    axes: Axes = Axes()
    rules: LayoutRules = DEFAULT_RULES
    micro_batch: int | torch.Tensor = 0
    in_loss: bool = False
    per_rank_memory: tuple[PerRankMemory, ...] = ()
    splits: tuple[BatchSplit | None, ...] = ()
    invariant_loss: InvariantLoss | None = None
    loss_scale: torch.Tensor | None = None
    device: torch.device = torch.device("cpu")


class _Scopes(threading.local):
    """The scopes of this thread's running rank programs. Not a ContextVar, which Dynamo cannot trace."""

    def __init__(self) -> None:
        self.stack: list[Scope] = []


_SCOPES = _Scopes()
_NO_AXES = Scope(Axes(default=()))


def call_in_scope(scope: Scope, f: Callable[..., Any], *args: Any) -> Any:
    """Call `f(*args)` with the axes of `scope` bound, and unbind them even after an error.

    A token that outlives its vmap would fail later with "Cannot access storage of BatchedTensorImpl".
    """
    _SCOPES.stack.append(scope)
    try:
        return f(*args)
    finally:
        _SCOPES.stack.pop()


def current_scope() -> Scope | None:
    """Return the scope of the running rank program; None outside any."""
    return _SCOPES.stack[-1] if _SCOPES.stack else None


def current_rules() -> LayoutRules:
    """Return the rules given to `fzero.shard`, if its step is running."""
    return _SCOPES.stack[-1].rules if _SCOPES.stack else DEFAULT_RULES


def call_in_micro_batch(index: int | torch.Tensor, f: Callable[..., Any], *args: Any) -> Any:
    """Call `f(*args)` as the loss function of a step's micro-batch `index`."""
    first = isinstance(index, int) and not index
    if not _SCOPES.stack and first:
        return f(*args)
    scope = _SCOPES.stack[-1] if _SCOPES.stack else _NO_AXES
    return call_in_scope(scope._replace(micro_batch=scope.micro_batch if first else index, in_loss=True), f, *args)


def varying_axes(storage: int) -> tuple[str, ...]:
    """List the axes along which a process knows that the contents of this memory differ by rank."""
    memories = _SCOPES.stack[-1].per_rank_memory if _SCOPES.stack else ()
    return tuple([name for memory in memories if memory.storage == storage for name in memory.axes])


def batch_splits() -> tuple[BatchSplit | None, ...]:
    """List how the running program's arguments in `PerRank` boxes were split; None for each that a rank loaded."""
    return _SCOPES.stack[-1].splits if _SCOPES.stack else ()


def in_loss() -> bool:
    """Return whether the loss function of a `value_and_grad` is running, and so is differentiated."""
    # not bool(stack), which Dynamo of torch 2.11 cannot trace
    return len(_SCOPES.stack) > 0 and _SCOPES.stack[-1].in_loss


def call_as_invariant_loss(invariant_loss: InvariantLoss, f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `f` as a loss that is invariant along some axes; `invariant_loss` records its collectives."""
    scope = _SCOPES.stack[-1]._replace(invariant_loss=invariant_loss)
    return call_in_scope(scope, lambda: f(*args, **kwargs))


def current_invariant_loss() -> InvariantLoss | None:
    """Return the record of the running loss; None if the loss is one value along no axis."""
    return _SCOPES.stack[-1].invariant_loss if _SCOPES.stack else None


def call_with_loss_scale(scale: torch.Tensor, f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `f` as a loss whose gradients are scaled: a pipeline computes its gradients in the forward pass."""
    if not _SCOPES.stack:
        return f(*args, **kwargs)
    return call_in_scope(_SCOPES.stack[-1]._replace(loss_scale=scale), lambda: f(*args, **kwargs))


def current_loss_scale() -> torch.Tensor | None:
    """Return the factor that scales the running loss's gradients; None if there is none."""
    return _SCOPES.stack[-1].loss_scale if _SCOPES.stack else None


def current_device() -> torch.device:
    """Return the device of the running rank program's ranks; the CPU outside any."""
    return _SCOPES.stack[-1].device if _SCOPES.stack else torch.device("cpu")


def micro_batch() -> int | torch.Tensor:
    """Return the index of the micro-batch that is being differentiated; 0 if there is none."""
    return _SCOPES.stack[-1].micro_batch if _SCOPES.stack else 0


# ---------------------------------------------------------------- axes


def bound_axes() -> tuple[Axis, ...]:
    """List the axes that are bound here; none outside a rank program."""
    return _SCOPES.stack[-1].axes.each if _SCOPES.stack else ()


_NO_PROGRAM = (
    "no rank program is running; mesh.spmd and fzero.shard run one, and outside of one step.gather and step.partition "
    "take trees"
)


def bound_axis(name: str) -> Axis:
    """Return the axis bound to `name`.

    Raises:
        ValueError: if no axis of that name is bound here.
    """
    for axis in bound_axes():
        if axis.name == name:
            return axis
    names = ", ".join([repr(axis.name) for axis in bound_axes()])
    raise ValueError(f"axis {name!r} is not bound here: " + (f"the bound axes are {names}" if names else _NO_PROGRAM))


def resolve_axes(axis: AxisName) -> tuple[Axis, ...]:
    """Return the bound axes that `axis` means.

    `None` means the axes given to `fzero.shard`, else the only bound axis; outside any mesh it means no axis, so
    that a train step runs unsharded as it stands. `()` means no axis.

    Raises:
        ValueError: if an axis is not bound, or if `None` is ambiguous.
    """
    if axis is not None:
        return tuple([bound_axis(name) for name in ((axis,) if isinstance(axis, str) else axis)])
    if not _SCOPES.stack:
        return ()
    axes = _SCOPES.stack[-1].axes
    if axes.default is not None:
        return tuple([bound_axis(name) for name in axes.default])
    if len(axes.each) > 1:
        names = [a.name for a in axes.each]
        raise ValueError(f"axis=None is ambiguous: {names} are bound here; name the axis, such as axis={names[0]!r}")
    return axes.each


def join_axes(axes: Sequence[Axis]) -> tuple[Axis, ...]:
    """Return the axes that a collective over `axes` runs over, the slowest first.

    If there is a group of their product, it is one axis that stands for all. Else the collective runs over one axis
    after the other, and the first one is recorded for all.
    """
    if len(axes) < 2:
        return tuple(axes)
    name = ",".join([a.name for a in axes])
    for a in _SCOPES.stack[-1].axes.joint if _SCOPES.stack else ():
        if a.name == name:
            return (a,)
    return (axes[0]._replace(name=name), *[a._replace(name="") for a in axes[1:]])


def axis_names() -> tuple[str, ...]:
    """List the axes that are bound here; none outside a rank program.

    For models that run with and without an axis: a collective over `()` is the identity.

    Example:
        >>> import fzero, torch
        >>> def total(x):
        ...     return fzero.collectives.psum_invariant(x.sum(), "tp" if "tp" in fzero.axes.axis_names() else ())
        >>> total(torch.ones(4))
        tensor(4.)
        >>> mesh = fzero.mesh(tp=2)
        >>> mesh.spmd(total)(mesh.split(torch.ones(4)))
        tensor(4.)
    """
    return tuple([axis.name for axis in bound_axes()])


def axis_if_bound(axis: str) -> tuple[str, ...]:
    """Return the axis of this name if it is bound; else no axis, and a collective over no axis sends nothing.

    Raises:
        TypeError: if `axis` is no string.
    """
    if not isinstance(axis, str):
        raise TypeError(f"axis={axis!r}: expected the name of the axis, a string")
    return (axis,) if axis in axis_names() else ()


def loss_axes() -> tuple[Axis, ...]:
    """List the axes whose ranks add to one loss: those of the running step, else all bound axes."""
    axes = _SCOPES.stack[-1].axes if _SCOPES.stack else Axes()
    return axes.each if axes.default is None else tuple([bound_axis(name) for name in axes.default])


def averaged_axes() -> tuple[str, ...]:
    """List the axes that the running step averages losses over: those given to `fzero.shard`, else none."""
    return (_SCOPES.stack[-1].axes.default or ()) if _SCOPES.stack else ()


def axis_index(axis: AxisName = None) -> torch.Tensor:
    """Return this rank's index along `axis`: an int64 tensor of shape []; 0 outside any mesh.

    For a tuple of axes the first is the slowest, as in JAX.

    Args:
        axis: an axis name or a tuple of names; `None` for the axes of the running step.

    Raises:
        ValueError: if an axis is not bound.

    Example:
        >>> import fzero
        >>> fzero.mesh(dp=3).spmd(lambda: fzero.PerRank(fzero.axes.axis_index("dp")))().value
        tensor([0, 1, 2])
    """
    index = torch.zeros((), dtype=torch.int64, device="cpu")
    for a in resolve_axes(axis):
        index = index * a.size + a.token
    return index


def index_on(device: torch.device, token: torch.Tensor, binding: Binding) -> torch.Tensor:
    """Return this rank's index along the axis of a token on a device: an int64 tensor of shape [].

    Where the rank is known it is made there, since the host would wait for a copy. Under vmap the token holds it.
    """
    if binding.group:
        return torch.full((), binding.rank, dtype=torch.int64, device=device)
    return token.to(device)


def axis_size(axis: AxisName = None) -> int:
    """Return the number of ranks along `axis` (a tuple: their product); 1 outside any mesh.

    Raises:
        ValueError: if an axis is not bound.

    Example:
        >>> axis_size()
        1
    """
    size = 1
    for a in resolve_axes(axis):
        size *= a.size
    return size
