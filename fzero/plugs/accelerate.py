"""shard_loop: a sharded step in a loop of Accelerate, in place of the model and the optimizer that it would prepare."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DDPCommunicationHookType, DistributedType, DynamoBackend

from fzero import optim, tree
from fzero._arguments import check_choice
from fzero._tracebacks import api_boundary
from fzero.plugs._engine import Backend, Engine, EngineOptions, make_engine
from fzero.plugs._half_precision import cast, half_precision
from fzero.plugs._param_groups import param_groups
from fzero.ranks import mesh as make_mesh
from fzero.tree import Tree

__all__ = ["Step", "full_model", "shard_loop"]

_FOLDER = "fzero"  # in a folder of save_state: the shards
# Of accelerate's DistributedType: processes with one device each.
_KINDS = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU")


class Step:
    """A sharded step in a loop of Accelerate, returned by `shard_loop`.

    Attributes:
        optimizer: the torch optimizer, prepared by accelerate. It has the learning rates, and neither weights nor
            moments.
        norm: the norm of the gradients of the latest update, before clipping.
    """

    def __init__(self, accelerator: Accelerator, engine: Engine, optimizer: Any, precision: optim.Precision | None):
        self.optimizer = optimizer
        self.norm: torch.Tensor | None = None
        self._accelerator, self._engine, self._precision = accelerator, engine, precision
        self._micro_batches: list[dict[str, Any]] = []

    def __call__(self, batch: Tree) -> torch.Tensor | None:
        """Take a micro-batch of this process; with the last one of a step, update the parameters.

        Call it within `accelerator.accumulate()`, which tells the last micro-batch.

        Returns:
            With the last one the mean loss of all processes' micro-batches, else None.
        """
        self._micro_batches.append({"batch": self._cast_batch(batch)})
        if not self._accelerator.sync_gradients:
            return None
        batches = list(self._micro_batches)
        self._micro_batches.clear()  # before the step, which may raise an error
        skipped = self._engine.metrics.get("skipped", 0)
        metrics = self._engine.run_step(batches, self._engine.optimizer_groups.rates(self.optimizer.optimizer))
        self.norm = metrics["norm"]
        self.optimizer._is_overflow = "skipped" in metrics and bool(metrics["skipped"] > skipped)
        self.optimizer.optimizer.step()  # it has no gradients, and tells schedulers that it was called
        return metrics["loss"] * (self._accelerator.gradient_accumulation_steps / len(batches))

    def evaluate(self, f: Callable[[Any, Any], Any], batch: Tree) -> Any:
        """Run `f(model, batch)` in evaluation mode without gradients, and return this process's result.

        All processes call it. Pass results on to `accelerator.gather_for_metrics`.
        """
        model = self._engine.models.apply.module
        modes = [(m, m.training) for m in model.modules()]
        model.eval()
        try:
            return self._engine.call(f, self._cast_batch(batch))
        finally:
            for m, mode in modes:
                m.training = mode

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return all weights on the main process's host, and nothing on others. All processes call it."""
        return self._engine.state_dict(is_writer=self._accelerator.is_main_process)

    def _cast_batch(self, batch: Any) -> Any:
        """Bring floating-point tensors to the dtype of half-precision parameters."""
        batch = dict(batch) if isinstance(batch, Mapping) else batch
        return batch if self._precision is None else tree.map(lambda x: cast(x, self._precision), batch)


