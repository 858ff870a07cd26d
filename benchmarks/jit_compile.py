"""Print how long a step takes to compile and to plan, and how that grows with layers, micro-batches and ranks.

python benchmarks/jit_compile.py [--write]

A narrow GPT (width 64, batch 2 x 32), AdamW. Each compilation runs in a process of its own. Cold: from an empty cache
of Inductor, tracing and imports excluded; equal segments are compiled once, so more layers should cost little more.
Warm: a second process, from the call of the step to its end, tracing included. Plans are made for a world that is not
at hand. `--write` keeps the tables in jit_compile.md; some minutes.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import fzero
from benchmarks.report import publish, table
from fzero import optim
from tests.helpers import train_step_for
from tests.tiny_gpt import gpt_loss, gpt_params

WARM_GOAL, COLD_GOAL, LINEAR_GOAL, FLAT_GOAL, LOOP_GOAL = 15.0, 1.3, 1.25, 1.25, 1.2
LAYERS_GOAL, LEAVES_GOAL = 4.0, 20.0  # seconds of a plan of 64 layers, and of 48 layers of 197 leaves
W = 8  # width of the mixture of experts


def time_call(f: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds that a call takes, and its result."""
    start = time.perf_counter()
    result = f()
    return time.perf_counter() - start, result


def step_of(layers: int, stage: int, mesh: fzero.ranks.Mesh, k: int = 1) -> tuple[Any, tuple[Any, ...]]:
    """Make a sharded step of the narrow GPT with k micro-batches, and its arguments."""
    opt = optim.adamw(1e-3)
    step = fzero.shard(train_step_for(gpt_loss, opt, micro_batches=k), stage=stage, mesh=mesh, check=False)
    state = step.init(gpt_params(64, layers, vocab=256, context=32), opt)
    return step, (*state, mesh.split(torch.randint(256, (2 * k * mesh.size, 33))))


# In a process of its own.


def lower_step(layers: int, stage: int, k: int) -> dict[str, Any]:
    """Trace, plan and compile one rank's step of a world of two that need not be at hand, without running it."""
    import torch._inductor.compile_fx  # noqa: F401  imported before the clock starts

    from fzero.graph import _one_rank
    from fzero.graph.run import _backends

    step, args = step_of(layers, stage, fzero.mesh(dp=2, simulate=True), k)
    planned_step = step.on_mesh(_one_rank.planned_mesh((("dp", 2),)))
    args = _one_rank.one_rank_tree(args, {"dp": 2}, all_ranks=True)
    jitted = fzero.jit(planned_step)
    planned, _ = time_call(lambda: jitted.plan(*args))
    (entry,) = jitted._entries.values()
    before = sum(os.times()[:4])
    seconds, run = time_call(lambda: _backends.lower(entry.best.graph, "inductor"))
    work = sum(os.times()[:4]) - before
    return {"plan": planned, "seconds": seconds, "work": work, "segments": run.segments, "distinct": run.distinct}


def first_step(layers: int, stage: int, k: int) -> dict[str, Any]:
    """Trace, compile and run a step, in a world of this process."""
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    step, args = step_of(layers, stage, fzero.mesh(dp=1), k)
    seconds, _ = time_call(lambda: fzero.jit(step)(*args))
    torch.distributed.destroy_process_group()
    return {"seconds": seconds}


def run_in_process(what: Callable[..., Any], layers: int, stage: int, cache: str, k: int = 1) -> dict[str, Any]:
    """Run one of the two above in a new process with Inductor's cache in a folder."""
    command = [sys.executable, __file__, what.__name__, str(layers), str(stage), str(k)]
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True, text=True)
    print(what.__name__, layers, stage, k, done.stdout.splitlines()[-1], file=sys.stderr, flush=True)
    return json.loads(done.stdout.splitlines()[-1])


def verdict(good: bool) -> str:
    """Say whether a goal is met."""
    return "met" if good else "missed"


def measure_compilation() -> list[str]:
    """Measure compilation."""
    cold = []
    for stage in (2, 3):
        results = {}
        for layers in (4, 16):
            with tempfile.TemporaryDirectory() as cache:
                results[layers] = run_in_process(lower_step, layers, stage, cache)
        few, many = results[4], results[16]
        counts = [f"{x['segments']}, {x['distinct']} distinct" for x in (few, many)]
        ratio = many["work"] / few["work"]
        seconds = [f"{x['seconds']:.1f}, {x['work']:.1f}" for x in (few, many)]
        cold.append([stage, *counts, *seconds, f"{ratio:.2f}", verdict(ratio <= COLD_GOAL)])
    with tempfile.TemporaryDirectory() as cache:
        first, second = [run_in_process(first_step, 16, 3, cache)["seconds"] for _ in range(2)]
    head = ["stage", "segments, 4 layers", "16 layers", "seconds, 4 layers", "16 layers", "ratio"]
    return [
        "Cold: seconds to compile all segments, 2 ranks: by the clock, of the processors; the ratio is the latter's.",
        table([*head, f"goal: ≤ {COLD_GOAL}"], cold),
        f"From the call to the end of the first step, 16 layers, stage 3, 1 process, gloo: {first:.1f} s in the first "
        f"process, {second:.1f} s in a second one (goal: < {WARM_GOAL:.0f} s): {verdict(second < WARM_GOAL)}.",
    ]


