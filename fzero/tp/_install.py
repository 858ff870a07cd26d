"""The styles of layers, put in the places of forward passes: in a copy of the model that nobody else has."""

from collections.abc import Mapping
from typing import Any

import torch

from fzero.tp._forwards import Layer
from fzero.tp._layers import Layers
from fzero.tp._regions import Heads, Region
from fzero.tp._sequence import Block, Child, blocks_of, children_of, is_gathered
from fzero.tp._styles import ColumnParallel, Divided, Shared

__all__ = ["install"]

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
