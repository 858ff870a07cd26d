"""Write benchmarks/cuda.md from what `make cuda` measured."""

import json
from collections import Counter
from typing import Any

import torch

from benchmarks.report import publish, table
from tests.cuda import processes
from tests.cuda.log import is_flash_attention
from tests.cuda.steps import LLAMA, MIXTRAL, SIZES
from tests.cuda.timeline import Timeline, draw

MB = 1e6
LARGE = {LLAMA: "one sequence of 8,192 tokens", MIXTRAL: "one sequence of 4,096 tokens, experts on 8 ranks"}


def write() -> None:
    """Write the tables."""
    measured = [json.loads(line) for line in processes.MEASURED.read_text().splitlines()]
    rows, peers = [r for r in measured if "peer" not in r], [r for r in measured if "peer" in r]
    card = torch.cuda.get_device_name() if processes.has_gpu() else "no GPU: the CUDA without one of tests/cuda/runtime"
    parts = [
        f"Measured on {card}. One rank of 8; the other ranks do not exist. Without a GPU the values mean nothing, and "
        "no time is measured: order, number, memory and streams are torch's own. MB are 1e6 bytes.",
        "## Laws",
        _laws(),
        "## Memory",
        "`requested` is the caching allocator's peak of requested bytes, `peak` that of its blocks, `reserved` that of "
        "its segments, in a steady step. `plan` is `Plan.peak_bytes`, beside which a plan tells cuBLAS's workspace: "
        "33.6 MB, which are in the other columns; `planned` is `Plan.allocator_peaks`, of blocks or of segments. "
        "`expandable` is a run with `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`. On 64 ranks, in bfloat16 with "
        "float32 masters and remat: "
        f"{'; '.join(f'{name} with {batch}' for name, batch in LARGE.items())}.",
        _memory([r for r in rows if r["task"] in {*SIZES, *LARGE} and r["plan"]]),
        "## What a steady step asks of CUDA",
        "Products are calls of cuBLAS. A wait is a call in which the host stands still until the device is done.",
        _counts(_first([r for r in rows if r["task"] not in SIZES and r["ranks"] == 8 and _is_plain(r)])),
        "## Launches beside FSDP2",
        "The perceptron at stage 3 on two ranks, with AdamW and a clip of the norm. FSDP2 has a unit for each layer, "
        "as fzero has; it has `nn.Linear`, and torch's fused AdamW.",
        _launches([r for r in rows if r["task"] == "dense" and r["ranks"] == 2 and r["stage"] == 3], peers),
        "## Kernels by card",
        "The toy transformer computes its loss in bfloat16, at stage 3. A card that is shown has the A100's, the "
        "H100's or the B200's architecture, and nothing more of it. cuDNN's attention is off in `make cuda`.",
        _kernels([r for r in rows if "card" in r]),
        "## A timeline of Llama 3 8B",
        "64 H100, eight to a machine, one sequence of 8,192 tokens each, stage 3, bfloat16, remat. Order, streams and "
        "waits are the log's; seconds are those of fzero's cost model on `fzero.tuning.H100`, not measured. A "
        "collective is hidden where the compute stream does not wait for it.",
        _timelines(_first([r for r in rows if r.get("timeline")])),
        "![The step's timeline, and two parts of it](results/timeline.png)",
        "## What a recorded step asks of CUDA",
        "`fzero.jit(step, device_graph=True)`: the other kernels copy the batch in and the loss out.",
        _graphs(_first([r for r in rows if r["graph"]])),
        "## Collectives behind products",
        "A collective is hidden if the compute stream was given products after the collective was issued and before it "
        "had to wait for it. Stage 3.",
        _print_hidden(_first([r for r in rows if r["task"] in SIZES and r["stage"] == 3])),
    ]
    publish(str(processes.ROOT / "benchmarks" / "cuda.py"), "make cuda", parts, write=True)


def _is_plain(row: dict[str, Any]) -> bool:
    return not row["default"] and not row["graph"] and "card" not in row and not row.get("timeline")


