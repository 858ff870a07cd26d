"""Mixtures of experts of transformers, with expert parallelism: an experts implementation named "fzero"."""

from functools import partial
from typing import Any

import torch

from fzero.axes import SplitRule, axis_size, where_bound
from fzero.parallel.experts._dispatch import sort_rows, unsort_rows
from fzero.parallel.experts._layer import check_axis, check_parts, grouped_linear

__all__ = ["register", "split"]

DEFAULT = "fzero, in place of grouped_mm"  # what transformers calls an implementation that nobody asked for


def register(name: str = "fzero", axis: str = "ep") -> str:
    """Register an experts implementation that sends tokens to their experts over an axis, without drops.

    It serves the families whose experts are fused: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, GPT-OSS, DeepSeek-V3 and
    all others that transformers decorates with `use_experts_implementation`. The model itself is untouched.
    transformers is imported here, and not before.

    Args:
        name: what `experts_implementation=` is to call it.
        axis: the name of the axis that experts are split over. Where none of that name is bound, all experts are here.

    Returns:
        The name.

    Raises:
        ImportError: if transformers is not installed, or too old to have a registry of experts.

    Example:
        >>> from fzero.parallel import experts as moe
        >>> moe.transformers.register()
        'fzero'

        >>> model = AutoModelForCausalLM.from_pretrained(..., experts_implementation="fzero")  # doctest: +SKIP
        >>> apply, params, buffers = fzero.nn.functional(model)  # doctest: +SKIP
        >>> step = fzero.shard(train_step, stage=3, mesh=mesh, split=moe.transformers.split(model))  # doctest: +SKIP
    """
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise ImportError(
            f"moe.transformers.register needs transformers 5 or newer, with its registry of experts: {error}"
        ) from error
    ALL_EXPERTS_FUNCTIONS.register(name, partial(_experts, axis))
    return name


def use_differentiable(module: torch.nn.Module) -> None:
    """Have the experts of a copy of a model run by an implementation that `torch.func` differentiates.

    Those of transformers' default, "grouped_mm", are an operator that it refuses. "eager" and "batched_mm" stay.

    Args:
        module: the copy, whose configuration is changed.
    """
    for m in module.modules():
        config: Any = m.config if _has_experts(m) else None
        if config is not None and config._experts_implementation == "grouped_mm":
            config._experts_implementation = register(DEFAULT)


def _has_experts(module: Any) -> bool:
    """Return whether a module's forward pass is one of transformers' registry of experts."""
    return hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")


def split(model: torch.nn.Module) -> SplitRule:
    """Make the rule for `fzero.shard(split=)` that splits a model's experts over the axis they were registered for.

    It knows the modules that run by the registered implementation. Experts of others, which would silently compute
    something else if they were split, are refused.

    Args:
        model: a model of transformers, built with `experts_implementation=moe.transformers.register()`.

    Returns:
        A rule `(path, leaf) -> {axis: 0}`, or None for other leaves.

    Raises:
        ValueError: if the model has no experts that transformers' registry serves, or they run by another
            implementation.

    Example:
        >>> from fzero.parallel import experts as moe
        >>> moe.transformers.split(torch.nn.Linear(2, 2))
        Traceback (most recent call last):
        ValueError: Linear has no experts that an implementation of transformers' registry serves
    """
    leaves: dict[str, str] = {}
    for name, module in model.named_modules():
        if _has_experts(module):
            axis, count = _axis_of(name, module), module.num_experts
            own = [leaf for leaf, p in module.named_parameters(recurse=False) if p.ndim and len(p) == count]
            leaves |= {f"{name}.{leaf}" if name else leaf: axis for leaf in own}
    if not leaves:
        raise ValueError(
            f"{type(model).__name__} has no experts that an implementation of transformers' registry serves"
        )

    def rule(path: str, leaf: torch.Tensor) -> dict[str, int] | None:
        parts = path.split(".")
        found = [leaves[end] for i in range(len(parts)) if (end := ".".join(parts[i:])) in leaves]
        return {found[0]: 0} if found and where_bound(found[0]) else None

    return rule


def _axis_of(name: str, module: Any) -> str:
    """Return the axis that the implementation of a module of experts was registered for."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    chosen = module.config._experts_implementation
    f = ALL_EXPERTS_FUNCTIONS.get(chosen)
    if not isinstance(f, partial) or f.func is not _experts:
        raise ValueError(
            f"the experts {name!r} run by {chosen!r}, which knows nothing of axes: build the model with "
            "experts_implementation=fzero.parallel.experts.transformers.register()"
        )
    return f.args[0]


def _experts(axis: str, module: Any, hidden: torch.Tensor, index: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Do what a module of experts does for `hidden [t, d]`, `index [t, k]` and `gates [t, k]`."""
    gated = module.has_gate
    first = module.gate_up_proj if gated else module.up_proj
    count = _count(module, first, axis)
    rows, order = sort_rows(hidden, index, count, axis)
    linear = partial(grouped_linear, order)

    def stored(weight: torch.Tensor) -> torch.Tensor:
        return weight if module.is_transposed else weight.mT

    bias = (module.gate_up_proj_bias if gated else module.up_proj_bias) if module.has_bias else None
    h = linear(rows, stored(first), bias)
    h = module._apply_gate(h) if gated else module.act_fn(h)
    y = linear(h, stored(module.down_proj), module.down_proj_bias if module.has_bias else None)
    if module.has_post_expert_norm:
        y = module.post_expert_norm(y)
    return unsort_rows(y, order, gates, axis).to(hidden.dtype)


def _count(module: Any, weight: torch.Tensor, axis: str) -> int:
    """Return the number of all experts, and check that this rank has its part."""
    check_axis(axis)
    n = axis_size(where_bound(axis))
    count = getattr(module, "num_experts", len(weight) * n)
    if len(weight) * n != count:
        raise ValueError(
            f"{type(module).__name__} has {len(weight)} of {count} experts on each of the {n} ranks along {axis!r}: "
            "say fzero.shard(split=fzero.parallel.experts.transformers.split(model)), and let the axis divide "
            "their number"
        )
    check_parts([weight], count, axis)
    return count
