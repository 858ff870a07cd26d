"""A module that is taken apart in place: its own attributes stay, and its parameters and buffers go and come back."""

from typing import Any

import torch

from fzero._torch.modules import attributes, refresh_flat_weights
from fzero._torch.types import NamedTensors
from fzero.nn._apply import Apply
from fzero.nn._copy import copy_module
from fzero.nn._functional import Functional, list_tensors, mutable_buffers, scratch_buffers
from fzero.nn._module_writes import tensors_in
from fzero.nn._remat_blocks import remat_blocks, repeated_blocks, undo_remat_blocks
from fzero.parallel.experts import use_differentiable
from fzero.zero import stand_ins

__all__ = ["full_copy", "functional_in_place", "put_back"]


def functional_in_place(module: torch.nn.Module, device: torch.device) -> Functional:
    """Take a module apart as `functional` does, with remat if it has repeated blocks; `apply` runs the module itself.

    So it keeps values that a call leaves in attributes. It holds no parameter and no buffer until `put_back`.

    Args:
        module: the module.
        device: where other tensors of the module go, such as the state of metrics.
    """
    params, frozen, buffers = list_tensors(module, is_copied=False)
    mutable, scratch = mutable_buffers(module), scratch_buffers(module)
    places, memo = _tensor_places(module), stand_ins(module)
    for m, name, _ in places:
        setattr(m, name, None)
    module.to(device)
    for m, name, x in places:
        setattr(m, name, memo[id(x)])
    refresh_flat_weights(module)
    use_differentiable(module)
    blocks = remat_blocks(module, None, mutable | scratch) if repeated_blocks(module) else ()
    buffers_and_frozen = {**buffers, **frozen}
    apply = Apply(
        module=module,
        param_names=frozenset(params),
        buffer_names=frozenset(buffers_and_frozen),
        mutable_names=mutable,
        blocks=blocks,
        is_own=True,
        scratch_names=scratch,
    )
    return Functional(apply, params, buffers_and_frozen)


def put_back(apply: Apply, tensors: NamedTensors) -> None:
    """Give the module of `functional_in_place` full parameters and buffers, and let its blocks run as before."""
    memo = _full_tensors(apply, tensors)
    for m, name, x in _tensor_places(apply.module):
        setattr(m, name, memo[id(x)])
    undo_remat_blocks(apply.module, apply.blocks)


def full_copy(apply: Apply, tensors: NamedTensors) -> torch.nn.Module:
    """Copy the module of `apply`, with full parameters and buffers in place of its stand-ins."""
    memo, values = _full_tensors(apply, tensors), [x for m in apply.module.modules() for x in attributes(m).values()]
    memo |= {id(x): x.detach() for value in values for x in tensors_in(value) if not x.is_leaf}  # deepcopy refuses it
    module_copy = copy_module(apply.module, memo)
    undo_remat_blocks(module_copy, apply.blocks)
    return module_copy


def _full_tensors(apply: Apply, tensors: NamedTensors) -> dict[int, Any]:
    """Map the ids of a module's stand-ins to parameters and buffers with values."""
    params_by_name = dict(apply.module.named_parameters())
    memo: dict[int, Any] = {
        id(p): torch.nn.Parameter(tensors[name], p.requires_grad) for name, p in params_by_name.items()
    }
    return memo | {id(x): tensors[name] for name, x in apply.module.named_buffers()}


def _tensor_places(module: torch.nn.Module) -> list[tuple[torch.nn.Module, str, torch.Tensor]]:
    """List the submodules, names and tensors of a module's parameters and buffers; a tied one has several places."""
    pairs = [(m, name, x) for m in module.modules() for name, x in [*m._parameters.items(), *m._buffers.items()]]
    return [(m, name, x) for m, name, x in pairs if x is not None]
