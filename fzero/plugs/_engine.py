"""Engine: the models, loss and optimizer of another library's training loop, as one sharded step."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch

from fzero import nn, optim, tree
from fzero.checkpoint import load, save
from fzero.collectives import pmean
from fzero.graph import jit
from fzero.plugs._param_groups import ParamGroups
from fzero.plugs._stand_ins import guard
from fzero.ranks import Mesh
from fzero.sharding import sharded_units
from fzero.transforms import gather, partition, scaled_value_and_grad, value_and_grad
from fzero.zero import ShardedStep, shard

__all__ = ["Backend", "Engine", "LoopStep", "MicroBatch", "Models", "make_engine", "stack"]

Backend = Literal["inductor", "auto", "fx"]


class MicroBatch(NamedTuple):
    """One micro-batch, or several that were stacked along a new dimension 0.

    Attributes:
        tensors: the trees of tensors in it, by name: `[k, ...]` for k micro-batches.
        constants: its values that hold no tensor, by name.
        count: the number k of micro-batches.
    """

    tensors: Any
    constants: dict[str, Any]
    count: int


def stack(batches: Sequence[dict[str, Any]], together: bool) -> list[MicroBatch]:
    """Stack the micro-batches of a step, if they are alike and `together` allows it; else make one of each.

    Raises:
        TypeError: if a value mixes tensors with others.
    """
    split = [_split(batch) for batch in batches]
    alike = all(_signature(x) == _signature(split[0]) for x in split)
    groups = [split] if together and alike else [[x] for x in split]
    return [
        MicroBatch(tree.map(lambda *xs: torch.stack(xs), *[tensors for tensors, _ in group]), group[0][1], len(group))
        for group in groups
    ]


def _split(batch: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    tensors, constants = {}, {}
    for name, value in batch.items():
        are_tensors = [isinstance(x, torch.Tensor) for x in tree.flatten(value)[0]]
        if any(are_tensors) and not all(are_tensors):
            raise TypeError(f"the batch's {name!r} mixes tensors with other values: let the collator return tensors")
        (tensors if any(are_tensors) else constants)[name] = value
    if not tensors:
        raise TypeError(f"the batch holds no tensor, only {sorted(batch)}: let the collator return tensors")
    return tensors, constants


def _signature(split: tuple[dict[str, Any], dict[str, Any]]) -> Any:
    leaves, structure = tree.flatten(split[0])
    return structure, [(x.shape, x.dtype) for x in leaves], split[1]


@dataclass(frozen=True)
class Models:
    """The model that is trained, and others that its loss calls, such as a reference model.

    Attributes:
        apply: the trained model.
        others: the other models.
    """

    apply: nn.Apply
    others: tuple[nn.Apply, ...] = ()

    def run(self, f: Callable[..., Any], params: Any, state: Any, *args: Any) -> tuple[Any, Any]:
        """Run `f(model, *args)`, where the model and the others have the given tensors.

        Args:
            f: the function; it reaches the other models by itself.
            params: the trained parameters.
            state: for each model, the trained one first, a pair of its frozen parameters and its buffers.
            *args: the other arguments of `f`.

        Returns:
            The result, and the new buffers of the trained model.
        """
        (frozen, buffers), *rest = state
        params, frozen = (params, frozen) if self.apply.blocks else gather((params, frozen))

        def of_model() -> tuple[Any, Any]:
            out, new = self.apply.method(f)(params, {**frozen, **buffers}, *args)
            return out, {name: new[name] for name in buffers}

        inner = of_model
        for apply, (others_params, others_buffers) in zip(self.others, rest, strict=True):
            inner = _with_model(apply, others_params, others_buffers, inner)
        return inner()


def _with_model(apply: nn.Apply, params: Any, buffers: Any, run: Callable[[], Any]) -> Callable[[], Any]:
    """Return `run`, within which another model has these tensors."""
    params = params if apply.blocks else gather(params)
    return lambda: apply.method(lambda module: run())({}, {**params, **buffers})[0]


@dataclass(frozen=True)
class LoopStep:
    """The unsharded train step: the gradient of the sum over the micro-batches, clipping, and the update.

    Attributes:
        models: the models.
        loss: `loss(model, batch)` returns what a micro-batch adds to the loss of the step, a 0-d tensor.
        groups: the optimizer.
        ranks: the number of ranks, over which the loss is averaged.
        clip: how the gradients are clipped; None if they are not.
        precision: the dtypes of half precision; None to train in the parameters' own.
        loss_scale: whether the loss is scaled, as for float16.
        autograd: whether torch.autograd differentiates, in place of torch.func; see `fzero.value_and_grad`.
    """

    models: Models
    loss: Callable[..., torch.Tensor]
    groups: ParamGroups
    ranks: int
    clip: optim.Optimizer | None
    precision: optim.Precision | None
    loss_scale: bool
    autograd: bool

    def optimizer(self, rates: Sequence[Any]) -> optim.Optimizer:
        """Make the whole optimizer, with a learning rate for each group."""
        opt = optim.chain(*([] if self.clip is None else [self.clip]), self.groups.optimizer(rates))
        opt = opt if self.precision is None else optim.master_weights(opt, self.precision)
        return optim.dynamic_loss_scale(opt) if self.loss_scale else opt

    def __call__(self, params: Any, opt_state: Any, buffers: Any, others: Any, batches: Any, rates: Any) -> Any:
        """Run the step.

        Args:
            params: the trained parameters.
            opt_state: the optimizer's state.
            buffers: the buffers of the trained model.
            others: the frozen parameters of the trained model, and a pair of parameters and buffers of each other one.
            batches: the micro-batches, stacked where they are alike.
            rates: the learning rates of the groups.

        Returns:
            `(params, opt_state, buffers, metrics)`.
        """
        grads, buffers, metrics = self.accumulate(params, opt_state, buffers, others, batches)
        params, opt_state = self.update(params, opt_state, grads, rates)
        return params, opt_state, buffers, {**metrics, **self.skipped(opt_state)}

    def accumulate(
        self, params: Any, opt_state: Any, buffers: Any, others: Any, batches: Any
    ) -> tuple[Any, Any, dict[str, torch.Tensor]]:
        """Return the sum of the gradients of the micro-batches, the new buffers, the loss and the norm."""
        total: Any = None
        grads: Any = None
        for batch in batches:
            value, new, buffers = self.gradients(params, opt_state, buffers, others, batch)
            total = value if total is None else total + value
            grads = new if grads is None else tree.elementwise(torch.add, grads, new)
        return grads, buffers, {"loss": total, "norm": optim.global_norm(grads)}

    def skipped(self, opt_state: Any) -> dict[str, torch.Tensor]:
        """Return the metric of the steps that were skipped, if the loss is scaled."""
        return {"skipped": optim.loss_scale(opt_state).skipped} if self.loss_scale else {}

    def update(self, params: Any, opt_state: Any, grads: Any, rates: Any) -> tuple[Any, Any]:
        """Return the parameters and the optimizer's state after an update by gradients."""
        updates, opt_state = self.optimizer(rates).update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state

    def gradients(
        self, params: Any, opt_state: Any, buffers: Any, others: Any, batch: MicroBatch
    ) -> tuple[torch.Tensor, Any, Any]:
        """Return the loss, the gradients and the new buffers of stacked micro-batches."""
        is_mutable = bool(self.models.apply.mutable_names)

        def loss_fn(params: Any, frozen: Any, tensors: Any) -> Any:
            one = {**tree.map(lambda x: x.squeeze(0), tensors), **batch.constants}
            state = ((frozen[0], buffers), *frozen[1:])
            loss, new = self.models.run(self.loss, params, state, one)
            loss = loss / self.ranks
            return (loss, new) if is_mutable else loss

        options: dict[str, Any] = {"reduce": "sum", "micro_batches": batch.count, "batch_argnums": 2}
        options |= {"precision": self.precision, "gather": False, "has_aux": is_mutable}
        options |= {"autograd": self.autograd}
        make = scaled_value_and_grad if self.loss_scale else value_and_grad
        scaling: Any = (optim.loss_scale(opt_state).scale,) if self.loss_scale else ()
        out, grads = make(loss_fn, *scaling, **options)(params, others, batch.tensors)
        loss, new = out if is_mutable else (out, buffers)
        return loss, grads, pmean(new) if is_mutable else buffers