@api_boundary
def shard_loop(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[Any, Any], torch.Tensor],
    *,
    stage: int,
    max_norm: float | None = None,
    backend: Backend | None = None,
    remat: bool = False,
) -> Step:
    """Make a sharded step of a model, its optimizer and its loss, for a loop of Accelerate.

    The step takes the place of `accelerator.backward`, `clip_grad_norm_`, `optimizer.step` and `optimizer.zero_grad`.
    Numbers are those of accelerate under DDP. `accelerator.save_state` and `load_state` save and load its shards, at
    any stage and on any number of processes. Loaders and schedulers are prepared by accelerate, after this call.

    The model is used up: its memory goes to the step.

    Args:
        accelerator: the accelerator. It has neither prepared the model nor the optimizer.
        model: the model, in training mode.
        optimizer: torch's AdamW, Adam, SGD or Adagrad, of the model's parameters.
        loss: `loss(model, batch)` returns the loss of one micro-batch, a 0-d tensor.
        stage: the stage of ZeRO; see `fzero.shard`.
        max_norm: the largest norm of the gradients; None for no clipping.
        backend: a backend of `fzero.jit`, for a loss that is pure; None to run steps eagerly, block by block.
        remat: whether the blocks of a jitted step run again in the backward pass. Eager ones always do.

    Raises:
        TypeError: if the model or the optimizer is prepared already.
        ValueError: if a setting of the accelerator is refused, or the optimizer has no counterpart in `fzero.optim`.
            The message names it.

    Example:
        >>> import torch
        >>> accelerator, model = Accelerator(cpu=True), torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> step = shard_loop(accelerator, model, optimizer, lambda model, x: model(x).square().mean(), stage=3)
        >>> for x in accelerator.prepare(torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=4)):
        ...     with accelerator.accumulate():
        ...         loss = step(x)
        >>> loss.shape
        torch.Size([])
    """
    _check_settings(accelerator, model, optimizer)
    check_choice("backend", backend, ("inductor", "auto", "fx", None))
    groups = param_groups(optimizer, model, "optimizer")
    is_lockstep = backend is None and accelerator.num_processes == 1
    halves = {"bf16": torch.bfloat16, "fp16": torch.float16}
    precision = half_precision(model, halves.get(str(accelerator.mixed_precision)))
    engine = make_engine(
        model,
        other_modules=[],
        loss=lambda model, one: loss(model, one["batch"]) / accelerator.gradient_accumulation_steps,
        optimizer_groups=groups,
        opt=optimizer,
        options=EngineOptions(
            stage=stage,
            mesh=make_mesh(dp=-1, device=accelerator.device.type, simulate="lockstep" if is_lockstep else None),
            backend=backend,
            remat=remat,
            clip=None if max_norm is None else optim.clip_by_global_norm(max_norm),
            precision=precision,
        ),
    )
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: engine.save(os.path.join(folder, _FOLDER)))
    accelerator.register_load_state_pre_hook(lambda models, folder: _load_engine(engine, os.path.join(folder, _FOLDER)))
    return Step(accelerator, engine, accelerator.prepare_optimizer(optimizer), precision)


@api_boundary
def full_model(step: Step) -> torch.nn.Module:
    """Return a copy of a step's model with all its weights, on the host. All processes call it.

    Raises:
        TypeError: if `step` is not a step of `shard_loop`.

    Example:
        >>> full_model(torch.nn.Linear(1, 1))
        Traceback (most recent call last):
        ...
        TypeError: step is a Linear: expected a step of fzero.plugs.accelerate.shard_loop
    """
    if not isinstance(step, Step):
        raise TypeError(f"step is a {type(step).__name__}: expected a step of fzero.plugs.accelerate.shard_loop")
    return step._engine.full_model()


def _check_settings(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    """Raise an error for a setting of the accelerator that a sharded step cannot follow."""
    if not isinstance(accelerator, Accelerator):
        raise TypeError(f"accelerator is a {type(accelerator).__name__}: expected an accelerate.Accelerator")
    for name, x in {"model": model, "optimizer": optimizer}.items():
        if isinstance(x, AcceleratedOptimizer) or any(x is m for m in accelerator._models):
            raise TypeError(
                f"{name} is prepared by accelerate already: pass the plain one, and prepare the others only"
            )
    parameters = [p for opt in accelerator._optimizers for group in opt.param_groups for p in group["params"]]
    if any(p.is_meta for p in parameters):
        raise ValueError(
            "the accelerator has a sharded step already, and save_state has one folder for it: make another "
            "Accelerator for another model"
        )
    if accelerator.distributed_type not in [DistributedType(kind) for kind in _KINDS]:
        raise ValueError(
            f"the accelerator's distributed_type={accelerator.distributed_type.value} is refused: fzero shards in its "
            "place; leave out its plugin, and its part of the configuration of accelerate launch"
        )
    if accelerator.mixed_precision not in ("no", "bf16", "fp16"):
        raise ValueError(
            f"Accelerator(mixed_precision={accelerator.mixed_precision!r}): expected 'no', 'bf16' or 'fp16'"
        )
    if accelerator.ddp_handler is not None and accelerator.ddp_handler.comm_hook != DDPCommunicationHookType.NO:
        raise ValueError(
            "DistributedDataParallelKwargs(comm_hook=...) is refused: DDP is not used, and gradients are reduced in "
            "their own dtype; leave it out"
        )
    if accelerator.autocast_handler is not None and not accelerator.autocast_handler.enabled:
        raise ValueError(
            "AutocastKwargs(enabled=False) is refused: the step has no autocast; pass mixed_precision='no'"
        )
    dynamo: Any = accelerator.state.dynamo_plugin
    if dynamo.backend != DynamoBackend.NO:
        raise ValueError(
            "Accelerator(dynamo_backend=...) is refused: the step is compiled, shard_loop(..., backend='inductor')"
        )


def _load_engine(engine: Engine, folder: str) -> None:
    if not os.path.isdir(folder):
        raise ValueError(
            f"load_state: {os.path.dirname(folder)!r} has no folder {_FOLDER!r}, so no sharded step saved its state "
            "there: load the weights into the model before fzero.plugs.accelerate.shard_loop"
        )
    engine.load(folder)
