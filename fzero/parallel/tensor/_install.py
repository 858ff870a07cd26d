"""Install the forward passes of parallel layers and of sequence parallelism in a copy of a model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fzero.parallel.tensor._boundaries import enter, gather, scatter
from fzero.parallel.tensor._forwards import Heads, Layer, Region
from fzero.parallel.tensor._layers import Layers
from fzero.parallel.tensor._styles import ColumnParallel, Divided, RowParallel, Shared

__all__ = ["Block", "Child", "blocks_of", "children_of", "install", "is_gathered"]

# Blocks between which each rank holds part of the tokens: the residual stream is split along the sequence.
#
# In such a block, norms run on parts of the tokens. Attention and MLPs gather all tokens, and leave parts. Any other
# child, such as a layer of experts, gets all tokens as without `sequence`, and the rank then keeps its part of them.


@dataclass(frozen=True)
class Block:
    """The first of the repeated blocks, which splits the tokens, or the last one, which joins them.

    Attributes:
        name: the module's name, for messages.
        axis: the axis over which the sequence is split.
        first: whether it is the first block.
        last: whether it is the last block.
        run: the block's own forward pass.
    """

    name: str
    axis: str
    first: bool
    last: bool
    run: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block on a part of the tokens."""
        if self.first:
            args, kwargs = _map_input(self.name, args, kwargs, lambda x: scatter(x, self.axis))
        out = self.run(*args, **kwargs)
        return _map_output(self.name, out, lambda x: gather(x, self.axis)) if self.last else out


