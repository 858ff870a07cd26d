"""Start the processes of `make cuda`, on the CUDA without a GPU or on a real one, and keep what they measured."""

import functools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections import Counter
from typing import Any

import torch

from tests.cuda import build

ROOT = pathlib.Path(__file__).parents[2]
ENVIRONMENT = ROOT / ".venv-cuda"
RUNTIME = ENVIRONMENT / "runtime"
MEASURED = ENVIRONMENT / "measured.jsonl"  # what `python -m tests.cuda` writes benchmarks/cuda.md from
LAWS = ENVIRONMENT / "laws.json"
COMPILED = ENVIRONMENT / "compiled"  # what Inductor and Triton make for a card that is shown
SECONDS = 900


def is_here() -> bool:
    """Return whether this Python has a CUDA build of torch, so that `make cuda` can run."""
    return torch.version.cuda is not None


@functools.cache
def has_gpu() -> bool:
    """Return whether there is a real GPU. This process never loads the CUDA without one."""
    return torch.cuda.is_available()


@functools.cache
def variables(lazy: bool = False) -> dict[str, str]:
    """Return the environment of the processes of `make cuda`."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    env |= {"LOCAL_RANK": "0", "TORCH_NCCL_ENABLE_MONITORING": "0", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if has_gpu():
        return env
    built = build.libraries(RUNTIME)
    env |= {"LD_PRELOAD": str(built["runtime"]), "LD_LIBRARY_PATH": str(RUNTIME), "TRITON_LIBCUDA_PATH": str(RUNTIME)}
    return env | ({"CUDA_LOG_LAZY": "1"} if lazy else {})


@functools.cache
def measure_task(
    task: str,
    backend: str,
    *stages: int,
    ranks: int = 8,
    lazy: bool = False,
    default_device: bool = False,
    root: pathlib.Path = ROOT,
    sanitizer: bool = False,
    device_graph: bool = False,
    card: str = "",
    timed: bool = False,
    expandable: bool = False,
) -> dict[int, dict[str, Any]]:
    """Measure a task in a process of its own, and return the facts of each stage (`tests.cuda.worker`).

    Args:
        task: a name in `tests.cuda.steps.TASKS`.
        backend: "eager", "fx" or "inductor".
        *stages: by default all.
        ranks: of the world, of which only rank 0 exists.
        lazy: whether large copies are noted and not made, so that models of real size fit into this machine.
        default_device: whether the process begins with `torch.set_default_device("cuda")`.
        sanitizer: whether torch's CUDA sanitizer watches; what it watches is not kept for the tables.
        device_graph: whether the step is recorded as a graph of the device.
        card: the card that is shown, "A100", "H100" or "B200"; what is compiled for it is compiled anew. By default the
            H100, or the GPU that is there.
        timed: whether work and collectives get their seconds by the cost model (`tests.cuda.timeline`).
        expandable: whether the allocator's segments grow instead of having a size.
        root: the project that is measured; another than this one is not kept for the tables.

    Raises:
        AssertionError: if the process fails; with its last lines.
    """
    command = [sys.executable, "-m", "tests.cuda.worker", task, "--backend", backend, "--ranks", str(ranks)]
    command += ["--default-device"] * default_device + ["--device-graph"] * device_graph + ["--timeline"] * timed
    output = run([*command, "--stages", *map(str, stages or range(4))], root, lazy, sanitizer, card, expandable)
    rows = [json.loads(line.removeprefix("FACTS ")) for line in output.splitlines() if line.startswith("FACTS ")]
    compiled = {"card": card, "targets": targets(card)} if card else {}
    with MEASURED.open("a") as file:
        for row in rows if root == ROOT and not sanitizer else ():
            what = {"task": task, "backend": backend, "ranks": ranks, "default": default_device, "graph": device_graph}
            what |= compiled | {"expandable": expandable}
            file.write(json.dumps(what | row) + "\n")
    return {row["stage"]: row for row in rows}


@functools.cache
def peer(*, compiled: bool) -> dict[str, Any]:
    """Measure FSDP2 with fused AdamW on the perceptron, at two ranks (`tests.cuda.peer`)."""
    output = run([sys.executable, "-m", "tests.cuda.peer", *["--compile"] * compiled])
    (row,) = [json.loads(x.removeprefix("FACTS ")) for x in output.splitlines() if x.startswith("FACTS ")]
    with MEASURED.open("a") as file:
        file.write(json.dumps({"peer": "FSDP2 compiled" if compiled else "FSDP2 eager"} | row) + "\n")
    return row


def targets(card: str) -> dict[str, int]:
    """Count what ptxas made for a card that was shown, by architecture."""
    results = [path for path in COMPILED.joinpath(card).rglob("*.ptx") if path.with_suffix(".cubin").exists()]
    return dict(Counter(re.findall(r"^\.target (\w+)", path.read_text(), re.M)[0] for path in results))


def run(
    command: list[str],
    root: pathlib.Path = ROOT,
    lazy: bool = False,
    sanitizer: bool = False,
    card: str = "",
    expandable: bool = False,
) -> str:
    """Run a command in a project, in the environment of `make cuda`, and return its output.

    Raises:
        AssertionError: if it fails; with its last lines.
    """
    env = variables(lazy) | {"PYTHONPATH": str(root)}
    env |= {"TORCH_CUDA_SANITIZER": "1"} if sanitizer else {}
    env |= {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if expandable else {}
    if card:
        shutil.rmtree(COMPILED / card, ignore_errors=True)
        env |= {"CUDA_LOG_CARD": card, "TORCHINDUCTOR_CACHE_DIR": str(COMPILED / card)}
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, f"{' '.join(command[1:])}:\n{done.stdout[-1000:]}\n{done.stderr[-4000:]}"
    return done.stdout
