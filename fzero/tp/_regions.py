"""Regions: a module whose layers are given the same values, such as attention or an MLP, runs on its part of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fzero.axes.scope import axis_size, where_bound
from fzero.tp._boundaries import enter
from fzero.tp._override import override_parameters
from fzero.tp._styles import kv_groups

__all__ = ["Heads", "Region"]


@dataclass(frozen=True)
class Heads:
    """The heads of a module of attention.

    Attributes:
        query: how many it has.
        groups: how many of them share a key and a value, if the module says so; else 0.
        counts: names of its attributes that are a number of heads.
    """

    query: int
    groups: int
    counts: tuple[str, ...]

    def attributes(self, name: str, axis: str, values: Mapping[str, Any]) -> dict[str, int]:
        """Return the attributes of a module that runs on a rank's heads.

        Raises:
            ValueError: if the heads do not divide among the ranks.
        """
        n = axis_size(where_bound(axis))
        if self.query % n:
            raise ValueError(
                f"attention {name!r} has {self.query} heads, which do not divide by the {n} ranks along {axis!r}: take "
                "another size of the axis, or leave its layers out, plan={'...q_proj': None, ...}"
            )
        kv = self.query // self.groups if self.groups else self.query
        each = self.groups if not kv % n else kv_groups(self.query, self.groups, n)
        own = {self.query: self.query // n, kv: self.query // n // max(each, 1)}
        found = {count: own[values[count]] for count in self.counts}
        return found | ({"num_key_value_groups": each} if self.groups else {})


@dataclass(frozen=True)
class Region:
    """A module that holds several layers that are cut by their results.

    Attributes:
        name: of the module, for messages.
        module: the module.
        axis: the axis that its layers are cut over.
        gathered: whether what it is given was handed to all ranks before, gathered from parts of the sequence.
        heads: those of attention; None where it has none.
        divided: names of further attributes that are divided among the ranks.
        run: the module's own forward pass.
    """

    name: str
    module: torch.nn.Module
    axis: str
    gathered: bool
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
                if "fzero" not in str(error):
                    error.add_note(self._note())
                raise
            finally:
                self._entered.clear()

    def _note(self) -> str:
        sequence = ", and leaves parts of the tokens unless you say sequence=False" if self.gathered else ""
        return (
            f"fzero.tp: {self.name!r} runs on its part of heads and columns along {self.axis!r}{sequence}. If it "
            f"counts them in an attribute, say so: plan={{{self.name!r}: fzero.tp.divided('num_heads')}}"
        )

    def entered(self, x: torch.Tensor) -> torch.Tensor:
        """Hand a value to all ranks, once for all layers that are given it: so one sum goes back, and not several."""
        for given, found in self._entered:
            if given is x:
                return found
        found = enter(x, self.axis)
        self._entered.append((x, found))
        return found

    def _attributes(self) -> dict[str, int]:
        n, values = axis_size(where_bound(self.axis)), vars(self.module)
        found = {} if self.heads is None or n == 1 else self.heads.attributes(self.name, self.axis, values)
        for name in self.divided:
            if values[name] % n:
                raise ValueError(
                    f"attribute '{self.name}.{name}' is {values[name]}, which does not divide by the {n} ranks along "
                    f"{self.axis!r}: take another size of the axis"
                )
            found[name] = values[name] // n
        return found
