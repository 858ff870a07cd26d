"""Wrappers: optimizers that run another optimizer, on some leaves, on other copies or in other memory."""

from fzero.optim.wrappers._groups import by_group
from fzero.optim.wrappers._inject_hyperparams import InjectHyperparamsState, inject_hyperparams
from fzero.optim.wrappers._loss_scaling import (
    LossScaleState,
    all_finite,
    dynamic_loss_scale,
    loss_scale,
    static_loss_scale,
)
from fzero.optim.wrappers._master_weights import (
    MasterState,
    convert_masters,
    master_params,
    master_weights,
    round_master,
)
from fzero.optim.wrappers._offload import DelayedState, offload, with_offload_ratio
from fzero.optim.wrappers._on_full_leaves import on_full_leaves
from fzero.optim.wrappers._stochastic_rounding import StochasticRoundingState, stochastic_rounding
from fzero.optim.wrappers._wrappers import leafwise, masked

__all__ = [
    "DelayedState",
    "InjectHyperparamsState",
    "LossScaleState",
    "MasterState",
    "StochasticRoundingState",
    "all_finite",
    "by_group",
    "convert_masters",
    "dynamic_loss_scale",
    "inject_hyperparams",
    "leafwise",
    "loss_scale",
    "masked",
    "master_params",
    "master_weights",
    "offload",
    "on_full_leaves",
    "round_master",
    "static_loss_scale",
    "stochastic_rounding",
    "with_offload_ratio",
]
