"""shard_trainer: the Trainer of transformers, its subclasses and those of TRL, with sharded steps."""

import copy
import functools
import os
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from transformers import Trainer, TrainerCallback

from fzero import optim, tree
from fzero._arguments import check_choice
from fzero._tracebacks import api_boundary
from fzero.plugs._engine import Backend, Engine, make_engine
from fzero.plugs._half_precision import cast, half_precision
from fzero.plugs._param_groups import hold_stand_ins, param_groups
from fzero.ranks import Mesh
from fzero.ranks import mesh as make_mesh

__all__ = ["full_model", "shard_trainer"]

T = TypeVar("T", bound=Trainer)
FOLDER = "fzero"  # in a checkpoint of Trainer: the shards


@api_boundary
def shard_trainer(
    trainer: T, *, stage: int, mesh: Mesh | None = None, backend: Backend | Literal["default"] | None = "default"
) -> T:
    """Return a trainer of the same class that trains, evaluates and saves with a ZeRO stage.

    The loop stays transformers' own: data, sampler, collator, callbacks, logging, schedules, evaluation and resuming.
    A step computes `compute_loss` on all micro-batches, and the update, as one sharded step. Numbers are those of the
    given trainer under DDP.

    The given trainer and its model are used up: their memory goes to the result. `result.model` has no storage; it is
    full within `compute_loss` and `prediction_step`. Use `save_model`, or `full_model(result)`, for weights.

    Args:
        trainer: a Trainer, or an object of a subclass. Its `compute_loss` is what is differentiated. It has not
            trained yet.
        stage: the ZeRO stage, 0 to 3.
        mesh: data-parallel ranks, one for each process; by default all processes.
        backend: a backend of `fzero.jit`; None to run steps eagerly, block by block. The default is "inductor" for
            Trainer's own `compute_loss`. It is None for a class that overrides it: its code may log, or read numbers,
            and then it has to run at each step. Pass a backend if the code is pure.

    Returns:
        The sharded trainer.

    Raises:
        TypeError: if `trainer` is no Trainer.
        ValueError: if a setting cannot hold, such as `fsdp`, or an optimizer without a counterpart in `fzero.optim`.
            The message names the setting.

    Example:
        >>> import tempfile, torch
        >>> from transformers import TrainingArguments
        >>> class Square(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.w = torch.nn.Parameter(torch.ones(3))
        ...
        ...     def forward(self, x):
        ...         return {"loss": (self.w * x).square().mean()}
        >>> args = TrainingArguments(tempfile.mkdtemp(), max_steps=2, report_to=[], disable_tqdm=True, use_cpu=True)
        >>> args = args.set_save("no").set_logging("no")
        >>> trainer = shard_trainer(
        ...     Trainer(Square(), args, train_dataset=[{"x": torch.ones(3)}] * 8), stage=3, backend=None
        ... )
        >>> isinstance(trainer, Trainer), trainer.model.w.is_meta
        (True, True)
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(f"trainer is a {type(trainer).__name__}: expected a transformers.Trainer that was made already")
    if isinstance(trainer, _ShardedTrainer):
        raise TypeError("trainer is sharded already")
    check_choice("backend", backend, ("default", "inductor", "auto", "fx", None))
    _check_settings(trainer)
    if backend == "default":
        backend = "inductor" if type(trainer).compute_loss is Trainer.compute_loss else None
    if mesh is None:  # one rank is simulated, and a loss that reads numbers runs in lockstep only
        is_lockstep = backend is None and trainer.args.world_size == 1
        mesh = make_mesh(dp=-1, simulate="lockstep" if is_lockstep else None)
    if mesh.size != trainer.args.world_size:
        raise ValueError(
            f"mesh={mesh!r} has {mesh.size} ranks, and Trainer runs in {trainer.args.world_size} processes: a trainer "
            "needs a data-parallel rank for each process; leave mesh out"
        )
    kind = type(trainer)
    # The user's class comes before ours and Trainer, so that its methods call ours by super().
    bases = (_Prediction, _ShardedTrainer) if kind is Trainer else (_Prediction, kind, _ShardedTrainer)
    sharded_class = type(kind.__name__, bases, {"__module__": kind.__module__})
    sharded = object.__new__(sharded_class)
    vars(sharded).update(vars(trainer))
    _start(sharded, stage, mesh, backend)
    return sharded


@api_boundary
def full_model(trainer: Trainer) -> torch.nn.Module:
    """Return the model of a sharded trainer with all its weights, on the host. All ranks call it.

    Raises:
        TypeError: if the trainer is not sharded.

    Example:
        >>> full_model(torch.nn.Linear(1, 1))
        Traceback (most recent call last):
        ...
        TypeError: trainer is a Linear that is not sharded: use its model
    """
    if not isinstance(trainer, _ShardedTrainer):
        raise TypeError(f"trainer is a {type(trainer).__name__} that is not sharded: use its model")
    return trainer._fzero.engine.full_model()


def _check_settings(trainer: Trainer) -> None:
    args = trainer.args
    refused = {
        "fsdp": "fzero shards in its place",
        "deepspeed": "fzero shards in its place",
        "torch_compile": "the sharded step is compiled: pass backend= to fzero.plugs.transformers.shard_trainer",
        "auto_find_batch_size": "a step that ran out of memory cannot be repeated; fzero.plan tells what fits",
        "use_liger_kernel": "its kernels have no derivative under torch.func",
        "torch_empty_cache_steps": "a step runs as a whole",
    }
    for name, reason in refused.items():
        if getattr(args, name, None):
            raise ValueError(f"TrainingArguments({name}={getattr(args, name)!r}) cannot hold: {reason}")
    if trainer.model_init is not None:
        raise ValueError("Trainer(model_init=...) makes a new model in train(): pass model=, as model_init()")
    if args.n_gpu > 1:
        raise ValueError(
            f"one process sees {args.n_gpu} GPUs, which Trainer gives to DataParallel: start a process for each with "
            f"torchrun --nproc-per-node {args.n_gpu}, or set CUDA_VISIBLE_DEVICES=0"
        )
    if getattr(trainer, "is_distributed_loading_by_transformers", False) or trainer.is_model_parallel:
        raise ValueError("the model was spread over devices when it was loaded: load it without device_map")
    for callback in trainer.callback_handler.callbacks:
        if type(callback).on_pre_optimizer_step is not TrainerCallback.on_pre_optimizer_step:
            raise ValueError(
                f"callback {type(callback).__name__} has on_pre_optimizer_step, for gradients before the update: the "
                "sharded step computes both at once, and no parameter has a .grad; use on_step_end"
            )


@dataclass
class _Sharding:
    """What a sharded trainer holds besides the attributes of the given trainer."""

    engine: Engine
    precision: optim.Precision | None
    micro_batches: list[dict[str, Any]] = field(default_factory=list)


def _start(trainer: "_ShardedTrainer", stage: int, mesh: Mesh, backend: Backend | None) -> None:
    """Put the model, other models among the trainer's attributes, and the optimizer on the mesh."""
    model: Any = trainer.model
    remat = _disable_checkpointing(trainer)
    chosen: Any = trainer.args.optim
    source = f"TrainingArguments(optim={str(chosen.value)!r})" if trainer.optimizer is None else "optimizers="
    opt: Any = trainer.create_optimizer()
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    attributes = {name: x for name, x in vars(trainer).items() if isinstance(x, torch.nn.Module)}
    others = {name: x for name, x in attributes.items() if name not in ("model", "model_wrapped")}
    args = trainer.args
    precision = half_precision(model, torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None)
    engine = make_engine(
        model.train(),
        list(others.values()),
        functools.partial(_loss, trainer),
        param_groups(opt, names, source),
        [group["lr"] for group in opt.param_groups],
        stage=stage,
        mesh=mesh,
        backend=backend,
        remat=remat,
        clip=optim.clip_by_global_norm(trainer.args.max_grad_norm) if trainer.args.max_grad_norm else None,
        precision=precision,
    )
    trainer._fzero = _Sharding(engine, precision)
    shell: Any = engine.models.apply.module
    hold_stand_ins(opt, names, shell)
    opt.step_was_skipped = False
    for prepared in (shell, opt):  # so that accelerate neither moves nor wraps it
        prepared._is_accelerate_prepared = True
    trainer.model = trainer.model_wrapped = trainer.callback_handler.model = shell
    for name, apply in zip(others, engine.models.others, strict=True):
        setattr(trainer, name, apply.module)


