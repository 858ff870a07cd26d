"""Optimizers as (init, update) pairs."""

from fzero.optim import schedules
from fzero.optim._adafactor import AdafactorState, adafactor
from fzero.optim._adagrad import AdagradState, adagrad
from fzero.optim._adam import AdamState, adam, adamw, scale_by_adam
from fzero.optim._base import (
    Mask,
    Optimizer,
    OptState,
    Pair,
    Params,
    Updates,
    apply_updates,
    as_optimizer,
    chain,
    check_pair,
    torch_optimizer_message,
)
from fzero.optim._clip import clip, clip_by_block_rms, clip_by_expert, clip_by_global_norm
from fzero.optim._ema import EmaState, ema, params_ema
from fzero.optim._inject import InjectHyperparamsState, inject_hyperparams
from fzero.optim._lamb import lamb, scale_by_trust_ratio
from fzero.optim._lion import LionState, lion, scale_by_lion
from fzero.optim._loss_scale import LossScaleState, all_finite, dynamic_loss_scale, loss_scale, static_loss_scale
from fzero.optim._master import MasterState, master_params, master_weights
from fzero.optim._muon import MuonState, muon
from fzero.optim._norms import leaf_norms
from fzero.optim._offload import DelayedState, offload, with_offload_ratio
from fzero.optim._precision import Precision
from fzero.optim._scale import (
    ScaleByScheduleState,
    add_decayed_weights,
    scale,
    scale_by_learning_rate,
    scale_by_schedule,
    set_to_zero,
)
from fzero.optim._sgd import SgdState, sgd
from fzero.optim._wrappers import leafwise, masked, on_full_leaves
from fzero.optim.schedules import (
    Schedule,
    constant,
    exponential_decay,
    join_schedules,
    linear,
    piecewise_constant,
    warmup_cosine,
    warmup_linear,
)
from fzero.sharding import global_norm

__all__ = [
    "AdafactorState",
    "AdagradState",
    "AdamState",
    "DelayedState",
    "EmaState",
    "InjectHyperparamsState",
    "LionState",
    "LossScaleState",
    "Mask",
    "MasterState",
    "MuonState",
    "OptState",
    "Optimizer",
    "Pair",
    "Params",
    "Precision",
    "ScaleByScheduleState",
    "Schedule",
    "SgdState",
    "Updates",
    "adafactor",
    "adagrad",
    "adam",
    "adamw",
    "add_decayed_weights",
    "all_finite",
    "apply_updates",
    "as_optimizer",
    "chain",
    "check_pair",
    "clip",
    "clip_by_block_rms",
    "clip_by_expert",
    "clip_by_global_norm",
    "constant",
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
    "schedules",
    "set_to_zero",
    "sgd",
    "static_loss_scale",
    "torch_optimizer_message",
    "warmup_cosine",
    "warmup_linear",
    "with_offload_ratio",
]