@dataclass(frozen=True)
class Child:
    """A child of a block that needs all tokens.

    Attributes:
        name: the module's name, for messages.
        axis: the axis over which the sequence is split.
        full: whether the child runs as without `sequence`. If not, its layers leave parts of the tokens.
        run: the module's own forward pass.
    """

    name: str
    axis: str
    full: bool
    run: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on all tokens."""
        if not self.full:
            args, kwargs = _map_input(self.name, args, kwargs, lambda x: enter(x, self.axis, sequence=True))
            return self.run(*args, **kwargs)
        args, kwargs = _map_input(self.name, args, kwargs, lambda x: gather(x, self.axis))
        return _map_output(self.name, self.run(*args, **kwargs), lambda x: scatter(x, self.axis))


_TensorMap = Callable[[torch.Tensor], torch.Tensor]


def _map_input(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], f: _TensorMap) -> tuple[Any, Any]:
    """Map the first argument `[.., tokens, width]`, or the one named "hidden_states" as in transformers.

    Raises:
        TypeError: if neither is such a tensor.
    """
    if args and _is_stream(args[0]):
        return (f(args[0]), *args[1:]), kwargs
    if _is_stream(kwargs.get("hidden_states")):
        return args, kwargs | {"hidden_states": f(kwargs["hidden_states"])}
    raise TypeError(
        f"module {name!r}: sequence=True splits its first argument, or hidden_states, along the tokens: expected a "
        "floating-point tensor [.., tokens, width] there; set sequence=False"
    )


def _map_output(name: str, out: Any, f: _TensorMap) -> Any:
    """Map a result, or the first of several.

    Raises:
        TypeError: if it is not a tensor `[.., tokens, width]`.
    """
    if _is_stream(out):
        return f(out)
    if type(out) is tuple and out and _is_stream(out[0]):
        return (f(out[0]), *out[1:])
    raise TypeError(
        f"module {name!r} returned {type(out).__name__}: sequence=True expected a tensor [.., tokens, width], or a "
        "tuple that starts with one; set sequence=False"
    )


def _is_stream(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point() and x.ndim > 1


# ---------------------------------------------------------------- the modules that split the sequence


def blocks_of(modules: Mapping[str, torch.nn.Module], layers: Layers) -> list[str]:
    """Return the names of the repeated blocks that hold split layers: the outermost numbered children.

    Raises:
        ValueError: if there are none, or if they lie in several lists.
    """
    names = []
    for name in modules:
        head, _, last = name.rpartition(".")
        if last.isdigit() and not any(part.isdigit() for part in head.split(".")) and _styles_in(name, layers):
            names.append(name)
    lists = sorted({name.rpartition(".")[0] for name in names})
    if len(lists) != 1:
        raise ValueError(
            "sequence=True splits the tokens at the first block of a list, and joins them at the last. Expected one "
            f"list of blocks; the layers lie in {len(lists)} lists, {lists}: set sequence=False"
        )
    return names


def children_of(name: str, block: torch.nn.Module, layers: Layers) -> dict[str, str]:
    """Return the kind of each child of a block that has parameters: "norm", "gathered" or "full"."""
    children = {f"{name}.{key}".lstrip("."): child for key, child in block.named_children()}
    return {at: _kind(at, child, layers) for at, child in children.items() if any(True for _ in child.parameters())}


def is_gathered(name: str, children: Mapping[str, str]) -> bool:
    """Return whether a module lies in a child that gathers all tokens, and leaves parts of them."""
    return any(kind == "gathered" and _within(name, place) for place, kind in children.items())


def _within(name: str, place: str) -> bool:
    return not place or name == place or name.startswith(f"{place}.")


def _styles_in(place: str, layers: Layers) -> list[str]:
    return [name for name in layers.styles if _within(name, place)]


def _kind(place: str, child: torch.nn.Module, layers: Layers) -> str:
    styles = _styles_in(place, layers)
    if not styles:
        is_norm = all(p.ndim < 2 for p in child.parameters()) and not any(True for _ in child.children())
        return "norm" if is_norm else "full"
    split_layers = [name for name in styles if isinstance(layers.styles[name], ColumnParallel | RowParallel | Shared)]
    names = [f"{place}.{name}" for name, _ in child.named_parameters()]
    return "gathered" if all(any(_within(name, at) for at in split_layers) for name in names) else "full"


# Installation of the parallel forward passes in a copy of the model.


_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_key_value_heads", "num_kv_heads", "n_kv_heads")


def install(module: torch.nn.Module, layers: Layers) -> None:
    """Make the layers of a module run on a rank's part of their parameters.

    Args:
        module: a copy of the module that `layers` was made from; it is changed.
        layers: the styles of its layers.

    Raises:
        ValueError: if `layers` was made from another module.
    """
    modules = dict(module.named_modules())
    if missing := [name for name in layers.styles if name not in modules]:
        raise ValueError(f"tp: the layers are of another module: {type(module).__name__} has no {missing[0]!r}")
    blocks = blocks_of(modules, layers) if layers.sequence and not layers.in_block else []
    split_blocks = [""] if layers.sequence and layers.in_block else blocks
    children = {
        place: kind for name in split_blocks for place, kind in children_of(name, modules[name], layers).items()
    }
    regions = _regions(modules, layers, children)
    for name, style in layers.styles.items():
        if not isinstance(style, Divided):
            _install_layer(name, modules, layers, regions, children)
    for place, kind in children.items():
        child = modules[place]
        if kind == "norm":
            child.forward = Layer(place, child, Shared(), layers.axis, {}, {}, None, True, 0, child.forward)
        else:
            child.forward = Child(place, layers.axis, kind == "full", child.forward)
    for i, name in enumerate(blocks):
        if i in (0, len(blocks) - 1):
            block = modules[name]
            block.forward = Block(name, layers.axis, not i, i == len(blocks) - 1, block.forward)


def _install_layer(
    name: str, modules: Mapping[str, Any], layers: Layers, regions: Mapping[str, Region], children: Mapping[str, str]
) -> None:
    layer, parent, style = modules[name], name.rpartition(".")[0], layers.styles[name]
    paths = {key: f"{name}.{key}".lstrip(".") for key, _ in layer.named_parameters(recurse=False)}
    cuts = {key: layers.cuts[path] for key, path in paths.items() if path in layers.cuts}
    sizes = {key: layers.sizes[path] for key, path in paths.items() if path in layers.sizes}
    groups = vars(modules[parent])["num_key_value_groups"] if any(c.shared for c in cuts.values()) else 0
    region = regions.get(parent) if isinstance(style, ColumnParallel) else None
    gathered = is_gathered(name, children)
    layer.forward = Layer(name, layer, style, layers.axis, cuts, sizes, region, gathered, groups, layer.forward)


def _regions(modules: Mapping[str, Any], layers: Layers, children: Mapping[str, str]) -> dict[str, Region]:
    """Make a region of each module that holds several column-parallel layers or heads, or that divides attributes."""
    columns_of: dict[str, list[str]] = {}
    for name, style in layers.styles.items():
        if isinstance(style, ColumnParallel):
            columns_of.setdefault(name.rpartition(".")[0], []).append(name)
    divided = {name: style.names for name, style in layers.styles.items() if isinstance(style, Divided)}
    regions = {}
    for name in {**columns_of, **divided}:
        m, columns = modules[name], columns_of.get(name, [])
        heads = _heads(m, columns, layers)
        if heads is None and name not in divided and len(columns) < 2:
            continue
        gathered = is_gathered(name, children)
        regions[name] = Region(name, m, layers.axis, gathered, heads, divided.get(name, ()), m.forward)
        m.forward = regions[name]
    return regions


def _heads(module: torch.nn.Module, columns: list[str], layers: Layers) -> Heads | None:
    """Return the heads of a module whose column-parallel layers are split by heads; None if there are none."""
    counts = [c for name in columns if (c := layers.cuts[f"{name}.weight"]).heads]
    if not counts:
        return None
    groups = vars(module).get("num_key_value_groups", 0) if any(c.shared for c in counts) else 0
    kv = next((c.heads for c in counts if c.shared), 0)
    query = kv * groups or max(c.heads for c in counts)
    names = tuple([name for name in _COUNTS if vars(module).get(name) in (query, kv or query)])
    return Heads(query, groups, names)
