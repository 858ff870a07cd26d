"""Print what a new length of a batch costs: traced anew, and run by code that serves all lengths.

python benchmarks/lengths.py [--layers 4] [--lengths 20] [--ranks 0] [--write]

One way calls `run.plan` with two lengths before the first step, and so compiles once; its plans count to the first.

A Llama of transformers (width 128, 4 heads), AdamW with a clip, stage 3, on two simulated ranks; or with `--ranks 2` on
as many processes. Each way runs in a process of its own, from an empty cache of Inductor. Seconds are of the first step
at each length, with code for all lengths, and with code for each (the first five lengths). Steps are timed at the last
length, beside the code that was compiled for that length alone, in turns.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import fzero
from benchmarks.report import publish, table
from fzero import optim

GOAL, STEP_GOAL = 2.0, 1.05
FEW = 5  # lengths for which code is compiled for each


def lengths(count: int) -> list[int]:
    """List different lengths, in no order."""
    return [64 + 8 * (7 * i % count) for i in range(count)]


def step_of(layers: int, ranks: int, backend: str, dynamic: bool) -> tuple[Any, list[Any], Any]:
    """Make a jitted step, its state and its buffers."""
    import transformers

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=512)
    torch.manual_seed(0)
    apply, params, buffers = fzero.nn.functional(transformers.LlamaForCausalLM(config).train())
    opt = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3))

    def train_step(params: Any, opt_state: Any, buffers: Any, batch: Any) -> Any:
        loss, grads = fzero.value_and_grad(lambda p, u, b: apply(p, u, **b)[0].loss)(params, buffers, batch)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, loss

    mesh = fzero.mesh(dp=-1) if ranks else fzero.mesh(dp=2)
    step = fzero.shard(train_step, stage=3, mesh=mesh)
    jitted = fzero.jit(step, backend=backend, dynamic=dynamic)  # pyright: ignore[reportArgumentType]
    return jitted, list(step.init(params, opt)), buffers


def batch_of(mesh: fzero.ranks.Mesh, length: int) -> Any:
    ids = torch.randint(0, 512, (4, length), generator=torch.Generator().manual_seed(length))
    return mesh.split({"input_ids": ids, "labels": ids})


def seconds_of(run: Any, state: list[Any], buffers: Any, length: int) -> float:
    """Run a step; returns how long it took. The state goes on."""
    batch = batch_of(run.mesh, length)
    start = time.perf_counter()
    *state[:], _ = run(*state, buffers, batch)
    return time.perf_counter() - start


def child(asked: argparse.Namespace) -> None:
    """Measure one way, in this process."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    used = lengths(asked.count)[: FEW if asked.way == "each" else None]
    run, state, buffers = step_of(asked.layers, asked.ranks, asked.backend, asked.way != "each")
    start = time.perf_counter()
    for n in used[:2] if asked.way == "planned" else ():
        run.plan(*state, buffers, batch_of(run.mesh, n))
    planned = time.perf_counter() - start
    first = [seconds_of(run, state, buffers, n) for n in used]
    first[0] += planned
    result: dict[str, Any] = {"first": first}
    if asked.way == "all" and asked.backend == "inductor":
        other, others, _ = step_of(asked.layers, asked.ranks, asked.backend, False)
        at = used[-1]
        seconds_of(other, others, buffers, at)
        rounds = [(seconds_of(run, state, buffers, at), seconds_of(other, others, buffers, at)) for _ in range(201)]
        ratios = sorted(a / b for a, b in rounds[1:])
        result["steps"] = [statistics.median(b for _, b in rounds), *statistics.quantiles(ratios, n=4)]
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(result))


def measure(asked: argparse.Namespace, backend: str, way: str) -> dict[str, Any]:
    """Measure one way in a process of its own, from an empty cache."""
    options = [
        "--layers",
        asked.layers,
        "--lengths",
        asked.count,
        "--ranks",
        asked.ranks,
        "--backend",
        backend,
        "--way",
        way,
    ]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(asked.ranks)] if asked.ranks else []
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "OMP_NUM_THREADS": "1"}
        words = [sys.executable, *launcher, __file__, *map(str, options)]
        done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    return json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])


def rows(asked: argparse.Namespace) -> Iterator[list[str]]:
    alone: dict[str, float] = {}
    for backend, way in (("fx", "all"), ("inductor", "all"), ("inductor", "planned")):
        all_ = measure(asked, backend, way)
        each = measure(asked, backend, "each") if (backend, way) == ("inductor", "all") else None
        first, later = all_["first"], all_["first"][2:]
        ratio = sum(first) / alone.setdefault(backend, first[0])
        yield [
            backend if way == "all" else f"{backend}, two lengths planned first",
            f"{first[0]:.1f} s",
            f"{first[1]:.1f} s",
            f"{statistics.median(later):.2f} s ({min(later):.2f} to {max(later):.2f})",
            f"{sum(first):.1f} s",
            f"{ratio:.2f} (goal {GOAL:g})",
            "" if each is None else f"{statistics.median(each['first'][1:]):.1f} s",
            ""
            if "steps" not in all_
            else "{1:.3f} to {3:.3f}, median {2:.3f} (goal {goal:g})".format(*all_["steps"], goal=STEP_GOAL),
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lengths", dest="count", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--backend", default="inductor", help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    if asked.way:
        child(asked)
        return
    head = [
        "backend",
        "first length",
        "second",
        "each later one",
        f"all {asked.count}",
        "all / one length",
        "code for each: a length",
        "steps: ratio to code for one length",
    ]
    load = f"Load of the machine at the start: {os.getloadavg()[0]:.1f}."
    of = f"A Llama of {asked.layers} layers on {asked.ranks or 'two simulated'} ranks"
    what = f"{of}. Seconds are of a first step: trace, schedule, compile, run."
    parts = [what, table(head, list(rows(asked))), load]
    publish(__file__, f"python benchmarks/lengths.py --layers {asked.layers} --ranks {asked.ranks}", parts, asked.write)


if __name__ == "__main__":
    main()
