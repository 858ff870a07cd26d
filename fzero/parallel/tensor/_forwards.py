"""The forward passes of layers and regions that run on a rank's part of their parameters, and how a model gets them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from fzero._tracebacks import is_message
from fzero.axes import axis_if_bound, axis_index, axis_size
from fzero.parallel.tensor._functions import enter, gather, leave, own_rows, scatter
from fzero.parallel.tensor._layers import Layers
from fzero.parallel.tensor._sequence import (
    SequenceBlock,
    SequenceChild,
    classify_children,
    find_split_blocks,
    is_gathered,
)
from fzero.parallel.tensor._styles import (
    ColumnParallel,
    DividedAttributes,
    Embedding,
    Experts,
    Heads,
    ParamSplit,
    ReplicatedParams,
    RowParallel,
    Style,
    kv_groups,
)

__all__ = ["install"]

# Temporary replacements of a module's parameters and attributes.


@contextmanager
def _override_parameters(
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
class _Region:
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
        with _override_parameters(self.module, {}, self._attributes()):
            try:
                return self.run(*args, **kwargs)
            except (RuntimeError, ValueError) as error:
                # a message of fzero says itself what to do; a plain RuntimeError is torch's, wherever it was called
                if type(error) is RuntimeError or not is_message(error, error.__traceback__):
                    error.add_note(self._note())
                raise
            finally:
                self._entered.clear()

    def _note(self) -> str:
        sequence = (
            ", and its layers leave parts of the tokens unless you set sequence=False" if self.is_gathered else ""
        )
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
class _Layer:
    """A layer that runs in one of the parallel styles.

    Attributes:
        name: the module's name, for messages.
        module: the layer.
        style: the layer's parallel style.
        axis: the axis over which its parameters are split.
        param_splits: how each split parameter is split.
        sizes: for each split parameter, the full size of the dimension that is split.
        region: the region that holds this layer and others with the same input; None if there is none.
        is_gathered: whether it lies in a module that gathers all tokens, and leaves parts of them.
        groups: for keys and values of attention, the number of query heads that share one of their heads; else 0.
        run: the module's own forward pass.
        linear: the function that computes a linear layer's product.
    """

    name: str
    module: torch.nn.Module
    style: Style
    axis: str
    param_splits: Mapping[str, ParamSplit]
    sizes: Mapping[str, int]
    region: _Region | None
    is_gathered: bool
    groups: int
    run: Callable[..., Any]
    linear: Callable[..., torch.Tensor] = F.linear

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer with this rank's part of its parameters."""
        if isinstance(self.style, ColumnParallel):
            return self._column(*args, **kwargs)
        if isinstance(self.style, RowParallel):
            return self._row(*args, **kwargs)
        if isinstance(self.style, Embedding):
            return self._embedding(*args, **kwargs)
        if isinstance(self.style, ReplicatedParams | Experts):
            return self._on_parts(*args, **kwargs)
        with _override_parameters(self.module, self._parameters(), {}):
            return self.run(*args, **kwargs)

    def _column(self, x: torch.Tensor) -> torch.Tensor:
        p = self._parameters()
        w, b = p["weight"], p.get("bias")
        if not self.is_gathered:
            x = enter(x, self.axis) if self.region is None else self.region.enter_once(x)
        if self._shares_heads():
            w, b = self._own_heads(w), None if b is None else self._own_heads(b)
        y = self.linear(x, w.mT if self.param_splits["weight"].dim else w, b)
        return gather(y, self.axis, dim=-1) if isinstance(self.style, ColumnParallel) and self.style.gather else y

    def _row(self, x: torch.Tensor) -> torch.Tensor:
        p = self._parameters()
        w, b = p["weight"], p.get("bias")
        if isinstance(self.style, RowParallel) and self.style.split_input:
            x = scatter(x, self.axis, dim=-1)
        w = w if self.param_splits["weight"].dim else w.mT
        y = leave(self.linear(x, w, None), self.axis, sequence=self.is_gathered)
        if b is None:
            return y
        return y + (enter(b, self.axis) if self.is_gathered else b)

    def _embedding(self, tokens: torch.Tensor) -> torch.Tensor:
        if not axis_if_bound(self.axis):
            return self.run(tokens)
        w, padding = self._parameters()["weight"], vars(self.module)["padding_idx"]
        local, is_local, fill = own_rows(tokens, w, self.axis)
        with _override_parameters(self.module, {}, {"padding_idx": None}):  # padding_idx is a row of the full table
            y = self.run(local)
        if padding is not None:  # the padding row gets no gradient
            y = torch.where((tokens == padding % self.sizes["weight"]).unsqueeze(-1), y.detach(), y)
        return leave(torch.where(is_local, y, fill), self.axis)

    def _on_parts(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on inputs that differ by rank, or on parts of its own parameters, whose results are summed."""
        replicated = [name for name, _ in self.module.named_parameters(recurse=False) if name not in self.param_splits]
        params = {name: enter(getattr(self.module, name), self.axis) for name in replicated}
        if isinstance(self.style, ReplicatedParams):
            with _override_parameters(self.module, params, {}):
                return self.run(*args, **kwargs)

        def enter_input(x: Any) -> Any:
            return enter(x, self.axis) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

        with _override_parameters(self.module, {**params, **self._parameters()}, {}):
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
            if (param_split := self.param_splits.get(name)) is not None:
                self._check_split(name, x, param_split)
                x = param_split.pack(x)
            params[name] = x
        return params

    def _check_split(self, name: str, x: torch.Tensor, param_split: ParamSplit) -> None:
        n, size = axis_size(axis_if_bound(self.axis)), self.sizes[name]
        expected = size if param_split.may_replicate and param_split.heads % n else size // n
        if x.shape[param_split.unpacked_dim] != expected:
            raise ValueError(
                f"parameter '{self.name}.{name}' is {list(x.shape)}: of the {size} along dimension "
                f"{param_split.unpacked_dim}, each of the {n} ranks along {self.axis!r} holds {expected}. Pass the "
                "layers' rule to fzero.shard, split=layers.split, and split frozen parameters too, with step.partition"
            )

    def _shares_heads(self) -> bool:
        """Return whether this rank's query heads use key and value heads that other ranks use too."""
        return self.groups > 0 and self.param_splits["weight"].heads % axis_size(axis_if_bound(self.axis)) > 0

    def _own_heads(self, w: torch.Tensor) -> torch.Tensor:
        """Select the heads of a full weight or bias `[heads k, ..]` that this rank's query heads use."""
        kv, n = self.param_splits["weight"].heads, axis_size(axis_if_bound(self.axis))
        count = kv * self.groups // n  # query heads of a rank
        group_size = kv_groups(kv * self.groups, self.groups, n)
        first = axis_index(self.axis, device=w.device) * count + torch.arange(0, count, group_size, device=w.device)
        heads = enter(w, self.axis).unflatten(0, (kv, -1))
        return heads[first // self.groups].flatten(0, 1)


# Installation of the parallel forward passes in a copy of the model.


_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_key_value_heads", "num_kv_heads", "n_kv_heads")


def install(
    module: torch.nn.Module, layers: Layers, linears: Mapping[str, Callable[..., torch.Tensor]] | None = None
) -> None:
    """Make the layers of a module run on a rank's part of their parameters.

    Args:
        module: a copy of the module that `layers` was made from; it is changed.
        layers: the styles of its layers.
        linears: the functions that replace `torch.nn.functional.linear`, by the names of layers.

    Raises:
        ValueError: if `layers` was made from another module.
    """
    modules = dict(module.named_modules())
    if missing := [name for name in layers.styles if name not in modules]:
        raise ValueError(
            f"tp: the layers are of another module: {type(module).__name__} has no {missing[0]!r}; make them from this "
            "one, tp=fzero.parallel.tensor.layers(module)"
        )
    blocks = find_split_blocks(modules, layers) if layers.sequence and not layers.in_block else []
    split_blocks = [""] if layers.sequence and layers.in_block else blocks
    children = {
        name: kind for name in split_blocks for name, kind in classify_children(name, modules[name], layers).items()
    }
    regions = _regions(modules, layers, children)
    for name, style in layers.styles.items():
        if not isinstance(style, DividedAttributes):
            linear = (linears or {}).get(name, F.linear)
            _install_layer(name, modules, layers, regions, children, linear)
    for name, kind in children.items():
        child = modules[name]
        if kind == "norm":
            child.forward = _Layer(name, child, ReplicatedParams(), layers.axis, {}, {}, None, True, 0, child.forward)
        else:
            child.forward = SequenceChild(name, layers.axis, kind == "full", child.forward)
    for i, name in enumerate(blocks):
        if i in (0, len(blocks) - 1):
            block = modules[name]
            block.forward = SequenceBlock(name, layers.axis, not i, i == len(blocks) - 1, block.forward)


def _install_layer(
    name: str,
    modules: Mapping[str, Any],
    layers: Layers,
    regions: Mapping[str, _Region],
    children: Mapping[str, str],
    linear: Callable[..., torch.Tensor],
) -> None:
    layer, parent, style = modules[name], name.rpartition(".")[0], layers.styles[name]
    paths = {key: f"{name}.{key}".lstrip(".") for key, _ in layer.named_parameters(recurse=False)}
    param_splits = {key: layers.param_splits[path] for key, path in paths.items() if path in layers.param_splits}
    sizes = {key: layers.sizes[path] for key, path in paths.items() if path in layers.sizes}
    groups = vars(modules[parent])["num_key_value_groups"] if any(c.may_replicate for c in param_splits.values()) else 0
    region = regions.get(parent) if isinstance(style, ColumnParallel) else None
    gathered = is_gathered(name, children)
    options = param_splits, sizes, region, gathered, groups, layer.forward, linear
    layer.forward = _Layer(name, layer, style, layers.axis, *options)


def _regions(modules: Mapping[str, Any], layers: Layers, children: Mapping[str, str]) -> dict[str, _Region]:
    """Make a region of each module that holds several column-parallel layers or heads, or that divides attributes."""
    columns_of: dict[str, list[str]] = {}
    for name, style in layers.styles.items():
        if isinstance(style, ColumnParallel):
            columns_of.setdefault(name.rpartition(".")[0], []).append(name)
    divided = {name: style.names for name, style in layers.styles.items() if isinstance(style, DividedAttributes)}
    regions = {}
    for name in {**columns_of, **divided}:
        m, columns = modules[name], columns_of.get(name, [])
        heads = _heads(m, columns, layers)
        if heads is None and name not in divided and len(columns) < 2:
            continue
        gathered = is_gathered(name, children)
        regions[name] = _Region(name, m, layers.axis, gathered, heads, divided.get(name, ()), m.forward)
        m.forward = regions[name]
    return regions


def _heads(module: torch.nn.Module, columns: list[str], layers: Layers) -> Heads | None:
    """Return the heads of a module whose column-parallel layers are split by heads; None if there are none."""
    counts = [c for name in columns if (c := layers.param_splits[f"{name}.weight"]).heads]
    if not counts:
        return None
    groups = vars(module).get("num_key_value_groups", 0) if any(c.may_replicate for c in counts) else 0
    kv = next((c.heads for c in counts if c.may_replicate), 0)
    query = kv * groups or max(c.heads for c in counts)
    names = tuple([name for name in _COUNTS if vars(module).get(name) in (query, kv or query)])
    return Heads(query, groups, names)
