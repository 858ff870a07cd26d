"""Blocks between which each rank holds part of the tokens: the residual stream is split along the sequence.

In such a block, norms run on parts of the tokens. Attention and MLPs gather all tokens, and leave parts. Any other
child, such as a layer of experts, gets all tokens as without `sequence`, and the rank then keeps its part of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fzero.parallel.tensor._boundaries import all_gather, enter, scatter
from fzero.parallel.tensor._layers import Layers
from fzero.parallel.tensor._styles import ColumnParallel, ReplicatedParams, RowParallel

__all__ = ["SequenceBlock", "SequenceChild", "classify_children", "find_split_blocks", "is_gathered"]


@dataclass(frozen=True)
class SequenceBlock:
    """The first of the repeated blocks, which splits the tokens, or the last one, which joins them.

    Attributes:
        name: the module's name, for messages.
        axis: the axis over which the sequence is split.
        is_first: whether it is the first block.
        is_last: whether it is the last block.
        run: the block's own forward pass.
    """

    name: str
    axis: str
    is_first: bool
    is_last: bool
    run: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block on a part of the tokens."""
        if self.is_first:
            args, kwargs = _map_input(self.name, args, kwargs, lambda x: scatter(x, self.axis))
        out = self.run(*args, **kwargs)
        return _map_output(self.name, out, lambda x: all_gather(x, self.axis)) if self.is_last else out


@dataclass(frozen=True)
class SequenceChild:
    """A child of a block that needs all tokens.

    Attributes:
        name: the module's name, for messages.
        axis: the axis over which the sequence is split.
        is_full: whether the child runs as without `sequence`. If not, its layers leave parts of the tokens.
        run: the module's own forward pass.
    """

    name: str
    axis: str
    is_full: bool
    run: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on all tokens."""
        if not self.is_full:
            args, kwargs = _map_input(self.name, args, kwargs, lambda x: enter(x, self.axis, sequence=True))
            return self.run(*args, **kwargs)
        args, kwargs = _map_input(self.name, args, kwargs, lambda x: all_gather(x, self.axis))
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


def find_split_blocks(modules: Mapping[str, torch.nn.Module], layers: Layers) -> list[str]:
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


def classify_children(name: str, block: torch.nn.Module, layers: Layers) -> dict[str, str]:
    """Return the kind of each child of a block that has parameters: "norm", "gathered" or "full"."""
    children = {f"{name}.{key}".lstrip("."): child for key, child in block.named_children()}
    return {
        path: _boundary_kind(path, child, layers)
        for path, child in children.items()
        if any(True for _ in child.parameters())
    }


def is_gathered(name: str, children: Mapping[str, str]) -> bool:
    """Return whether a module lies in a child that gathers all tokens, and leaves parts of them."""
    return any(kind == "gathered" and _is_within(name, child) for child, kind in children.items())


def _is_within(name: str, outer: str) -> bool:
    return not outer or name == outer or name.startswith(f"{outer}.")


def _styles_in(outer: str, layers: Layers) -> list[str]:
    return [name for name in layers.styles if _is_within(name, outer)]


def _boundary_kind(name: str, child: torch.nn.Module, layers: Layers) -> str:
    styles = _styles_in(name, layers)
    if not styles:
        is_norm = all(p.ndim < 2 for p in child.parameters()) and not any(True for _ in child.children())
        return "norm" if is_norm else "full"
    split_layers = [
        name for name in styles if isinstance(layers.styles[name], ColumnParallel | RowParallel | ReplicatedParams)
    ]
    names = [f"{name}.{key}" for key, _ in child.named_parameters()]
    return "gathered" if all(any(_is_within(name, layer) for layer in split_layers) for name in names) else "full"
