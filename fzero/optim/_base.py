"""The (init, update) pair, optax's: an optimizer is two pure functions over trees.

`init(params) -> state`; `update(grads, state, params) -> (updates, state)`; `apply_updates` adds the updates to the
parameters. On boxed trees `tree_map` visits the shards, so an elementwise pair runs on any layout unchanged.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fzero import tree
from fzero.precision import Precision

__all__ = ["Optimizer", "apply_updates", "around", "chain", "find_state"]


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
    """

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]
    elementwise: bool | None = None
    precision: Precision | None = None
    skips: bool = False

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        return iter((self.init, self.update))


def around(init: Callable[[Any], Any], update: Callable[..., tuple[Any, Any]], *pairs: Any) -> Optimizer:
    """Make a pair of functions around others: it is what they are."""
    known = [getattr(pair, "elementwise", None) for pair in pairs]
    elementwise = False if False in known else None if None in known else True
    policies = [pair.precision for pair in pairs if getattr(pair, "precision", None) is not None]
    skips = any(getattr(pair, "skips", False) for pair in pairs)
    return Optimizer(init, update, elementwise, policies[0] if policies else None, skips)


def find_state(opt_state: Any, kind: type) -> Any:
    """Find the one state of this type in an optimizer's state.

    Raises:
        ValueError: if there is none, or more than one.
    """
    found = [x for x in tree.flatten(opt_state, lambda x: isinstance(x, kind))[0] if isinstance(x, kind)]
    if len(found) != 1:
        raise ValueError(f"opt_state holds {len(found)} of {kind.__name__}: expected one")
    return found[0]


def apply_updates(params: Any, updates: Any) -> Any:
    """Add updates to parameters, keeping their dtypes; leaves that are one tensor object (tied) stay one.

    Raises:
        ValueError: if the trees differ in structure or are cut differently. Names the path.

    Example:
        >>> import torch
        >>> apply_updates({"w": torch.tensor(1.0)}, {"w": torch.tensor(0.5)})
        {'w': tensor(1.5000)}
    """
    return tree.map(lambda p, u: (p + u).to(p.dtype), params, updates)


def chain(*pairs: Any) -> Optimizer:
    """Compose pairs: the updates of one are the gradients of the next.

    Args:
        *pairs: (init, update) pairs, third-party ones among them.

    Returns:
        A pair whose state is the tuple of their states.

    Raises:
        ValueError: if `master_weights` is not the last: what came after would change the parameters and not the
            masters; or if a link is a loss scale, which goes around the chain.

    Example:
        >>> import torch
        >>> from fzero.optim import clip_by_global_norm, sgd
        >>> opt, params = chain(clip_by_global_norm(1.0), sgd(0.5)), {"w": torch.zeros(2)}
        >>> opt.update({"w": torch.tensor([3.0, 4.0])}, opt.init(params), params)[0]
        {'w': tensor([-0.3000, -0.4000])}
    """
    if any(getattr(pair, "precision", None) is not None for pair in pairs[:-1]):
        raise ValueError("chain: master_weights must be the last link, or around the whole chain")
    if any(getattr(pair, "skips", False) for pair in pairs):
        raise ValueError(
            "chain: a loss scale goes around the whole chain: a clip before it would hide an overflow, and a link "
            "after it would see steps that are skipped"
        )

    def init(params: Any) -> Any:
        return tuple([pair.init(params) for pair in pairs])

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        new = []
        for pair, s in zip(pairs, state, strict=True):
            grads, s = pair.update(grads, s, params=params)
            new.append(s)
        return grads, tuple(new)

    return around(init, update, *pairs)
