"""Fallback: a segment that cannot run compiled runs operation by operation, on all ranks or on none.

A compiled segment is checked before the first step: it runs once on arguments of zeros. Its results must have the
traced shapes, strides and dtypes, since later segments were compiled for these. They must be finite wherever the
results of the uncompiled operations are finite.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.fx import GraphModule

from fzero._format import format_bytes
from fzero._notice import warn_once
from fzero._torch import fork_random_state, have_equal_strides
from fzero.graph.ir import FUSED, nbytes, node_stand_ins
from fzero.graph.run._segment_compiler import (
    Code,
    CompileError,
    GraphFunction,
    compile_and_mark,
    describe_segment,
    first_line,
)
from fzero.ranks import Mesh, gather_texts

__all__ = [
    "Refusal",
    "all_refusals",
    "attempt",
    "check_outputs",
    "compile_checked",
    "merge_refusals",
    "notify",
    "serialize",
]

_MAX_COMPILE_SECONDS = 1800.0  # to wait until the other ranks have compiled


class Refusal(NamedTuple):
    """Why a segment does not run compiled.

    Attributes:
        segment: the segment's number, operations and source lines, for the user.
        reason: the reason, for the user.
        cost: the memory cost of running it uncompiled, for the user; "" if there is none.
        rank: the rank that refused.
    """

    segment: str
    reason: str
    cost: str
    rank: int = 0


def attempt(make: Callable[[], GraphFunction], cost: str = "") -> GraphFunction | Refusal:
    """Call a function that compiles. Return its code, or the reason why it failed."""
    try:
        return make()
    except CompileError as error:
        return Refusal(error.segment, error.reason, cost)


def compile_checked(
    code: Code, compile_one: Callable[[Code], GraphFunction] = compile_and_mark
) -> GraphFunction | Refusal:
    """Compile a segment, and run it once to check its results."""

    def make() -> GraphFunction:
        function = compile_one(code)
        check_outputs(code, function)
        return function

    return attempt(make, _cost_text(code))


def check_outputs(code: Code, function: GraphFunction) -> None:
    """Run compiled code on arguments of zeros, and compare its results with the traced stand-ins.

    Raises:
        CompileError: if the code fails where the uncompiled operations do not, or if its results have other shapes,
            strides or dtypes. Also if a result is not finite where that of the uncompiled operations is.
    """
    if not all(isinstance(x, torch.Tensor) for x in code.stand_ins):
        return
    with fork_random_state(x.device for x in code.stand_ins), torch.no_grad():
        try:
            outputs = list(function([_zeros_like(x) for x in code.stand_ins]))
        except Exception as error:
            if _run_uncompiled(code) is not None:
                raise CompileError(
                    describe_segment(code.graph, code.location), f"it fails compiled: {first_line(error)}"
                ) from error
            return  # the operations themselves fail on zeros, so nothing can be checked
    for i, (x, like) in enumerate(zip(outputs, code.outputs, strict=True)):
        if not _is_like(x, like) or not have_equal_strides(x, like):
            reason = f"result {i} of its compiled code is {_show_tensor(x)}, but was traced as {_show_tensor(like)}"
            raise CompileError(describe_segment(code.graph, code.location), reason)
    if not all(bool(_finite_mask(x).all()) for x in outputs):
        _check_finite(code, outputs)


def _zeros_like(x: torch.Tensor) -> torch.Tensor:
    """Make a tensor of zeros with the shape and strides of a stand-in."""
    if not x.numel():
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    reach = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1
    return torch.zeros(reach, dtype=x.dtype, device=x.device).as_strided(x.shape, x.stride())


def _check_finite(code: Code, outputs: Sequence[torch.Tensor]) -> None:
    expected = _run_uncompiled(code)
    for i, (x, y) in enumerate(zip(outputs, expected or outputs, strict=True)):
        if bool((~_finite_mask(x) & _finite_mask(y)).any()):
            reason = f"result {i} of its compiled code is not finite, but that of the uncompiled operations is"
            raise CompileError(describe_segment(code.graph, code.location), reason)


def _finite_mask(x: torch.Tensor) -> torch.Tensor:
    """Return whether each value is finite, also for 8-bit floats, for which torch lacks the kernel."""
    return (x.float() if x.is_floating_point() and x.itemsize == 1 else x).isfinite()


def _run_uncompiled(code: Code) -> Sequence[torch.Tensor] | None:
    """Run the operations one by one on arguments of zeros. Return None if that fails."""
    try:
        return GraphModule({}, code.graph).forward(*[_zeros_like(x) for x in code.stand_ins])
    except Exception:
        return None


def _is_like(x: torch.Tensor, like: torch.Tensor) -> bool:
    return x.shape == like.shape and x.dtype == like.dtype and x.device == like.device


def _show_tensor(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)} with strides {list(x.stride())}"


def _cost_text(code: Code) -> str:
    """Describe the memory cost of running a segment's operations one by one; "" if there is none."""
    fused_bytes = nbytes(*[x for n in code.graph.nodes if n.meta.get(FUSED) for x in node_stand_ins(n)])
    return f"{format_bytes(fused_bytes)} more than planned" if fused_bytes else ""


def all_refusals(refusals: Mapping[str, Refusal], mesh: Mesh | None) -> dict[str, Refusal]:
    """Return the refusals of all ranks, by the name of the code. No rank runs a refused segment compiled."""
    if mesh is None or not mesh.distributed:
        return dict(refusals)
    return merge_refusals(gather_texts(serialize(refusals, mesh.rank), mesh, "jit/refusals", _MAX_COMPILE_SECONDS))


def serialize(refusals: Mapping[str, Refusal], rank: int) -> str:
    """Serialize a rank's refusals for the other ranks."""
    return json.dumps({name: refusal._replace(rank=rank) for name, refusal in refusals.items()})


def merge_refusals(texts: Sequence[str]) -> dict[str, Refusal]:
    """Merge the serialized refusals of all ranks. The first rank's refusal of a segment is kept."""
    refusals_by_name: dict[str, Refusal] = {}
    for text in texts:
        refusals_by_name = {name: Refusal(*refusal) for name, refusal in json.loads(text).items()} | refusals_by_name
    return refusals_by_name


def notify(refusals: Sequence[Refusal], mesh: Mesh | None, strict: bool) -> None:
    """Notify the user once of the segments that run uncompiled, the reason and the cost.

    Raises:
        CompileError: if `strict`, on all ranks.
    """
    if not refusals:
        return
    segment, reason, _, rank = refusals[0]
    rest_count = len(refusals) - 1
    segments = f"{segment}{f' and {rest_count} more' if rest_count else ''}{f' (on rank {rank})' if rank else ''}"
    if strict:
        raise CompileError(segments, reason)
    if mesh is not None and mesh.distributed and mesh.rank:
        return
    cost_text = next((f", and with up to {r.cost}" for r in refusals if r.cost), "")
    warn_once(
        f"fzero.jit: {segments}: {reason}. So {'they run' if rest_count else 'it runs'} operation by operation on "
        f'every rank, as with backend="fx": slower{cost_text}. strict=True raises instead'
    )
