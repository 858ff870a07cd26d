"""The layers of a module that are split over an axis, of all of the module or of a part."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fzero import tree
from fzero._tracebacks import api_boundary
from fzero.axes import axis_if_bound, axis_size, bound_axis, check_inputs_replicated
from fzero.parallel.tensor._split_rule import T, match_suffix
from fzero.parallel.tensor._styles import ParamSplit, Style
from fzero.parallel.tensor._tensor_plan import (
    Plan,
    check_ties,
    list_param_splits,
    resolve_plan,
    style_tied_layers,
    with_stars,
)
from fzero.tree import Tree

__all__ = ["Layers", "layers", "of_block", "outside"]


@dataclass(frozen=True, repr=False)
class Layers:
    """The layers of a module that are split over an axis; made by `tp.layers`.

    Attributes:
        axis: the axis.
        sequence: whether the residual stream is split along the sequence.
        styles: the parallel style of each module, by its name.
        param_splits: how each parameter is split, by its name.
        sizes: the full size of the dimension that is split, by the parameter's name.
        in_block: whether the module is itself one of the blocks between which the residual stream is split.
    """

    axis: str
    sequence: bool
    styles: Mapping[str, Style]
    param_splits: Mapping[str, ParamSplit]
    sizes: Mapping[str, int]
    in_block: bool = False

    def __repr__(self) -> str:
        styles_by_name: dict[str, set[Style]] = {}
        for name, style in self.styles.items():
            styles_by_name.setdefault(with_stars(name), set()).add(style)
        is_common = {pattern: len(styles) == 1 for pattern, styles in styles_by_name.items()}
        names = {name: with_stars(name) if is_common[with_stars(name)] else name for name in self.styles}
        rows = {names[name]: style for name, style in self.styles.items()}
        width = max(map(len, rows), default=0)
        head = f"layers along {self.axis!r}" + (", residual stream split along the sequence" if self.sequence else "")
        return "\n".join([head, *[f"  {name:<{width}}  {style.description}" for name, style in rows.items()]])

    def split(self, path: str, leaf: torch.Tensor) -> dict[str, int] | None:
        """Return the axis and dimension along which a leaf is split: the rule for `fzero.shard(split=)`.

        The rule matches the end of a path, so the parameters may be part of a larger tree.

        Raises:
            ValueError: if attention heads do not divide among the ranks, or the leaf has another shape than
                `fzero.nn.functional(module, tp=layers)` gives it. The message names the leaf.
        """
        param_split = match_suffix(path, self.param_splits)
        if param_split is None or not axis_if_bound(self.axis):
            return None
        n = axis_size(self.axis)
        if param_split.heads % n:
            if param_split.may_replicate:
                return None
            raise ValueError(
                f"leaf {path!r} holds {param_split.heads} heads, which do not divide by the {n} ranks along "
                f"{self.axis!r}: change the size of the axis, or leave out the attention layers, "
                "plan={'...q_proj': None, ...}"
            )
        size = match_suffix(path, self.sizes)
        if param_split.packed > 1 and (
            leaf.ndim <= param_split.unpacked_dim or leaf.shape[param_split.dim] != param_split.packed
        ):
            raise ValueError(
                f"leaf {path!r} is {list(leaf.shape)}: expected {param_split.packed} matrices along dimension "
                f"{param_split.dim}. Train the parameters that fzero.nn.functional(module, tp=layers) returns, or "
                "layers.unpack(params)"
            )
        if size is not None and size % n:
            raise ValueError(
                f"leaf {path!r} has {size} along dimension {param_split.unpacked_dim}, which does not divide by the "
                f"{n} ranks along {self.axis!r}: pad it (a vocabulary by "
                f"model.resize_token_embeddings(pad_to_multiple_of={n})), or leave its layer out, "
                f"plan={{{path.rpartition('.')[0]!r}: None}}"
            )
        return {self.axis: param_split.unpacked_dim}

    def unpack(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Give the matrices within one parameter a dimension of their own: `[.., k m, ..]` to `[.., k, m, ..]`.

        `fzero.nn.functional(module, tp=layers)` returns parameters in this form.

        Args:
            params: tensors by name, in the module's shapes.
        """
        return {
            name: self.param_splits[name].unpack(x) if name in self.param_splits else x for name, x in params.items()
        }

    def pack(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Undo `unpack`: return full parameters in the module's shapes, for `module.load_state_dict`.

        Args:
            params: full tensors by name, as `step.gather` returns them.
        """
        return {name: self.param_splits[name].pack(x) if name in self.param_splits else x for name, x in params.items()}

    def check_shared(self, inputs: Tree) -> None:
        """Check that the ranks along the axis receive the same examples.

        Raises:
            ValueError: if a tensor is known to differ by rank. The message names the tensor.
        """

        def message(label: str, name: str) -> str:
            return (
                f"fzero.parallel.tensor.layers: {label} differs by rank along {name!r}, the axis of "
                f"layers(..., axis={self.axis!r}). These ranks hold parts of one model, and must receive the same "
                "examples: split the batch over the data-parallel axes only, mesh.split(batch, step.data_axes); or "
                "give layers the axis over which the model is split"
            )

        paths, leaves, _ = tree.flatten_with_paths(inputs)
        axes = [bound_axis(name) for name in axis_if_bound(self.axis)]
        check_inputs_replicated("the module's input", [a for a in axes if a.size > 1], paths, leaves, message)


@api_boundary
def layers(module: torch.nn.Module, plan: Plan | None = None, axis: str = "tp", *, sequence: bool = False) -> Layers:
    """List the layers of a module that are split over an axis, for `fzero.nn.functional(module, tp=layers)`.

    Models of transformers carry a plan, `model.tp_plan`; for another module, pass one. The module is not changed.

    Args:
        module: the full module.
        plan: name of a layer -> its style; `*` stands for a part of a name, such as a number. Entries override the
            module's own plan, and None leaves a layer out. Styles are the names of transformers' styles: "colwise",
            "colwise_gather_output", "rowwise", "rowwise_split_input", "embedding_rowwise", "packed_colwise",
            "replicated_with_grad_allreduce", "moe_tp_experts"; or `tp.packed` and `tp.divided`.
        axis: the name of the axis. On a mesh without an axis of this name, the full module runs.
        sequence: whether each rank holds only part of the tokens between the layers of the repeated blocks.

    Returns:
        `Layers`, whose method `split` is the rule for `fzero.shard(split=)`.

    Raises:
        TypeError: if a layer is of a kind that its style does not support.
        ValueError: if the module carries no plan and none is passed, a name in `plan` matches no layer, or a style is
            unknown. Also if tied parameters would be split in different ways.

    Example:
        >>> import fzero
        >>> from fzero.parallel import tensor as tp
        >>> mlp = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
        >>> tp_layers = tp.layers(mlp, {"0": "colwise", "2": "rowwise"})
        >>> tp_layers
        layers along 'tp'
          0  some columns
          2  some rows
        >>> apply, params, buffers = fzero.nn.functional(mlp, tp=tp_layers)
        >>> fzero.mesh(tp=2).spmd(lambda: [tp_layers.split(name, x) for name, x in params.items()])()
        [{'tp': 0}, {'tp': 0}, {'tp': 1}, None]
    """
    axis_if_bound(axis)
    styles, parameters = resolve_plan(module, plan)
    style_tied_layers(module, styles)
    param_splits = list_param_splits(module, styles, parameters)
    sizes = {name: module.get_parameter(name).shape[c.dim] // c.packed for name, c in param_splits.items()}
    check_ties(module, param_splits)
    return Layers(axis=axis, sequence=sequence, styles=styles, param_splits=param_splits, sizes=sizes)


def of_block(layers: Layers, name: str) -> Layers:
    """Return the layers of one block, by their names within the block.

    Args:
        layers: the layers of the full module.
        name: the name of the block.
    """

    def within(table: Mapping[str, T]) -> dict[str, T]:
        return {key.removeprefix(f"{name}."): x for key, x in table.items() if key.startswith(f"{name}.")}

    styles, param_splits, sizes = within(layers.styles), within(layers.param_splits), within(layers.sizes)
    return replace(layers, styles=styles, param_splits=param_splits, sizes=sizes, in_block=True)


def outside(layers: Layers, names: Sequence[str]) -> Layers:
    """Return the layers outside the blocks. The caller splits the values that pass between blocks along the sequence.

    Args:
        layers: the layers of the full module.
        names: the names of the blocks.
    """
    prefixes = tuple([f"{name}." for name in names])

    def keep(table: Mapping[str, T]) -> dict[str, T]:
        return {key: x for key, x in table.items() if not key.startswith(prefixes)}

    styles, param_splits, sizes = keep(layers.styles), keep(layers.param_splits), keep(layers.sizes)
    return replace(layers, sequence=False, styles=styles, param_splits=param_splits, sizes=sizes)
