"""A call of a rematerialised block as a function of tensors, which can be run again later, elsewhere."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fzero._torch.levels import is_differentiated
from fzero.axes.axis import Axis
from fzero.axes.scope import Scope, scope_here, within
from fzero.transforms._gather import gather
from fzero.transforms._remat._guards import Guard, check_captured
from fzero.transforms._remat._stand_ins import Distinct, StandIns, arguments, result
from fzero.transforms._remat._tape import Chosen, Player, RandomTape

__all__ = ["BlockCall", "call_of", "called"]


def called(block: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a block with its boxes gathered."""
    args, kwargs = gather((args, kwargs))
    return block(*args, **kwargs)


@dataclass(frozen=True)
class Casts:
    """Autocast at a call, which a backward pass may run outside of.

    Attributes:
        dtypes: device -> the dtype that autocast has for it.
        enabled: the devices on which it is on.
    """

    dtypes: dict[str, torch.dtype]
    enabled: frozenset[str]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Set autocast as it was."""
        with ExitStack() as stack:
            for device, dtype in self.dtypes.items():
                enabled = device in self.enabled
                if enabled or torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, dtype, enabled, cache_enabled=False))
            yield


def casts_here() -> Casts:
    """Take autocast down."""
    devices = ("cpu", "cuda")
    dtypes = {device: torch.get_autocast_dtype(device) for device in devices}
    return Casts(dtypes, frozenset([device for device in devices if torch.is_autocast_enabled(device)]))


@dataclass(frozen=True)
class BlockCall:
    """A call of a block, without its tensors.

    Attributes:
        block: the function.
        save: which operations' results are kept.
        arguments: its arguments, with stand-ins for tensors.
        differentiated: for each distinct tensor whether it is differentiated.
        scope: the axes that are bound.
        tokens: the number of each of their tokens among the distinct tensors.
        casts: its autocast.
        host: whether what it is given waits in host memory for the backward pass.
    """

    block: Callable[..., Any]
    save: Chosen | None
    arguments: StandIns
    differentiated: tuple[bool, ...]
    scope: Scope | None
    tokens: tuple[int, ...]
    casts: Casts
    host: bool

    @property
    def waiting(self) -> frozenset[int]:
        """The numbers of the tensors that wait on the host: what is differentiated, but for parameters' boxes."""
        if not self.host:
            return frozenset()
        return frozenset([i for i, d in enumerate(self.differentiated) if d]) - self.arguments.boxed()

    def run(
        self, tensors: Sequence[torch.Tensor], guard: Guard, tape: RandomTape | Player
    ) -> tuple[tuple[torch.Tensor, ...], StandIns]:
        """Run the block on its tensors, in the scope and under the casts of its call.

        Returns:
            The distinct tensors of its result, and the result without them.
        """

        def run() -> Any:
            args, kwargs = self.arguments.filled(tensors)
            with guard, tape:
                return called(self.block, args, kwargs) if self.arguments.has_boxes() else self.block(*args, **kwargs)

        with self.casts.again():
            out = run() if self.scope is None else within(self._rebound(self.scope, tensors), run)
        distinct = Distinct()
        found = result(out, distinct)
        return tuple(distinct.tensors), found

    def _rebound(self, scope: Scope, tensors: Sequence[torch.Tensor]) -> Scope:
        """Return the scope with this run's tokens, which the transforms around it may have wrapped."""
        tokens = iter([tensors[i] for i in self.tokens])

        def rebound(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
            return tuple([a._replace(token=next(tokens)) for a in axes])

        axes = scope.axes._replace(each=rebound(scope.axes.each), joint=rebound(scope.axes.joint))
        return scope._replace(axes=axes)


def call_of(
    block: Callable[..., Any], save: Chosen | None, args: Any, kwargs: Any, host: bool = False
) -> tuple[BlockCall, tuple[torch.Tensor, ...]]:
    """Take a call down: return it, and its distinct tensors, the tokens of the bound axes among them.

    Raises:
        TypeError: if an argument holds an object that is neither a tensor nor a constant.
        ValueError: if the block's closure holds a tensor that is differentiated.
    """
    check_captured(block)
    distinct, scope = Distinct(), scope_here()
    given = arguments(args, kwargs, distinct)
    axes = () if scope is None else (*scope.axes.each, *scope.axes.joint)
    tokens = tuple([distinct.number(a.token) for a in axes])
    differentiated = tuple([is_differentiated(x) for x in distinct.tensors])
    return BlockCall(block, save, given, differentiated, scope, tokens, casts_here(), host), tuple(distinct.tensors)
