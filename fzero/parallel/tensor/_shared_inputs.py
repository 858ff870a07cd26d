"""Modules such as attention or an MLP, whose layers share one input and run on the rank's part of it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from fzero._tracebacks import is_message
from fzero.axes import axis_if_bound, axis_size
from fzero.parallel.tensor._boundaries import enter
from fzero.parallel.tensor._style_splits import Heads

__all__ = ["SharedInputModule", "override_parameters"]


@contextmanager
def override_parameters(
    module: torch.nn.Module, tensors: Mapping[str, Any], attributes: Mapping[str, Any]
) -> Iterator[None]:
    """Replace some parameters of a module by tensors, and some attributes by values, within a `with` block."""
    parameters: dict[str, Any] = module._parameters
    previous_values = {name: parameters[name] for name in tensors}, {name: vars(module)[name] for name in attributes}
    try:
        parameters.update(tensors)
        vars(module).update(attributes)
        yield
    finally:
        parameters.update(previous_values[0])
        vars(module).update(previous_values[1])


@dataclass(frozen=True)
class SharedInputModule:
    """A module that holds several column-parallel layers, or whose attributes are divided among the ranks.

    Attributes:
        name: the module's name, for messages.
        module: the module.
        axis: the axis over which its layers are split.
        is_gathered: whether its input was already gathered from parts of the sequence.
        heads: the module's heads, if it is attention; else None.
        divided: the names of other attributes that are divided among the ranks.
        run: the module's own forward pass.
    """

    name: str
    module: torch.nn.Module
    axis: str
    is_gathered: bool
    heads: Heads | None
    divided: tuple[str, ...]
    run: Callable[..., Any]
    _entered: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list, repr=False, compare=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        with override_parameters(self.module, {}, self._attributes()):
            try:
                return self.run(*args, **kwargs)
            except (RuntimeError, ValueError) as error:
                # a message of fzero says itself what to do; a plain RuntimeError is torch's, wherever it was called
                if type(error) is RuntimeError or not is_message(error, error.__traceback__):
                    error.add_note(self._plan_hint())
                raise
            finally:
                self._entered.clear()

    def _plan_hint(self) -> str:
        sequence = (
            ", and its layers leave parts of the tokens unless you set sequence=False" if self.is_gathered else ""
        )
        return (
            f"fzero.parallel.tensor: {self.name!r} runs on its part of heads and columns along {self.axis!r}{sequence}"
            f". If an attribute counts them, add it to the plan: {{{self.name!r}: "
            "fzero.parallel.tensor.divided('num_heads')}"
        )

    def enter_once(self, x: torch.Tensor) -> torch.Tensor:
        """Call `enter` once for all layers that share an input, so that the backward pass has one sum for them all."""
        for value, result in self._entered:
            if value is x:
                return result
        result = enter(x, self.axis)
        self._entered.append((x, result))
        return result

    def _attributes(self) -> dict[str, int]:
        n, values = axis_size(axis_if_bound(self.axis)), vars(self.module)
        attributes = {} if self.heads is None or n == 1 else self.heads.attributes(self.name, self.axis, values)
        for name in self.divided:
            if values[name] % n:
                raise ValueError(
                    f"attribute '{self.name}.{name}' is {values[name]}, which does not divide by the {n} ranks along "
                    f"{self.axis!r}: change the size of the axis"
                )
            attributes[name] = values[name] // n
        return attributes
