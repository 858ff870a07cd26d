"""Runs with tensor parallelism, pipelines and split sequences that others published, planned.

python -m benchmarks.published.parallel --write        (twenty minutes)

No constant was fitted to these runs.
"""

import argparse
import math
import pathlib
import re
from collections.abc import Mapping
from dataclasses import replace

import torch

from benchmarks.published.__main__ import Result, plan_run
from benchmarks.published.runs import CARDS, GIB, Run, code_of, rows_of
from benchmarks.report import publish, table
from fzero.tuning import Configuration
from fzero.tuning._table_views import format_remat
from fzero.tuning.models import PRESETS

REMAT = {"full": True, "selective-op": "matmuls"}  # selective-op keeps most products
STAGES = 4  # of a rank: two blocks each, and fewer in the first and the last, as in Llama 3
WAYS = ("as it ran", "recompute")


def runs() -> list[Run]:
    """List torchtitan's runs with tp that fzero can say, and those of Llama 3's paper."""
    return [*[_torchtitan(r) for r in rows_of("torchtitan") if _can_say(r)], *map(_llama, rows_of("llama3_paper"))]


def _can_say(row: Mapping[str, str]) -> bool:
    splits = {word.rstrip("0123456789") for word in row["parallel"].split()}
    return "tp" in splits and not {"cp", "async-tp"} & splits


def long_runs() -> list[Run]:
    """List torchtitan's runs with split sequences: its tables 2 (8 B, 8 GPUs) and 6 (405 B, 512 GPUs)."""
    return [_torchtitan(r) for r in rows_of("torchtitan") if " cp" in r["parallel"]]


def _torchtitan(row: Mapping[str, str]) -> Run:
    sizes = {name: int(n) for name, n in re.findall(r"([a-z]+)(\d+)", row["parallel"])}
    shape, batch = PRESETS[row["model"].replace("llama-3.1", "llama-3")], int(row["local_batch"])
    micro_batch, micro_batches = (1, batch) if "pp" in sizes else (batch, 1)
    config = Configuration(3, micro_batch, micro_batches, REMAT[row["remat"]], ranks=sizes.pop("fsdp"), **sizes)
    config = replace(config, schedule=row["schedule"] or config.schedule, depth=shape.depth, **code_of(row))
    tokens, memory = float(row["tokens_per_s_per_gpu"]), float(row["memory_gib"] or math.nan) * GIB
    return Run("torchtitan", row["gpu"], shape, int(row["sequence"]), config, tokens, memory, note="compiled")


def _llama(row: Mapping[str, str]) -> Run:
    shape, length = PRESETS[row["model"]], int(row["sequence"])
    tp, cp, pp, dp, micro_batches = (int(row[name]) for name in ("tp", "cp", "pp", "dp", "batch_per_dp"))
    config = Configuration(2, 1, micro_batches, ranks=dp, tp=tp, cp=cp, pp=pp, schedule="interleaved")
    config = replace(config, stages_per_rank=STAGES, depth=shape.depth)
    flops = 6 * 405_853_388_800 + 6 * shape.depth * shape.width * length  # of a token, with half of causal attention
    tokens = float(row["tflops_per_gpu"]) * 1e12 / flops
    return Run("Llama 3", "h100_80gb", shape, length, config, tokens)


def line(run: Run) -> list[str]:
    """Plan a run, and write its row."""
    rows = [plan_run(run, way) for way in WAYS]
    result = Result(run, rows[0], WAYS[0], rows[-1])
    c = run.config
    sizes = " ".join([f"{name} {n}" for name, n in c.axes.items()])
    peaks = " / ".join([f"{row.peak_bytes / GIB:.1f}" for row in rows])
    fits = "yes" if result.fits else "no"
    speeds = [f"{run.tokens:,.0f}", f"{result.tokens:,.0f}", f"{result.error:+.0%}"]
    return [
        f"{run.family}, {run.shape.name}",
        sizes,
        f"{run.length:,}",
        f"{c.accumulation}",
        format_remat(c),
        *speeds,
        peaks,
        fits,
    ]


def long_line(run: Run) -> list[str]:
    """Plan a run with split sequences as it ran, and write its row."""
    row = plan_run(run, WAYS[0])
    result = Result(run, row, WAYS[0], row)
    sizes = " ".join([f"{name} {n}" for name, n in run.config.axes.items()])
    speeds = [f"{run.tokens:,.0f}", f"{result.tokens:,.0f}", f"{result.error:+.0%}"]
    sizes = [run.shape.name, sizes, f"{run.length:,}", *speeds]
    return [*sizes, f"{run.memory / GIB:.1f}", f"{row.peak_bytes / GIB:.1f}", f"{row.peak_bytes / run.memory - 1:+.0%}"]


def main() -> None:
    """Plan the runs, print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write benchmarks/published/parallel.md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    head = ["run", "axes", "length", "micro-batches", "remat", "tokens/s of a card", "planned", "error"]
    text = [
        "Runs that others published with `tp`, pipelines and split sequences, planned. No constant was fitted to them.",
        table([*head, f"GiB planned {' / '.join(WAYS)}", f"fits {CARDS['h100_80gb'].name}"], [line(r) for r in runs()]),
        "- Plans are 18 to 32% slow for torchtitan's runs, and 26 to 29% for Llama 3's at 8,192 tokens. torchtitan's "
        "are planned compiled, and in float8 where they ran so. Llama 3's are planned operation by operation.\n"
        f"- The paper does not say how many stages a rank held. Here they are {STAGES}. On 16 ranks with 16 "
        "micro-batches that leaves a bubble of 23% on top; two stages leave 47%, and seven 13%.\n"
        "- The longest sequences are furthest off. Why has not been found.\n"
        "- Llama 3's paper gives TFLOP/s. Here a token takes 6 operations a parameter, and half of attention's.\n"
        "- Llama 3 trained without remat, by kernels that keep less than torch's operations. fzero needs remat there: "
        "28.6 GB with `1f1b` in the [first setting of 16,384 cards](../../docs/planner_runs.md#goodput-of-a-long-run).",
    ]
    memory = ["GiB reserved", "GiB planned", "error"]
    text += [
        "## Split sequences",
        "torchtitan's tables 2 and 6. All ran with full remat, compiled, with products in float8, and are "
        "planned so. Published memory is what the allocator reserved.",
        table(["model", "axes", "length", *head[5:], *memory], [long_line(r) for r in long_runs()]),
        "Plans hold 4 to 19% less than the allocator reserved, which includes its fragmentation. Until 2026-11-28 "
        "plans of 405 B held twice as much. Each stage sent its input's gradient before it computed those of its "
        "weights, and so held all that remat had computed again.",
    ]
    publish(str(pathlib.Path(__file__)), "python -m benchmarks.published.parallel --write", text, args.write)


if __name__ == "__main__":
    main()
