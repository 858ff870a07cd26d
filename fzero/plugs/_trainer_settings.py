"""The settings of transformers' Trainer and TRL: those that a sharded run refuses, and those that it translates."""

import copy

import torch
from transformers import Trainer, TrainerCallback

__all__ = ["check_callback", "check_settings", "disable_caches", "disable_checkpointing"]


# What a sharded step does itself, or would not call.
_METHODS = ("autocast_smart_context_manager", "_clip_grad_norm", "_get_grad_norm")
_FULL_EVAL = "evaluation runs in the dtype of training: pass bf16=True or fp16=True, or leave it out"

_REFUSED = {  # arguments that a sharded run cannot follow, each with the reason
    "fsdp": "fzero shards in its place",
    "deepspeed": "fzero shards in its place",
    "torch_compile": "the sharded step is compiled: pass backend= to fzero.plugs.transformers.shard_trainer",
    "auto_find_batch_size": "a step that ran out of memory cannot be repeated; fzero.plan tells what fits",
    "use_liger_kernel": "its kernels have no derivative under torch.func",
    "torch_empty_cache_steps": "a step runs as a whole",
    "bf16_full_eval": _FULL_EVAL,
    "fp16_full_eval": _FULL_EVAL,
    "parallelism_config": "all processes are data-parallel ranks here",
    "activation_offloading": "steps keep only the inputs of blocks already; leave it out",
    "num_generations": "the trainer generates within training_step, where the model has no weights",
    "sync_ref_model": "between steps each rank has only shards of the two models, and a callback cannot mix them",
}


def check_settings(trainer: Trainer) -> None:
    """Check that a sharded run supports the settings of a trainer.

    Raises:
        ValueError: if it cannot. The message names the setting.
    """
    args = trainer.args
    for name, reason in _REFUSED.items():
        if getattr(args, name, None):
            raise ValueError(f"TrainingArguments({name}={getattr(args, name)!r}) is refused: {reason}")
    if trainer.model_init is not None:
        raise ValueError("Trainer(model_init=...) makes a new model in train(): pass model=, as model_init()")
    if args.n_gpu > 1:
        raise ValueError(
            f"one process sees {args.n_gpu} GPUs, which Trainer gives to DataParallel: start a process for each with "
            f"torchrun --nproc-per-node {args.n_gpu}, or set CUDA_VISIBLE_DEVICES=0"
        )
    if getattr(trainer, "is_distributed_loading_by_transformers", False) or trainer.is_model_parallel:
        raise ValueError("the model was spread over devices when it was loaded: load it without device_map")
    if not (args.max_grad_norm or 0) >= 0:
        raise ValueError(f"TrainingArguments(max_grad_norm={args.max_grad_norm}): expected 0, for none, or more")
    if args.load_best_model_at_end and args.save_only_model:
        raise ValueError(
            "TrainingArguments(save_only_model=True) is refused with load_best_model_at_end=True, which reads the "
            "shards of a checkpoint: pass save_only_model=False"
        )
    _check_overrides(trainer)


def _check_overrides(trainer: Trainer) -> None:
    """Raise an error if the trainer or a callback overrides a method that a sharded step does not call."""
    for name in _METHODS:
        if getattr(type(trainer), name) is not getattr(Trainer, name):
            raise ValueError(
                f"{type(trainer).__name__} overrides {name}, which a sharded step does not call: clip by "
                "TrainingArguments(max_grad_norm=...), and use torch.autocast within compute_loss"
            )
    for callback in trainer.callback_handler.callbacks:
        check_callback(callback)


def check_callback(callback: TrainerCallback | type[TrainerCallback]) -> None:
    """Check that a callback does not look at gradients before the update, or raise a ValueError that names it."""
    kind = callback if isinstance(callback, type) else type(callback)
    if kind.on_pre_optimizer_step is not TrainerCallback.on_pre_optimizer_step:
        raise ValueError(
            f"callback {kind.__name__} has on_pre_optimizer_step, for gradients before the update: the sharded step "
            "computes both at once, and no parameter has a .grad; use on_step_end"
        )


def disable_checkpointing(trainer: Trainer) -> bool:
    """Disable activation checkpointing, whose hooks torch.func refuses, and return whether fzero's takes over."""
    names = [name for name in ("activation_checkpointing", "gradient_checkpointing") if hasattr(trainer.args, name)]
    is_enabled = any(getattr(trainer.args, name) for name in names)
    trainer.args = copy.copy(trainer.args)
    for name in names:
        setattr(trainer.args, name, False)
    models = [x for x in vars(trainer).values() if isinstance(x, torch.nn.Module)]
    for module in {id(m): m for model in models for m in model.modules()}.values():
        for method in ("activation_checkpointing_disable", "disable_input_require_grads"):
            if hasattr(type(module), method):
                getattr(module, method)()
    return is_enabled


def disable_caches(trainer: Trainer) -> None:
    """Disable the caches of a model's parts with configurations of their own, as Trainer does for the model's own.

    Such a part is T5's decoder. A block that runs again would write twice into its cache.
    """
    if getattr(trainer.args, "use_cache", False):
        return
    modules = trainer.model.modules() if trainer.model is not None else ()
    for config in [vars(m)["config"] for m in modules if "config" in vars(m)]:
        if getattr(config, "use_cache", False) is True:
            config.use_cache = False
