"""Install the forward passes of parallel layers and of sequence parallelism in a copy of a model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fzero.parallel.tensor._boundaries import cut, enter, join
from fzero.parallel.tensor._forwards import Heads, Layer, Region
from fzero.parallel.tensor._layers import Layers
from fzero.parallel.tensor._styles import ColumnParallel, Divided, RowParallel, Shared

__all__ = ["Block", "Child", "blocks_of", "children_of", "install", "is_gathered"]

# Blocks between which each rank has a part of the tokens: the residual stream is cut along the sequence.
#
# Of a block's children norms work on parts. Attention and MLPs are handed all tokens, and leave parts. Anything else,
# such as a layer of experts, runs as without `sequence`, on all tokens, of which its rank takes a part again.


@dataclass(frozen=True)
class Block:
    """The first block of several, which cuts what it is given, or the last one, which joins what it gives.

    Attributes:
        name: of the module, for messages.
        axis: the axis that the sequence is cut over.
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
            args, kwargs = _changed(self.name, args, kwargs, lambda x: cut(x, self.axis))
        out = self.run(*args, **kwargs)
        return _of_result(self.name, out, lambda x: join(x, self.axis)) if self.last else out


@dataclass(frozen=True)
class Child:
    """A module within a block that is handed all tokens.

    Attributes:
        name: of the module, for messages.
        axis: the axis that the sequence is cut over.
        whole: whether it works as without `sequence`; if not its layers leave parts of the tokens.
        run: the module's own forward pass.
    """

    name: str
    axis: str
    whole: bool
    run: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on all tokens."""
        if not self.whole:
            args, kwargs = _changed(self.name, args, kwargs, lambda x: enter(x, self.axis, sequence=True))
            return self.run(*args, **kwargs)
        args, kwargs = _changed(self.name, args, kwargs, lambda x: join(x, self.axis))
        return _of_result(self.name, self.run(*args, **kwargs), lambda x: cut(x, self.axis))


_Change = Callable[[torch.Tensor], torch.Tensor]


def _changed(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], f: _Change) -> tuple[Any, Any]:
    """Change the first argument, `[.., tokens, width]`, or the one that transformers call so.

    Raises:
        TypeError: if there is none.
    """
    if args and _is_stream(args[0]):
        return (f(args[0]), *args[1:]), kwargs
    if _is_stream(kwargs.get("hidden_states")):
        return args, kwargs | {"hidden_states": f(kwargs["hidden_states"])}
    raise TypeError(
        f"module {name!r}: sequence=True cuts its first argument, or hidden_states, along the tokens, and it is given "
        "no floating-point tensor [.., tokens, width] there: say sequence=False"
    )


def _of_result(name: str, out: Any, f: _Change) -> Any:
    """Change a result, or the first of several.

    Raises:
        TypeError: if it is no tensor.
    """
    if _is_stream(out):
        return f(out)
    if type(out) is tuple and out and _is_stream(out[0]):
        return (f(out[0]), *out[1:])
    raise TypeError(
        f"module {name!r} returned {type(out).__name__}: sequence=True joins a tensor [.., tokens, width], or the "
        "first of a tuple: say sequence=False"
    )


def _is_stream(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point() and x.ndim > 1


# ---------------------------------------------------------------- which modules


def blocks_of(modules: Mapping[str, torch.nn.Module], layers: Layers) -> list[str]:
    """List the repeated blocks whose layers are cut: the outermost numbered children.

    Raises:
        ValueError: if there are none, or several lists of them.
    """
    found = []
    for name in modules:
        head, _, last = name.rpartition(".")
        if last.isdigit() and not any(part.isdigit() for part in head.split(".")) and _styles_in(name, layers):
            found.append(name)
    lists = sorted({name.rpartition(".")[0] for name in found})
    if len(lists) != 1:
        raise ValueError(
            "sequence=True cuts the tokens at the first of a list of blocks, and joins them at the last: the layers "
            f"lie in {len(lists)} lists, {lists}; say sequence=False"
        )
    return found


def children_of(name: str, block: torch.nn.Module, layers: Layers) -> dict[str, str]:
    """Return of each child of a block that has parameters whether it is a "norm", "gathered" or "whole"."""
    children = {f"{name}.{own}".lstrip("."): child for own, child in block.named_children()}
    return {at: _kind(at, child, layers) for at, child in children.items() if any(True for _ in child.parameters())}


def is_gathered(name: str, children: Mapping[str, str]) -> bool:
    """Return whether a module lies in one that is handed all tokens, and leaves parts."""
    return any(kind == "gathered" and _within(name, place) for place, kind in children.items())


def _within(name: str, place: str) -> bool:
    return not place or name == place or name.startswith(f"{place}.")


def _styles_in(place: str, layers: Layers) -> list[str]:
    return [name for name in layers.styles if _within(name, place)]


def _kind(place: str, child: torch.nn.Module, layers: Layers) -> str:
    styles = _styles_in(place, layers)
    if not styles:
        is_norm = all(p.ndim < 2 for p in child.parameters()) and not any(True for _ in child.children())
        return "norm" if is_norm else "whole"
    known = [name for name in styles if isinstance(layers.styles[name], ColumnParallel | RowParallel | Shared)]
    names = [f"{place}.{name}" for name, _ in child.named_parameters()]
    return "gathered" if all(any(_within(name, at) for at in known) for name in names) else "whole"


# The styles of layers, put in the places of forward passes: in a copy of the model that nobody else has.


_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_key_value_heads", "num_kv_heads", "n_kv_heads")


def install(module: torch.nn.Module, layers: Layers) -> None:
    """Have the layers of a module run on a rank's part of their parameters.

    Args:
        module: a copy of the module that `layers` was made of; it is changed.
        layers: says what becomes of each of its layers.

    Raises:
        ValueError: if it was made of another module.
    """
    modules = dict(module.named_modules())
    if missing := [name for name in layers.styles if name not in modules]:
        raise ValueError(f"tp: the layers are of another module: {type(module).__name__} has no {missing[0]!r}")
    blocks = blocks_of(modules, layers) if layers.sequence and not layers.in_block else []
    cut = [""] if layers.sequence and layers.in_block else blocks
    children = {place: kind for name in cut for place, kind in children_of(name, modules[name], layers).items()}
    regions = _regions(modules, layers, children)
    for name, style in layers.styles.items():
        if not isinstance(style, Divided):
            _install_layer(name, modules, layers, regions, children)
    for place, kind in children.items():
        child = modules[place]
        if kind == "norm":
            child.forward = Layer(place, child, Shared(), layers.axis, {}, {}, None, True, 0, child.forward)
        else:
            child.forward = Child(place, layers.axis, kind == "whole", child.forward)
    for i, name in enumerate(blocks):
        if i in (0, len(blocks) - 1):
            block = modules[name]
            block.forward = Block(name, layers.axis, not i, i == len(blocks) - 1, block.forward)


def _install_layer(
    name: str, modules: Mapping[str, Any], layers: Layers, regions: Mapping[str, Region], children: Mapping[str, str]
) -> None:
    layer, parent, style = modules[name], name.rpartition(".")[0], layers.styles[name]
    keys = {own: f"{name}.{own}".lstrip(".") for own, _ in layer.named_parameters(recurse=False)}
    cuts = {own: layers.cuts[key] for own, key in keys.items() if key in layers.cuts}
    sizes = {own: layers.sizes[key] for own, key in keys.items() if key in layers.sizes}
    groups = vars(modules[parent])["num_key_value_groups"] if any(c.shared for c in cuts.values()) else 0
    region = regions.get(parent) if isinstance(style, ColumnParallel) else None
    gathered = is_gathered(name, children)
    layer.forward = Layer(name, layer, style, layers.axis, cuts, sizes, region, gathered, groups, layer.forward)


def _regions(modules: Mapping[str, Any], layers: Layers, children: Mapping[str, str]) -> dict[str, Region]:
    """Make a region of each module that holds layers that are cut by their results, or that divides attributes."""
    held: dict[str, list[str]] = {}
    for name, style in layers.styles.items():
        if isinstance(style, ColumnParallel):
            held.setdefault(name.rpartition(".")[0], []).append(name)
    divided = {name: style.names for name, style in layers.styles.items() if isinstance(style, Divided)}
    found = {}
    for name in {**held, **divided}:
        m, columns = modules[name], held.get(name, [])
        heads = _heads(m, columns, layers)
        if heads is None and name not in divided and len(columns) < 2:
            continue
        gathered = is_gathered(name, children)
        found[name] = Region(name, m, layers.axis, gathered, heads, divided.get(name, ()), m.forward)
        m.forward = found[name]
    return found


def _heads(module: torch.nn.Module, columns: list[str], layers: Layers) -> Heads | None:
    """Return the heads of a module of attention, given its layers that are cut by them."""
    counts = [c for name in columns if (c := layers.cuts[f"{name}.weight"]).heads]
    if not counts:
        return None
    groups = vars(module).get("num_key_value_groups", 0) if any(c.shared for c in counts) else 0
    kv = next((c.heads for c in counts if c.shared), 0)
    query = kv * groups or max(c.heads for c in counts)
    names = tuple([name for name in _COUNTS if vars(module).get(name) in (query, kv or query)])
    return Heads(query, groups, names)
