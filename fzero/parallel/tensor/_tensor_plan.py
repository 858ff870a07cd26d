"""A plan of names: the style of each layer, and how it splits the layer's parameters."""

import re
from collections.abc import Mapping
from typing import Any

import torch

from fzero.parallel.tensor._style_splits import count_heads, layer_splits, parameter_split
from fzero.parallel.tensor._styles import (
    NAMED,
    ColumnParallel,
    Embedding,
    Experts,
    LatentProjection,
    ParamSplit,
    ReplicatedParams,
    Style,
)

__all__ = ["Plan", "check_ties", "list_param_splits", "resolve_plan", "style_tied_layers", "with_stars"]


Plan = Mapping[str, str | Style | None]

_KEYS_AND_VALUES = ("k_proj", "v_proj")


def resolve_plan(module: torch.nn.Module, plan: Plan | None) -> tuple[dict[str, Style], dict[str, str]]:
    """Return the style of each module, and of each parameter that the plan names itself."""
    module_plan: Plan = getattr(module, "tp_plan", None) or {}
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
            matches = [name for name in names if _compile_pattern(pattern).fullmatch(name)]
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
    styles = {name: _resolve_style(name, style) for name, style in plan_styles.items() if name in modules}
    parameters = {name: style for name, style in plan_styles.items() if name not in modules and style is not None}
    for name in [name for name, style in styles.items() if isinstance(style, LatentProjection)]:
        styles |= _style_latent(name, styles, modules)
    styles = {**_style_activations(styles, modules), **styles}
    return {name: style for name, style in styles.items() if style is not None}, parameters


def _style_latent(
    name: str, styles: Mapping[str, Style | None], modules: Mapping[str, torch.nn.Module]
) -> dict[str, Style]:
    """Return the styles of the norm and the linear layer that run on the result of a latent projection.

    Raises:
        ValueError: if the module around it lacks one of them, or the plan splits the linear layer otherwise.
    """
    prefix = name.rpartition(".")[0]
    norm, linear = (f"{prefix}.{last}".lstrip(".") for last in ("kv_a_layernorm", "kv_b_proj"))
    if missing := [x for x in (norm, linear) if x not in modules]:
        raise ValueError(
            f"layer {name!r} has the style 'mla_kv_a_proj', whose result goes into kv_a_layernorm and kv_b_proj, and "
            f"there is no {missing[0]!r}: leave the attention out, with None in the plan for each of its layers"
        )
    if styles.get(linear) != ColumnParallel():
        raise ValueError(
            f"layer {name!r} has the style 'mla_kv_a_proj', so the plan must give {linear!r} the style 'colwise': each "
            "rank's heads use all of the latent, and its gradient is summed over the ranks"
        )
    return {norm: ReplicatedParams(), linear: ColumnParallel(sums_input_gradient=False)}


def _style_activations(styles: Mapping[str, Style | None], modules: Mapping[str, torch.nn.Module]) -> dict[str, Style]:
    """Return the styles of activations with parameters, such as Apertus's, that run on a rank's columns.

    Plans of transformers leave them out.
    """
    columns = [name for name, style in styles.items() if isinstance(style, ColumnParallel) and not style.gather]
    parents = dict.fromkeys([name.rpartition(".")[0] for name in columns])
    names = [".".join([parent, "act_fn"]).lstrip(".") for parent in parents]
    activations = [name for name in names if name in modules and any(True for _ in modules[name].parameters())]
    return dict.fromkeys(activations, ReplicatedParams())


def with_stars(name: str) -> str:
    """Return a name with `*` in place of each number."""
    return ".".join(["*" if part.isdigit() else part for part in name.split(".")])


def _compile_pattern(text: str) -> re.Pattern[str]:
    """Compile a name of a plan. `*` matches one part of a name; at the start it matches any number of parts."""
    start, rest = (r"(?:.+\.)?", text[2:]) if text.startswith("*.") else ("", text)
    return re.compile(start + r"[^.]+".join([re.escape(part) for part in rest.split("*")]))


def _resolve_style(name: str, style: Any) -> Style | None:
    if style is None or isinstance(style, Style):
        return style
    if not isinstance(style, str) or style not in NAMED:
        raise ValueError(
            f"layer {name!r} has the style {style!r}, which fzero.parallel.tensor does not know: expected one of "
            f"{', '.join(NAMED)}, fzero.parallel.tensor.packed or fzero.parallel.tensor.divided; "
            "None leaves the layer replicated"
        )
    return NAMED[style]


def list_param_splits(
    module: torch.nn.Module, styles: Mapping[str, Style], parameters: Mapping[str, str]
) -> dict[str, ParamSplit]:
    """Return how each parameter of the split layers is split, by its name; an error for one that cannot be."""
    modules = dict(module.named_modules())
    splits = {}
    for name, style in styles.items():
        layer = modules[name]
        parent, _, leaf_name = name.rpartition(".")
        for key, param_split in layer_splits(name, style, layer).items():
            if isinstance(style, ColumnParallel) and not style.gather:
                size = getattr(layer, key).shape[param_split.dim] // param_split.packed
                groups = vars(modules[parent]).get("num_key_value_groups", 0) if leaf_name in _KEYS_AND_VALUES else 0
                param_split = param_split._replace(heads=count_heads(modules[parent], size), may_replicate=bool(groups))
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


def style_tied_layers(module: torch.nn.Module, styles: dict[str, Style]) -> None:
    """Give a matching style to each layer that shares its weight with a split embedding or column-parallel layer."""
    for names in _tied_names(module):
        layers = [name.rpartition(".")[0] for name in names]
        if not any(isinstance(styles.get(layer), Embedding | ColumnParallel) for layer in layers):
            continue
        for layer in layers:
            if layer not in styles:
                is_table = isinstance(module.get_submodule(layer), torch.nn.Embedding)
                styles[layer] = Embedding() if is_table else ColumnParallel(gather=True)


def check_ties(module: torch.nn.Module, param_splits: Mapping[str, ParamSplit]) -> None:
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
