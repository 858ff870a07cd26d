"""The (init, update) pair of optax: an optimizer is two pure functions over trees.

`init(params) -> state`; `update(grads, state, params) -> (updates, state)`; `apply_updates` adds the updates to the
parameters. On boxed trees `fzero.tree.map` visits the shards, so an elementwise optimizer runs on any layout unchanged.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, cast

import torch

from fzero import tree
from fzero._arguments import check_callable, function_name
from fzero._names import missing_members
from fzero._tracebacks import api_boundary, api_boundary_of_class
from fzero.optim._offload_plan import Ratio, offload_params
from fzero.optim._precision import Precision
from fzero.optim.checks import check_has_method, check_updates, checks_gradients, checks_params, mark_role
from fzero.sharding import check_per_leaf
from fzero.tree import Tree

__all__ = [
    "Mask",
    "OptState",
    "Optimizer",
    "OptimizerLike",
    "Params",
    "Updates",
    "apply_updates",
    "as_optimizer",
    "chain",
    "check_mask",
    "check_mask_fits",
    "find_state",
    "optimizer_factory",
    "wrap_optimizers",
]

Params = Tree
"""A tree of parameters: plain tensors, or boxes where a stage shards them."""
Updates = Tree
"""A tree like the parameters: gradients, or the differences that `apply_updates` adds to the parameters."""
OptState = Tree
"""The state of an optimizer: any tree. Its leaves that mirror the parameters lie in boxes if the parameters do."""
Mask = Tree | Callable[[Params], Tree]
"""A tree of bools like the full parameters, or a function that returns one from the full leaves (as meta tensors)."""

_State = TypeVar("_State")
_F = TypeVar("_F", bound=Callable[..., "Optimizer"])


class OptimizerLike(Protocol):
    """An (init, update) pair: an `Optimizer`, or a third-party object with the two methods of optax's optimizers.

    Example:
        >>> import fzero, torch
        >>> class Descend:
        ...     def init(self, params):
        ...         return ()
        ...
        ...     def update(self, grads, state, params=None):
        ...         return fzero.tree.map(lambda g: -0.1 * g, grads), state
        >>> opt = chain(Descend())
        >>> opt.update({"w": torch.tensor(2.0)}, opt.init({"w": torch.tensor(1.0)}))[0]
        {'w': tensor(-0.2000)}
    """

    def init(self, params: Params, /) -> OptState:
        """Make the state for these parameters."""
        ...

    def update(self, grads: Updates, state: OptState, /, *, params: Params | None = None) -> tuple[Updates, OptState]:
        """Return the updates for these gradients, and the new state. The arguments stay unchanged."""
        ...


_FOREIGN_NAMES = {  # names of torch.optim's optimizers
    "step": "updates, opt_state = opt.update(grads, opt_state, params), and optim.apply_updates(params, updates)",
    "zero_grad": "not needed: fzero.value_and_grad returns gradients and keeps none",
    "param_groups": "optim.by_group((opt, mask), ...); a rate that changes is a schedule",
    "add_param_group": "optim.by_group((opt, mask), ...)",
    "state": "opt_state, an argument and a result: opt_state = opt.init(params)",
    "state_dict": "opt_state, an argument and a result, which fzero.save(path, values, mesh) saves",
    "load_state_dict": "fzero.load(path, like, mesh), with opt_state in the tree like",
    "defaults": "the arguments of the function that made the optimizer; optim.inject_hyperparams keeps them as state",
    "apply_updates": "optim.apply_updates(params, updates)",
    "apply": "optim.apply_updates(params, updates)",
    "apply_gradients": "updates, opt_state = opt.update(grads, opt_state, params), and optim.apply_updates",
    "backward": "fzero.value_and_grad(loss_fn)(params, batch), which takes gradients",
    "minimize": "fzero.value_and_grad(loss_fn)(params, batch), then opt.update(grads, opt_state, params)",
}


class _FactoryCall(NamedTuple):
    """The call of a factory that made an optimizer, such as `adam(1e-3)`. Its text is made when somebody reads it.

    Attributes:
        name: the name of the factory.
        args: its positional arguments, as they were given.
        kwargs: its keyword arguments.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __str__(self) -> str:
        """Format the call as it is written."""
        keywords = [f"{name}={_format_argument(value)}" for name, value in self.kwargs.items()]
        return f"{self.name}({', '.join([*map(_format_argument, self.args), *keywords])})"


