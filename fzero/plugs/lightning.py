"""Strategy: a Trainer of Lightning runs sharded steps, `Trainer(strategy=Strategy(stage=3))`."""

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.apply_func import apply_to_collection

from fzero import optim, tree
from fzero._tracebacks import api_boundary
from fzero.plugs._engine import Engine, EngineOptions, make_engine
from fzero.plugs._half_precision import cast, half_precision
from fzero.plugs._lightning_processes import Processes
from fzero.plugs._lightning_settings import check_settings, clipping, mixed_dtype
from fzero.plugs._param_groups import ParamGroups, param_groups
from fzero.ranks import Mesh
from fzero.ranks import mesh as make_mesh
from fzero.zero import check_stage

__all__ = ["Strategy", "full_model"]

_SHARDS = ".fzero"  # the folder of a checkpoint's shards: the name of the checkpoint's file, and this suffix


class Strategy(Processes):
    """A strategy of Lightning's Trainer that trains with a ZeRO stage: `Trainer(strategy=Strategy(stage=3))`.

    The loop stays Lightning's own: data, callbacks, logging, schedulers, validation and checkpoints. Numbers are those
    of `DDPStrategy`. Each call of `training_step` computes the gradient of one micro-batch, sharded, and the
    optimizer's step is sharded too.

    Between steps the module holds no weights. It is full within `training_step`, `validation_step`, `test_step` and
    `predict_step`, and after `fit`. Elsewhere use `full_model(trainer)`.

    Args:
        stage: the stage of ZeRO; see `fzero.shard`.
        full_weights: whether the module has its weights again after `fit`, on every rank's host. Pass False for a
            model that is too large; its checkpoints have them.
        process_group_backend: the backend of torch.distributed; by default NCCL on GPUs, and gloo on CPUs.
        timeout: how long processes wait for each other.

    Raises:
        ValueError: if `stage` is no stage of ZeRO. `fit` raises it for a setting that is refused, such as manual
            optimization. The message names the setting.

    Example:
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> trainer = Trainer(strategy=Strategy(stage=3), max_steps=3, barebones=True, accelerator="cpu", devices=1)
        >>> trainer.fit(BoringModel())
        >>> trainer.global_step
        3
    """

    @api_boundary
    def __init__(
        self,
        stage: int,
        *,
        full_weights: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        """Keep the settings; Lightning gives the model and the trainer later."""
        super().__init__(process_group_backend, timeout)
        self.stage = check_stage(stage)
        self.full_weights = full_weights
        self._engine: Engine | None = None
        self._is_taken_apart = False
        self._has_failed = False
        self._precision: optim.Precision | None = None
        self._output: Any = None  # the result of training_step
        self._new: Any = None  # its gradients, until Lightning calls `backward`
        self._grads: Any = None  # the sum of the gradients since the latest `zero_grad`
        self._is_zeroed = True  # whether `zero_grad` was called since the latest update
        self._shards = ""  # the folder of the checkpoint that was loaded

    # The module, and the end.

    def setup(self, trainer: Trainer) -> None:
        """Shard the module, and its optimizer if it is to be trained."""
        module: Any = self.lightning_module
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        check_settings(trainer, module, is_fitting)
        _check_has_weights(module)
        accelerator: Any = self.accelerator
        accelerator.setup(trainer)
        self._engine, self._new, self._grads = None, None, None
        self._is_zeroed, self._has_failed = True, False
        self.model = self.precision_plugin.convert_module(module)
        opt, groups = self._make_optimizer(trainer) if is_fitting else (None, ParamGroups.without_updates(module))
        self._precision = half_precision(module, mixed_dtype(self.precision_plugin))
        self._engine = make_engine(
            model=module,
            other_modules=[],
            loss=self._loss,
            optimizer_groups=groups,
            opt=opt,
            options=EngineOptions(
                stage=self.stage,
                mesh=self._make_mesh(),
                backend=None,
                remat=True,
                clip=clipping(trainer),
                precision=self._precision,
                in_place=True,
            ),
        )
        self._is_taken_apart = True
        if opt is not None:
            opt.zero_grad = self._zero_grad

    def _make_optimizer(self, trainer: Trainer) -> tuple[Any, ParamGroups]:
        """Let the module make its optimizer; return it, and its groups for the sharded step."""
        self.setup_optimizers(trainer)
        (opt,) = self.optimizers
        module: Any = self.lightning_module
        return opt, param_groups(opt, module, "configure_optimizers")

    def _make_mesh(self) -> Mesh:
        """Make the mesh of this trainer's processes.

        Raises:
            ValueError: if Lightning and fzero choose different devices for this process.
        """
        mesh = make_mesh(dp=-1, device=self.root_device.type, simulate="lockstep" if self.world_size == 1 else None)
        if mesh.device != self.root_device:
            raise ValueError(
                f"Trainer(devices=...) gives this process {self.root_device}, and fzero {mesh.device}, by its local "
                "rank: choose GPUs with CUDA_VISIBLE_DEVICES, and pass their number as devices"
            )
        return mesh

    def on_exception(self, exception: BaseException) -> None:
        """Note that a rank failed, so that the others may not come to gather weights."""
        self._has_failed = True

    def teardown(self) -> None:
        """Give the module its weights again. The shards stay, for `trainer.save_checkpoint`."""
        if self._is_taken_apart and self.full_weights and not (self._has_failed and self.world_size > 1):
            assert self._engine is not None
            self._engine.restore_weights()
            self._is_taken_apart = False
        module = self._lightning_module
        self._lightning_module = None if self._is_taken_apart else module  # nothing moves stand-ins to the host
        super().teardown()
        self._lightning_module = module

    # Steps.

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training step, and compute its gradients."""
        assert self._engine is not None
        batch = {"args": self._cast_batch(args), "kwargs": self._cast_batch(kwargs)}
        _, self._new = self._engine.gradients(batch)
        output, self._output = self._output, None
        return output

    def _loss(self, model: Any, batch: dict[str, Any]) -> torch.Tensor:
        with self._precision_context("train"):
            output = model.training_step(*batch["args"], **batch["kwargs"])
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, torch.Tensor):
            raise TypeError(
                f"{type(model).__name__}.training_step returned {type(output).__name__}: expected the loss, or a dict "
                "with 'loss'. All ranks step together, so none can skip a batch: return a loss that is multiplied by 0"
            )
        self._output = apply_to_collection(output, torch.Tensor, torch.Tensor.detach)
        return loss / self._trainer.accumulate_grad_batches

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Add the gradients of the latest training step to those of the step's other micro-batches."""
        if not self._is_zeroed:
            raise ValueError(
                f"{type(self.lightning_module).__name__}.optimizer_zero_grad left out optimizer.zero_grad() after an "
                "update, which would add its gradients again, and a sharded step has dropped them: call it each time"
            )
        Precision().pre_backward(closure_loss, self._trainer.lightning_module)  # calls on_before_backward
        self._grads = self._new if self._grads is None else tree.elementwise(torch.add, self._grads, self._new)
        self._new = None
        return closure_loss

    def _zero_grad(self, set_to_none: bool = True) -> None:
        self._grads, self._is_zeroed = None, True

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run the closure, which computes gradients, and update the parameters by them."""
        assert self._engine is not None
        loss = closure()
        grads, self._grads, self._is_zeroed = self._grads, None, False
        if grads is None:
            raise RuntimeError(
                "optimizer.step() was called without its closure: call optimizer.step(optimizer_closure)"
            )
        self._engine.update(grads, self._engine.optimizer_groups.rates(optimizer))
        optimizer.step()  # it has no gradients, and tells schedulers that it was called
        return loss

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's validation step with full parameters."""
        return self._evaluate("val", "validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's test step with full parameters."""
        return self._evaluate("test", "test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's prediction step with full parameters."""
        return self._evaluate("predict", "predict_step", args, kwargs)

    def _evaluate(self, stage: str, name: str, args: Any, kwargs: Any) -> Any:
        assert self._engine is not None
        args, kwargs = self._cast_batch(args), self._cast_batch(kwargs)

        def run(model: Any, batch: Any) -> Any:
            with self._precision_context(stage):
                return getattr(model, name)(*args, **kwargs)

        return self._engine.call(run, {})

    def _precision_context(self, stage: str) -> AbstractContextManager[Any]:
        """Return the context of the precision setting, except for autocast, which half-precision parameters replace."""
        plugin = self.precision_plugin
        return nullcontext() if isinstance(plugin, MixedPrecision) else getattr(plugin, f"{stage}_step_context")()

    def _cast_batch(self, batch: Any) -> Any:
        """Bring floating-point tensors to the dtype of half-precision parameters."""
        return apply_to_collection(batch, torch.Tensor, lambda x: cast(x, self._precision))

    @property
    def _trainer(self) -> Any:
        module: Any = self.lightning_module
        return module.trainer

    # Checkpoints.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return all weights on the first rank, and nothing on others. All ranks call it."""
        if self._is_taken_apart and self._engine is not None:
            return self._engine.state_dict(is_writer=self.is_global_zero)
        return super().lightning_module_state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint of Lightning with full weights; beside it, each rank writes its shards for resuming."""
        if "optimizer_states" in checkpoint and self._engine is not None:
            self._engine.save(f"{filepath}{_SHARDS}")
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint and its shards."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            self.checkpoint_io.remove_checkpoint(f"{filepath}{_SHARDS}")

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint, and note where its shards are."""
        path = str(checkpoint_path)
        self._shards = f"{path if '://' in path else os.path.realpath(path)}{_SHARDS}"  # last.ckpt may be a link
        return super().load_checkpoint(checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights into the module, which has none after a fit with `full_weights=False`."""
        module: Any = self.lightning_module
        assign = any(x.is_meta for x in module.parameters())
        module.load_state_dict(checkpoint["state_dict"], strict=strict, assign=assign)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the shards that `save_checkpoint` wrote, on any number of ranks and at any stage."""
        assert self._engine is not None
        if not get_filesystem(self._shards).isdir(self._shards):
            raise ValueError(
                f"ckpt_path={self._shards.removesuffix(_SHARDS)!r} has no folder {self._shards!r} beside it, so no "
                f"sharded trainer saved its optimizer: load its weights with {type(self.lightning_module).__name__}"
                ".load_from_checkpoint, and start from them"
            )
        super().load_optimizer_state_dict(checkpoint)
        self._engine.load(self._shards)


def _check_has_weights(module: LightningModule) -> None:
    if any(x.is_meta for x in module.parameters()):
        raise ValueError(
            f"{type(module).__name__} has no weights, as after a fit with Strategy(full_weights=False), or made on "
            "the meta device: make the module anew, or pass ckpt_path="
        )


@api_boundary
def full_model(trainer: Trainer) -> LightningModule:
    """Return a copy of the module that a trainer trains now, with all its weights, on the host. All ranks call it.

    Raises:
        TypeError: if the trainer has another strategy, or does not run. Then the module itself has its weights.

    Example:
        >>> full_model(Trainer(accelerator="cpu", logger=False, enable_checkpointing=False))
        Traceback (most recent call last):
        ...
        TypeError: trainer runs nothing with fzero.plugs.lightning.Strategy: use its module
    """
    strategy: Any = trainer.strategy
    if not isinstance(strategy, Strategy) or not strategy._is_taken_apart or strategy._engine is None:
        raise TypeError("trainer runs nothing with fzero.plugs.lightning.Strategy: use its module")
    return strategy._engine.full_model()  # pyright: ignore[reportReturnType]
