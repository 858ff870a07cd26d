"""Measure a module's SYSTEMS on these ranks: memory and wire of each alone, then all in rounds.

torchrun --nproc-per-node 2 benchmarks/measure.py benchmarks.moe_systems OUT.json --config toy --systems fzero-0 FSDP2
"""

import argparse
import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

import fzero
from benchmarks.allocator import held_bytes
from benchmarks.peers.measure import Runner, alone, over_ranks, settle, together
from benchmarks.peers.row import Row
from benchmarks.peers.systems import Setup


def measure(of: Any, key: str, name: str, mesh: fzero.ranks.Mesh, peaks: int) -> tuple[Row, Runner]:
    """Build a system and measure its memory; its row's `state` is what it holds between steps."""
    system, config = of.SYSTEMS[key], of.CONFIGS[name]
    row = Row(system.name, system.stage, system.variant, name, 1, mesh.size, state=0)
    settle()
    before = held_bytes()
    setup: Any = Setup(config, 1, mesh)  # pyright's Config is the other benchmark's; both make batches
    runner = alone(system, row, setup, peaks)
    settle()
    row.state = int(over_ranks(held_bytes() - before))
    if mesh.rank == 0:
        print(f"{key}: peak {row.peak / 1e6:.1f} MB, rest {row.state / 1e6:.1f}", file=sys.stderr, flush=True)
    return row, runner


def main() -> None:
    """Measure, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", help="its CONFIGS and SYSTEMS are measured")
    parser.add_argument("out", type=Path)
    parser.add_argument("--config", default="state")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peaks", type=int, default=5, help="of so many steps, the least counts")
    parser.add_argument("--systems", nargs="+", default=[""])
    args = parser.parse_args()
    torch.set_num_threads(1)
    mesh = fzero.mesh(simulate=False, dp=-1)
    of = importlib.import_module(args.module)
    keys = [key for key in of.SYSTEMS if key.startswith(tuple(args.systems))]
    results = {key: measure(of, key, args.config, mesh, args.peaks) for key in keys}
    rows = {key: row for key, (row, _) in results.items()}
    together({key: runner for key, (_, runner) in results.items()}, rows, args.rounds, steps=1)
    if mesh.rank == 0:
        args.out.write_text(json.dumps([asdict(row) for row in rows.values()]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