@api_boundary_of_class
@dataclass(frozen=True)
class Optimizer:
    """An (init, update) pair. It unpacks: `init, update = opt`.

    Attributes:
        init: `init(params) -> state`.
        update: `update(grads, state, params) -> (updates, state)`; `params` may be None if it is not needed. Before it
            runs, gradients of another structure or shape than the parameters raise ValueError with the leaf's path.
        exact_on_shards: whether the optimizer gives the same numbers on flat shards as on full leaves: True for all
            optimizers in `fzero.optim`; None if unknown, and `fzero.testing.is_exact_on_shards` finds out.
        precision: the policy by which `step.init` casts the parameters, if the optimizer keeps master weights.
        skips_overflow: whether the optimizer skips steps whose gradients overflowed, as a loss scale does.
        parts: the optimizers that this optimizer is composed of.
        elementwise: False if the update of an element reads other elements, for a norm for instance.
        offloads_state: whether part of the state lies in host memory.
        param_offload_ratio: the share of the parameters that lies in host memory, or a rule `(path) -> share`.
        factory_call: the call that made the optimizer, for its repr; None for an optimizer of your own.

    Example:
        >>> from fzero import optim
        >>> optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(3e-4, weight_decay=0.1))
        Optimizer(chain(clip_by_global_norm(1.0), adamw(0.0003, weight_decay=0.1)))
    """

    init: Callable[[Params], OptState]
    update: Callable[..., tuple[Updates, OptState]]
    exact_on_shards: bool | None = None
    precision: Precision | None = None
    skips_overflow: bool = False
    parts: tuple["Optimizer", ...] = ()
    elementwise: bool | None = None
    offloads_state: bool = False
    param_offload_ratio: Ratio = 0
    factory_call: _FactoryCall | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        """Let every init check its parameters, and every update its gradients."""
        check_callable("init", self.init, "a function (params) -> state")
        check_callable("update", self.update, "a function (grads, state, params) -> (updates, state)")
        object.__setattr__(self, "init", checks_params(self.init))
        object.__setattr__(self, "update", checks_gradients(self.update))

    @property
    def name(self) -> str:
        """The call that made the optimizer, or the name of the function or class and those of its parts."""
        if self.factory_call is not None:
            return str(self.factory_call)
        factory = getattr(self.update, "__qualname__", type(self.update).__name__)
        inner = ", ".join([part.name for part in self.parts])
        return factory.split(".")[0] + (f"({inner})" if inner else "")

    def __repr__(self) -> str:
        return f"Optimizer({self.name})"

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        return iter((self.init, self.update))

    if not TYPE_CHECKING:  # a type checker finds a missing name itself
        __getattr__ = missing_members(_FOREIGN_NAMES)

    def cast_and_offload(self, params: Params) -> Params:
        """Cast parameters to the dtypes of `precision`, and move their share to the host, after the state is made.

        Raises:
            ValueError: if a share goes to the host, and all parameters are full, as at stages 0 to 2.
        """
        params = params if self.precision is None else self.precision.cast(params)
        ratio = self.param_offload_ratio
        return offload_params(params, ratio, self.precision) if ratio else params


def optimizer_factory(f: _F, name: str = "") -> _F:
    """Return a function that makes an optimizer, whose repr shows the call: by default with the function's name."""

    @functools.wraps(f)
    def make_optimizer(*args: Any, **kwargs: Any) -> Optimizer:
        optimizer = copy.copy(f(*args, **kwargs))
        object.__setattr__(optimizer, "factory_call", _FactoryCall(name or f.__name__, args, kwargs))
        return optimizer

    return cast("_F", make_optimizer)


def _format_argument(value: Any) -> str:
    """Format a plain value as it is written, an optimizer by its call, a function by its name, others by their type."""
    if isinstance(value, Optimizer):
        return value.name
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return f"({', '.join(map(_format_argument, value))}{',' if len(value) == 1 else ''})"
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return repr(value)
    return function_name(value) if callable(value) else f"<{type(value).__name__}>"


def check_mask(mask: Mask | None) -> None:
    """Check that a mask is a function or a tree of bools, before it is applied to parameters.

    Raises:
        TypeError: if it is neither, such as a list of names.
    """
    is_function = mask is None or callable(mask)
    if not is_function and not all(isinstance(x, bool | torch.Tensor) or x is None for x in tree.flatten(mask)[0]):
        raise TypeError(
            f"mask is {tree.show(mask)}: expected a tree of bools like the parameters, or a function that makes one: "
            "lambda params: fzero.tree.map(lambda p: p.ndim >= 2, params)"
        )


def check_mask_fits(mask: Mask | None, params: Params) -> None:
    """Check that a mask, if there is one, has the structure of the parameters: on init, before the first update.

    Raises:
        ValueError: if it has another. The message names the path.
    """
    if mask is not None:
        check_per_leaf(params, mask)


