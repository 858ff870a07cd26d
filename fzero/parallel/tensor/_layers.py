"""The layers of a module that are split over an axis by a plan of names, and the rule that splits their leaves."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from fzero import tree
from fzero.axes import SplitRule, axis_size, check_inputs_replicated, lookup, where_bound
from fzero.parallel.tensor._styles import (
    NAMED,
    ColumnParallel,
    Cut,
    Embedding,
    Experts,
    Style,
    heads_of,
    layer_cuts,
    parameter_cut,
)

__all__ = ["Layers", "Plan", "layers", "named", "of_block", "outside", "split"]

# The rule that splits leaves over an axis by their names.


T = TypeVar("T")


@dataclass(frozen=True)
class _ByName:
    dims: tuple[tuple[str, int], ...]
    axis: str

    def __call__(self, path: str, leaf: torch.Tensor) -> dict[str, int] | None:
        dim = named(path, dict(self.dims))
        return None if dim is None or not where_bound(self.axis) else {self.axis: dim}


def split(dims: Mapping[str, int], axis: str = "tp") -> SplitRule:
    """Make the rule for `fzero.shard(split=)` that splits leaves over an axis by their names.

    Args:
        dims: the end of a leaf's path -> the dimension that is cut: "up" or "mlp.up" for "blocks.3.mlp.up". The longest
            one counts. Columns are the last dimension (-1, also of a bias), rows and vocabularies the first (0).
        axis: the name of the axis. On a mesh that has none of that name nothing is split.

    Returns:
        A rule `(path, leaf) -> {axis: dimension}`, or None for other leaves.

    Raises:
        TypeError: if `dims` has other keys than names, or other values than dimensions; or `axis` is no name.

    Example:
        >>> import fzero
        >>> from fzero.parallel import tensor as tp
        >>> rule = tp.split({"tokens": 0, "up": -1, "down": 0})
        >>> fzero.mesh(tp=2).spmd(lambda: [rule(path, torch.ones(4, 4)) for path in ("h.0.up", "h.0.norm")])()
        [{'tp': -1}, None]
    """
    where_bound(axis)
    if not isinstance(dims, Mapping):
        raise TypeError(f"dims={dims!r}: expected a dict from names of leaves to dimensions, such as {{'up': -1}}")
    for name, dim in dims.items():
        if not isinstance(name, str) or not name or not isinstance(dim, int) or isinstance(dim, bool):
            raise TypeError(f"dims: {name!r}: {dim!r}, expected a name of leaves and a dimension, such as 'up': -1")
    return _ByName(tuple(dims.items()), axis)


def named(path: str, table: Mapping[str, T]) -> T | None:
    """Return what a table has for the longest end of a path that it names; None if it names none."""
    parts = path.split(".")
    for i in range(len(parts)):
        if (end := ".".join(parts[i:])) in table:
            return table[end]
    return None


# The layers of a module that are cut over an axis, by a plan of names.


Plan = Mapping[str, str | Style | None]

_KEYS_AND_VALUES = ("k_proj", "v_proj")


@dataclass(frozen=True, repr=False)
class Layers:
    """The layers of a module that are cut over an axis; made by `tp.layers`.

    Attributes:
        axis: the axis.
        sequence: whether the residual stream is cut along the sequence.
        styles: what becomes of each module, by its name.
        cuts: how each parameter is cut, by its name.
        sizes: the whole size of the dimension that is cut, by the parameter's name.
        in_block: whether the module is itself one of the blocks between which the residual stream is cut.
    """

    axis: str
    sequence: bool
    styles: Mapping[str, Style]
    cuts: Mapping[str, Cut]
    sizes: Mapping[str, int]
    in_block: bool = False

    def __repr__(self) -> str:
        alike: dict[str, set[Style]] = {}
        for name, style in self.styles.items():
            alike.setdefault(_numbered(name), set()).add(style)
        names = {name: _numbered(name) if len(alike[_numbered(name)]) == 1 else name for name in self.styles}
        rows = {names[name]: style for name, style in self.styles.items()}
        width = max(map(len, rows), default=0)
        head = f"layers along {self.axis!r}" + (", the residual stream cut along the sequence" if self.sequence else "")
        return "\n".join([head, *[f"  {name:<{width}}  {style.shown}" for name, style in rows.items()]])

    def split(self, path: str, leaf: torch.Tensor) -> dict[str, int] | None:
        """Say how a leaf is cut: the rule for `fzero.shard(split=)`.

        It knows the end of a path, so that the parameters may be part of a larger tree.

        Raises:
            ValueError: if heads of attention do not divide among the ranks, or the leaf has not the shape that
                `fzero.nn.functional(module, tp=layers)` gives it. The message names it.
        """
        known = named(path, self.cuts)
        if known is None or not where_bound(self.axis):
            return None
        n = axis_size(self.axis)
        if known.heads % n:
            if known.shared:
                return None
            raise ValueError(
                f"leaf {path!r} holds {known.heads} heads, which do not divide by the {n} ranks along {self.axis!r}: "
                "take another size of the axis, or leave the layers of attention out, plan={'...q_proj': None, ...}"
            )
        size = named(path, self.sizes)
        if known.packed > 1 and (leaf.ndim <= known.along or leaf.shape[known.dim] != known.packed):
            raise ValueError(
                f"leaf {path!r} is {list(leaf.shape)}, and {known.packed} matrices lie along dimension {known.dim}: "
                "train what fzero.nn.functional(module, tp=layers) returns, or layers.unpack(params)"
            )
        if size is not None and size % n:
            raise ValueError(
                f"leaf {path!r} has {size} along dimension {known.along}, which do not divide by the {n} ranks along "
                f"{self.axis!r}: pad it (a vocabulary by model.resize_token_embeddings(pad_to_multiple_of={n})), or "
                f"leave its layer out, plan={{{path.rpartition('.')[0]!r}: None}}"
            )
        return {self.axis: known.along}

    def unpack(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Give each of several matrices in one parameter a dimension of its own: `[.., k m, ..]` to `[.., k, m, ..]`.

        `fzero.nn.functional(module, tp=layers)` does so to what it returns.

        Args:
            params: tensors by name, as the module has them.
        """
        return {name: self.cuts[name].unpack(x) if name in self.cuts else x for name, x in params.items()}

    def pack(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Undo `unpack`: whole parameters as the module has them, for `module.load_state_dict`.

        Args:
            params: whole tensors by name, as `step.gather` gives them.
        """
        return {name: self.cuts[name].pack(x) if name in self.cuts else x for name, x in params.items()}

    def check_shared(self, given: Any) -> None:
        """Check that the ranks along the axis are given the same examples.

        Raises:
            ValueError: if a tensor is known to differ. The message names it.
        """

        def says(where: str, name: str) -> str:
            return (
                f"fzero.parallel.tensor: {where} differs by rank along {name!r}, whose ranks have parts of one "
                f"model, and work on "
                "the same examples: split the batch over the data-parallel axes only, mesh.split(batch, step.data_axes)"
            )

        paths, leaves, _ = tree.flatten_with_paths(given)
        axes = [lookup(name) for name in where_bound(self.axis)]
        check_inputs_replicated("what the module is given", [a for a in axes if a.size > 1], paths, leaves, says)


def layers(module: torch.nn.Module, plan: Plan | None = None, axis: str = "tp", *, sequence: bool = False) -> Layers:
    """List the layers of a module that are cut over an axis: for `fzero.nn.functional(module, tp=layers)`.

    Models of transformers carry a plan, `model.tp_plan`; of another module you give one. The module stays as it is.

    Args:
        module: the module, whole.
        plan: name of a layer -> its style; `*` stands for a part of a name, such as a number. It goes before a plan of
            the module's own, and None leaves a layer out. Styles are those of transformers by name: "colwise",
            "colwise_gather_output", "rowwise", "rowwise_split_input", "embedding_rowwise", "packed_colwise",
            "replicated_with_grad_allreduce", "moe_tp_experts"; or `tp.packed` and `tp.divided`.
        axis: the name of the axis. On a mesh that has none of that name the module runs whole.
        sequence: whether between the layers of its repeated blocks each rank has a part of the tokens.

    Returns:
        `Layers`, whose method `split` is the rule for `fzero.shard(split=)`.

    Raises:
        TypeError: if a layer is none that its style knows.
        ValueError: if the module carries no plan and none is given, a name of `plan` is no layer's, or a style is
            unknown. Also if tied parameters are cut in different ways, or no blocks are found for `sequence`.

    Example:
        >>> import fzero
        >>> from fzero.parallel import tensor as tp
        >>> mlp = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
        >>> found = tp.layers(mlp, {"0": "colwise", "2": "rowwise"})
        >>> found
        layers along 'tp'
          0  some columns
          2  some rows
        >>> apply, params, buffers = fzero.nn.functional(mlp, tp=found)
        >>> fzero.mesh(tp=2).spmd(lambda: [found.split(name, x) for name, x in params.items()])()
        [{'tp': 0}, {'tp': 0}, {'tp': 1}, None]
    """
    where_bound(axis)
    styles, parameters = _resolved(module, plan)
    _let_ties_follow(module, styles)
    cuts = _cuts(module, styles, parameters)
    sizes = {name: module.get_parameter(name).shape[c.dim] // c.packed for name, c in cuts.items()}
    _check_ties(module, cuts)
    return Layers(axis, sequence, styles, cuts, sizes)


# ---------------------------------------------------------------- a plan of names


def _resolved(module: torch.nn.Module, plan: Plan | None) -> tuple[dict[str, Style], dict[str, str]]:
    """Return the style of each module, and of each parameter that is named by itself."""
    own: Plan = getattr(module, "tp_plan", None) or {}
    if not own and plan is None:
        raise ValueError(
            f"{type(module).__name__} carries no tp_plan: give one, plan={{'layers.*.up': 'colwise', "
            "'layers.*.down': 'rowwise'}"
        )
    modules = dict(module.named_modules())
    names = {**modules, **dict(module.named_parameters(remove_duplicate=False))}
    chosen: dict[str, Any] = {}
    for given, entries in ((False, own), (True, plan or {})):
        for pattern, style in entries.items():
            matched = [name for name in names if _pattern(pattern).fullmatch(name)]
            if given and not matched:
                near = ", ".join([repr(name) for name in names if name.endswith(pattern.rpartition(".")[2])][:3])
                raise ValueError(
                    f"plan: {pattern!r} names no layer of {type(module).__name__}"
                    + (f": did you mean one of {near}?" if near else "; `*` stands for a part of a name")
                )
            chosen.update(dict.fromkeys(matched, style))
    if not chosen:
        raise ValueError(
            f"{type(module).__name__} carries a tp_plan that names none of its layers, as where another module wraps "
            "them: list the layers of the module inside, or give a plan"
        )
    chosen = {name: chosen[name] for name in names if name in chosen}  # in the module's order
    styles = {name: _style(name, style) for name, style in chosen.items() if name in modules}
    parameters = {name: style for name, style in chosen.items() if name not in modules and style is not None}
    return {name: style for name, style in styles.items() if style is not None}, parameters


def _numbered(name: str) -> str:
    """Put `*` in the places of the numbers in a name."""
    return ".".join(["*" if part.isdigit() else part for part in name.split(".")])


def _pattern(text: str) -> re.Pattern[str]:
    """Compile a name of a plan, in which `*` is a part of a name; at the start it is any number of parts."""
    start, rest = (r"(?:.+\.)?", text[2:]) if text.startswith("*.") else ("", text)
    return re.compile(start + r"[^.]+".join([re.escape(part) for part in rest.split("*")]))


def _style(name: str, style: Any) -> Style | None:
    if style is None or isinstance(style, Style):
        return style
    if not isinstance(style, str) or style not in NAMED:
        raise ValueError(
            f"layer {name!r} has the style {style!r}, which fzero.parallel.tensor does not know: expected one of "
            f"{', '.join(NAMED)}, tp.packed or tp.divided; None leaves the layer whole"
        )
    return NAMED[style]


# ---------------------------------------------------------------- how parameters are cut


def _cuts(module: torch.nn.Module, styles: Mapping[str, Style], parameters: Mapping[str, str]) -> dict[str, Cut]:
    modules, found = dict(module.named_modules()), {}
    for name, style in styles.items():
        layer = modules[name]
        parent, _, last = name.rpartition(".")
        for own, known in layer_cuts(name, style, layer).items():
            if isinstance(style, ColumnParallel) and not style.gather:
                size = getattr(layer, own).shape[known.dim] // known.packed
                groups = vars(modules[parent]).get("num_key_value_groups", 0) if last in _KEYS_AND_VALUES else 0
                known = known._replace(heads=heads_of(modules[parent], size), shared=bool(groups))
            found[f"{name}.{own}".lstrip(".")] = known
    for name, style in parameters.items():
        found[name] = parameter_cut(name, style, module.get_parameter(name))
    for name in [name for name, style in styles.items() if isinstance(style, Experts)]:
        for own, _ in modules[name].named_parameters():
            if f"{name}.{own}" not in found:  # a bias that each rank adds, a norm of partial sums
                raise ValueError(
                    f"experts {name!r}: a part of each rank leaves no place for {own!r}, which is not cut: leave them "
                    "whole, None in the plan for each of their names, and split them over an axis of their own"
                )
    return found


def _let_ties_follow(module: torch.nn.Module, styles: dict[str, Style]) -> None:
    """Give an embedding, or a linear layer, the style that cuts its weight as another layer's that is the same one."""
    for places in _tied(module):
        owners = [place.rpartition(".")[0] for place in places]
        if not any(isinstance(styles.get(owner), Embedding | ColumnParallel) for owner in owners):
            continue
        for owner in owners:
            if owner not in styles:
                is_table = isinstance(module.get_submodule(owner), torch.nn.Embedding)
                styles[owner] = Embedding() if is_table else ColumnParallel(gather=True)


def _check_ties(module: torch.nn.Module, cuts: Mapping[str, Cut]) -> None:
    for places in _tied(module):
        ways = {place: f"along {cuts[place].along}" if place in cuts else "not" for place in places}
        if len(set(ways.values())) > 1:
            raise ValueError(
                f"tied parameters are one, and are to be cut in different ways, {ways}: give them one style"
            )


def _tied(module: torch.nn.Module) -> list[list[str]]:
    """List the names of parameters that have several."""
    places: dict[int, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        places.setdefault(id(p), []).append(name)
    return [names for names in places.values() if len(names) > 1]


# The layers of a part of a module: of a block, or of all but the blocks.


def of_block(layers: Layers, name: str) -> Layers:
    """Return the layers of a block, named as it names them itself.

    Args:
        layers: of the whole module.
        name: of the block.
    """

    def own(table: Mapping[str, T]) -> dict[str, T]:
        return {key.removeprefix(f"{name}."): x for key, x in table.items() if key.startswith(f"{name}.")}

    styles, cuts, sizes = own(layers.styles), own(layers.cuts), own(layers.sizes)
    return replace(layers, styles=styles, cuts=cuts, sizes=sizes, in_block=True)


def outside(layers: Layers, names: Sequence[str]) -> Layers:
    """Return the layers that lie in none of some blocks. What blocks hand on is cut by who runs these.

    Args:
        layers: of the whole module.
        names: of the blocks.
    """
    places = tuple([f"{name}." for name in names])

    def rest(table: Mapping[str, T]) -> dict[str, T]:
        return {key: x for key, x in table.items() if not key.startswith(places)}

    styles, cuts, sizes = rest(layers.styles), rest(layers.cuts), rest(layers.sizes)
    return replace(layers, sequence=False, styles=styles, cuts=cuts, sizes=sizes)