class Engine:
    """What a sharded training loop holds between steps, and what it does with it.

    Attributes:
        step: the sharded step, whose `train_step` is a `LoopStep`.
        models: the models with which `call` runs a function; its blocks gather their own parameters.
        params: the trained parameters, in the stage's layout.
        opt_state: the optimizer's state.
        buffers: the buffers of the trained model.
        others: the other tensors of the models, as `LoopStep` takes them.
        metrics: the results of the latest step: the loss, the norm of the gradients, and for float16 the steps skipped.
        keeps_masters: whether the optimizer's state holds parameters in full precision.
    """

    def __init__(
        self,
        step: ShardedStep,
        backend: Backend | None,
        models: Models,
        params: Any,
        opt_state: Any,
        state: Any,
        keeps_masters: bool,
    ) -> None:
        self.step = step
        self.models = models
        self.params = params
        self.opt_state = opt_state
        (frozen, self.buffers), *rest = state
        self.others = (frozen, *rest)
        self.metrics: dict[str, torch.Tensor] = {}
        self.keeps_masters = keeps_masters
        self._run = None if backend is None else jit(step, backend=backend)
        # An eager update of the whole tree would hold the state three times. The parameters are not donated: a user's
        # module may keep a loss with its graph, which holds them.
        update = replace(step, train_step=self._loop_step.update, check=False)  # no argument of it is a batch
        in_lockstep = step.mesh.simulation == "lockstep"  # which is not compiled, as a notice of jit would say
        self._update = update if in_lockstep else jit(update, backend="fx", donate=(1, 2))

    @property
    def is_jitted(self) -> bool:
        """Whether steps are compiled."""
        return self._run is not None

    @property
    def mesh(self) -> Mesh:
        """The mesh of the step."""
        return self.step.mesh

    def train(self, batches: Sequence[dict[str, Any]], rates: Sequence[float]) -> dict[str, torch.Tensor]:
        """Run a step on this rank's micro-batches."""
        stacked = stack(batches, together=self.is_jitted and not self.models.apply.mutable_names)
        local = [batch._replace(tensors=self.mesh.local(lambda rank, x=batch: x.tensors)) for batch in stacked]
        state = self.params, self.opt_state, self.buffers, self.others
        if self._run is not None:
            new = self._run(*state, local, _tensors(rates))
            self.params, self.opt_state, self.buffers, self.metrics = new
            return self.metrics
        grads, self.buffers, metrics = self._program(self._loop_step.accumulate)(*state, local)
        del state  # the old optimizer's state is donated
        self.update(grads, rates)
        self.metrics = {**metrics, **self._loop_step.skipped(self.opt_state)}
        return self.metrics

    def gradients(self, batch: dict[str, Any]) -> tuple[torch.Tensor, Any]:
        """Return the loss and the gradients of one micro-batch, which may hold any values. It runs eagerly.

        A loop that takes its micro-batches one by one adds them up, and calls `update`. The buffers are new at once.
        """

        def run(params: Any, opt_state: Any, buffers: Any, others: Any) -> tuple[Any, Any, Any]:
            return self._loop_step.gradients(params, opt_state, buffers, others, MicroBatch({}, batch, 1))

        state = self.params, self.opt_state, self.buffers, self.others
        loss, grads, self.buffers = self._program(run)(*state)
        return loss, grads

    def finish(self, grads: Any, rates: Sequence[float], loss: torch.Tensor) -> None:
        """Update as `update` does, and set `metrics`, with this loss of the step."""
        norm = self.step.program(optim.global_norm)(grads)  # before the update, which may reuse the gradients' memory
        self.update(grads, rates)
        self.metrics = {"loss": loss, "norm": norm, **self._loop_step.skipped(self.opt_state)}

    def _program(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """Make a rank program of `f(params, ...)`, in which parameters have the layout that they have within a step."""
        layout = self.step.layout

        def program(params: Any, *args: Any) -> Any:
            within = partition(params, reduce_grads=layout.grads) if layout.shards_within_step else params
            return f(within, *args)

        return self.step.program(program)

    def update(self, grads: Any, rates: Sequence[float]) -> None:
        """Update the parameters by gradients, the sum of those of a step's micro-batches."""
        self.params, self.opt_state = self._update(self.params, self.opt_state, grads, _tensors(rates))

    @property
    def groups(self) -> ParamGroups:
        """The optimizer."""
        return self._loop_step.groups

    @property
    def _loop_step(self) -> LoopStep:
        return self.step.train_step  # pyright: ignore[reportReturnType]

    def call(self, f: Callable[..., Any], batch: dict[str, Any]) -> Any:
        """Run `f(model, batch)` on every rank, without gradients, and return this rank's result."""
        results = []

        def program(params: Any, buffers: Any, others: Any) -> None:
            state = ((others[0], buffers), *others[1:])
            with torch.no_grad():  # here, for a rank in lockstep is a thread of its own
                results.append(self.models.run(f, params, state, batch)[0])

        self.step.program(program)(self.params, self.buffers, self.others)
        return results[0]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each parameter and buffer of the trained model by name, full and on the host. All ranks call it."""
        values = {**self._exact_params(), **self.others[0], **self.buffers}
        names, entries = list(values), list(values.values())
        in_units = set()
        for _, _, members in sharded_units(names, entries):
            unit = self.step.gather({names[at]: entries[at] for at, _ in members})
            in_units |= unit.keys()
            yield from [(name, x.cpu()) for name, x in unit.items()]
        yield from [(name, x.cpu()) for name, x in values.items() if name not in in_units]

    def full_model(self) -> torch.nn.Module:
        """Return a copy of the trained model with all its weights, on the host. All ranks call it."""
        return nn.full_copy(self.models.apply, dict(self.tensors()))

    def put_back(self) -> None:
        """Give full weights, on the host, to the model that steps run in place. All ranks call it."""
        nn.put_back(self.models.apply, dict(self.tensors()))

    def state_dict(self, keep: bool) -> dict[str, torch.Tensor]:
        """Return the trained model's state dict, on the host; if not `keep`, an empty dict. All ranks call it."""
        full = {name: x for name, x in self.tensors() if keep}
        if not keep:
            return {}
        model = self.models.apply.module
        names = {id(x): name for name, x in [*model.named_parameters(), *model.named_buffers()]}
        # tied weights stay one tensor; a metric has tensors that are no buffers
        state = model.state_dict(keep_vars=True)
        return {key: full[names[id(x)]] if id(x) in names else x for key, x in state.items()}

    def _exact_params(self) -> Any:
        return optim.master_params(self.params, self.opt_state) if self.keeps_masters else self.params

    def save(self, folder: str) -> None:
        """Save what training changes. All ranks call it."""
        save(folder, self._state(), self.mesh).wait()

    def load(self, folder: str) -> None:
        """Load what `save` wrote, on any number of ranks and at any stage."""
        state = load(folder, self._state(), self.mesh)
        self.params, self.opt_state, self.buffers = state["params"], state["opt_state"], state["buffers"]

    def _state(self) -> dict[str, Any]:
        return {"params": self.params, "opt_state": self.opt_state, "buffers": self.buffers}


def _tensors(rates: Sequence[float]) -> list[torch.Tensor]:
    return [torch.tensor(rate, dtype=torch.float64, device="cpu") for rate in rates]


def make_engine(
    model: torch.nn.Module,
    others: Sequence[torch.nn.Module],
    loss: Callable[..., torch.Tensor],
    groups: ParamGroups,
    rates: Sequence[float],
    *,
    stage: int,
    mesh: Mesh,
    backend: Backend | None,
    remat: bool,
    clip: optim.Optimizer | None,
    precision: optim.Precision | None,
    in_place: bool = False,
) -> Engine:
    """Shard models and their optimizer. The memory of their tensors goes to the engine, and they are left on meta.

    Args:
        model: the model to train, in training mode.
        others: other models that the loss calls; they are frozen.
        loss: see `LoopStep`.
        groups: the optimizer.
        rates: the first learning rates.
        stage: the ZeRO stage.
        mesh: the ranks; all axes are data-parallel.
        backend: the backend of `fzero.jit`; None to run steps eagerly, for a loss that is not pure.
        remat: whether blocks run again in the backward pass.
        clip: how the gradients are clipped; None if they are not.
        precision: the dtypes of half precision; None to train in the parameters' own.
        in_place: whether steps run `model` itself, so that it keeps what they leave in attributes. They run eagerly.
    """
    for module in (model, *others):
        _copy_from_first_rank(module, mesh)
    by_block = nn.functional_in_place(model, mesh.device) if in_place else _by_block(model)
    rest = [_by_block(other.requires_grad_(False)) for other in others]
    models = Models(by_block.apply, tuple([x.apply for x in rest]))
    in_step = models if remat or backend is None else Models(nn.functional(model).apply, models.others)
    loss_scale = precision is not None and precision.param is torch.float16
    train_step = LoopStep(in_step, loss, groups, mesh.size, clip, precision, loss_scale, backend is None)
    step = shard(train_step, stage=stage, mesh=mesh)
    params, opt_state = step.init(by_block.params, train_step.optimizer(rates), donate=True)

    def split(functional: nn.Functional, module: torch.nn.Module) -> tuple[Any, Any]:
        buffers = {name: functional.buffers[name] for name, _ in module.named_buffers()}
        frozen = {name: x for name, x in functional.buffers.items() if name not in buffers}
        frozen = frozen if precision is None else precision.cast(frozen)
        return step.partition(frozen), mesh.device_put(buffers)

    state = [split(x, module) for x, module in zip([by_block, *rest], [model, *others], strict=True)]
    for module in others if in_place else (model, *others):  # callers hold their model on, and its memory with it
        module.to("meta")
    for module in (model, *others, *[apply.module for apply in (models.apply, *models.others)]):
        guard(module)
    return Engine(step, backend, models, params, opt_state, state, precision is not None)


def _copy_from_first_rank(module: torch.nn.Module, mesh: Mesh) -> None:
    """Give all ranks the first rank's weights, as DDP does: their random numbers may differ."""
    for x in [*module.parameters(), *module.buffers()] if mesh.distributed else ():
        sent = x.detach().to(mesh.device)
        torch.distributed.broadcast(sent, 0)
        x.data.copy_(sent)


def _by_block(module: torch.nn.Module) -> nn.Functional:
    """Take a module apart so that each repeated block, if there are any, gathers its own parameters."""
    return nn.functional(module, remat=bool(nn.repeated_blocks(module)))
