"""A copy of a model gets the forward passes of its split layers, and of modules whose layers share an input."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from fzero.parallel.tensor._forwards import Layer
from fzero.parallel.tensor._layers import Layers
from fzero.parallel.tensor._sequence import (
    SequenceBlock,
    SequenceChild,
    classify_children,
    find_split_blocks,
    is_gathered,
)
from fzero.parallel.tensor._shared_inputs import SharedInputModule
from fzero.parallel.tensor._style_splits import Heads
from fzero.parallel.tensor._styles import ColumnParallel, DividedAttributes, ReplicatedParams

__all__ = ["install"]


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
    shared_inputs = _install_shared_inputs(modules, layers, children)
    for name, style in layers.styles.items():
        if not isinstance(style, DividedAttributes):
            linear = (linears or {}).get(name, F.linear)
            _install_layer(name, modules, layers, shared_inputs, children, linear)
    for name, kind in children.items():
        child = modules[name]
        if kind == "norm":
            child.forward = Layer(
                name,
                module=child,
                style=ReplicatedParams(),
                axis=layers.axis,
                param_splits={},
                sizes={},
                shared_input=None,
                is_gathered=True,
                groups=0,
                run=child.forward,
            )
        else:
            child.forward = SequenceChild(name, layers.axis, kind == "full", child.forward)
    for i, name in enumerate(blocks):
        if i in (0, len(blocks) - 1):
            block = modules[name]
            block.forward = SequenceBlock(
                name, axis=layers.axis, is_first=not i, is_last=i == len(blocks) - 1, run=block.forward
            )


def _install_layer(
    name: str,
    modules: Mapping[str, Any],
    layers: Layers,
    shared_inputs: Mapping[str, SharedInputModule],
    children: Mapping[str, str],
    linear: Callable[..., torch.Tensor],
) -> None:
    """Replace the forward method of a layer by one that computes this rank's part of it."""
    layer, parent, style = modules[name], name.rpartition(".")[0], layers.styles[name]
    paths = {key: f"{name}.{key}".lstrip(".") for key, _ in layer.named_parameters(recurse=False)}
    param_splits = {key: layers.param_splits[path] for key, path in paths.items() if path in layers.param_splits}
    sizes = {key: layers.sizes[path] for key, path in paths.items() if path in layers.sizes}
    groups = vars(modules[parent])["num_key_value_groups"] if any(c.may_replicate for c in param_splits.values()) else 0
    layer.forward = Layer(
        name,
        module=layer,
        style=style,
        axis=layers.axis,
        param_splits=param_splits,
        sizes=sizes,
        shared_input=shared_inputs.get(parent) if isinstance(style, ColumnParallel) else None,
        is_gathered=is_gathered(name, children),
        groups=groups,
        run=layer.forward,
        linear=linear,
    )


def _install_shared_inputs(
    modules: Mapping[str, Any], layers: Layers, children: Mapping[str, str]
) -> dict[str, SharedInputModule]:
    """Replace the forwards of modules that hold several column-parallel layers or heads, or that divide attributes."""
    columns_of: dict[str, list[str]] = {}
    for name, style in layers.styles.items():
        if isinstance(style, ColumnParallel):
            columns_of.setdefault(name.rpartition(".")[0], []).append(name)
    divided_attributes = {
        name: style.names for name, style in layers.styles.items() if isinstance(style, DividedAttributes)
    }
    shared_inputs = {}
    for name in {**columns_of, **divided_attributes}:
        m, columns = modules[name], columns_of.get(name, [])
        heads = _find_heads(m, columns, layers)
        if heads is None and name not in divided_attributes and len(columns) < 2:
            continue
        has_gathered_input = is_gathered(name, children)
        shared_inputs[name] = SharedInputModule(
            name,
            module=m,
            axis=layers.axis,
            is_gathered=has_gathered_input,
            heads=heads,
            divided=divided_attributes.get(name, ()),
            run=m.forward,
        )
        m.forward = shared_inputs[name]
    return shared_inputs


def _find_heads(module: torch.nn.Module, columns: list[str], layers: Layers) -> Heads | None:
    """Return the heads of a module whose column-parallel layers are split by heads; None if there are none."""
    counts = [c for name in columns if (c := layers.param_splits[f"{name}.weight"]).heads]
    if not counts:
        return None
    groups = vars(module).get("num_key_value_groups", 0) if any(c.may_replicate for c in counts) else 0
    kv = next((c.heads for c in counts if c.may_replicate), 0)
    query = kv * groups or max(c.heads for c in counts)
    names = tuple([name for name in _COUNTS if vars(module).get(name) in (query, kv or query)])
    return Heads(query, groups, names)
