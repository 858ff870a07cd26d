"""Engine: the models, loss and optimizer of another library's training loop, as one sharded step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from fzero import nn, optim
from fzero.checkpoint import load, save
from fzero.graph import jit
from fzero.plugs._forward_hooks import check_hooks, list_hooks
from fzero.plugs._loop_step import LoopStep, Models
from fzero.plugs._micro_batches import MicroBatch, stack
from fzero.plugs._param_groups import ParamGroups, hold_stand_ins
from fzero.plugs._stand_ins import guard
from fzero.ranks import Mesh
from fzero.sharding import sharded_units
from fzero.transforms import partition
from fzero.zero import ShardedStep, shard

__all__ = ["Backend", "Engine", "EngineOptions", "make_engine"]

Backend = Literal["inductor", "auto", "fx"]


class Engine:
    """The state of a sharded training loop between its steps, and the steps, saves and loads that change it.

    Attributes:
        step: the sharded step, whose `train_step` is a `LoopStep`.
        models: the models with which `call` runs a function; its blocks gather their own parameters.
        params: the trained parameters, in the stage's layout.
        opt_state: the optimizer's state.
        buffers: the buffers of the trained model.
        other_tensors: the frozen parameters of the trained model, and a pair of parameters and buffers of each other
            model.
        exact_frozen: the frozen parameters that half precision rounds, as they were given, sharded as an optimizer's
            state is.
        metrics: the results of the latest step: the loss, the norm of the gradients, and for float16 the steps skipped.
        precision: the dtypes of half precision; None to train in the parameters' own.
    """

    def __init__(
        self,
        step: ShardedStep,
        backend: Backend | None,
        models: Models,
        params: Any,
        opt_state: Any,
        frozen_and_buffers: Sequence[tuple[Any, Any]],
        exact_frozen: Any,
        precision: optim.Precision | None,
    ) -> None:
        """Keep the state of a sharded loop, and compile the step and its update."""
        self.step = step
        self.models = models
        self.params = params
        self.opt_state = opt_state
        (frozen, self.buffers), *rest = frozen_and_buffers
        self.other_tensors = (frozen, *rest)
        self.exact_frozen = exact_frozen
        self.metrics: dict[str, torch.Tensor] = {}
        self.precision = precision
        self._jitted_step = None if backend is None else jit(step, backend=backend)
        # A step on a copy of the model has the hooks of now, and one on the model itself those of its first run.
        self._hooks = None if self._loop_step.models is models else list_hooks(models.apply.module)
        # An eager update of the whole tree would hold the state three times. The parameters are not donated: a user's
        # module may keep a loss with its graph, which holds them.
        update = replace(step, train_step=self._loop_step.update, check=False)  # no argument of it is a batch
        in_lockstep = step.mesh.simulation == "lockstep"  # which is not compiled, as a notice of jit would say
        self._sharded_update = update if in_lockstep else jit(update, backend="fx", donate=(1, 2))

    @property
    def is_jitted(self) -> bool:
        """Whether steps are compiled."""
        return self._jitted_step is not None

    @property
    def mesh(self) -> Mesh:
        """The mesh of the step."""
        return self.step.mesh

    def run_step(self, batches: Sequence[dict[str, Any]], rates: Sequence[float]) -> dict[str, torch.Tensor]:
        """Run a step on this rank's micro-batches."""
        if self.is_jitted:
            self._hooks = list_hooks(self.models.apply.module) if self._hooks is None else self._hooks
            check_hooks(self._hooks, self.models.apply.module)
        stacked = stack(batches, as_one=self.is_jitted and not self.models.apply.mutable_names)
        local = [batch._replace(tensors=self.mesh.local(lambda rank, x=batch: x.tensors)) for batch in stacked]
        arguments = self.params, self.opt_state, self.buffers, self.other_tensors
        if self._jitted_step is not None:
            new = self._jitted_step(*arguments, local, _rate_tensors(rates))
            self.params, self.opt_state, self.buffers, self.metrics = new
            return self.metrics
        grads, self.buffers, metrics = self._make_program(self._loop_step.accumulate)(*arguments, local)
        del arguments  # the old optimizer's state is donated
        self.update(grads, rates)
        self.metrics = {**metrics, **self._loop_step.skipped(self.opt_state)}
        return self.metrics

    def gradients(self, batch: dict[str, Any]) -> tuple[torch.Tensor, Any]:
        """Return the loss and the gradients of one micro-batch, which may hold any values. It runs eagerly.

        A loop that takes its micro-batches one by one adds them up, and calls `update`. The buffers are new at once.
        """

        def program(params: Any, opt_state: Any, buffers: Any, other_tensors: Any) -> tuple[Any, Any, Any]:
            return self._loop_step.gradients(params, opt_state, buffers, other_tensors, MicroBatch({}, batch, 1))

        arguments = self.params, self.opt_state, self.buffers, self.other_tensors
        loss, grads, self.buffers = self._make_program(program)(*arguments)
        return loss, grads

    def update_and_measure(self, grads: Any, rates: Sequence[float], loss: torch.Tensor) -> None:
        """Update as `update` does, and set `metrics`, with this loss of the step."""
        norm = self.step.program(optim.global_norm)(grads)  # before the update, which may reuse the gradients' memory
        self.update(grads, rates)
        self.metrics = {"loss": loss, "norm": norm, **self._loop_step.skipped(self.opt_state)}

    def _make_program(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """Make a rank program of `f(params, ...)`, in which parameters have the layout that they have within a step."""
        layout = self.step.layout

        def program(params: Any, *args: Any) -> Any:
            sharded_params = partition(params, reduce_grads=layout.grads) if layout.shards_within_step else params
            return f(sharded_params, *args)

        return self.step.program(program)

    def update(self, grads: Any, rates: Sequence[float]) -> None:
        """Update the parameters by gradients, the sum of those of a step's micro-batches."""
        self.params, self.opt_state = self._sharded_update(self.params, self.opt_state, grads, _rate_tensors(rates))

    @property
    def optimizer_groups(self) -> ParamGroups:
        """The optimizer of the sharded step, by parameter groups."""
        return self._loop_step.optimizer_groups

    @property
    def _loop_step(self) -> LoopStep:
        return self.step.train_step  # pyright: ignore[reportReturnType]

    def call(self, f: Callable[..., Any], batch: dict[str, Any]) -> Any:
        """Run `f(model, batch)` on every rank, without gradients, and return this rank's result."""
        results = []

        def program(params: Any, buffers: Any, other_tensors: Any) -> None:
            frozen_and_buffers = ((other_tensors[0], buffers), *other_tensors[1:])
            with torch.no_grad():  # here, for a rank in lockstep is a thread of its own
                results.append(self.models.run(f, params, frozen_and_buffers, batch)[0])

        params = self.params if self.precision is None else self.precision.to_param(self.params)
        self.step.program(program)(params, self.buffers, self.other_tensors)
        return results[0]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each parameter and buffer of the trained model by name, full and on the host. All ranks call it."""
        values = {**self._exact_params(), **self.other_tensors[0], **self.exact_frozen, **self.buffers}
        names, entries = list(values), list(values.values())
        in_units = set()
        for _, _, members in sharded_units(names, entries):
            unit = self.step.gather({names[position]: entries[position] for position, _ in members})
            in_units |= unit.keys()
            yield from [(name, x.cpu()) for name, x in unit.items()]
        yield from [(name, x.cpu()) for name, x in values.items() if name not in in_units]

    def full_model(self) -> torch.nn.Module:
        """Return a copy of the trained model with all its weights, on the host. All ranks call it."""
        return nn.full_copy(self.models.apply, dict(self.tensors()))

    def restore_weights(self) -> None:
        """Give full weights, on the host, to the model that steps run in place. All ranks call it."""
        nn.put_back(self.models.apply, dict(self.tensors()))

    def state_dict(self, is_writer: bool) -> dict[str, torch.Tensor]:
        """Return the trained model's state dict, on the host of a rank that writes it, else {}. All ranks call it."""
        full = {name: x for name, x in self.tensors() if is_writer}
        if not is_writer:
            return {}
        model = self.models.apply.module
        names = {id(x): name for name, x in [*model.named_parameters(), *model.named_buffers()]}
        # tied weights stay one tensor; a metric has tensors that are not buffers
        entries = model.state_dict(keep_vars=True)
        return {key: full[names[id(x)]] if id(x) in names else x for key, x in entries.items()}

    def _exact_params(self) -> Any:
        return self.params if self.precision is None else optim.master_params(self.params, self.opt_state)

    def save(self, folder: str) -> None:
        """Save the parameters, the optimizer's state and the buffers. All ranks call it."""
        save(folder, self._checkpoint_tree(), self.mesh).wait()

    def load(self, folder: str) -> None:
        """Load what `save` wrote, on any number of ranks and at any stage."""
        tree = load(folder, self._checkpoint_tree(), self.mesh)
        self.params, self.opt_state, self.buffers = tree["params"], tree["opt_state"], tree["buffers"]
        self.params, self.opt_state = self._with_masters(self.params, self.opt_state, "as shards")

    def _checkpoint_tree(self) -> dict[str, Any]:
        """Return what a checkpoint holds, in the form of all stages: with master weights in the optimizer's state."""
        params, opt_state = self._with_masters(self.params, self.opt_state, "in the state")
        return {"params": params, "opt_state": opt_state, "buffers": self.buffers}

    def _with_masters(
        self, params: Any, opt_state: Any, place: Literal["as shards", "in the state"]
    ) -> tuple[Any, Any]:
        """Move the master weights, where shards may be these, into the optimizer's state or back."""
        if self.precision is None or not self.step.layout.shards_params:
            return params, opt_state
        policy = self.precision if place == "as shards" else replace(self.precision, shard=None)
        return optim.convert_masters(params, opt_state, policy)


def _rate_tensors(rates: Sequence[float]) -> list[torch.Tensor]:
    return [torch.tensor(rate, dtype=torch.float64, device="cpu") for rate in rates]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How an engine runs its steps.

    Attributes:
        stage: the ZeRO stage.
        mesh: the ranks; all axes are data-parallel.
        backend: the backend of `fzero.jit`; None to run steps eagerly, for a loss that is not pure.
        remat: whether blocks run again in the backward pass.
        clip: how the gradients are clipped; None if they are not.
        precision: the dtypes of half precision; None to train in the parameters' own.
        in_place: whether steps run the model itself, eagerly, so that it keeps values that they leave in attributes.
    """

    stage: int
    mesh: Mesh
    backend: Backend | None
    remat: bool
    clip: optim.Optimizer | None
    precision: optim.Precision | None
    in_place: bool = False


def make_engine(
    model: torch.nn.Module,
    other_modules: Sequence[torch.nn.Module],
    loss: Callable[..., torch.Tensor],
    optimizer_groups: ParamGroups,
    opt: torch.optim.Optimizer | None,
    options: EngineOptions,
) -> Engine:
    """Shard models and their optimizer. The memory of their tensors goes to the engine, and they are left on meta.

    The loop's own optimizer is left with stand-ins: a scheduler changes its learning rates, which each step reads.

    Args:
        model: the model to train, in training mode.
        other_modules: other models that the loss calls; they are frozen.
        loss: see `LoopStep`.
        optimizer_groups: the optimizer of the sharded step, by parameter groups.
        opt: the loop's optimizer, from which `optimizer_groups` was read; None for a loop that does not train.
        options: how the steps run.
    """
    mesh, backend, precision = options.mesh, options.backend, options.precision
    for module in (model, *other_modules):
        _copy_from_first_rank(module, mesh)
    by_block = nn.functional_in_place(model, mesh.device) if options.in_place else _divide_at_blocks(model)
    other_splits = [_divide_at_blocks(other.requires_grad_(False)) for other in other_modules]
    models = Models(by_block.apply, tuple([x.apply for x in other_splits]))
    in_step = _choose_step_models(model, models, options)
    train_step = _make_train_step(in_step, loss, optimizer_groups, options)
    step = shard(train_step, stage=options.stage, mesh=mesh)
    rates = [0.0] * len(optimizer_groups.names) if opt is None else optimizer_groups.rates(opt)
    params, opt_state = step.init(by_block.params, train_step.optimizer(rates), donate=True)

    parts = [
        _split_buffers(x, module) for x, module in zip([by_block, *other_splits], [model, *other_modules], strict=True)
    ]
    exact_frozen = {} if precision is None else _exact_frozen(step, parts[0][0], precision)
    cast = (lambda frozen: frozen) if precision is None else precision.cast
    frozen_and_buffers = [(step.partition(cast(frozen)), mesh.device_put(buffers)) for frozen, buffers in parts]
    _release_modules(other_modules if options.in_place else (model, *other_modules))
    for module in (model, *other_modules, *[apply.module for apply in (models.apply, *models.other_applies)]):
        guard(module)
    if opt is not None:
        hold_stand_ins(opt, optimizer_groups, models.apply.module)
    return Engine(
        step=step,
        backend=backend,
        models=models,
        params=params,
        opt_state=opt_state,
        frozen_and_buffers=frozen_and_buffers,
        exact_frozen=exact_frozen,
        precision=precision,
    )


def _make_train_step(
    models: Models, loss: Callable[..., torch.Tensor], optimizer_groups: ParamGroups, options: EngineOptions
) -> LoopStep:
    """Return the step that is sharded. Gradients of float16 are scaled."""
    precision = options.precision
    return LoopStep(
        models=models,
        loss=loss,
        optimizer_groups=optimizer_groups,
        ranks=options.mesh.size,
        clip=options.clip,
        precision=precision,
        loss_scale=precision is not None and precision.param is torch.float16,
        autograd=options.backend is None,
    )


def _split_buffers(functional: nn.Functional, module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split what a module does not train into its frozen parameters and its buffers."""
    buffers = {name: functional.buffers[name] for name, _ in module.named_buffers()}
    frozen = {name: x for name, x in functional.buffers.items() if name not in buffers}
    return frozen, buffers


def _release_modules(modules: Sequence[torch.nn.Module]) -> None:
    """Move modules to meta: callers hold their model on, and its memory with it."""
    for module in modules:
        module.to("meta")


def _exact_frozen(step: ShardedStep, frozen: Mapping[str, torch.Tensor], policy: optim.Precision) -> Any:
    """Shard the frozen parameters that the policy rounds, as master weights of them: a saved model holds these."""
    half_precision_leaves = {name: x for name, x in frozen.items() if x.dtype == policy.master}
    if not half_precision_leaves:
        return {}
    masters = optim.master_weights(optim.set_to_zero(), replace(policy, shard=None))
    return step.init(half_precision_leaves, masters)[1].master


def _copy_from_first_rank(module: torch.nn.Module, mesh: Mesh) -> None:
    """Give all ranks the first rank's weights, as DDP does: their random numbers may differ."""
    if not mesh.distributed:
        return
    for x in [*module.parameters(), *module.buffers()]:
        on_device = x.detach().to(mesh.device)
        torch.distributed.broadcast(on_device, 0)
        x.data.copy_(on_device)


def _choose_step_models(model: torch.nn.Module, models: Models, options: EngineOptions) -> Models:
    """Return the models of a step: with blocks that gather their own parameters and run again, or without.

    Hooks of transformers collect the logits of routers, which a block that runs again would lose. A step of such a
    model gathers all parameters.

    Raises:
        ValueError: if blocks should run again in such a model.
    """
    if options.in_place:
        return models
    configs = [getattr(m, "config", None) for m in model.modules()]
    collects_router_logits = any(getattr(config, "output_router_logits", False) is True for config in configs)
    if options.remat and collects_router_logits:
        raise ValueError(
            "config.output_router_logits is set, and blocks that run again in the backward pass would lose these "
            "logits: pass gradient_checkpointing=False, where TRL has True by default, or set the flag to False"
        )
    is_by_block = options.remat or (options.backend is None and not collects_router_logits)
    return models if is_by_block else Models(nn.functional(model).apply, models.other_applies)


def _divide_at_blocks(module: torch.nn.Module) -> nn.Functional:
    """Take a module apart so that each repeated block, if there are any, gathers its own parameters."""
    return nn.functional(module, remat=bool(nn.repeated_blocks(module)))
