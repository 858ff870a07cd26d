"""Optimizers as (init, update) pairs."""

from typing import TYPE_CHECKING

from fzero._names import missing_names
from fzero.optim._adam import AdamState, adam, adamw, scale_by_adam
from fzero.optim._averages import EmaState, ema, params_ema
from fzero.optim._base import (
    Mask,
    Optimizer,
    OptimizerLike,
    OptState,
    Params,
    Updates,
    apply_updates,
    as_optimizer,
    chain,
)
from fzero.optim._convert_moments import convert_moments
from fzero.optim._lamb import lamb, scale_by_trust_ratio
from fzero.optim._links import (
    ScaleByScheduleState,
    add_decayed_weights,
    scale,
    scale_by_learning_rate,
    scale_by_schedule,
    set_to_zero,
)
from fzero.optim._norms import leaf_norms
from fzero.optim._one_moment import AdagradState, LionState, SgdState, adagrad, lion, scale_by_lion, sgd
from fzero.optim._precision import Precision
from fzero.optim._schedules import (
    Schedule,
    constant,
    exponential_decay,
    join_schedules,
    linear,
    piecewise_constant,
    warmup_cosine,
    warmup_linear,
)
from fzero.optim.checks import (
    check_has_method,
    has_role,
    is_opt_state,
    mark_role,
    role_of,
    torch_equivalents,
    torch_optimizer_message,
    watch_roles,
)
from fzero.optim.clipping import clip, clip_by_block_rms, clip_by_expert, clip_by_global_norm
from fzero.optim.matrices import AdafactorState, MuonState, adafactor, muon
from fzero.optim.moments import EightBit, Moments, SixteenBit
from fzero.optim.wrappers import (
    DelayedState,
    InjectHyperparamsState,
    LossScaleState,
    MasterState,
    StochasticRoundingState,
    all_finite,
    by_group,
    convert_masters,
    dynamic_loss_scale,
    inject_hyperparams,
    leafwise,
    loss_scale,
    masked,
    master_params,
    master_weights,
    offload,
    on_full_leaves,
    round_master,
    static_loss_scale,
    stochastic_rounding,
    with_offload_ratio,
)
from fzero.sharding import global_norm

__all__ = [
    "AdafactorState",
    "AdagradState",
    "AdamState",
    "DelayedState",
    "EightBit",
    "EmaState",
    "InjectHyperparamsState",
    "LionState",
    "LossScaleState",
    "Mask",
    "MasterState",
    "Moments",
    "MuonState",
    "OptState",
    "Optimizer",
    "OptimizerLike",
    "Params",
    "Precision",
    "ScaleByScheduleState",
    "Schedule",
    "SgdState",
    "SixteenBit",
    "StochasticRoundingState",
    "Updates",
    "adafactor",
    "adagrad",
    "adam",
    "adamw",
    "add_decayed_weights",
    "all_finite",
    "apply_updates",
    "by_group",
    "chain",
    "clip",
    "clip_by_block_rms",
    "clip_by_expert",
    "clip_by_global_norm",
    "constant",
    "convert_masters",
    "convert_moments",
    "dynamic_loss_scale",
    "ema",
    "exponential_decay",
    "global_norm",
    "inject_hyperparams",
    "join_schedules",
    "lamb",
    "leaf_norms",
    "leafwise",
    "linear",
    "lion",
    "loss_scale",
    "masked",
    "master_params",
    "master_weights",
    "muon",
    "offload",
    "on_full_leaves",
    "params_ema",
    "piecewise_constant",
    "scale",
    "scale_by_adam",
    "scale_by_learning_rate",
    "scale_by_lion",
    "scale_by_schedule",
    "scale_by_trust_ratio",
    "set_to_zero",
    "sgd",
    "static_loss_scale",
    "stochastic_rounding",
    "warmup_cosine",
    "warmup_linear",
    "with_offload_ratio",
]

# For other packages of fzero only. They may change in any release.
INTERNAL = [
    "as_optimizer",
    "check_has_method",
    "has_role",
    "is_opt_state",
    "mark_role",
    "role_of",
    "round_master",
    "torch_equivalents",
    "torch_optimizer_message",
    "watch_roles",
]

_FOREIGN_NAMES = {  # names of other libraries
    "warmup_cosine_decay_schedule": "fzero.optim.warmup_cosine",
    "cosine_decay_schedule": "fzero.optim.warmup_cosine with warmup_steps=0",
    "warmup_exponential_decay_schedule": "fzero.optim.join_schedules of linear and exponential_decay",
    "piecewise_constant_schedule": "fzero.optim.piecewise_constant",
    "apply_if_finite": "fzero.optim.dynamic_loss_scale, which skips steps whose gradients are not finite",
    "adaptive_grad_clip": "fzero.optim.clip_by_block_rms, or clip_by_global_norm",
    "noisy_sgd": "fzero.optim.sgd, with fzero.random in the loss",
    "linear_schedule": "fzero.optim.linear",
    "constant_schedule": "fzero.optim.constant",
    "multi_transform": "fzero.optim.by_group",
    "partition": "fzero.optim.by_group",
    "MultiSteps": "micro_batches= of fzero.value_and_grad",
    "GradientTransformation": "fzero.optim.Optimizer",
    "incremental_update": "fzero.optim.params_ema",
    "tree_utils": "fzero.tree",
    "LambdaLR": "a function from the step's count to a rate, as the optimizer's first argument",
    "GradScaler": "fzero.optim.dynamic_loss_scale",
    "param_groups": "fzero.optim.by_group",
    "FusedAdam": "fzero.optim.adamw, which fzero.jit fuses",
    "DeepSpeedCPUAdam": "fzero.optim.offload(fzero.optim.adamw(rate), 1.0)",
}

if not TYPE_CHECKING:  # a type checker finds a missing name itself
    __getattr__ = missing_names(__name__, __all__, _FOREIGN_NAMES)