def as_optimizer(opt: OptimizerLike, name: str = "opt") -> Optimizer:
    """Return an optimizer as an `Optimizer`; a third-party one may have an attribute `exact_on_shards`.

    Messages call the argument by `name`.

    Raises:
        TypeError: if it has no `init` or no `update`.
    """
    if isinstance(opt, Optimizer):
        return opt
    for method in ("init", "update"):
        check_has_method(opt, method, name)
    return Optimizer(opt.init, opt.update, getattr(opt, "exact_on_shards", None))


def wrap_optimizers(
    init: Callable[[Params], OptState], update: Callable[..., tuple[Updates, OptState]], *opts: OptimizerLike
) -> Optimizer:
    """Return an optimizer of functions that call `opts`, with the attributes that follow from theirs."""
    optimizers = [as_optimizer(opt) for opt in opts]
    exact = {opt.exact_on_shards for opt in optimizers}
    all_exact = None if None in exact else True
    policies = [opt.precision for opt in optimizers if opt.precision is not None]
    return Optimizer(
        init,
        update,
        exact_on_shards=False if False in exact else all_exact,
        precision=policies[0] if policies else None,
        skips_overflow=any(opt.skips_overflow for opt in optimizers),
        parts=tuple(optimizers),
        elementwise=False if any(opt.elementwise is False for opt in optimizers) else None,
        offloads_state=any(opt.offloads_state for opt in optimizers),
        param_offload_ratio=next((x.param_offload_ratio for x in optimizers if x.param_offload_ratio), 0),
    )


def find_state(opt_state: OptState, kind: type[_State]) -> _State:
    """Return the only state of type `kind` in an optimizer's state.

    Raises:
        ValueError: if there is none, or more than one.
    """
    states = [x for x in tree.flatten(opt_state, lambda x: isinstance(x, kind))[0] if isinstance(x, kind)]
    if len(states) != 1:
        advice = (
            "pass the part with the one that you mean" if states else "pass the state of an optimizer that keeps it"
        )
        raise ValueError(f"opt_state holds {len(states)} of {kind.__name__}: expected one; {advice}")
    return states[0]


@api_boundary
def apply_updates(params: Params, updates: Updates) -> Params:
    """Add updates to parameters, keeping their dtypes; leaves that are one tensor object (tied) stay one.

    Raises:
        ValueError: if the trees differ in structure, in a leaf's shape, or are sharded differently. The message names
            the path.

    Example:
        >>> import torch
        >>> apply_updates({"w": torch.tensor(1.0)}, {"w": torch.tensor(0.5)})
        {'w': tensor(1.5000)}
    """
    check_updates(params, updates)
    params = tree.elementwise(lambda p, u: (p + u).to(p.dtype), params, updates)
    mark_role(params, "parameters")
    return params


@api_boundary
@optimizer_factory
def chain(*opts: OptimizerLike) -> Optimizer:
    """Compose optimizers: the updates of one are the gradients of the next.

    Args:
        *opts: (init, update) pairs, third-party ones among them.

    Returns:
        An optimizer whose state is the tuple of the links' states.

    Raises:
        ValueError: if `master_weights` is not the last link: a later link would change the parameters and not the
            masters. Also if a link is a loss scale, which goes around the chain.

    Example:
        >>> import torch
        >>> from fzero.optim import clip_by_global_norm, sgd
        >>> opt, params = chain(clip_by_global_norm(1.0), sgd(0.5)), {"w": torch.zeros(2)}
        >>> opt.update({"w": torch.tensor([3.0, 4.0])}, opt.init(params), params)[0]
        {'w': tensor([-0.3000, -0.4000])}
    """
    optimizers = [as_optimizer(opt, f"opts[{i}]") for i, opt in enumerate(opts)]
    if any(opt.precision is not None for opt in optimizers[:-1]):
        raise ValueError(
            "chain: master_weights must be the last link, or around the whole chain: "
            "optim.master_weights(optim.chain(...), precision)"
        )
    if any(opt.skips_overflow for opt in optimizers):
        raise ValueError(
            "chain: a loss scale goes around the whole chain: a clip before it would hide an overflow, and a link "
            "after it would see steps that are skipped"
        )

    def init(params: Params) -> OptState:
        return tuple([opt.init(params) for opt in opts])

    def update(grads: Updates, state: OptState, params: Params | None = None) -> tuple[Updates, OptState]:
        new_states = []
        if hasattr(state, "_fields") or len(state) != len(opts):
            actual = type(state).__name__ if hasattr(state, "_fields") else f"a tuple of {len(state)} states"
            raise TypeError(
                f"chain was given {actual}: expected a tuple of {len(opts)} states, one a link; make it with "
                "step.init(params, opt) of the same optimizer"
            )
        for opt, s in zip(opts, state, strict=True):
            grads, s = opt.update(grads, s, params=params)
            new_states.append(s)
        return grads, tuple(new_states)

    return wrap_optimizers(init, update, *opts)
