"""One process of `make cuda` that asks where values lie, and what bringing them there does. It prints facts as JSON.

    python -m tests.cuda.devices batches

A script of `examples/` runs so, too: `python -m tests.cuda.devices examples/train_gpt.py --steps 2`.
"""

import json
import pathlib
import runpy
import sys
from collections.abc import Iterable
from typing import Any

import torch

import fzero
from fzero import optim, tree
from tests.cuda import log
from tests.cuda.worker import rank_0_of

WIDTH = 256
OPT = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3))


def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
    def loss_fn(params: Any, batch: Any) -> torch.Tensor:
        return (torch.tanh(batch["x"] @ params["w"] + params["b"]) ** 2).mean()

    loss, grads = fzero.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = OPT.update(grads, opt_state, params)
    return optim.apply_updates(params, updates), opt_state, loss


def make() -> dict[str, torch.Tensor]:
    return {"w": torch.ones(WIDTH, WIDTH), "b": torch.ones(WIDTH)}


def places(values: Any) -> list[str]:
    return sorted({str(x.device) for x in fzero.tree.tensors(values) if x.ndim})


def state(mesh: fzero.ranks.Mesh) -> dict[str, Any]:
    """Where parameters, state, results and gathered parameters lie at each stage, and what `init` takes of the GPU."""
    results = {}
    for stage in range(4):
        step = fzero.shard(train_step, stage=stage, mesh=mesh, check=False)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        params, opt_state = step.init(make, OPT)
        peak = torch.cuda.max_memory_allocated() - before
        held = step.state_bytes(params, opt_state) * (mesh.size if mesh.simulated else 1)
        out = step(params, opt_state, mesh.local(mesh_batch(mesh)))
        results[stage] = {"places": places((params, opt_state, out, step.gather(params))), "peak": peak, "held": held}
    return results


def cache(mesh: fzero.ranks.Mesh) -> dict[str, Any]:
    """Return what the allocator holds, and what tensors use, after `init` of 16 half-precision leaves of 12 MB."""
    opt = optim.master_weights(optim.adam(0.1), optim.Precision(torch.bfloat16))
    results = {}
    for stage in range(4):
        step = fzero.shard(train_step, stage=stage, mesh=mesh, check=False)
        result = step.init(lambda: {f"w{i}": torch.ones(3, 1024, 1024) for i in range(16)}, opt)
        results[stage] = {"reserved": torch.cuda.memory_reserved(), "used": torch.cuda.memory_allocated()}
        del result
    return results


def mesh_batch(mesh: fzero.ranks.Mesh) -> dict[str, torch.Tensor]:
    """A batch on the host, as a rank loads it."""
    return {"x": torch.ones(mesh.size, 4, WIDTH) if mesh.simulated else torch.ones(4, WIDTH)}


def batches(mesh: fzero.ranks.Mesh) -> dict[str, Any]:
    """Return what a batch's way to the GPU does: pageable, pinned already, on the GPU already."""
    host = mesh_batch(mesh)
    kinds = {"pageable": host, "pinned": {"x": host["x"].pin_memory()}, "there": mesh.device_put(host)}
    results = {}
    for kind, batch in kinds.items():
        mesh.local(batch)
        _, events = log.record(lambda batch=batch: mesh.local(batch))
        results[kind] = {"waits": log.waits(events), "copies": [e.name for e in events if e.kind == "copy"]}
    return results


def prefetch(mesh: fzero.ranks.Mesh) -> dict[str, Any]:
    """The streams of copies and kernels of three steps whose batches are taken ahead."""
    step = fzero.shard(train_step, stage=3, mesh=mesh, check=False)
    result: list[Any] = list(step.init(make, OPT))
    loaded = fzero.data.prefetch((mesh.local(mesh_batch(mesh)) for _ in range(6)), mesh)

    def call() -> None:
        result[:] = step(*result, next(loaded))[:2]

    for _ in range(2):
        call()
    _, events = log.record(call)
    copies = [e for e in events if e.kind == "copy" and e.name == "pinned to device"]
    kernels = [e for e in events if e.kind in ("kernel", "product")]
    return {
        "waits": log.waits(events),
        "copies": sorted({e.stream for e in copies}),
        "kernels": sorted({e.stream for e in kernels}),
        "first": bool(copies) and events.index(copies[0]) < events.index(kernels[0]),
        "left": sum(1 for _ in loaded),
    }


def elsewhere(mesh: fzero.ranks.Mesh) -> dict[str, str]:
    """The message for each argument that is left on the CPU."""
    step = fzero.shard(train_step, stage=0, mesh=mesh, check=False)
    params, opt_state = step.init(make, OPT)
    batch, messages = mesh.local(mesh_batch(mesh)), {}
    calls = {
        "params": (make(), opt_state, batch),
        "state": (params, OPT.init(make()), batch),
        "batch": (params, opt_state, fzero.PerRank(mesh_batch(mesh))),
    }
    for name, args in calls.items():
        for run in (step, fzero.jit(step, backend="fx")):
            try:
                run(*args)
            except ValueError as error:
                messages[f"{name}, {'jit' if run is not step else 'eager'}"] = str(error)
    return messages


def mean_of_zeros(totals: Iterable[tuple[Any, torch.Tensor]]) -> Any:
    """Read the last sums as `fzero.data.mean` does. Kernels compute nothing here, so all weights are 0."""
    return tree.map(torch.Tensor.item, [*totals][-1][0])


FACTS = {f.__name__: f for f in (state, cache, batches, prefetch, elsewhere)}


def main() -> None:
    name, *rest = sys.argv[1:]
    log.leave_out_cudnn()
    if log.without_gpu():  # NVRTC compiles nothing
        torch.special.entr = lambda x: -torch.xlogy(x, x)
        fzero.data.mean = mean_of_zeros
    if name in FACTS:
        for kind in ("simulated", "distributed"):
            if kind == "simulated":
                print("FACTS", json.dumps({"kind": kind, **FACTS[name](fzero.mesh(dp=2))}))
                continue
            with rank_0_of({"dp": 2}) as mesh:
                print("FACTS", json.dumps({"kind": kind, **FACTS[name](mesh)}))
        return
    sys.argv = [name, *rest]
    sys.path.insert(0, str(pathlib.Path(name).parent))
    runpy.run_path(name, run_name="__main__")


if __name__ == "__main__":
    main()
