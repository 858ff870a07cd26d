"""The layers of a module that are split over an axis by a plan of names, and the rule that splits their leaves."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from fzero import tree
from fzero._arguments import is_int
from fzero.axes import SplitRule, axis_if_bound, axis_size, bound_axis, check_inputs_replicated
from fzero.parallel.tensor._styles import (
    NAMED,
    ColumnParallel,
    Embedding,
    Experts,
    ParamSplit,
    Style,
    heads_of,
    layer_splits,
    parameter_split,
)

__all__ = ["Layers", "layers", "of_block", "outside", "split"]

# The rule that splits leaves over an axis by their names.


_T = TypeVar("_T")


@dataclass(frozen=True)
class _SplitByName:
    dims: tuple[tuple[str, int], ...]
    axis: str

    def __call__(self, path: str, leaf: torch.Tensor) -> dict[str, int] | None:
        dim = _match_suffix(path, dict(self.dims))
        return None if dim is None or not axis_if_bound(self.axis) else {self.axis: dim}


def split(dims: Mapping[str, int], axis: str = "tp") -> SplitRule:
    """Make the rule for `fzero.shard(split=)` that splits leaves over an axis by their names.

    Args:
        dims: the end of a leaf's path -> the dimension to split: "up" or "mlp.up" for "blocks.3.mlp.up". The longest
            match counts. Columns are the last dimension (-1, also of a bias); rows and vocabularies are the first (0).
        axis: the name of the axis. On a mesh without an axis of this name, nothing is split.

    Returns:
        A rule `(path, leaf) -> {axis: dimension}`, or None for other leaves.

    Raises:
        TypeError: if `dims` is not a dict from names to dimensions, or `axis` is not a name.

    Example:
        >>> import fzero
        >>> from fzero.parallel import tensor as tp
        >>> rule = tp.split({"tokens": 0, "up": -1, "down": 0})
        >>> fzero.mesh(tp=2).spmd(lambda: [rule(path, torch.ones(4, 4)) for path in ("h.0.up", "h.0.norm")])()
        [{'tp': -1}, None]
    """
    axis_if_bound(axis)
    if not isinstance(dims, Mapping):
        raise TypeError(f"dims={dims!r}: expected a dict from names of leaves to dimensions, such as {{'up': -1}}")
    for name, dim in dims.items():
        if not isinstance(name, str) or not name or not is_int(dim):
            raise TypeError(f"dims: {name!r}: {dim!r}, expected a name of leaves and a dimension, such as 'up': -1")
    return _SplitByName(tuple(dims.items()), axis)


def _match_suffix(path: str, table: Mapping[str, _T]) -> _T | None:
    """Return the value of the longest end of a path that is a key of the table; None if no end is."""
    parts = path.split(".")
    for i in range(len(parts)):
        if (end := ".".join(parts[i:])) in table:
            return table[end]
    return None


# The layers of a module that are split over an axis, by a plan of names.


_Plan = Mapping[str, str | Style | None]

_KEYS_AND_VALUES = ("k_proj", "v_proj")


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
            styles_by_name.setdefault(_numbered(name), set()).add(style)
        names = {name: _numbered(name) if len(styles_by_name[_numbered(name)]) == 1 else name for name in self.styles}
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
        param_split = _match_suffix(path, self.param_splits)
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
        size = _match_suffix(path, self.sizes)
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

    def check_shared(self, inputs: Any) -> None:
        """Check that the ranks along the axis receive the same examples.

        Raises:
            ValueError: if a tensor is known to differ by rank. The message names the tensor.
        """

        def message(label: str, name: str) -> str:
            return (
                f"fzero.parallel.tensor: {label} differs by rank along {name!r}, the axis of tp.layers(..., "
                f"axis={self.axis!r}). These ranks hold parts of one model, and must receive the same examples: split "
                "the batch over the data-parallel axes only, mesh.split(batch, step.data_axes); or give tp.layers the "
                "axis over which the model is split"
            )

        paths, leaves, _ = tree.flatten_with_paths(inputs)
        axes = [bound_axis(name) for name in axis_if_bound(self.axis)]
        check_inputs_replicated("the module's input", [a for a in axes if a.size > 1], paths, leaves, message)


def layers(module: torch.nn.Module, plan: _Plan | None = None, axis: str = "tp", *, sequence: bool = False) -> Layers:
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
    styles, parameters = _resolve(module, plan)
    _style_tied_layers(module, styles)
    param_splits = _param_splits(module, styles, parameters)
    sizes = {name: module.get_parameter(name).shape[c.dim] // c.packed for name, c in param_splits.items()}
    _check_ties(module, param_splits)
    return Layers(axis, sequence, styles, param_splits, sizes)


# ---------------------------------------------------------------- a plan of names


def _resolve(module: torch.nn.Module, plan: _Plan | None) -> tuple[dict[str, Style], dict[str, str]]:
    """Return the style of each module, and of each parameter that the plan names itself."""
    module_plan: _Plan = getattr(module, "tp_plan", None) or {}
    if not module_plan and plan is None:
        raise ValueError(
            f"{type(module).__name__} carries no tp_plan: give one, plan={{'layers.*.up': 'colwise', "
            "'layers.*.down': 'rowwise'}"
        )
    modules = dict(module.named_modules())
    names = {**modules, **dict(module.named_parameters(remove_duplicate=False))}
    plan_styles: dict[str, Any] = {}
    for is_user_plan, entries in ((False, module_plan), (True, plan or {})):
        for pattern, style in entries.items():
            matches = [name for name in names if _pattern(pattern).fullmatch(name)]
            if is_user_plan and not matches:
                candidates = ", ".join([repr(name) for name in names if name.endswith(pattern.rpartition(".")[2])][:3])
                raise ValueError(
                    f"plan: {pattern!r} names no layer of {type(module).__name__}"
                    + (f": did you mean one of {candidates}?" if candidates else "; `*` stands for a part of a name")
                )
            plan_styles.update(dict.fromkeys(matches, style))
    if not plan_styles:
        raise ValueError(
            f"{type(module).__name__} carries a tp_plan that names none of its layers; another module may wrap them. "
            "List the layers of the wrapped module, or pass a plan"
        )
    plan_styles = {name: plan_styles[name] for name in names if name in plan_styles}  # in the module's order
    styles = {name: _style(name, style) for name, style in plan_styles.items() if name in modules}
    parameters = {name: style for name, style in plan_styles.items() if name not in modules and style is not None}
    return {name: style for name, style in styles.items() if style is not None}, parameters


def _numbered(name: str) -> str:
    """Replace each number in a name by `*`."""
    return ".".join(["*" if part.isdigit() else part for part in name.split(".")])


def _pattern(text: str) -> re.Pattern[str]:
    """Compile a name of a plan. `*` matches one part of a name; at the start it matches any number of parts."""
    start, rest = (r"(?:.+\.)?", text[2:]) if text.startswith("*.") else ("", text)
    return re.compile(start + r"[^.]+".join([re.escape(part) for part in rest.split("*")]))


def _style(name: str, style: Any) -> Style | None:
    if style is None or isinstance(style, Style):
        return style
    if not isinstance(style, str) or style not in NAMED:
        raise ValueError(
            f"layer {name!r} has the style {style!r}, which fzero.parallel.tensor does not know: expected one of "
            f"{', '.join(NAMED)}, tp.packed or tp.divided; None leaves the layer replicated"
        )
    return NAMED[style]


# ---------------------------------------------------------------- the splits of parameters


def _param_splits(
    module: torch.nn.Module, styles: Mapping[str, Style], parameters: Mapping[str, str]
) -> dict[str, ParamSplit]:
    modules = dict(module.named_modules())
    splits = {}
    for name, style in styles.items():
        layer = modules[name]
        parent, _, last = name.rpartition(".")
        for key, param_split in layer_splits(name, style, layer).items():
            if isinstance(style, ColumnParallel) and not style.gather:
                size = getattr(layer, key).shape[param_split.dim] // param_split.packed
                groups = vars(modules[parent]).get("num_key_value_groups", 0) if last in _KEYS_AND_VALUES else 0
                param_split = param_split._replace(heads=heads_of(modules[parent], size), may_replicate=bool(groups))
            splits[f"{name}.{key}".lstrip(".")] = param_split
    for name, style in parameters.items():
        splits[name] = parameter_split(name, style, module.get_parameter(name))
    for name in [name for name, style in styles.items() if isinstance(style, Experts)]:
        for key, _ in modules[name].named_parameters():
            if f"{name}.{key}" not in splits:  # such as a bias, which each rank would add, or a norm of partial sums
                raise ValueError(
                    f"experts {name!r}: {key!r} is not split, and each rank would apply it to partial sums. Leave "
                    "the experts out, with None in the plan for each of their names, and split them over another axis"
                )
    return splits


def _style_tied_layers(module: torch.nn.Module, styles: dict[str, Style]) -> None:
    """Give a matching style to each layer that shares its weight with a split embedding or column-parallel layer."""
    for names in _tied_names(module):
        owners = [name.rpartition(".")[0] for name in names]
        if not any(isinstance(styles.get(owner), Embedding | ColumnParallel) for owner in owners):
            continue
        for owner in owners:
            if owner not in styles:
                is_table = isinstance(module.get_submodule(owner), torch.nn.Embedding)
                styles[owner] = Embedding() if is_table else ColumnParallel(gather=True)


def _check_ties(module: torch.nn.Module, param_splits: Mapping[str, ParamSplit]) -> None:
    for names in _tied_names(module):
        splits = {name: f"along {param_splits[name].unpacked_dim}" if name in param_splits else "not" for name in names}
        if len(set(splits.values())) > 1:
            raise ValueError(
                f"tied parameters are one tensor, but would be split in different ways, {splits}: give them one style"
            )


def _tied_names(module: torch.nn.Module) -> list[list[str]]:
    """Return the groups of names that stand for one parameter."""
    names_by_id: dict[int, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        names_by_id.setdefault(id(p), []).append(name)
    return [names for names in names_by_id.values() if len(names) > 1]


# The layers of part of a module: of one block, or of everything outside the blocks.


def of_block(layers: Layers, name: str) -> Layers:
    """Return the layers of one block, by their names within the block.

    Args:
        layers: the layers of the full module.
        name: the name of the block.
    """

    def within(table: Mapping[str, _T]) -> dict[str, _T]:
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

    def rest(table: Mapping[str, _T]) -> dict[str, _T]:
        return {key: x for key, x in table.items() if not key.startswith(prefixes)}

    styles, param_splits, sizes = rest(layers.styles), rest(layers.param_splits), rest(layers.sizes)
    return replace(layers, sequence=False, styles=styles, param_splits=param_splits, sizes=sizes)
