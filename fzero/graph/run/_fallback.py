"""Fallback: a segment that cannot run compiled runs operation by operation, on all ranks or on none.

A segment is proved before the first step: it runs once on arguments that are made up. Its results must have the shapes,
strides and dtypes that were traced, since all that follows was compiled for these. They must be finite where those of
the operations themselves are.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule

from fzero._notice import notice
from fzero._torch import have_equal_strides
from fzero.graph._ir import FUSED, nbytes, values
from fzero.graph.planning._text import size
from fzero.graph.run._compile import Code, CompileError, Runs, compiled, described, first_line
from fzero.ranks import Mesh, gather_texts

__all__ = ["Refusal", "all_refusals", "attempt", "packed", "prove", "proved", "tell", "united"]

PATIENCE = 1800.0  # seconds that a rank waits until the others have compiled


class Refusal(NamedTuple):
    """Why a segment does not run compiled.

    Attributes:
        segment: its place, operations and lines, for the user.
        reason: what happened.
        cost: what it takes to run it uncompiled.
        rank: on which rank it happened.
    """

    segment: str
    reason: str
    cost: str
    rank: int = 0


def attempt(make: Callable[[], Runs], cost: str = "") -> Runs | Refusal:
    """Compile something, or return why that cannot be."""
    try:
        return make()
    except CompileError as error:
        return Refusal(error.segment, error.reason, cost)


def proved(code: Code, compile_one: Callable[[Code], Runs] = compiled) -> Runs | Refusal:
    """Compile a segment, and run it once to see whether its results are those that were traced."""

    def make() -> Runs:
        runs = compile_one(code)
        prove(code, runs)
        return runs

    return attempt(make, _cost(code))


def prove(code: Code, runs: Runs) -> None:
    """Run compiled code on arguments that are made up, and compare its results with what was traced.

    Raises:
        CompileError: if it fails and the operations one by one do not. Or if its results have other shapes, strides or
            dtypes, or are not finite where the results of the operations one by one are.
    """
    if not all(isinstance(x, torch.Tensor) for x in code.fakes):
        return
    cards = sorted({x.device.index or 0 for x in code.fakes if x.device.type == "cuda"})
    with torch.random.fork_rng(cards), torch.no_grad():
        try:
            got = list(runs([_made_up(x) for x in code.fakes]))
        except Exception as error:
            if _uncompiled(code) is not None:
                raise CompileError(
                    described(code.graph, code.where), f"it fails compiled: {first_line(error)}"
                ) from error
            return  # of arguments like these it can make nothing
    for i, (x, like) in enumerate(zip(got, code.made, strict=True)):
        if _form(x) != _form(like) or not have_equal_strides(x, like):
            reason = f"result {i} of its compiled code is {_shown(x)}; traced was {_shown(like)}"
            raise CompileError(described(code.graph, code.where), reason)
    if not all(bool(_finite(x).all()) for x in got):
        _prove_finite(code, got)


def _made_up(fake: torch.Tensor) -> torch.Tensor:
    """Make a tensor of zeros that lies as a stand-in does."""
    if not fake.numel():
        return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
    reach = sum((n - 1) * s for n, s in zip(fake.shape, fake.stride(), strict=True)) + 1
    return torch.zeros(reach, dtype=fake.dtype, device=fake.device).as_strided(fake.shape, fake.stride())


def _prove_finite(code: Code, got: Sequence[torch.Tensor]) -> None:
    right = _uncompiled(code)
    for i, (x, y) in enumerate(zip(got, right or got, strict=True)):
        if bool((~_finite(x) & _finite(y)).any()):
            reason = f"result {i} of its compiled code is not finite; that of the operations one by one is"
            raise CompileError(described(code.graph, code.where), reason)


def _finite(x: torch.Tensor) -> torch.Tensor:
    """Say of each value whether it is finite, also of 8-bit floats, for which torch lacks the kernel."""
    return (x.float() if x.is_floating_point() and x.itemsize == 1 else x).isfinite()


def _uncompiled(code: Code) -> Sequence[torch.Tensor] | None:
    """Run the operations one by one on arguments that are made up. None if that fails."""
    try:
        return GraphModule({}, code.graph).forward(*[_made_up(x) for x in code.fakes])
    except Exception:
        return None


def _form(x: torch.Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), x.dtype, x.device


def _shown(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)} with strides {list(x.stride())}"


def _cost(code: Code) -> str:
    """Say what it costs to run a segment's operations one by one."""
    stored = nbytes(*[x for n in code.graph.nodes if n.meta.get(FUSED) for x in values(n)])
    return f"{size(stored)} more than planned" if stored else ""


def all_refusals(mine: Mapping[str, Refusal], mesh: Mesh | None) -> dict[str, Refusal]:
    """Return the refusals of all ranks, by the name of the code: what one cannot run compiled, none does."""
    if mesh is None or not mesh.distributed:
        return dict(mine)
    return united(gather_texts(packed(mine, mesh.rank), mesh, "jit/refusals", PATIENCE))


def packed(refusals: Mapping[str, Refusal], rank: int) -> str:
    """Write a rank's refusals down for the others."""
    return json.dumps({name: refusal._replace(rank=rank) for name, refusal in refusals.items()})


def united(texts: Sequence[str]) -> dict[str, Refusal]:
    """Return the refusals that ranks have written down; of one segment those of the first rank."""
    found: dict[str, Refusal] = {}
    for text in texts:
        found = {name: Refusal(*refusal) for name, refusal in json.loads(text).items()} | found
    return found


def tell(refusals: Sequence[Refusal], mesh: Mesh | None, strict: bool) -> None:
    """Say once what runs uncompiled, why, and what it costs.

    Raises:
        CompileError: if `strict`, on all ranks.
    """
    if not refusals:
        return
    segment, reason, _, rank = refusals[0]
    more = len(refusals) - 1
    where = f"{segment}{f' and {more} more' if more else ''}{f' (on rank {rank})' if rank else ''}"
    if strict:
        raise CompileError(where, reason)
    if mesh is not None and mesh.distributed and mesh.rank:
        return
    stored = next((f", and with up to {r.cost}" for r in refusals if r.cost), "")
    notice(
        f"fzero.jit: {where}: {reason}. So {'they run' if more else 'it runs'} operation by operation on every rank, "
        f'as with backend="fx": slower{stored}. strict=True raises instead'
    )
