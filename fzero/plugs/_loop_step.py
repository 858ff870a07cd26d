"""LoopStep: the models, loss and optimizer of another library's training loop, as one train step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fzero import nn, optim, tree
from fzero.collectives import pmean
from fzero.plugs._micro_batches import MicroBatch
from fzero.plugs._param_groups import ParamGroups
from fzero.transforms import gather, scaled_value_and_grad, value_and_grad

__all__ = ["LoopStep", "Models"]


@dataclass(frozen=True)
class Models:
    """The model that is trained, and others that its loss calls, such as a reference model.

    Attributes:
        apply: the trained model.
        other_applies: the other models.
    """

    apply: nn.Apply
    other_applies: tuple[nn.Apply, ...] = ()

    def run(self, f: Callable[..., Any], params: Any, frozen_and_buffers: Any, *args: Any) -> tuple[Any, Any]:
        """Run `f(model, *args)`, where the model and the others have the given tensors.

        Args:
            f: the function; it reaches the other models by itself.
            params: the trained parameters.
            frozen_and_buffers: for each model, the trained one first, a pair of its frozen parameters and its buffers.
            *args: the other arguments of `f`.

        Returns:
            The result, and the new buffers of the trained model.
        """
        (frozen, buffers), *other_tensors = frozen_and_buffers
        params, frozen = (params, frozen) if self.apply.blocks else gather((params, frozen))

        def run_trained_model() -> tuple[Any, Any]:
            out, new = self.apply.method(f)(params, {**frozen, **buffers}, *args)
            return out, {name: new[name] for name in buffers}

        inner = run_trained_model
        for apply, (others_params, others_buffers) in zip(self.other_applies, other_tensors, strict=True):
            inner = _bind_model(apply, others_params, others_buffers, inner)
        return inner()


def _bind_model(apply: nn.Apply, params: Any, buffers: Any, run: Callable[[], Any]) -> Callable[[], Any]:
    """Return `run`, within which another model has these tensors."""
    params = params if apply.blocks else gather(params)
    return lambda: apply.method(lambda module: run())({}, {**params, **buffers})[0]


@dataclass(frozen=True)
class LoopStep:
    """The unsharded train step: the gradient of the sum over the micro-batches, clipping, and the update.

    Attributes:
        models: the models.
        loss: `loss(model, batch)` returns the share of a micro-batch in the loss of the step, a 0-d tensor.
        optimizer_groups: the optimizer of the sharded step, by parameter groups.
        ranks: the number of ranks, over which the loss is averaged.
        clip: how the gradients are clipped; None if they are not.
        precision: the dtypes of half precision; None to train in the parameters' own.
        loss_scale: whether the loss is scaled, as for float16.
        autograd: whether torch.autograd differentiates, in place of torch.func; see `fzero.value_and_grad`.
    """

    models: Models
    loss: Callable[..., torch.Tensor]
    optimizer_groups: ParamGroups
    ranks: int
    clip: optim.Optimizer | None
    precision: optim.Precision | None
    loss_scale: bool
    autograd: bool

    def optimizer(self, rates: Sequence[Any]) -> optim.Optimizer:
        """Make the whole optimizer, with a learning rate for each group."""
        opt = optim.chain(*([] if self.clip is None else [self.clip]), self.optimizer_groups.optimizer(rates))
        opt = opt if self.precision is None else optim.master_weights(opt, self.precision)
        return optim.dynamic_loss_scale(opt) if self.loss_scale else opt

    def __call__(self, params: Any, opt_state: Any, buffers: Any, other_tensors: Any, batches: Any, rates: Any) -> Any:
        """Run the step.

        Args:
            params: the trained parameters.
            opt_state: the optimizer's state.
            buffers: the buffers of the trained model.
            other_tensors: the frozen parameters of the trained model, and a pair of parameters and buffers of each
                other one.
            batches: the micro-batches, stacked where they are alike.
            rates: the learning rates of the groups.

        Returns:
            `(params, opt_state, buffers, metrics)`.
        """
        grads, buffers, metrics = self.accumulate(params, opt_state, buffers, other_tensors, batches)
        params, opt_state = self.update(params, opt_state, grads, rates)
        return params, opt_state, buffers, {**metrics, **self.skipped(opt_state)}

    def accumulate(
        self, params: Any, opt_state: Any, buffers: Any, other_tensors: Any, batches: Any
    ) -> tuple[Any, Any, dict[str, torch.Tensor]]:
        """Return the sum of the gradients of the micro-batches, the new buffers, the loss and the norm."""
        total: Any = None
        grads: Any = None
        for batch in batches:
            value, new, buffers = self.gradients(params, opt_state, buffers, other_tensors, batch)
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
        self, params: Any, opt_state: Any, buffers: Any, other_tensors: Any, batch: MicroBatch
    ) -> tuple[torch.Tensor, Any, Any]:
        """Return the loss, the gradients and the new buffers of stacked micro-batches."""
        is_mutable = bool(self.models.apply.mutable_names)

        def loss_fn(params: Any, frozen: Any, tensors: Any) -> Any:
            micro_batch = {**tree.map(lambda x: x.squeeze(0), tensors), **batch.constants}
            frozen_and_buffers = ((frozen[0], buffers), *frozen[1:])
            loss, new = self.models.run(self.loss, params, frozen_and_buffers, micro_batch)
            loss = loss / self.ranks
            return (loss, new) if is_mutable else loss

        options: dict[str, Any] = {"reduce": "sum", "micro_batches": batch.count, "batch_argnums": 2}
        options |= {"precision": self.precision, "gather": False, "has_aux": is_mutable}
        options |= {"autograd": self.autograd}
        make = scaled_value_and_grad if self.loss_scale else value_and_grad
        scaling: Any = (optim.loss_scale(opt_state).scale,) if self.loss_scale else ()
        out, grads = make(loss_fn, *scaling, **options)(params, other_tensors, batch.tensors)
        loss, new = out if is_mutable else (out, buffers)
        return loss, grads, pmean(new) if is_mutable else buffers
