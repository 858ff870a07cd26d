"""Expert parallelism for mixtures of experts of transformers: an experts implementation named "fzero"."""

from functools import partial
from typing import Any

import torch

from fzero._tracebacks import api_boundary
from fzero.axes import SplitRule, axis_if_bound, axis_size
from fzero.parallel.experts._expert_split import check_axis, check_parts
from fzero.parallel.experts._layer import grouped_linear
from fzero.parallel.experts._sorted_rows import sort_rows, unsort_rows

__all__ = ["register", "split_rule"]

_DEFAULT = "fzero, in place of grouped_mm"  # the registered name of the implementation that replaces the default


@api_boundary
def register(name: str = "fzero", axis: str = "ep") -> str:
    """Register an experts implementation that sends tokens to their experts over an axis, and drops none.

    It serves the families whose experts are fused: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, GPT-OSS, DeepSeek-V3 and
    all others that transformers decorates with `use_experts_implementation`. The model itself is not changed.
    transformers is imported when this function is called, and not before.

    Args:
        name: the value of `experts_implementation=` that selects it.
        axis: the axis over which experts are split. If no axis of this name is bound, this rank holds all experts.

    Returns:
        The name.

    Raises:
        ImportError: if transformers is not installed, or too old to have a registry of experts.

    Example:
        >>> from fzero.parallel import experts
        >>> experts.transformers.register()
        'fzero'

        >>> model = AutoModelForCausalLM.from_pretrained(..., experts_implementation="fzero")  # doctest: +SKIP
        >>> apply, params, buffers = fzero.nn.functional(model)  # doctest: +SKIP
        >>> step = fzero.shard(
        ...     train_step, stage=3, mesh=mesh, split=experts.transformers.split_rule(model)
        ... )  # doctest: +SKIP
    """
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise ImportError(
            "fzero.parallel.experts.transformers.register needs transformers 5 or newer, with its registry of experts: "
            f"{error}"
        ) from error
    ALL_EXPERTS_FUNCTIONS.register(name, partial(_run_experts, axis))
    return name


def use_differentiable(module: torch.nn.Module) -> None:
    """Make the experts in a copy of a model run with an implementation that `torch.func` can differentiate.

    transformers' default, "grouped_mm", is an operator that `torch.func` refuses, so it is replaced. "eager" and
    "batched_mm" stay.

    Args:
        module: the copy, whose configuration is changed.
    """
    for m in module.modules():
        config: Any = m.config if _has_experts(m) else None
        if config is not None and config._experts_implementation == "grouped_mm":
            config._experts_implementation = register(_DEFAULT)


def _has_experts(module: Any) -> bool:
    """Return whether a module runs its experts through transformers' registry."""
    return hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")


@api_boundary
def split_rule(model: torch.nn.Module) -> SplitRule:
    """Make the rule for `fzero.shard(split=)` that splits a model's experts over the axis they were registered for.

    The rule splits the modules that run with the registered implementation. Experts with another implementation are
    refused, since they would silently compute something else if they were split.

    Args:
        model: a model of transformers, built with `experts_implementation=experts.transformers.register()`.

    Returns:
        A rule `(path, leaf) -> {axis: 0}`, or None for other leaves.

    Raises:
        ValueError: if the model has no experts that transformers' registry serves, or they run with another
            implementation.

    Example:
        >>> from fzero.parallel import experts
        >>> experts.transformers.split_rule(torch.nn.Linear(2, 2))
        Traceback (most recent call last):
        ValueError: Linear has no experts that an implementation of transformers' registry serves
    """
    leaves: dict[str, str] = {}
    for name, module in model.named_modules():
        if _has_experts(module):
            axis, count = _registered_axis(name, module), module.num_experts
            expert_leaves = [leaf for leaf, p in module.named_parameters(recurse=False) if p.ndim and len(p) == count]
            leaves |= {f"{name}.{leaf}" if name else leaf: axis for leaf in expert_leaves}
    if not leaves:
        raise ValueError(
            f"{type(model).__name__} has no experts that an implementation of transformers' registry serves"
        )

    def rule(path: str, leaf: torch.Tensor) -> dict[str, int] | None:
        parts = path.split(".")
        axes = [leaves[end] for i in range(len(parts)) if (end := ".".join(parts[i:])) in leaves]
        return {axes[0]: 0} if axes and axis_if_bound(axes[0]) else None

    return rule


def _registered_axis(name: str, module: Any) -> str:
    """Return the axis for which the implementation of a module of experts was registered."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    implementation = module.config._experts_implementation
    f = ALL_EXPERTS_FUNCTIONS.get(implementation)
    if not isinstance(f, partial) or f.func is not _run_experts:
        raise ValueError(
            f"the experts {name!r} run by {implementation!r}, which does not support axes: build the model with "
            "experts_implementation=fzero.parallel.experts.transformers.register()"
        )
    return f.args[0]


def _run_experts(
    axis: str, module: Any, hidden: torch.Tensor, index: torch.Tensor, gates: torch.Tensor
) -> torch.Tensor:
    """Run a module of experts on `hidden [t, d]`, `index [t, k]` and `gates [t, k]`."""
    has_gate = module.has_gate
    first_projection = module.gate_up_proj if has_gate else module.up_proj
    count = _count_experts(module, first_projection, axis)
    rows, order = sort_rows(hidden, index, count, axis)
    linear = partial(grouped_linear, order)

    def as_matrix(weight: torch.Tensor) -> torch.Tensor:
        return weight if module.is_transposed else weight.mT

    bias = None
    if module.has_bias:
        bias = module.gate_up_proj_bias if has_gate else module.up_proj_bias
    h = linear(rows, as_matrix(first_projection), bias)
    h = module._apply_gate(h) if has_gate else module.act_fn(h)
    y = linear(h, as_matrix(module.down_proj), module.down_proj_bias if module.has_bias else None)
    if module.has_post_expert_norm:
        y = module.post_expert_norm(y)
    return unsort_rows(y, order, gates, axis).to(hidden.dtype)


def _count_experts(module: Any, weight: torch.Tensor, axis: str) -> int:
    """Return the number of all experts, and check that this rank holds its part of them."""
    check_axis(axis)
    n = axis_size(axis_if_bound(axis))
    count = getattr(module, "num_experts", len(weight) * n)
    if len(weight) * n != count:
        raise ValueError(
            f"{type(module).__name__} has {len(weight)} of {count} experts on each of the {n} ranks along {axis!r}: "
            "set fzero.shard(split=fzero.parallel.experts.transformers.split_rule(model)), and choose an axis whose "
            "size divides the number of experts"
        )
    check_parts([weight], count, axis)
    return count
