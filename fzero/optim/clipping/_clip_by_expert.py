"""Clipping by the norm of each expert: an expert is an index of dimension 0 of the leaves that hold all experts."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero._dtypes import at_least_float32
from fzero._torch import tensor_on
from fzero.collectives import psum
from fzero.optim._base import Optimizer, OptState, Params, Updates, optimizer_factory
from fzero.optim._hyperparams import Scalar, check_positive
from fzero.optim.checks import torch_hints
from fzero.sharding import Shard, ShardedUnit, is_box, leaf_ids, sharded_units, traced_spec, unit_index

__all__ = ["clip_by_expert"]


_EXPERT_SUMS = 16  # partial sums of each expert's row, as `_PARTIAL_SUMS` of a leaf
_NO_EXPERT_DIM = "leaf {!r} has no dimension of experts: name another part of the path in names="


@torch_hints
@optimizer_factory
def clip_by_expert(max_norm: Scalar, names: Sequence[str] = ("experts",)) -> Optimizer:
    """Scale each expert's gradients by `min(1, max_norm / norm)`, with the norm of the expert in its layer.

    An expert that few tokens reach has noisy gradients. With a global norm they would scale down the gradients of all
    other experts. Expert e of a layer is row e of all the layer's expert leaves together, such as "layers.0.experts.up"
    and "layers.0.experts.down". All other leaves pass unchanged. The result is exact on every layout, by one psum per
    set of axes.

    Args:
        max_norm: the largest 2-norm of an expert that passes unchanged.
        names: parts of the paths of leaves that hold experts along dimension 0, as for
            `fzero.parallel.experts.split_rule`.

    Returns:
        An optimizer without state.

    Raises:
        ValueError: if `max_norm` is not positive, or `names` are not parts of paths. On update, if no leaf's path has
            such a part, if experts are a list, or if leaves of one layer have different numbers of experts.

    Example:
        >>> clip = clip_by_expert(1.0)
        >>> grads = {"experts": {"up": torch.tensor([[3.0], [0.5]]), "down": torch.tensor([[4.0], [0.0]])}}
        >>> clip.update(grads, ())[0]["experts"]["up"]  # of norms 5 and 0.5
        tensor([[0.6000],
                [0.5000]])
    """
    check_positive(max_norm=max_norm)
    if isinstance(names, str):
        names = (names,)
    are_parts = isinstance(names, Sequence) and names and all(isinstance(x, str) and "." not in x for x in names)
    if not are_parts:
        raise ValueError(f"names={names!r}: expected parts of the paths of experts, such as 'experts', without a dot")

    def update(grads: Updates, state: OptState, params: Params | None = None) -> tuple[Updates, OptState]:
        return _clip_experts(grads, max_norm, tuple(names)), state

    return Optimizer(lambda params: (), update, exact_on_shards=True, elementwise=False)


class _ExpertUnit(NamedTuple):
    """A unit with experts.

    Attributes:
        unit: the unit.
        layers: the layer of each leaf; None for a leaf without experts.
        first: the number of each leaf's first row, and of the padding's, among the rows of the unit.
    """

    unit: ShardedUnit
    layers: list[str | None]
    first: list[int]


def _layer_path(path: str, names: tuple[str, ...]) -> str | None:
    """Return the part of a leaf's path that all experts of a layer share; None for a leaf without experts."""
    parts = path.split(".")
    indices = [i for i, part in enumerate(parts) if part in names]
    if not indices:
        return None
    if any(part.isdigit() for part in parts[indices[0] + 1 :]):
        raise ValueError(
            f"leaf {path!r} is of one expert in a list, and an expert is a row of dimension 0: "
            "stack the experts, or name another part of the path in names="
        )
    return ".".join(parts[: indices[0] + 1])


def _clip_experts(grads: Updates, max_norm: Scalar, names: tuple[str, ...]) -> Updates:
    """Scale the rows of each expert so that the norm of an expert's gradients is at most `max_norm`."""
    paths, entries, structure = tree.flatten_with_paths(grads, is_box)
    layers = _expert_layers(paths, names)
    plain = [
        (i, layer)
        for i, (x, layer) in enumerate(zip(entries, layers, strict=True))
        if isinstance(x, torch.Tensor) and layer is not None
    ]
    units = _units_with_experts(paths, entries, layers)
    sums: dict[tuple[str, ...], list[tuple[str, torch.Tensor]]] = {}
    for i, layer in plain:
        sums.setdefault((), []).append((layer, _row_sums(paths[i], entries[i])))
    for u in units:
        for axes, layer, squares in _unit_row_sums(u):
            sums.setdefault(axes, []).append((layer, squares))
    factors = _expert_factors(sums, max_norm)
    out = list(entries)
    for i, layer in plain:
        out[i] = _multiply_by_expert(out[i], factors[layer].view(-1, *[1] * (out[i].ndim - 1)))
    for u in units:
        out[u.unit.members[0][0]] = _clip_unit(u, factors)
    return tree.unflatten(structure, out)


def _expert_layers(paths: Sequence[str], names: tuple[str, ...]) -> list[str | None]:
    """Return the layer of each leaf, None for a leaf without experts.

    Raises:
        ValueError: if no leaf has experts, for then a wrong name would clip nothing.
    """
    layers = [_layer_path(path, names) for path in paths]
    if paths and not any(layers):
        examples = ", ".join([repr(path) for path in paths[:3]])
        rest = ", .." if len(paths) > 3 else ""
        raise ValueError(
            f"names={names!r}: no leaf's path has such a part, and the leaves are {examples}{rest}: "
            "nothing would be clipped"
        )
    return layers