def by_micro_batches() -> list[str]:
    """Measure what a step costs before it runs, by its micro-batches."""
    rows = []
    for stage in (1, 3):
        results = {}
        for k in (1, 8, 64):
            with tempfile.TemporaryDirectory() as cache:
                results[k] = run_in_process(lower_step, 4, stage, cache, k)
        for k, x in results.items():
            times = [x[name] / results[1][name] for name in ("plan", "work")]
            met = verdict(max(times) <= LOOP_GOAL)
            rows.append([stage, k, f"{x['plan']:.2f}", f"{x['work']:.1f}", *[f"{t:.2f}" for t in times], met])
    head = ["stage", "micro-batches", "plan, s", "compile, s", "plan / that of 1", "compile / that of 1"]
    return [
        "By micro-batches: 4 layers, 2 ranks, cold; trace and plan by the clock, compilation by the processors.",
        table([*head, f"goal: ≤ {LOOP_GOAL}"], rows),
    ]


def experts(layers: int) -> dict[str, Any]:
    """Make the parameters of a small mixture of experts: 197 leaves a layer, 64 experts of 3 matrices and 5 others."""

    def leaf(*shape: int) -> torch.Tensor:
        return torch.full(shape, 0.1, device="meta")

    def layer() -> dict[str, Any]:
        every = [{"gate": leaf(W, W), "up": leaf(W, W), "down": leaf(W, W)} for _ in range(64)]
        return {
            "ln": leaf(W),
            "q": leaf(W, W),
            "o": leaf(W, W),
            "ln2": leaf(W),
            "router": leaf(W, 64),
            "experts": every,
        }

    return {"wte": leaf(32, W), "layers": [layer() for _ in range(layers)], "head": leaf(W, 32)}


def experts_loss(params: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Compute the loss of a model in which every token goes to every expert."""
    x = params["wte"][tokens[:, :-1]].flatten(0, 1)
    for p in params["layers"]:
        x = x + torch.tanh(functional.layer_norm(x, (W,), p["ln"]) @ p["q"]) @ p["o"]
        h = functional.layer_norm(x, (W,), p["ln2"])
        share = (h @ p["router"]).softmax(-1)
        gate, up, down = [torch.stack([e[name] for e in p["experts"]]) for name in ("gate", "up", "down")]
        x = x + (torch.bmm(functional.silu(h @ gate) * (h @ up), down) * share.T.unsqueeze(-1)).sum(0)
    return functional.cross_entropy(x @ params["head"], tokens[:, 1:].flatten())


def of_many_leaves() -> list[str]:
    """Measure `fzero.plan` of models whose layers have 197 leaves, at stage 3."""
    mesh, opt = fzero.mesh(dp=2, simulate=True), optim.adamw(1e-3)
    ways = {"a layer": lambda path, leaf: ".".join(path.split(".")[:2]), "a leaf": lambda path, leaf: path}
    rows = []
    for unit, counts in (("a layer", (2, 8, 48)), ("a leaf", (2,))):
        for layers in counts:
            train_step = train_step_for(experts_loss, opt)
            step = fzero.shard(train_step, stage=3, mesh=mesh, check=False, units=ways[unit])
            args = (*step.init(experts(layers), opt), mesh.split(torch.randint(32, (4, 9))))
            took, _ = time_call(lambda step=step, args=args: fzero.plan(step, *args, world_size=8))
            rows.append([layers, unit, f"{took:.1f}", f"{took / layers:.2f}"])
            print("leaves", *rows[-1], file=sys.stderr, flush=True)
    return [
        f"Layers of 197 leaves: stage 3, 8 ranks. Goal: 48 layers in {LEAVES_GOAL:g} s.",
        table(["layers", "a unit is", "seconds", "a layer"], rows),
    ]


def measure_plan() -> list[str]:
    """Measure `fzero.plan` at stage 3."""

    def seconds(layers: int, ranks: int) -> float:
        step, args = step_of(layers, 3, fzero.mesh(dp=2, simulate=True))
        return min(
            time_call(lambda: fzero.plan(step, *args, world_size=ranks))[0] for _ in range(3 if layers < 32 else 1)
        )

    seconds(2, 2)  # imports
    by_layers = {n: seconds(n, 8) for n in (4, 8, 16, 32, 64)}
    by_ranks = {n: seconds(8, n) for n in (2, 16, 256, 4096)}
    linear = (by_layers[64] / 64) / (by_layers[8] / 8)
    flat = max(by_ranks.values()) / min(by_ranks.values())
    return [
        "Seconds of `fzero.plan` by layers: stage 3, 8 ranks.",
        table(["layers", "seconds", "a layer"], [[n, f"{t:.2f}", f"{t / n:.3f}"] for n, t in by_layers.items()]),
        f"A layer of 64 takes {linear:.2f} times one of 8 (goal, linear: ≤ {LINEAR_GOAL}): "
        f"{verdict(linear <= LINEAR_GOAL)}. 64 layers take {by_layers[64]:.1f} s (goal: ≤ {LAYERS_GOAL:g}): "
        f"{verdict(by_layers[64] <= LAYERS_GOAL)}.",
        "By ranks: stage 3, 8 layers.",
        table(["ranks", "seconds"], [[n, f"{t:.2f}"] for n, t in by_ranks.items()]),
        f"The slowest takes {flat:.2f} times the fastest (goal, flat: ≤ {FLAT_GOAL}): {verdict(flat <= FLAT_GOAL)}.",
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    children = {f.__name__: f for f in (lower_step, first_step)}
    if len(sys.argv) == 5 and sys.argv[1] in children:
        print(json.dumps(children[sys.argv[1]](*map(int, sys.argv[2:]))))
    else:
        tables = [*measure_compilation(), *by_micro_batches(), *measure_plan(), *of_many_leaves()]
        publish(__file__, "python benchmarks/jit_compile.py", tables, "--write" in sys.argv)
