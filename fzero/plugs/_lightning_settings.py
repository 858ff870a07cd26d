"""The settings of Lightning's Trainer and modules: those that a sharded run refuses, and those that it translates."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities.model_helpers import is_overridden

from fzero import optim

__all__ = ["check_settings", "clipping", "mixed_dtype"]

# What is refused: the hooks see gradients, or weights before they are updated; the callbacks read or change weights.
_HOOKS = ("on_after_backward", "on_before_zero_grad", "on_before_optimizer_step")
_MODULE_HOOKS = (*_HOOKS, "backward", "configure_gradient_clipping")
_CALLBACKS = ("BaseFinetuning", "ModelPruning", "StochasticWeightAveraging", "WeightAveraging")
_PRECISIONS = (Precision, HalfPrecision, DoublePrecision, MixedPrecision)
_REASON = (
    "no parameter has a .grad, since gradients are sharded values. Clip by gradient_clip_val; look at the loss in "
    "on_train_batch_end"
)


def check_settings(trainer: Trainer, module: Any, is_fitting: bool) -> None:
    """Check that a sharded run supports the settings of a trainer and its module.

    Raises:
        ValueError: if it cannot. The message names the setting.
    """
    kind = type(module).__name__
    precision = trainer.precision_plugin
    if type(precision) not in _PRECISIONS:
        raise ValueError(
            f"precision plugin {type(precision).__name__} is refused, since it replaces layers or scales gradients: "
            "use precision='32-true', '64-true', 'bf16-true', '16-true', 'bf16-mixed' or '16-mixed'"
        )
    if getattr(trainer.strategy, "_layer_sync", None) is not None:
        raise ValueError("Trainer(sync_batchnorm=True) is refused: SyncBatchNorm has no derivative under torch.func")
    if getattr(module, "_compiler_ctx", None) is not None:
        raise ValueError(f"{kind} is compiled, and a sharded step runs the plain module: leave torch.compile out")
    if not is_fitting:
        return
    if not module.automatic_optimization:
        raise ValueError(
            f"{kind}.automatic_optimization is False: manual optimization calls backward and optimizers itself, and a "
            "sharded step computes the gradients of training_step's loss; return the loss, or write a step of your own"
        )
    for name in _MODULE_HOOKS:
        if is_overridden(name, module, LightningModule):
            raise ValueError(f"{kind} overrides {name}: {_REASON}")
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        for name in _HOOKS:
            if is_overridden(name, callback, Callback):
                raise ValueError(f"callback {type(callback).__name__} overrides {name}: {_REASON}")
        for name in _CALLBACKS:
            if isinstance(callback, getattr(callbacks, name, ())):
                raise ValueError(
                    f"callback {type(callback).__name__} reads or changes weights between steps, and there each rank "
                    "has only its shards: leave it out"
                )


def clipping(trainer: Trainer) -> optim.Optimizer | None:
    """Return how a trainer clips gradients."""
    if not trainer.gradient_clip_val:
        return None
    make = optim.clip if trainer.gradient_clip_algorithm == "value" else optim.clip_by_global_norm
    return make(trainer.gradient_clip_val)


def mixed_dtype(plugin: Precision) -> torch.dtype | None:
    """Return the dtype of a mixed precision; None for another precision."""
    if not isinstance(plugin, MixedPrecision):
        return None
    return torch.bfloat16 if plugin.precision == "bf16-mixed" else torch.float16
