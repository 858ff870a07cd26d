"""Jitted steps: training them beside eager ones, comparing bits, and what needs a compiler."""

import shutil
from typing import Any

import pytest
import torch

import fzero
from fzero import _torch, optim, tree
from fzero.graph._schedule_options import ScheduleOptions
from fzero.graph.ir import graph_results, is_input
from fzero.graph.run._segment import _graph_key
from fzero.graph.run._segment_compiler import Code, segment_name
from tests.helpers import LEAST
from tests.memory import peak_bytes
from tests.optim.offloading import BF16, Row

COMPILER = any(shutil.which(name) for name in ("c++", "g++", "clang++"))


needs_compiler = pytest.mark.skipif(not COMPILER, reason="no compiler")


def code_of(f: Any, *xs: torch.Tensor, name: str = "") -> Code:
    stand_ins = _torch.stand_ins_like(xs)
    graph = _torch.trace(f, stand_ins).graph
    for node, x in zip([n for n in graph.nodes if is_input(n)], stand_ins, strict=True):
        node.meta["val"] = x
    return Code(
        graph, stand_ins, [n.meta["val"] for n in graph_results(graph)], name or segment_name(_graph_key(graph))
    )


def copy_graph(values: Any) -> Any:
    return tree.map(torch.clone, values)


def bitwise(x: Any, y: Any) -> None:
    xs, ys = tree.tensors(x), tree.tensors(y)
    assert len(xs) == len(ys)
    for a, b in zip(xs, ys, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def train_both(
    step: fzero.zero.ShardedStep, jitted: fzero.graph.Jitted, params: Any, opt: Any, batches: list[Any]
) -> Any:
    """Train with both from one start; returns their states and losses."""
    eager, fast = step.init(params, opt), jitted.init(copy_graph(params), opt)
    losses: tuple[list[Any], list[Any]] = ([], [])
    for batch in batches:
        *eager, loss = step(*eager, step.mesh.split(batch))
        *fast, other = jitted(*fast, step.mesh.split(batch))
        losses[0].append(loss)
        losses[1].append(other)
    return [list(eager), losses[0]], [list(fast), losses[1]]


def entry_of(step: Any, *args: Any, world_size: Any = None, backend: str = "fx") -> Any:
    """Trace a rank's step once, in one schedule: `with_schedule` gives the others, which share the trace."""
    rank = fzero.graph.step_of_rank(fzero.jit(step, backend=backend, **LEAST), *args, world_size=world_size)
    rank.plan()
    (entry,) = rank.step._entries.values()
    return entry


def plan_of(entry: Any, **options: Any) -> fzero.graph.Plan:
    """The plan of a traced step in the schedule of these options of `fzero.jit`."""
    return entry.with_schedule(ScheduleOptions(**options).validated()).plan


WIDTH, LAYERS = 128, 3


MASTERS = Row(lambda o, p: o(optim.master_weights(optim.adamw(1e-3), BF16)), BF16)
CLIPPED = Row(lambda o, p: optim.chain(optim.clip_by_global_norm(1.0), MASTERS.make(o, p)), BF16)
WIDE = Row(lambda o, p: o(optim.adamw(1e-3)))
NO_DECAY = Row(lambda o, p: o(optim.adam(1e-3)))
ROWS = {"masters": MASTERS, "clip before": CLIPPED, "float32": WIDE, "no decay": NO_DECAY}


def params_of() -> dict[str, Any]:
    block = {"w": (WIDTH, WIDTH), "b": (WIDTH,)}
    return {"h": [{k: torch.empty(s, device="meta") for k, s in block.items()} for _ in range(LAYERS)]}


def loss_of(params: Any, x: torch.Tensor) -> torch.Tensor:
    for block in params["h"]:
        x = torch.tanh(x.to(block["w"].dtype) @ block["w"] + block["b"])
    return x.float().square().mean()


def assert_peak_is_the_allocators(step: fzero.graph.Jitted, state: list[Any], batch: Any, rtol: float) -> None:
    """Run a second step, and compare its plan's peak with the allocator's. The state must have no other owner."""
    owned = [step(*state, batch)[:-1]]
    state.clear()
    plan = step.plan(*owned[0], batch)

    def run() -> None:
        owned.append(step(*owned.pop(), batch)[:-1])

    measured = plan.argument_bytes + peak_bytes(run)
    assert abs(measured / plan.peak_bytes - 1) < rtol, (measured, plan.peak_bytes)
