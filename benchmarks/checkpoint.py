"""Measure saves and loads of checkpoints beside torch's DCP and beside a gather and `torch.save`.

python benchmarks/checkpoint.py [--write] [--ranks 2 4] [--mb 144] [--rounds 7] [--folder /tmp]

Stage 3 and AdamW; each rank holds so many MB of parameters and moments. One world runs all of them in turns, round by
round, into fresh folders of a local disk, each file fsynced. Memory is what a rank's peak resident size grew by (VmHWM,
reset before each): the tensors of a save are not torch allocations. `--write` keeps the tables in checkpoint.md.
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import fzero
from benchmarks.report import publish, table
from fzero import optim, tree
from fzero.checkpoint.layout import PAGE_BYTES, File, Manifest, parse_manifest, safetensors_header
from fzero.checkpoint.layout._ranges import Leaf, LeafGroup, TreeLayout

LAYERS = 8
GOALS = {"save": 0.75, "background": 0.15}
PARSE_GOAL = 50.0  # milliseconds, of the manifest of 1,024 ranks


def peak_resident() -> int:
    """Return the most bytes that this process had in memory since the last reset."""
    with open("/proc/self/status") as f:
        return next(1024 * int(line.split()[1]) for line in f if line.startswith("VmHWM"))


def reset_peak() -> int:
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")
    return peak_resident()


def measure(f: Callable[[], Any]) -> tuple[float, int]:
    """Return the seconds that a call takes from the ranks' common start, and the bytes that the peak grew by."""
    os.sync()  # what others left unwritten
    dist.barrier()
    before, start = reset_peak(), time.perf_counter()
    f()
    seconds = time.perf_counter() - start
    return seconds, peak_resident() - before


