"""step: the optimizer's update, on trees of any layout."""

from collections.abc import Callable
from typing import Any

from fzero.optim import apply_updates, check_pair

__all__ = ["step"]


def step(opt: Any) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """Make the function that updates parameters: the fourth transform.

    On shards each rank updates 1/N of the parameters, with 1/N of the optimizer's state.

    Args:
        opt: an (init, update) pair.

    Returns:
        `(params, grads, opt_state) -> (params, opt_state)`.

    Raises:
        TypeError: if `opt` is not a pair, for example an optimizer of torch.optim.
        ValueError: when called, if the trees differ in structure or layout. The message names the leaf.

    Example:
        >>> import torch
        >>> from fzero import optim
        >>> params, opt = {"w": torch.tensor(1.0)}, optim.sgd(0.1)
        >>> step(opt)(params, {"w": torch.tensor(2.0)}, opt.init(params))[0]
        {'w': tensor(0.8000)}
    """
    check_pair(opt, "update")

    def update(params: Any, grads: Any, opt_state: Any) -> tuple[Any, Any]:
        updates, opt_state = opt.update(grads, opt_state, params=params)
        return apply_updates(params, updates), opt_state

    return update
