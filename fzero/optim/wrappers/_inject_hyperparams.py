"""inject_hyperparams: hyperparameters that change during training lie in the state."""

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import torch

from fzero._arguments import check_callable, function_name
from fzero._tracebacks import api_boundary
from fzero.optim._base import Optimizer, OptState, Params, Updates, optimizer_factory, wrap_optimizers

__all__ = ["InjectHyperparamsState", "inject_hyperparams"]


class InjectHyperparamsState(NamedTuple):
    """The number of updates (int64, 0-d), the hyperparameters (float64, 0-d), and the state of the optimizer."""

    count: torch.Tensor
    hyperparams: dict[str, torch.Tensor]
    inner_state: OptState


@api_boundary
def inject_hyperparams(
    factory: Callable[..., Optimizer], static_args: str | Iterable[str] = ()
) -> Callable[..., Optimizer]:
    """Move an optimizer's hyperparameters into its state, where they follow schedules or can be changed by hand.

    Like `optax.inject_hyperparams`: every argument that is a number may also be a schedule, and becomes a tensor of
    `state.hyperparams`, float64 and 0-d. Write a new value into the tensor between steps (`.fill_(1e-4)`), and a jitted
    step reads it without another trace. A number or another tensor in its place works too, but may cause a trace. Each
    update overwrites scheduled hyperparameters, so changing them by hand has no effect.

    Args:
        factory: a function that makes an optimizer, such as `optim.adamw`, or your own function that returns a `chain`.
        static_args: names of arguments that stay out of the state: functions that are not schedules, such as `mask`,
            and numbers that decide a structure. Bools, None, trees and arguments of type `int` always stay out.

    Returns:
        `factory`, with the same arguments.

    Raises:
        ValueError: if `static_args` names no argument of `factory`. On use, if a schedule does not return a number, or
            the state has other hyperparameters. A call also raises the errors of `factory`.

    Example:
        >>> from fzero import optim
        >>> opt = inject_hyperparams(optim.sgd)(0.1, momentum=optim.linear(0.0, 0.9, 100))
        >>> params = {"w": torch.tensor(1.0)}
        >>> state = opt.init(params)
        >>> _ = state.hyperparams["learning_rate"].fill_(0.5)
        >>> opt.update({"w": torch.tensor(2.0)}, state, params)[0]
        {'w': tensor(-1.)}
    """
    check_callable(
        "factory", factory, "a function that makes an optimizer, as in optim.inject_hyperparams(optim.adamw)(1e-3)"
    )
    static = {static_args} if isinstance(static_args, str) else set(static_args)
    signature = inspect.signature(factory)
    if not static <= set(signature.parameters):
        names = ", ".join(signature.parameters)
        raise ValueError(f"static_args={sorted(static)}: expected some of the arguments of {factory!r}: {names}")

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Optimizer:
        """Return the optimizer of the factory whose numbers and schedules lie in the state."""
        settings = signature.bind(*args, **kwargs)
        settings.apply_defaults()
        dynamic = {k: v for k, v in settings.arguments.items() if k not in static}
        injected_optimizer = _InjectedOptimizer(
            factory,
            signature,
            args,
            kwargs,
            numbers={k: v for k, v in dynamic.items() if _is_number(v) and not _is_count(signature.parameters[k])},
            schedules={k: v for k, v in dynamic.items() if callable(v)},
        )
        # the numbers are not yet tensors, so that `factory` checks them
        opt = injected_optimizer.optimizer_with(
            injected_optimizer.scheduled_at(torch.zeros((), dtype=torch.int64, device="cpu"))
        )
        return wrap_optimizers(injected_optimizer.init, injected_optimizer.update, opt)

    return optimizer_factory(make, f"inject_hyperparams({function_name(factory)})")


@dataclass(frozen=True, eq=False)  # a trace may hash the optimizer, and dicts have no hash
class _InjectedOptimizer:
    """An optimizer whose hyperparameters are in its state.

    Attributes:
        factory: the function that makes an optimizer of hyperparameters.
        signature: the signature of `factory`.
        args: the positional arguments of `factory`.
        kwargs: its keyword arguments.
        numbers: the arguments that are numbers, defaults among them.
        schedules: the arguments that are schedules, defaults among them.
    """

    factory: Callable[..., Optimizer]
    signature: inspect.Signature
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    numbers: dict[str, Any]
    schedules: dict[str, Callable[[torch.Tensor], Any]]

    def init(self, params: Params) -> InjectHyperparamsState:
        """Make the state, with the hyperparameters of the first update."""
        count = torch.zeros((), dtype=torch.int64, device="cpu")
        hyperparams = {k: _scalar_tensor(k, v, count) for k, v in self.numbers.items()} | self.scheduled_at(count)
        return InjectHyperparamsState(count, hyperparams, self.optimizer_with(hyperparams).init(params))

    def update(
        self, grads: Updates, state: InjectHyperparamsState, params: Params | None = None
    ) -> tuple[Updates, OptState]:
        """Update with the hyperparameters of the state, and with those of the schedules at its count."""
        _check_names(state.hyperparams, {**self.numbers, **self.schedules})
        current = {k: _scalar_tensor(k, v, state.count) for k, v in state.hyperparams.items()}
        hyperparams = {**current, **self.scheduled_at(state.count)}
        updates, inner = self.optimizer_with(hyperparams).update(grads, state.inner_state, params=params)
        return updates, InjectHyperparamsState(state.count + 1, hyperparams, inner)

    def scheduled_at(self, count: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the scheduled hyperparameters of an update."""
        return {k: _scalar_tensor(k, schedule(count), count) for k, schedule in self.schedules.items()}

    def optimizer_with(self, hyperparams: dict[str, Any]) -> Optimizer:
        """Make the optimizer with other hyperparameters in place of its own."""
        bound = self.signature.bind(*self.args, **self.kwargs)
        bound.arguments.update(hyperparams)
        return self.factory(*bound.args, **bound.kwargs)


def _check_names(hyperparams: dict[str, Any], expected: dict[str, Any]) -> None:
    if hyperparams.keys() != expected.keys():
        raise ValueError(
            f"state.hyperparams has {sorted(hyperparams)}: expected {sorted(expected)}; "
            "make the state with this optimizer's `init`"
        )


def _is_count(parameter: inspect.Parameter) -> bool:
    """Return whether an argument is annotated as an int: it decides a structure, such as the length of a loop."""
    return parameter.annotation in (int, "int")


def _is_number(value: object) -> bool:
    is_scalar = isinstance(value, torch.Tensor) and value.ndim == 0
    return is_scalar or (isinstance(value, Real) and not isinstance(value, bool))


def _scalar_tensor(name: str, value: Any, like: torch.Tensor) -> torch.Tensor:
    if not _is_number(value):
        raise ValueError(
            f"hyperparameter {name!r}: its schedule returned {value!r}, expected a number or a 0-d tensor; name a "
            f'function that is not a schedule in static_args: inject_hyperparams(factory, static_args=("{name}",))'
        )
    return torch.as_tensor(value, dtype=torch.float64, device=like.device).clone()
