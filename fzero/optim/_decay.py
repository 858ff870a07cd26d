"""Weight decay."""

from fzero import tree
from fzero.layout.segments import per_leaf
from fzero.optim._base import Mask, Optimizer, OptState, Params, Updates
from fzero.optim._hyper import Number, is_zero, nonnegative

__all__ = ["add_decayed_weights"]


def add_decayed_weights(weight_decay: Number, mask: Mask | None = None) -> Optimizer:
    """Add a fraction of the parameters to their gradients.

    Before an optimizer this is L2 regularisation; between its direction and its learning rate it is decoupled
    weight decay (arXiv:1711.05101).

    Args:
        weight_decay: the fraction.
        mask: which leaves decay: a tree of bools, or a function from the tree of whole leaves (as meta tensors)
            to one. By default all do.

    Returns:
        A pair without state.

    Raises:
        ValueError: if `weight_decay` is negative; on update, if it is not 0 and `params` is not given, or if `mask`
            has another structure than `params`.

    Example:
        >>> import torch
        >>> params = {"w": torch.tensor(2.0)}
        >>> add_decayed_weights(0.1).update({"w": torch.tensor(1.0)}, (), params)[0]
        {'w': tensor(1.2000)}
    """
    nonnegative(weight_decay=weight_decay)

    def update(grads: Updates, state: OptState, params: Params | None = None) -> tuple[Updates, OptState]:
        if is_zero(weight_decay):
            return grads, state
        if params is None:
            raise ValueError("weight decay needs the parameters: opt.update(grads, state, params)")
        decays = tree.map(lambda p: True, params) if mask is None else per_leaf(params, mask)
        return tree.map(lambda g, p, d: (g + weight_decay * d * p).to(g.dtype), grads, params, decays), state

    return Optimizer(lambda params: (), update, elementwise=True)