def _units_with_experts(
    paths: Sequence[str], entries: Sequence[Any], layers: Sequence[str | None]
) -> list[_ExpertUnit]:
    units = [_expert_unit(unit, paths, layers) for unit in sharded_units(paths, entries)]
    return [u for u in units if any(layer is not None for layer in u.layers)]


def _clip_unit(u: _ExpertUnit, factors: dict[str, torch.Tensor]) -> Shard:
    """Multiply each element of a shard by the factor of its expert; those of other leaves, and the padding, by 1."""
    box = u.unit.shard
    no_clip = factors[next(layer for layer in u.layers if layer is not None)].new_ones(1)
    table = torch.cat([no_clip if layer is None else factors[layer] for layer in (*u.layers, None)])
    return Shard(_multiply_by_expert(box.data, table[_row_ids(u)]), box.spec_id)


def _multiply_by_expert(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (at_least_float32(x) * scale).to(x.dtype)


def _expert_unit(unit: ShardedUnit, paths: Sequence[str], layers: Sequence[str | None]) -> _ExpertUnit:
    shapes = traced_spec(unit.spec_id).shapes
    unit_layers: list[str | None] = [None] * len(shapes)
    for position, index in unit.members:
        unit_layers[index] = layers[position]
        if unit_layers[index] is not None and not shapes[index]:
            raise ValueError(_NO_EXPERT_DIM.format(paths[position]))
    row_starts = [0]
    for layer, shape in zip(unit_layers, shapes, strict=True):
        row_starts.append(row_starts[-1] + (shape[0] if layer is not None and shape else 1))
    return _ExpertUnit(unit, unit_layers, row_starts)


def _row_ids(u: _ExpertUnit) -> torch.Tensor:
    """Return for each element of this rank's shard the number of its row among the rows of the unit: int64 `[k]`."""
    spec, device = traced_spec(u.unit.spec_id), u.unit.shard.data.device
    leaf = leaf_ids(u.unit.spec_id, device)  # the number of leaves for padding
    position = unit_index(u.unit.spec_id, device) * spec.shard_numel
    offset = position + torch.arange(spec.shard_numel, device=device) - tensor_on(spec.offsets, device=device)[leaf]
    sizes = [
        max(math.prod(shape) // max(rows, 1), 1)
        for shape, rows in zip(spec.shapes, [b - a for a, b in zip(u.first, u.first[1:], strict=False)], strict=True)
    ]
    row = torch.div(offset, tensor_on([*sizes, 1], device=device)[leaf], rounding_mode="floor")
    row = torch.where(leaf == len(sizes), 0, row)  # the padding is one row, however long it is
    return tensor_on(u.first, device=device)[leaf] + row


def _row_sums(path: str, x: torch.Tensor) -> torch.Tensor:
    if not x.ndim:
        raise ValueError(_NO_EXPERT_DIM.format(path))
    return at_least_float32(x).square().flatten(1).sum(1) if x.ndim > 1 else at_least_float32(x).square()


def _unit_row_sums(u: _ExpertUnit) -> list[tuple[tuple[str, ...], str, torch.Tensor]]:
    """Return for each leaf with experts the axes to sum its rows over, its layer, and its rows' sums of squares."""
    spec, box = traced_spec(u.unit.spec_id), u.unit.shard
    squares = at_least_float32(box.data).square()
    column = torch.arange(len(squares), device=squares.device) % _EXPERT_SUMS
    total = squares.new_zeros((u.first[-1] + 1) * _EXPERT_SUMS).index_add(
        0, _row_ids(u) * _EXPERT_SUMS + column, squares
    )
    rows = total.view(-1, _EXPERT_SUMS).sum(1)
    sums: list[tuple[tuple[str, ...], str, torch.Tensor]] = []
    for i, layer in enumerate(u.layers):
        if layer is not None:
            # along the axes that split dimension 0 each rank has other experts
            axes = [s.axis for s in spec.split if s.dims[i] != 0]
            sums.append(((*spec.axes, *axes), layer, rows[u.first[i] : u.first[i + 1]]))
    return sums


def _expert_factors(
    sums: dict[tuple[str, ...], list[tuple[str, torch.Tensor]]], max_norm: Scalar
) -> dict[str, torch.Tensor]:
    """Sum squares over ranks and over the leaves of each layer, and return the factor of each expert, by layer."""
    squares: dict[str, Any] = {}
    for axes, local in sums.items():
        totals = psum(torch.cat([s for _, s in local]), axes).split([len(s) for _, s in local])
        for (layer, _), total in zip(local, totals, strict=True):
            if layer in squares and len(squares[layer]) != len(total):
                sizes = f"{len(squares[layer])} and {len(total)}"
                raise ValueError(f"leaves of {layer!r} have {sizes} experts along dimension 0: split all of them alike")
            squares[layer] = squares[layer] + total if layer in squares else total
    norms = {layer: total.sqrt() for layer, total in squares.items()}
    return {
        layer: torch.where(norm > max_norm, max_norm / norm, torch.ones_like(norm)) for layer, norm in norms.items()
    }