def _first(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out what another process measured already."""
    results: dict[Any, dict[str, Any]] = {}
    for r in rows:
        results.setdefault(_key(r), r)
    return [*results.values()]


def _launches(rows: list[dict[str, Any]], peers: list[dict[str, Any]]) -> str:
    head = ["step", "kernels", "products", "collectives", "copies within the device", "copies to the device", "events"]
    lines = []
    for name, r in [(f"fzero {r['backend']}", r) for r in rows] + [(r["peer"], r) for r in peers]:
        counts = r["counts"]
        collectives = sum(n for kind, n in counts.items() if kind.startswith("collective"))
        kinds = ("copy: device to device", "copy: pinned to device", "record event")
        lines.append([name, counts["kernel"], counts["product"], collectives, *(counts.get(x, 0) for x in kinds)])
    return table(head, lines)


def _timelines(rows: list[dict[str, Any]]) -> str:
    """List the seconds of each timeline, and draw the last one."""
    head = ["model", "backend", "step ms", "collectives ms", "waited for ms", "hidden"]
    lines = []
    for r in rows:
        result = Timeline.of(r["timeline"])
        seconds = (result.seconds, result.communication, result.exposed)
        lines.append([r["task"], r["backend"], *(f"{1e3 * x:,.0f}" for x in seconds), f"{result.hidden:.1%}"])
        title = f"{r['task']}, rank 0 of {r['ranks']}: {result.hidden:.1%} of the collectives' time is hidden"
        draw(result, title, processes.ROOT / "benchmarks" / "results" / "timeline.png")
    return table(head, lines)


def _kernels(rows: list[dict[str, Any]]) -> str:
    head = ["card", "backend", "attention", "products", "Triton kernels that ptxas made"]
    lines = []
    for r in rows:
        is_flash = any(is_flash_attention(name) for name in r["kernels"])
        products = [name for name in r["kernels"] if name.startswith("cublas")]
        made = ", ".join(f"{n} for {target}" for target, n in r["targets"].items())
        lines.append([r["card"], r["backend"], "flash" if is_flash else "other", ", ".join(products), made or "none"])
    return table(head, lines)


def _graphs(rows: list[dict[str, Any]]) -> str:
    head = ["task", "backend", "stage", "graphs", "other kernels", "copies", "waits"]
    lines = []
    for r in rows:
        counts = r["counts"]
        copies = sum(n for name, n in counts.items() if name.startswith("copy"))
        numbers = [counts.get("graph", 0), counts.get("kernel", 0), copies]
        lines.append([r["task"], r["backend"], r["stage"], *numbers, len(r["waits"])])
    return table(head, lines)


def _print_hidden(rows: list[dict[str, Any]]) -> str:
    head = ["model", "backend", "all_gathers", "hidden", "reduce_scatters", "hidden"]
    lines = []
    for r in rows:
        line = [r["task"], r["backend"]]
        for kind in ("all_gather", "reduce_scatter"):
            products = [n for name, n, _ in r["collectives"] if name.startswith(kind)]
            line += [len(products), sum(bool(n) for n in products)]
        lines.append(line)
    return table(head, lines)


def _laws() -> str:
    """List each law with the number of cases that hold, and the reason where it does not hold yet."""
    results: dict[str, Counter[str]] = {}
    reasons: dict[str, set[str]] = {}
    for row in json.loads(processes.LAWS.read_text()):
        name = row["law"].partition("::")[2].partition("[")[0].removeprefix("test_").replace("_", " ")
        results.setdefault(name, Counter())[row["outcome"]] += 1
        reasons.setdefault(name, set()).update({row["reason"]} - {""})
    head = ["law", "cases that hold", "that do not hold yet", "why"]
    lines = [
        [name, n["passed"], n["xfailed"] + n["failed"] or "", "; ".join(sorted(reasons[name]))]
        for name, n in results.items()
    ]
    return table(head, lines)


def _memory(rows: list[dict[str, Any]]) -> str:
    head = ["model", "backend", "stage", "plan MB", "requested MB", "peak MB"]
    head += [
        f"{ratio}{how}"
        for how in ("", ", expandable")
        for ratio in ("peak / planned", "reserved / peak", "reserved / planned")
    ]
    expandable = {_key(r): r for r in rows if r["expandable"]}
    lines = [
        [
            *(r["task"], r["backend"], r["stage"]),
            *(f"{r[name] / MB:,.1f}" for name in ("plan", "requested", "peak")),
            *_ratios(r),
            *(_ratios(expandable[_key(r)]) if _key(r) in expandable else ["", ""]),
        ]
        for r in _first([r for r in rows if not r["expandable"]])
    ]
    return table(head, lines)


def _key(r: dict[str, Any]) -> tuple[Any, ...]:
    return r["task"], r["backend"], r["stage"]


def _ratios(r: dict[str, Any]) -> list[str]:
    """Return the peak and the reserved bytes in relation to those of the plan's simulated allocator."""
    planned = r["planned"]
    reserved = [f"{r['reserved'] / n:.3f}" for n in (r["peak"], planned["reserved_bytes"])]
    return [f"{r['peak'] / planned['allocated_bytes']:.4f}", *reserved]


def _counts(rows: list[dict[str, Any]]) -> str:
    head = ["task", "backend", "stage", "kernels", "products", "collectives", "copies within the device", "waits"]
    lines = []
    for r in rows:
        counts = r["counts"]
        collectives = sum(n for name, n in counts.items() if name.startswith("collective"))
        waits = ", ".join(f"{n} x {name}" for name, n in Counter(r["waits"]).items())
        copies = counts.get("copy: device to device", 0)
        numbers = [counts.get("kernel", 0), counts.get("product", 0), collectives, copies]
        lines.append([r["task"], r["backend"], r["stage"], *numbers, waits or "none"])
    return table(head, lines)
