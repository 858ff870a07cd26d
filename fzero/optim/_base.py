"""The (init, update) pair, optax's: an optimizer is two pure functions over trees.

`init(params) -> state`; `update(grads, state, params) -> (updates, state)`; `apply_updates` adds the updates to the
parameters. On boxed trees `tree_map` visits the shards, so an elementwise pair runs on any layout unchanged.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from fzero import tree
from fzero.optim._pair import check_pair
from fzero.precision import Precision
from fzero.tree import Tree

__all__ = [
    "Mask",
    "OptState",
    "Optimizer",
    "Pair",
    "Params",
    "Updates",
    "apply_updates",
    "around",
    "as_optimizer",
    "chain",
    "find_state",
]

Params = Tree
"""A tree of parameters: plain tensors, or at stages 1 to 3 boxes."""
Updates = Tree
"""A tree like the parameters: gradients, or the differences that `apply_updates` adds to the parameters."""
OptState = Tree
"""The state of a pair: any tree, whose leaves that are like the parameters lie in boxes as they do."""
Mask = Tree | Callable[[Params], Tree]
"""A tree of bools like the whole parameters, or a function that makes one of the whole leaves (as meta tensors)."""

State = TypeVar("State")


class Pair(Protocol):
    """An (init, update) pair: an `Optimizer`, or a third-party one, such as optax's form in PyTorch.

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
        """Make updates of gradients; return them and the new state. Its arguments stay as they are."""
        ...


@dataclass(frozen=True)
class Optimizer:
    """An (init, update) pair; it unpacks as one: `init, update = opt`.

    Attributes:
        init: `init(params) -> state`.
        update: `update(grads, state, params) -> (updates, state)`; `params` may be None if it is not needed.
        elementwise: whether the pair gives the same numbers on flat shards as on whole leaves: True of all pairs
            in `fzero.optim`; None if not known, and `fzero.testing.check_elementwise` finds out.
        precision: the policy by which `step.init` casts the parameters, if the pair keeps master weights.
        skips: whether the pair skips steps that overflowed: a loss scale.
        parts: the pairs that it is made of.
        pointwise: False of a pair that reads more of a leaf than one element to update it, such as a norm.
        lowers: the share of the parameters that `step.init` puts into host memory, or a rule `(path) -> share`.

    Example:
        >>> from fzero import optim
        >>> optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(3e-4))
        Optimizer(chain(clip_by_global_norm, adamw))
    """

    init: Callable[[Params], OptState]
    update: Callable[..., tuple[Updates, OptState]]
    elementwise: bool | None = None
    precision: Precision | None = None
    skips: bool = False
    parts: tuple["Optimizer", ...] = ()
    pointwise: bool | None = None
    lowers: float | Callable[[str], float] = 0

    @property
    def name(self) -> str:
        """Name the pair by the function or class that made it, and those of its parts."""
        own = getattr(self.update, "__qualname__", type(self.update).__name__)
        inner = ", ".join([part.name for part in self.parts])
        return own.split(".")[0] + (f"({inner})" if inner else "")

    def __repr__(self) -> str:
        return f"Optimizer({self.name})"

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        return iter((self.init, self.update))


def as_optimizer(pair: Pair) -> Optimizer:
    """Return a pair as an `Optimizer`; a third-party one may have an attribute `elementwise`.

    Raises:
        TypeError: if it is no pair.
    """
    if isinstance(pair, Optimizer):
        return pair
    for needed in ("init", "update"):
        check_pair(pair, needed)
    return Optimizer(pair.init, pair.update, getattr(pair, "elementwise", None))


def around(
    init: Callable[[Params], OptState], update: Callable[..., tuple[Updates, OptState]], *pairs: Pair
) -> Optimizer:
    """Make a pair of functions around others: it is elementwise, keeps masters and skips steps as these do."""
    known = [as_optimizer(pair) for pair in pairs]
    elementwise = {pair.elementwise for pair in known}
    policies = [pair.precision for pair in known if pair.precision is not None]
    return Optimizer(
        init,
        update,
        elementwise=False if False in elementwise else None if None in elementwise else True,
        precision=policies[0] if policies else None,
        skips=any(pair.skips for pair in known),
        parts=tuple(known),
        pointwise=False if any(pair.pointwise is False for pair in known) else None,
        lowers=next((pair.lowers for pair in known if pair.lowers), 0),
    )


def find_state(opt_state: OptState, kind: type[State]) -> State:
    """Find the one state of this type in an optimizer's state.

    Raises:
        ValueError: if there is none, or more than one.
    """
    found = [x for x in tree.flatten(opt_state, lambda x: isinstance(x, kind))[0] if isinstance(x, kind)]
    if len(found) != 1:
        raise ValueError(f"opt_state holds {len(found)} of {kind.__name__}: expected one")
    return found[0]


def apply_updates(params: Params, updates: Updates) -> Params:
    """Add updates to parameters, keeping their dtypes; leaves that are one tensor object (tied) stay one.

    Raises:
        ValueError: if the trees differ in structure or are cut differently. Names the path.

    Example:
        >>> import torch
        >>> apply_updates({"w": torch.tensor(1.0)}, {"w": torch.tensor(0.5)})
        {'w': tensor(1.5000)}
    """
    return tree.map(lambda p, u: (p + u).to(p.dtype), params, updates)


def chain(*pairs: Pair) -> Optimizer:
    """Compose pairs: the updates of one are the gradients of the next.

    Args:
        *pairs: (init, update) pairs, third-party ones among them.

    Returns:
        A pair whose state is the tuple of their states.

    Raises:
        ValueError: if `master_weights` is not the last: a link after it would change the parameters and not the
            masters. Also if a link is a loss scale, which goes around the chain.

    Example:
        >>> import torch
        >>> from fzero.optim import clip_by_global_norm, sgd
        >>> opt, params = chain(clip_by_global_norm(1.0), sgd(0.5)), {"w": torch.zeros(2)}
        >>> opt.update({"w": torch.tensor([3.0, 4.0])}, opt.init(params), params)[0]
        {'w': tensor([-0.3000, -0.4000])}
    """
    known = [as_optimizer(pair) for pair in pairs]
    if any(pair.precision is not None for pair in known[:-1]):
        raise ValueError("chain: master_weights must be the last link, or around the whole chain")
    if any(pair.skips for pair in known):
        raise ValueError(
            "chain: a loss scale goes around the whole chain: a clip before it would hide an overflow, and a link "
            "after it would see steps that are skipped"
        )

    def init(params: Params) -> OptState:
        return tuple([pair.init(params) for pair in pairs])

    def update(grads: Updates, state: OptState, params: Params | None = None) -> tuple[Updates, OptState]:
        new = []
        for pair, s in zip(pairs, state, strict=True):
            grads, s = pair.update(grads, s, params=params)
            new.append(s)
        return grads, tuple(new)

    return around(init, update, *pairs)
