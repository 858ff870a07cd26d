"""A call of a block under remat as a function of tensors, which can run again later in another context."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fzero._torch import autocast_kinds
from fzero._torch.levels import is_differentiated
from fzero.axes import Axis, Scope, call_in_scope, current_scope
from fzero.transforms._indexed_tree import DistinctTensors, IndexedTree, replace_arguments, replace_result
from fzero.transforms._remat_guards import Guard, check_captured
from fzero.transforms._remat_tape import RandomTape, SaveFilter, TapeReplayer
from fzero.transforms._stage_transforms import gather

__all__ = ["BlockCall", "flatten_call", "gather_and_call"]


def gather_and_call(block: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Gather the boxes in a block's arguments, and call the block."""
    args, kwargs = gather((args, kwargs))
    return block(*args, **kwargs)


@dataclass(frozen=True)
class _AutocastState:
    """The autocast settings at a call. A backward pass may run outside the autocast context, and restores them.

    Attributes:
        dtypes: device -> its autocast dtype.
        enabled: the devices whose autocast is enabled.
    """

    dtypes: dict[str, torch.dtype]
    enabled: frozenset[str]

    @contextmanager
    def restore(self) -> Iterator[None]:
        """Restore the autocast settings of the call."""
        with ExitStack() as stack:
            for device, dtype in self.dtypes.items():
                is_enabled = device in self.enabled
                if is_enabled or torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, dtype, is_enabled, cache_enabled=False))
            yield


def _autocast_state() -> _AutocastState:
    """Return the current autocast settings."""
    devices = autocast_kinds()
    dtypes = {device: torch.get_autocast_dtype(device) for device in devices}
    return _AutocastState(dtypes, frozenset([device for device in devices if torch.is_autocast_enabled(device)]))


@dataclass(frozen=True)
class BlockCall:
    """A call of a block, without its tensors.

    Attributes:
        block: the function.
        save: selects the operations whose results are saved.
        arguments: the arguments, with indices in place of tensors.
        differentiated: for each distinct tensor whether it is differentiated.
        scope: the scope of the call, with its bound axes.
        tokens: the indices of the axes' tokens among the distinct tensors.
        autocast: the autocast settings of the call.
        uses_host: whether saved arguments are offloaded to host memory until the backward pass.
    """

    block: Callable[..., Any]
    save: SaveFilter | None
    arguments: IndexedTree
    differentiated: tuple[bool, ...]
    scope: Scope | None
    tokens: tuple[int, ...]
    autocast: _AutocastState
    uses_host: bool

    @property
    def offload_indices(self) -> frozenset[int]:
        """The indices of the tensors to offload to the host: all differentiated tensors outside boxes."""
        if not self.uses_host:
            return frozenset()
        return frozenset([i for i, d in enumerate(self.differentiated) if d]) - self.arguments.boxed_indices()

    def run(
        self, tensors: Sequence[torch.Tensor], guard: Guard, tape: RandomTape | TapeReplayer
    ) -> tuple[tuple[torch.Tensor, ...], IndexedTree]:
        """Run the block on its tensors, in the scope and under the autocast settings of its call.

        Returns:
            The distinct tensors of the block's result, and the result with indices in place of them.
        """

        def run() -> Any:
            args, kwargs = self.arguments.restore(tensors)
            with guard, tape:
                return (
                    gather_and_call(self.block, args, kwargs)
                    if self.arguments.has_boxes()
                    else self.block(*args, **kwargs)
                )

        with self.autocast.restore():
            out = run() if self.scope is None else call_in_scope(self._rebind(self.scope, tensors), run)
        distinct = DistinctTensors()
        result = replace_result(out, distinct)
        return tuple(distinct.tensors), result

    def _rebind(self, scope: Scope, tensors: Sequence[torch.Tensor]) -> Scope:
        """Return the scope with this run's tokens, which outer transforms may have wrapped."""
        tokens = iter([tensors[i] for i in self.tokens])

        def rebind(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
            return tuple([a._replace(token=next(tokens)) for a in axes])

        axes = scope.axes._replace(each=rebind(scope.axes.each), joint=rebind(scope.axes.joint))
        return scope._replace(axes=axes)


def flatten_call(
    block: Callable[..., Any], save: SaveFilter | None, args: Any, kwargs: Any, uses_host: bool = False
) -> tuple[BlockCall, tuple[torch.Tensor, ...]]:
    """Return a call as data, and its distinct tensors, which include the tokens of the bound axes.

    Raises:
        TypeError: if an argument holds an object that is neither a tensor nor a constant.
        ValueError: if the block's closure holds a tensor that is differentiated.
    """
    check_captured(block)
    distinct, scope = DistinctTensors(), current_scope()
    arguments = replace_arguments(args, kwargs, distinct)
    axes = () if scope is None else (*scope.axes.each, *scope.axes.joint)
    tokens = tuple([distinct.index_of(a.token) for a in axes])
    is_differentiable = tuple([is_differentiated(x) for x in distinct.tensors])
    return BlockCall(
        block=block,
        save=save,
        arguments=arguments,
        differentiated=is_differentiable,
        scope=scope,
        tokens=tokens,
        autocast=_autocast_state(),
        uses_host=uses_host,
    ), tuple(distinct.tensors)
