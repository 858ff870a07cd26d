"""LAMB, and the trust ratio that it scales steps by."""

import torch

from fzero import tree
from fzero._tracebacks import api_boundary
from fzero.optim._adam import scale_by_adam
from fzero.optim._base import Mask, Optimizer, OptState, Params, Updates, chain, optimizer_factory
from fzero.optim._hyperparams import Scalar
from fzero.optim._links import add_decayed_weights, scale_by_learning_rate
from fzero.optim._norms import leaf_norms
from fzero.optim._schedules import Schedule
from fzero.optim.checks import torch_hints
from fzero.optim.moments import MomentsLike

__all__ = ["lamb", "scale_by_trust_ratio"]


@torch_hints
@optimizer_factory
def lamb(
    learning_rate: Scalar | Schedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-6,
    weight_decay: Scalar = 0.0,
    mask: Mask | None = None,
    moments: MomentsLike = None,
) -> Optimizer:
    """Scale AdamW's step of each leaf to the leaf's norm (arXiv:1904.00962): `optax.lamb`'s numbers.

    LAMB suits large batches. It is exact on shards: the leaves' norms take one psum of two numbers per leaf.

    Args:
        learning_rate: a number, or a schedule: the norm of a step relative to the norm of the leaf.
        b1: the decay of the first moment.
        b2: the decay of the second moment.
        eps: added to the root of the second moment.
        weight_decay: the fraction of a parameter that is added to its direction before the trust ratio scales it.
        mask: which leaves decay; see `add_decayed_weights`.
        moments: how to store the moments; see `adamw`.

    Returns:
        An optimizer, the chain of `scale_by_adam`, `add_decayed_weights`, `scale_by_trust_ratio` and
        `scale_by_learning_rate`. Its state has two moments per element.

    Raises:
        ValueError: if a hyperparameter is out of its range. On update, if `params` is not given.

    Example:
        >>> opt = lamb(0.1)
        >>> params = {"w": torch.tensor([3.0, 4.0])}
        >>> opt.update({"w": torch.tensor([0.1, 0.0])}, opt.init(params), params)[0]
        {'w': tensor([-0.5000, -0.0000])}
    """
    return chain(
        scale_by_adam(b1, b2, eps, moments),
        add_decayed_weights(weight_decay, mask),
        scale_by_trust_ratio(),
        scale_by_learning_rate(learning_rate),
    )


@api_boundary
@optimizer_factory
def scale_by_trust_ratio() -> Optimizer:
    """Scale each leaf's step to the norm of the leaf (LARS, arXiv:1708.03888; LAMB, arXiv:1904.00962).

    If the norm of a leaf or of its step is zero, the step stays unchanged.

    Returns:
        An optimizer without state.

    Raises:
        ValueError: on update, if `params` is not given.

    Example:
        >>> params = {"w": torch.tensor([3.0, 4.0])}
        >>> scale_by_trust_ratio().update({"w": torch.tensor([0.0, 2.0])}, (), params)[0]
        {'w': tensor([0., 5.])}
    """

    def update(grads: Updates, state: OptState, params: Params | None = None) -> tuple[Updates, OptState]:
        if params is None:
            raise ValueError("a trust ratio needs the parameters: opt.update(grads, state, params)")
        return tree.map(_scale_to_norm, grads, *leaf_norms((grads, params))), state

    return Optimizer(lambda params: (), update, exact_on_shards=True, elementwise=False)


def _scale_to_norm(step: torch.Tensor, step_norm: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    ratio = torch.where((norm == 0) | (step_norm == 0), torch.ones_like(norm), norm / step_norm)
    return (step * ratio).to(step.dtype)
