"""shard_trainer: the Trainer of transformers, its subclasses and those of TRL, with sharded steps."""

import functools
import os
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from transformers import Seq2SeqTrainer, Trainer

from fzero import optim, tree
from fzero._arguments import check_choice
from fzero._tracebacks import api_boundary
from fzero.checkpoint import CheckpointError
from fzero.plugs._engine import Backend, Engine, EngineOptions, make_engine
from fzero.plugs._half_precision import cast, half_precision
from fzero.plugs._param_groups import param_groups
from fzero.plugs._trainer_settings import check_callback, check_settings, disable_caches, disable_checkpointing
from fzero.ranks import Mesh
from fzero.ranks import mesh as make_mesh

__all__ = ["full_model", "shard_trainer"]

_T = TypeVar("_T", bound=Trainer)
_USED_UP = "_fzero_used_up"  # of a given trainer, whose model's memory went to the sharded one
_FOLDER = "fzero"  # in a checkpoint of Trainer: the shards
_COUNT, _ITEMS = "fzero.count", "fzero.items"  # in a micro-batch: of how many it was one, and the items in all of them


@api_boundary
def shard_trainer(
    trainer: _T, *, stage: int, mesh: Mesh | None = None, backend: Backend | Literal["default"] | None = "default"
) -> _T:
    """Return a trainer of the same class that trains, evaluates and saves with a ZeRO stage.

    The loop stays transformers' own: data, sampler, collator, callbacks, logging, schedules, evaluation and resuming.
    A step computes `compute_loss` on all micro-batches, and the update, as one sharded step. Numbers are those of the
    given trainer under DDP.

    The given trainer and its model are used up: their memory goes to the result. `result.model` has no storage; it is
    full within `compute_loss` and `prediction_step`. Use `save_model`, or `full_model(result)`, for weights.

    Args:
        trainer: a Trainer, or an object of a subclass, that has not trained yet. Its `compute_loss` is differentiated.
        stage: the stage of ZeRO; see `fzero.shard`.
        mesh: data-parallel ranks, one for each process; by default all processes.
        backend: a backend of `fzero.jit`; None to run steps eagerly, block by block. The default is "inductor" for
            Trainer's own `compute_loss`. It is None for a class that overrides it: its code may log, or read numbers,
            and then it has to run at each step. Pass a backend if the code is pure.

    Returns:
        The sharded trainer.

    Raises:
        TypeError: if `trainer` is not a Trainer.
        ValueError: if a setting is refused, such as `fsdp`, or an optimizer without a counterpart in `fzero.optim`.
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
    if getattr(trainer, _USED_UP, False):
        raise TypeError("trainer was given to shard_trainer before, and is used up: use the trainer that it returned")
    check_choice("backend", backend, ("default", "inductor", "auto", "fx", None))
    check_settings(trainer)
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
    # methods are found in this order: a prediction step runs the user's one on full weights, and the user's other
    # methods run ours by super()
    bases = (_Prediction, _ShardedTrainer) if kind is Trainer else (_Prediction, kind, _ShardedTrainer)
    sharded_class = type(kind.__name__, bases, {"__module__": kind.__module__})
    sharded_trainer = object.__new__(sharded_class)
    vars(sharded_trainer).update(vars(trainer))
    _put_on_mesh(sharded_trainer, stage, mesh, backend)
    _use_up(trainer)
    return sharded_trainer


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


@dataclass
class _TrainerState:
    """The attributes that a sharded trainer has besides those of the given trainer."""

    engine: Engine
    precision: optim.Precision | None
    max_norm: float
    micro_batches: list[dict[str, Any]] = field(default_factory=list)  # of a compiled step that is not complete
    grads: Any = None  # the sum of the gradients of an eager step that is not complete


def _put_on_mesh(trainer: "_ShardedTrainer", stage: int, mesh: Mesh, backend: Backend | None) -> None:
    """Put the model, other models among the trainer's attributes, and the optimizer on the mesh."""
    model: Any = trainer.model
    remat = disable_checkpointing(trainer)
    disable_caches(trainer)
    optim_name: Any = trainer.args.optim
    source = f"TrainingArguments(optim={str(optim_name.value)!r})" if trainer.optimizer is None else "optimizers="
    opt: Any = trainer.create_optimizer()
    attributes = {name: x for name, x in vars(trainer).items() if isinstance(x, torch.nn.Module)}
    other_attributes = {name: x for name, x in attributes.items() if name not in ("model", "model_wrapped")}
    args = trainer.args
    float16 = torch.float16 if args.fp16 else None
    precision = half_precision(model, torch.bfloat16 if args.bf16 else float16)
    engine = make_engine(
        model=model.train(),
        other_modules=list(other_attributes.values()),
        loss=functools.partial(_compute_loss, trainer),
        optimizer_groups=param_groups(opt, model, source),
        opt=opt,
        options=EngineOptions(
            stage=stage,
            mesh=mesh,
            backend=backend,
            remat=remat,
            clip=optim.clip_by_global_norm(trainer.args.max_grad_norm) if trainer.args.max_grad_norm else None,
            precision=precision,
        ),
    )
    trainer._fzero = _TrainerState(engine, precision, args.max_grad_norm)
    shell: Any = engine.models.apply.module
    opt.step_was_skipped = False
    for part in (shell, opt):  # so that accelerate neither moves nor wraps it
        part._is_accelerate_prepared = True
    trainer.model = trainer.model_wrapped = trainer.callback_handler.model = shell
    for name, apply in zip(other_attributes, engine.models.other_applies, strict=True):
        setattr(trainer, name, apply.module)


