"""The forward passes of layers and regions of which each rank runs its part, with its own parameters put in place."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from fzero.axes import axis_index, axis_size, where_bound
from fzero.parallel.tensor._boundaries import cut, enter, join, leave
from fzero.parallel.tensor._linear import own_rows
from fzero.parallel.tensor._styles import ColumnParallel, Cut, Embedding, Experts, RowParallel, Shared, Style, kv_groups

__all__ = ["Heads", "Layer", "Region", "override_parameters"]

# What a module finds in the places of its parameters and attributes for a while.


@contextmanager
def override_parameters(
    module: torch.nn.Module, tensors: Mapping[str, Any], attributes: Mapping[str, Any]
) -> Iterator[None]:
    """Put tensors in the places of some parameters of a module, and values in those of attributes, for a while."""
    parameters: dict[str, Any] = module._parameters
    before = {name: parameters[name] for name in tensors}, {name: vars(module)[name] for name in attributes}
    try:
        parameters.update(tensors)
        vars(module).update(attributes)
        yield
    finally:
        parameters.update(before[0])
        vars(module).update(before[1])


# Regions: a module whose layers are given the same values, such as attention or an MLP, runs on its part of them.


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
            f"fzero.parallel.tensor: {self.name!r} runs on its part of heads and columns along "
            f"{self.axis!r}{sequence}. If it "
            f"counts them in an attribute, say so: plan={{{self.name!r}: fzero.parallel.tensor.divided('num_heads')}}"
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


# The forward passes of layers of which each rank has a part: called in the modules' places, in a copy of the model.


@dataclass(frozen=True)
class Layer:
    """A layer with a style.

    Attributes:
        name: of the module, for messages.
        module: the layer.
        style: what becomes of it.
        axis: the axis that its parameters are cut over.
        cuts: how those are cut.
        sizes: of each, the size of the dimension that is cut, of the whole parameter.
        region: what holds it and the layers beside it, which are given the same values; None for none.
        gathered: whether it lies in a module that was handed all tokens, gathered from parts, and leaves parts.
        groups: for keys and values of attention, how many query heads share one of theirs; else 0.
        run: the module's own forward pass.
    """

    name: str
    module: torch.nn.Module
    style: Style
    axis: str
    cuts: Mapping[str, Cut]
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
            x = enter(x, self.axis) if self.region is None else self.region.entered(x)
        if self._shares_heads():
            w, b = self._own_heads(w), None if b is None else self._own_heads(b)
        y = F.linear(x, w.mT if self.cuts["weight"].dim else w, b)
        return join(y, self.axis, dim=-1) if isinstance(self.style, ColumnParallel) and self.style.gather else y

    def _row(self, x: torch.Tensor) -> torch.Tensor:
        p = self._parameters()
        w, b = p["weight"], p.get("bias")
        if isinstance(self.style, RowParallel) and self.style.cut:
            x = cut(x, self.axis, dim=-1)
        y = leave(F.linear(x, w if self.cuts["weight"].dim else w.mT), self.axis, sequence=self.gathered)
        if b is None:
            return y
        return y + (enter(b, self.axis) if self.gathered else b)

    def _embedding(self, tokens: torch.Tensor) -> torch.Tensor:
        if not where_bound(self.axis):
            return self.run(tokens)
        w, padding = self._parameters()["weight"], vars(self.module)["padding_idx"]
        local, mine, fill = own_rows(tokens, w, self.axis)
        with override_parameters(self.module, {}, {"padding_idx": None}):  # it is a number of the whole table
            y = self.run(local)
        if padding is not None:  # whose row gets no gradient
            y = torch.where((tokens == padding % self.sizes["weight"]).unsqueeze(-1), y.detach(), y)
        return leave(torch.where(mine, y, fill), self.axis)

    def _on_parts(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on what differs by rank, or on parts of its own parameters; sum what experts give."""
        whole = [name for name, _ in self.module.named_parameters(recurse=False) if name not in self.cuts]
        own = {name: enter(getattr(self.module, name), self.axis) for name in whole}
        if isinstance(self.style, Shared):
            with override_parameters(self.module, own, {}):
                return self.run(*args, **kwargs)

        def entered(x: Any) -> Any:
            return enter(x, self.axis) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

        with override_parameters(self.module, {**own, **self._parameters()}, {}):
            out = self.run(*map(entered, args), **{name: entered(x) for name, x in kwargs.items()})
        return leave(out, self.axis)

    # ---- parameters

    def _parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters of the layer as its own forward pass takes them.

        Raises:
            ValueError: if one is not cut.
        """
        found = {}
        for name, x in self.module.named_parameters(recurse=False):
            if (known := self.cuts.get(name)) is not None:
                self._check_cut(name, x, known)
                x = known.pack(x)
            found[name] = x
        return found

    def _check_cut(self, name: str, x: torch.Tensor, known: Cut) -> None:
        n, size = axis_size(where_bound(self.axis)), self.sizes[name]
        wanted = size if known.shared and known.heads % n else size // n
        if x.shape[known.along] != wanted:
            raise ValueError(
                f"parameter '{self.name}.{name}' is {list(x.shape)}, and of the {size} along dimension {known.along} "
                f"each of the {n} ranks along {self.axis!r} is to have {wanted}: give fzero.shard the rule of its "
                "layers, split=layers.split, and cut frozen parameters by it too, with step.partition"
            )

    def _shares_heads(self) -> bool:
        """Return whether this rank's query heads need heads that other ranks need too."""
        return self.groups > 0 and self.cuts["weight"].heads % axis_size(where_bound(self.axis)) > 0

    def _own_heads(self, w: torch.Tensor) -> torch.Tensor:
        """Take the heads of a whole weight or bias `[heads k, ..]` that this rank's query heads use."""
        kv, n = self.cuts["weight"].heads, axis_size(where_bound(self.axis))
        count = kv * self.groups // n  # query heads of a rank
        each = kv_groups(kv * self.groups, self.groups, n)
        first = axis_index(self.axis) * count + torch.arange(0, count, each)
        own = enter(w, self.axis).unflatten(0, (kv, -1))
        return own[(first // self.groups).to(w.device)].flatten(0, 1)