def _disable_checkpointing(trainer: Trainer) -> bool:
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


def _batch(trainer: "_ShardedTrainer", inputs: Any) -> dict[str, Any]:
    """Bring a batch to the device, and its floating-point tensors to the dtype of the parameters."""
    batch = dict(trainer._prepare_inputs(inputs))
    precision = trainer._fzero.precision
    return batch if precision is None else tree.map(lambda x: cast(x, precision), batch)


def _loss(trainer: Any, model: Any, batch: dict[str, Any], count: int, items: Any) -> torch.Tensor:
    """Compute the loss of one of `count` micro-batches, scaled as `Trainer.training_step` scales it."""
    loss: Any = trainer.compute_loss(model, batch, num_items_in_batch=items)
    is_scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
    if is_scaled is None:
        is_scaled = (trainer.model_accepts_loss_kwargs and items is not None) or trainer.compute_loss_func is not None
    return loss if is_scaled else loss / count


class _Prediction:
    """The first of a sharded trainer's classes: prediction steps run with full parameters, whatever they call."""

    def prediction_step(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the user's prediction step on a model that has its tensors."""
        predict: Any = super().prediction_step  # pyright: ignore[reportAttributeAccessIssue]
        return self._fzero.engine.call(
            lambda model, batch: predict(model, batch, *args, **kwargs), _batch(self, inputs)
        )


class _ShardedTrainer(Trainer):
    """The last of a sharded trainer's classes but Trainer: what a step does, and what is saved."""

    _fzero: _Sharding

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Keep a micro-batch; with the last one, run the step, and return the loss of all."""
        micro_batches, engine = self._fzero.micro_batches, self._fzero.engine
        model.train()  # as Trainer does here: an evaluation has left dropout off
        micro_batches.append(_batch(self, inputs))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        optimizer: Any = self.optimizer
        skipped = engine.metrics.get("skipped", 0)
        batches = list(micro_batches)
        micro_batches.clear()  # before the step, which may raise an error
        metrics = engine.train(batches, num_items_in_batch, engine.groups.rates(optimizer))
        if "skipped" in metrics:
            optimizer.step_was_skipped = bool(metrics["skipped"] > skipped)
        return metrics["loss"]

    def _clip_grad_norm(self, model: Any) -> torch.Tensor:
        return self._fzero.engine.metrics["norm"]

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> torch.Tensor:
        return self._fzero.engine.metrics["norm"]

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if state_dict is None:
            state_dict = self._fzero.engine.state_dict(keep=self.args.should_save)
        super()._save(output_dir, state_dict=state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        self._fzero.engine.save(os.path.join(output_dir, FOLDER))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder = os.path.join(resume_from_checkpoint, FOLDER)
        if not os.path.isdir(folder):
            raise ValueError(
                f"resume_from_checkpoint={resume_from_checkpoint!r} has no folder {FOLDER!r}, so no sharded trainer "
                "saved its state there: load its weights with from_pretrained, and start from them"
            )
        self._fzero.engine.load(folder)

    def _load_best_model(self) -> None:
        folder = os.path.join(str(self.state.best_model_checkpoint), FOLDER)
        if not os.path.isdir(folder):
            raise ValueError(f"load_best_model_at_end=True needs save_only_model=False, which saves {folder}")
        self._fzero.engine.load(folder)  # master weights are in the optimizer's state