def _use_up(trainer: Trainer) -> None:
    """Let the methods of the given trainer that need its model be errors, which say what took its place."""

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"{name}: this trainer was given to shard_trainer, and is used up: call {name} of the trainer that "
            "shard_trainer returned, trainer = shard_trainer(trainer, stage=3)"
        )

    setattr(trainer, _USED_UP, True)
    for name in ("train", "evaluate", "predict", "save_model"):
        setattr(trainer, name, functools.partial(refuse, name))


def _prepare_batch(trainer: "_ShardedTrainer", inputs: Any) -> dict[str, Any]:
    """Bring a batch to the device, and its floating-point tensors to the dtype of the parameters."""
    batch = dict(trainer._prepare_inputs(inputs))
    precision = trainer._fzero.precision
    return batch if precision is None else tree.map(lambda x: cast(x, precision), batch)


def _compute_loss(trainer: Any, model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Compute the loss of a micro-batch, scaled as `Trainer.training_step` scales it."""
    inputs = {name: x for name, x in batch.items() if name not in (_COUNT, _ITEMS)}
    items = batch[_ITEMS]
    loss: Any = trainer.compute_loss(model, inputs, num_items_in_batch=items)
    is_scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
    if is_scaled is None:
        is_scaled = (trainer.model_accepts_loss_kwargs and items is not None) or trainer.compute_loss_func is not None
    return loss if is_scaled else loss / batch[_COUNT]


class _Prediction:
    """Runs a prediction step, the user's or Trainer's, with full parameters: the first class of a sharded trainer."""

    def prediction_step(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the user's prediction step on a model that has its tensors."""
        predict: Any = super().prediction_step  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(self, Seq2SeqTrainer) and self._fzero.engine.mesh.distributed:
            # blocks gather at each pass, so a rank whose texts are complete goes on with the others
            self._gen_kwargs = {"synced_gpus": True, **getattr(self, "_gen_kwargs", {})}
        return self._fzero.engine.call(
            lambda model, batch: predict(model, batch, *args, **kwargs), _prepare_batch(self, inputs)
        )


class _ShardedTrainer(Trainer):
    """Replaces Trainer's steps, saves and loads by sharded ones: the class between the user's and Trainer."""

    _fzero: _TrainerState

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._fzero.micro_batches.clear()  # as Trainer clears gradients of a step that another call left incomplete
        self._fzero.grads = None
        return super()._inner_training_loop(*args, **kwargs)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Compute a micro-batch's gradients, and with the last one the update; a compiled step runs as a whole then."""
        state, engine = self._fzero, self._fzero.engine
        optimizer: Any = self.optimizer
        if self.args.max_grad_norm != state.max_norm:
            raise ValueError(
                f"max_grad_norm was {state.max_norm} and is {self.args.max_grad_norm} now: a sharded step has the "
                "limit that it was made with; leave it unchanged in callbacks"
            )
        model.train()  # as Trainer does here: an evaluation has left dropout off
        counts = {_COUNT: self.current_gradient_accumulation_steps, _ITEMS: num_items_in_batch}
        batch, rates = {**_prepare_batch(self, inputs), **counts}, engine.optimizer_groups.rates(optimizer)
        skipped = engine.metrics.get("skipped", 0)
        if not engine.is_jitted:
            loss, new = engine.gradients(batch)
            state.grads = new if state.grads is None else tree.elementwise(torch.add, state.grads, new)
            if not self.accelerator.sync_gradients:
                return loss
            grads, state.grads = state.grads, None
            engine.update_and_measure(grads, rates, loss)
        else:
            state.micro_batches.append(batch)
            if not self.accelerator.sync_gradients:
                return torch.zeros((), device=self.args.device)
            batches = list(state.micro_batches)
            state.micro_batches.clear()  # before the step, which may raise an error
            loss = engine.run_step(batches, rates)["loss"]
        if "skipped" in engine.metrics:
            optimizer.step_was_skipped = bool(engine.metrics["skipped"] > skipped)
        return loss

    def add_callback(self, callback: Any) -> None:
        """Add a callback, unless it needs gradients before the update."""
        check_callback(callback)
        super().add_callback(callback)

    def _clip_grad_norm(self, model: Any) -> torch.Tensor:
        return self._fzero.engine.metrics["norm"]

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> torch.Tensor:
        return self._fzero.engine.metrics["norm"]

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if state_dict is None:
            state_dict = self._fzero.engine.state_dict(is_writer=self.args.should_save)
        super()._save(output_dir, state_dict=state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        self._fzero.engine.save(os.path.join(output_dir, _FOLDER))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the shards of a checkpoint, or raise an error that says what it lacks."""
        folder = os.path.join(resume_from_checkpoint, _FOLDER)
        if not os.path.isdir(resume_from_checkpoint):
            raise ValueError(f"resume_from_checkpoint={resume_from_checkpoint!r} is not a folder")
        if not os.path.isdir(folder):
            raise ValueError(
                f"resume_from_checkpoint={resume_from_checkpoint!r} has no folder {_FOLDER!r} with the state of a "
                "sharded trainer: a Trainer without fzero saved it, or one with save_only_model=True; load its weights "
                "with from_pretrained, and start from them"
            )
        try:
            self._fzero.engine.load(folder)
        except CheckpointError as error:
            error.add_note(
                "fzero: a trainer resumes with the optim, bf16 and fp16 of the one that saved, with max_grad_norm=0 if "
                "that had it, and with the same adapters"
            )
            raise

    def _load_best_model(self) -> None:
        folder = os.path.join(str(self.state.best_model_checkpoint), _FOLDER)
        if not os.path.isdir(folder):
            raise ValueError(f"load_best_model_at_end=True needs save_only_model=False, which saves {folder}")
        self._fzero.engine.load(folder)  # master weights are in the optimizer's state
