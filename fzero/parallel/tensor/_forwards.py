"""The forward passes of layers and regions that run on a rank's part of their parameters."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from fzero.axes import axis_if_bound, axis_index, axis_size
from fzero.parallel.tensor._boundaries import enter, gather, leave, scatter
from fzero.parallel.tensor._linear import own_rows
from fzero.parallel.tensor._styles import (
    ColumnParallel,
    Embedding,
    Experts,
    ParamSplit,
    RowParallel,
    Shared,
    Style,
    kv_groups,
)

__all__ = ["Heads", "Layer", "Region", "override_parameters"]

# Temporary replacements of a module's parameters and attributes.


@contextmanager
def override_parameters(
    module: torch.nn.Module, tensors: Mapping[str, Any], attributes: Mapping[str, Any]
) -> Iterator[None]:
    """Replace some parameters of a module by tensors, and some attributes by values, within a `with` block."""
    parameters: dict[str, Any] = module._parameters
    before = {name: parameters[name] for name in tensors}, {name: vars(module)[name] for name in attributes}
    try:
        parameters.update(tensors)
        vars(module).update(attributes)
        yield
    finally:
        parameters.update(before[0])
        vars(module).update(before[1])


# Regions: modules such as attention or an MLP, whose layers share one input and run on the rank's part of it.


@dataclass(frozen=True)
class Heads:
    """The heads of an attention module.

    Attributes:
        query: the number of query heads.
        groups: the number of query heads that share a key and a value head, if the module has such groups; else 0.
        counts: the names of the module's attributes that hold a number of heads.
    """

    query: int
    groups: int
    counts: tuple[str, ...]

    def attributes(self, name: str, axis: str, values: Mapping[str, Any]) -> dict[str, int]:
        """Return the attributes with which the module runs on a rank's heads.

        Raises:
            ValueError: if the query heads do not divide among the ranks.
        """
        n = axis_size(axis_if_bound(axis))
        if self.query % n:
            raise ValueError(
                f"attention {name!r} has {self.query} heads, which do not divide by the {n} ranks along {axis!r}: "
                "change the size of the axis, or leave its layers out, plan={'...q_proj': None, ...}"
            )
        kv = self.query // self.groups if self.groups else self.query
        group_size = self.groups if not kv % n else kv_groups(self.query, self.groups, n)
        local_counts = {self.query: self.query // n, kv: self.query // n // max(group_size, 1)}
        attributes = {count: local_counts[values[count]] for count in self.counts}
        return attributes | ({"num_key_value_groups": group_size} if self.groups else {})


@dataclass(frozen=True)
class Region:
    """A module that holds several column-parallel layers, or whose attributes are divided among the ranks.

    Attributes:
        name: the module's name, for messages.
        module: the module.
        axis: the axis over which its layers are split.
        gathered: whether its input was already gathered from parts of the sequence.
        heads: the module's heads, if it is attention; else None.
        divided: the names of other attributes that are divided among the ranks.
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
        sequence = ", and its layers leave parts of the tokens unless you set sequence=False" if self.gathered else ""
        return (
            f"fzero.parallel.tensor: {self.name!r} runs on its part of heads and columns along "
            f"{self.axis!r}{sequence}. If an "
            f"attribute counts them, add it to the plan: {{{self.name!r}: fzero.parallel.tensor.divided('num_heads')}}"
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


# The forward passes of split layers. They replace the modules' own forward passes in a copy of the model.


@dataclass(frozen=True)
class Layer:
    """A layer that runs in one of the parallel styles.

    Attributes:
        name: the module's name, for messages.
        module: the layer.
        style: the layer's parallel style.
        axis: the axis over which its parameters are split.
        cuts: how each split parameter is split.
        sizes: for each split parameter, the full size of the dimension that is split.
        region: the region that holds this layer and others with the same input; None if there is none.
        gathered: whether it lies in a module that gathers all tokens, and leaves parts of them.
        groups: for keys and values of attention, the number of query heads that share one of their heads; else 0.
        run: the module's own forward pass.
    """

    name: str
    module: torch.nn.Module
    style: Style
    axis: str
    cuts: Mapping[str, ParamSplit]
    sizes: Mapping[str, int]
    region: Region | None
    gathered: bool
    groups: int
    run: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer with this rank's part of its parameters."""
        if isinstance(self.style, ColumnParallel):
            return self._column(*args, **kwargs)
        if isinstance(self.style, RowParallel):
            return self._row(*args, **kwargs)
        if isinstance(self.style, Embedding):
            return self._embedding(*args, **kwargs)
        if isinstance(self.style, Shared | Experts):
            return self._on_parts(*args, **kwargs)
        with override_parameters(self.module, self._parameters(), {}):
            return self.run(*args, **kwargs)

    def _column(self, x: torch.Tensor) -> torch.Tensor:
        p = self._parameters()
        w, b = p["weight"], p.get("bias")
        if not self.gathered:
            x = enter(x, self.axis) if self.region is None else self.region.enter_once(x)
        if self._shares_heads():
            w, b = self._own_heads(w), None if b is None else self._own_heads(b)
        y = F.linear(x, w.mT if self.cuts["weight"].dim else w, b)
        return gather(y, self.axis, dim=-1) if isinstance(self.style, ColumnParallel) and self.style.gather else y

    def _row(self, x: torch.Tensor) -> torch.Tensor:
        p = self._parameters()
        w, b = p["weight"], p.get("bias")
        if isinstance(self.style, RowParallel) and self.style.split_input:
            x = scatter(x, self.axis, dim=-1)
        y = leave(F.linear(x, w if self.cuts["weight"].dim else w.mT), self.axis, sequence=self.gathered)
        if b is None:
            return y
        return y + (enter(b, self.axis) if self.gathered else b)

    def _embedding(self, tokens: torch.Tensor) -> torch.Tensor:
        if not axis_if_bound(self.axis):
            return self.run(tokens)
        w, padding = self._parameters()["weight"], vars(self.module)["padding_idx"]
        local, is_local, fill = own_rows(tokens, w, self.axis)
        with override_parameters(self.module, {}, {"padding_idx": None}):  # padding_idx is a row of the full table
            y = self.run(local)
        if padding is not None:  # the padding row gets no gradient
            y = torch.where((tokens == padding % self.sizes["weight"]).unsqueeze(-1), y.detach(), y)
        return leave(torch.where(is_local, y, fill), self.axis)

    def _on_parts(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on inputs that differ by rank, or on parts of its own parameters, whose results are summed."""
        replicated = [name for name, _ in self.module.named_parameters(recurse=False) if name not in self.cuts]
        params = {name: enter(getattr(self.module, name), self.axis) for name in replicated}
        if isinstance(self.style, Shared):
            with override_parameters(self.module, params, {}):
                return self.run(*args, **kwargs)

        def enter_input(x: Any) -> Any:
            return enter(x, self.axis) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

        with override_parameters(self.module, {**params, **self._parameters()}, {}):
            out = self.run(*map(enter_input, args), **{name: enter_input(x) for name, x in kwargs.items()})
        return leave(out, self.axis)

    # ---- parameters

    def _parameters(self) -> dict[str, torch.Tensor]:
        """Return the layer's parameters in the shapes that its own forward pass takes.

        Raises:
            ValueError: if a parameter does not have the size of a rank's part.
        """
        params = {}
        for name, x in self.module.named_parameters(recurse=False):
            if (param_split := self.cuts.get(name)) is not None:
                self._check_split(name, x, param_split)
                x = param_split.pack(x)
            params[name] = x
        return params

    def _check_split(self, name: str, x: torch.Tensor, param_split: ParamSplit) -> None:
        n, size = axis_size(axis_if_bound(self.axis)), self.sizes[name]
        expected = size if param_split.shared and param_split.heads % n else size // n
        if x.shape[param_split.along] != expected:
            raise ValueError(
                f"parameter '{self.name}.{name}' is {list(x.shape)}: of the {size} along dimension "
                f"{param_split.along}, each of the {n} ranks along {self.axis!r} holds {expected}. Pass the "
                "layers' rule to fzero.shard, split=layers.split, and split frozen parameters too, with step.partition"
            )

    def _shares_heads(self) -> bool:
        """Return whether this rank's query heads use key and value heads that other ranks use too."""
        return self.groups > 0 and self.cuts["weight"].heads % axis_size(axis_if_bound(self.axis)) > 0

    def _own_heads(self, w: torch.Tensor) -> torch.Tensor:
        """Select the heads of a full weight or bias `[heads k, ..]` that this rank's query heads use."""
        kv, n = self.cuts["weight"].heads, axis_size(axis_if_bound(self.axis))
        count = kv * self.groups // n  # query heads of a rank
        group_size = kv_groups(kv * self.groups, self.groups, n)
        first = axis_index(self.axis) * count + torch.arange(0, count, group_size)
        heads = enter(w, self.axis).unflatten(0, (kv, -1))
        return heads[(first // self.groups).to(w.device)].flatten(0, 1)
