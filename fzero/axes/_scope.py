"""The scope of a running rank program: its axes, the rules that shard trees, and the current micro-batch.

An axis is bound to a *token*, its rank index. In a vmap simulation the token is `arange(n)`, mapped by the axis's own
vmap. The token is batched only there, so a collective that takes it can distinguish this vmap from a user's. In a
distributed run, and in lockstep, the token is a constant and the axis has a group.

Each rank program runs within a `Scope`. The scopes of nested programs form a stack, and each thread has its own stack.
The functions here read its top. Outside any rank program they answer as if there were no axis.
"""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fzero.axes._rules import DEFAULT_RULES, LayoutRules

__all__ = [
    "PLANNED",
    "SCOPES",
    "Axes",
    "Axis",
    "BatchSplit",
    "Binding",
    "InvariantLoss",
    "LossCollective",
    "PerRankMemory",
    "Scope",
    "batch_splits",
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
    "micro_batch",
    "sequence_lengths",
    "tokens_axis",
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
        return Axis(binding.axis, size=binding.size, group=binding.group, rank=binding.rank, token=token)


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
    """How a batch was split over the ranks: into which parts along which axis.

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
        has_calls: whether any such collective was called, also on constants and in a block under remat.
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
        sequence_lengths: the sizes, besides that of samples, of the integers in these boxes, or in plain tensors if
            there is no box: lengths of sequences of tokens.
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
    sequence_lengths: tuple[int, ...] = ()
    invariant_loss: InvariantLoss | None = None
    loss_scale: torch.Tensor | None = None
    device: torch.device = torch.device("cpu")


class _Scopes(threading.local):
    """The scopes of this thread's running rank programs. Not a ContextVar, which Dynamo cannot trace."""

    def __init__(self) -> None:
        self.stack: list[Scope] = []


SCOPES = _Scopes()
_NO_AXES = Scope(Axes(default=()))


def call_in_scope(scope: Scope, f: Callable[..., Any], *args: Any) -> Any:
    """Call `f(*args)` with the axes of `scope` bound, and unbind them even after an error.

    A token that outlives its vmap would fail later with "Cannot access storage of BatchedTensorImpl".
    """
    SCOPES.stack.append(scope)
    try:
        return f(*args)
    finally:
        SCOPES.stack.pop()


def current_scope() -> Scope | None:
    """Return the scope of the running rank program; None outside any."""
    return SCOPES.stack[-1] if SCOPES.stack else None


def current_rules() -> LayoutRules:
    """Return the rules given to `fzero.shard`, if its step is running."""
    return SCOPES.stack[-1].rules if SCOPES.stack else DEFAULT_RULES


def call_in_micro_batch(index: int | torch.Tensor, f: Callable[..., Any], *args: Any) -> Any:
    """Call `f(*args)` as the loss function of a step's micro-batch `index`."""
    is_first = isinstance(index, int) and not index
    if not SCOPES.stack and is_first:
        return f(*args)
    scope = SCOPES.stack[-1] if SCOPES.stack else _NO_AXES
    return call_in_scope(scope._replace(micro_batch=scope.micro_batch if is_first else index, in_loss=True), f, *args)


def varying_axes(storage: int) -> tuple[str, ...]:
    """List the axes along which a process knows that the contents of this memory differ by rank."""
    memories = SCOPES.stack[-1].per_rank_memory if SCOPES.stack else ()
    return tuple([name for memory in memories if memory.storage == storage for name in memory.axes])


def batch_splits() -> tuple[BatchSplit | None, ...]:
    """List how the running program's arguments in `PerRank` boxes were split; None for each that a rank loaded."""
    return SCOPES.stack[-1].splits if SCOPES.stack else ()


def tokens_axis() -> str | None:
    """Return the axis along which several ranks share the tokens of each sequence; None if none is known to."""
    splits = [split.tokens for split in batch_splits() if split is not None and split.tokens is not None]
    return next((axis for axis, ranks in splits if ranks > 1), None)


def sequence_lengths() -> tuple[int, ...]:
    """Return the sizes, besides that of samples, of the integers in the program's arguments: in boxes, if any are."""
    return SCOPES.stack[-1].sequence_lengths if SCOPES.stack else ()


def in_loss() -> bool:
    """Return whether the loss function of a `value_and_grad` is running, and so is differentiated."""
    # not bool(stack), which Dynamo of torch 2.11 cannot trace
    return len(SCOPES.stack) > 0 and SCOPES.stack[-1].in_loss


def call_as_invariant_loss(invariant_loss: InvariantLoss, f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `f` as a loss that is invariant along some axes; `invariant_loss` records its collectives."""
    scope = SCOPES.stack[-1]._replace(invariant_loss=invariant_loss)
    return call_in_scope(scope, lambda: f(*args, **kwargs))


def current_invariant_loss() -> InvariantLoss | None:
    """Return the record of the running loss; None if the loss is one value along no axis."""
    return SCOPES.stack[-1].invariant_loss if SCOPES.stack else None


def call_with_loss_scale(scale: torch.Tensor, f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `f` as a loss whose gradients are scaled: a pipeline computes its gradients in the forward pass."""
    if not SCOPES.stack:
        return f(*args, **kwargs)
    return call_in_scope(SCOPES.stack[-1]._replace(loss_scale=scale), lambda: f(*args, **kwargs))


def current_loss_scale() -> torch.Tensor | None:
    """Return the factor that scales the running loss's gradients; None if there is none."""
    return SCOPES.stack[-1].loss_scale if SCOPES.stack else None


def current_device() -> torch.device:
    """Return the device of the running rank program's ranks; the CPU outside any."""
    return SCOPES.stack[-1].device if SCOPES.stack else torch.device("cpu")


def micro_batch() -> int | torch.Tensor:
    """Return the index of the micro-batch that is being differentiated; 0 if there is none."""
    return SCOPES.stack[-1].micro_batch if SCOPES.stack else 0