def sharded(ranks: int, mb: int) -> tuple[Any, Any]:
    opt = optim.adamw(1e-3)
    step = fzero.shard(lambda p, s, b: (p, s), stage=3, mesh=fzero.mesh(dp=-1), check=False)
    numel = mb * 10**6 * ranks // (3 * 4 * LAYERS)  # parameters and two moments, float32
    width = 1024
    params = {f"h{i}": {"w": torch.empty(numel // width, width), "b": torch.empty(width)} for i in range(LAYERS)}
    return step, step.init(tree.map(torch.zeros_like, params), opt)


def state_dict(state: Any) -> dict[str, Any]:
    """This rank's tensors by name, as DCP saves a dict of plain tensors: nothing is shared between ranks."""
    return {f"{dist.get_rank()}.{i}": x for i, x in enumerate(tree.tensors(state))}


def run(ranks: int, mb: int, rounds: int, root: str) -> None:
    torch.set_num_threads(1)
    step, state = sharded(ranks, mb)
    mesh = step.mesh
    times: dict[str, list[tuple[float, int]]] = {}
    background: list[tuple[float, int]] = []
    with fzero.checkpoint.checkpoints(f"{root}/runs", mesh, keep=1) as runs:
        for i in range(rounds + 1):  # the first one makes buffers and folders
            ours, theirs, file = f"{root}/ours{i}", f"{root}/dcp{i}", f"{root}/whole{i}.pt"

            def gathered(file: str = file) -> None:
                whole = step.gather(state[0]), step.gather(state[1])
                if mesh.rank == 0:
                    torch.save(whole, file)
                dist.barrier()

            def reloaded(file: str = file) -> None:
                params, opt_state = torch.load(file, weights_only=False)
                step.partition(params), step.partition(opt_state, like=state[1])

            calls: dict[str, Callable[[], Any]] = {
                "save": lambda path=ours: fzero.save(path, state, mesh),
                "save, DCP": lambda path=theirs: dcp.save(state_dict(state), checkpoint_id=path),
                "save, gathered": gathered,
                "load": lambda path=ours: fzero.load(path, like=state, mesh=mesh),
                "load, DCP": lambda path=theirs: dcp.load(state_dict(state), checkpoint_id=path),
                "load, gathered": reloaded,
            }
            order = list(calls) if i % 2 else [*list(calls)[2::-1], *list(calls)[:2:-1]]
            for name in order:
                times.setdefault(name, []).append(measure(calls[name]))
            blocked = measure(lambda i=i: runs.save(i, state))
            start = time.perf_counter()
            runs.wait()
            background.append(blocked)
            times.setdefault("background, ends after", []).append((blocked[0] + time.perf_counter() - start, 0))
            dist.barrier()
            if mesh.rank == 0:
                for path in (ours, theirs):
                    shutil.rmtree(path)
                os.unlink(file)
            dist.barrier()
    times["background"] = background
    everyones: list[Any] = [None] * mesh.size
    dist.all_gather_object(everyones, times)
    if mesh.rank == 0:  # the slowest and the largest rank of each round
        worst = {}
        for name in times:
            rounds_ = zip(*[r[name] for r in everyones], strict=True)
            worst[name] = [(max(s for s, _ in x), max(n for _, n in x)) for x in rounds_]
        print("RESULT " + json.dumps({name: x[1:] for name, x in worst.items()}), flush=True)
    dist.destroy_process_group()


def manifest_of(ranks: int, layers: int = 96) -> bytes:
    """The manifest of a model of 70e9 parameters, its moments and masters, on so many ranks."""
    leaves, groups = [], []
    for tree_name in ("params", "mu", "nu", "master"):
        for layer in range(layers):
            names = ("q", "k", "v", "o", "up", "gate", "down", "norm1", "norm2")
            numbers = range(len(leaves), len(leaves) + len(names))
            leaves += [
                Leaf(f"{tree_name}.blocks.{layer}.{name}.weight", (81_000_000,), torch.float32) for name in names
            ]
            groups.append(LeafGroup(tuple(numbers), ("dp",), -(-len(names) * 81_000_000 // ranks)))
    layout = TreeLayout((("dp", ranks),), tuple(leaves), tuple(groups), {}, {"step": 1})
    files = []
    for r in range(ranks):
        size = len(safetensors_header(layout, r)) + layout.starts(r)[-1]
        files.append(File(size, "0123456789abcdef" * -(-size // PAGE_BYTES)))
    return Manifest.of("0" * 16, layout, files).encode()


def time_parsing(ranks: int) -> tuple[int, float]:
    """Return the bytes of a manifest, and the milliseconds that reading it takes: the median of 5."""
    data = manifest_of(ranks)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        parse_manifest(data)
        times.append(1e3 * (time.perf_counter() - start))
    return len(data), statistics.median(times)


def world(ranks: int, mb: int, rounds: int, folder: str) -> dict[str, list[tuple[float, int]]]:
    with tempfile.TemporaryDirectory(dir=folder) as root:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), __file__]
        command += ["--worker", root, "--mb", str(mb), "--rounds", str(rounds)]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        if done.returncode:
            raise RuntimeError(done.stderr[-4000:])
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


def quartiles(xs: list[float], digits: int = 2) -> str:
    low, middle, high = statistics.quantiles(xs, n=4, method="inclusive")
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def rows_of(ranks: int, times: dict[str, list[tuple[float, int]]]) -> list[list[str]]:
    rows = []
    for name, against, goal in (
        ("save", "save, DCP", GOALS["save"]),
        ("load", "load, DCP", GOALS["save"]),
        ("background", "save", GOALS["background"]),
        ("background", "background, ends after", GOALS["background"]),
        ("background, ends after", "save", None),
        ("save, DCP", "save, DCP", None),
        ("save, gathered", "save, DCP", None),
        ("load, DCP", "load, DCP", None),
        ("load, gathered", "load, DCP", None),
    ):
        mine, theirs = [[s for s, _ in times[n]] for n in (name, against)]
        ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
        met = "" if goal is None else f"≤ {goal}: {'met' if statistics.median(ratios) <= goal else 'missed'}"
        grew = max(n for _, n in times[name]) / 1e6
        rows.append([str(ranks), name, quartiles(mine), quartiles(ratios), against, met, f"{grew:.0f}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mb", type=int, default=144, help="MB that a rank holds")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--worker", help="of this script's own")
    args = parser.parse_args()
    if args.worker:
        run(int(os.environ["WORLD_SIZE"]), args.mb, args.rounds, args.worker)
        return
    rows = [row for n in args.ranks for row in rows_of(n, world(n, args.mb, args.rounds, args.folder))]
    heads = ["ranks", "what", "seconds", "ratio", "to", "goal", "MB the peak grew by, at most"]
    parse_rows = []
    for ranks in (8, 128, 1024):
        size, milliseconds = time_parsing(ranks)
        met = "met" if milliseconds <= PARSE_GOAL else "missed"
        parse_rows.append([str(ranks), f"{size / 1e6:.2f}", f"{milliseconds:.0f}", met])
    tables = [
        f"Stage 3, {args.mb} MB a rank; medians of {args.rounds} rounds, with quartiles. `background` is how long a "
        "save in the background blocks, and `ends after` when it is committed. This machine's disk takes a few hundred "
        "MB at the page cache's speed, which `save` mostly finds, and then 0.6 GB/s, which `background` finds.",
        table(heads, rows),
        "A manifest of 3,456 leaves of 1.1 TB, with a checksum for each 4 MiB.",
        table(["ranks", "MB", "ms to read", f"goal: ≤ {PARSE_GOAL:g}"], parse_rows),
    ]
    publish(__file__, "python benchmarks/checkpoint.py", tables, args.write)


if __name__ == "__main__":
    main()
