"""Measure the systems of benchmarks/pipelines.py on these ranks: memory, bytes and numbers alone, then time in rounds.

torchrun --nproc-per-node 4 benchmarks/pipelines_measure.py OUT.json --pp 2 --config toy --systems fzero torch
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._inductor.utils import fresh_cache
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1]))

import fzero
from benchmarks.allocator import held_bytes, most_bytes, restart
from benchmarks.peers.measure import over_ranks, settle, shared_cache
from benchmarks.peers.row import Row
from benchmarks.peers.wire import BUFFERS, SILENT, nbytes
from benchmarks.pipelines_systems import CONFIGS, Built, PipelineConfig, System, by_path, choose
from fzero import tree
from tests.tiny_gpt import gpt_loss

__all__ = ["PipelineRow"]

WARM, MEASURED, BATCHES = 2, 5, 4


@dataclass
class PipelineRow(Row):
    """A system on a mesh.

    Attributes:
        schedule: of the pipeline.
        pp: how many ranks a pipeline has.
        peaks: by rank, bytes of a steady step, above what was held before the model was built.
        messages: by rank, bytes that leave it for other stages.
        collectives_sent: by rank, all other bytes that leave it.
        processor: seconds of all ranks' processors, a step's, one a round.
        loss_off: how far the loss lies from the dense model's, relative.
        grads_off: likewise of gradients: the worst leaf, by its largest element.
    """

    schedule: str = ""
    pp: int = 1
    peaks: list[int] = field(default_factory=list)
    messages: list[int] = field(default_factory=list)
    collectives_sent: list[int] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    loss_off: float = 0.0
    grads_off: float = 0.0


class Leaving(TorchDispatchMode):
    """Counts the bytes that leave this rank: messages as they are, collectives as a ring of their ranks sends them."""

    def __init__(self) -> None:
        super().__init__()
        self.messages, self.collectives = 0, Fraction(0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        space, name = func.name().split("::")
        name = name.split(".")[0]
        if space not in ("c10d", "_c10d_functional") or name in SILENT:
            return out
        if name == "send":  # fzero's collectives on gloo are such messages, too; their tags are lower
            of_a_stage = not (1 << 20 <= args[3] < 1 << 21)
            self.messages += of_a_stage * nbytes(tree.tensors(args[0]))
            self.collectives += (not of_a_stage) * nbytes(tree.tensors(args[0]))
            return out
        where, n = BUFFERS[name], _ranks(args)
        whole = nbytes(tree.tensors(out if where == "result" else args[where]))
        twice = "reduce" in name and "scatter" not in name and name != "reduce_"
        self.collectives += Fraction(n - 1, n) * whole * (1 + twice)
        return out


def _ranks(args: Any) -> int:
    """Return how many ranks the process group among the arguments of a collective has."""
    for x in args:
        if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type()):
            return dist.ProcessGroup.unbox(x).size()
    names = [x for x in args if isinstance(x, str)]
    return dist.distributed_c10d._resolve_process_group(names[-1]).size()


def everyones(value: Any) -> list[Any]:
    """Return the values of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def total(share: torch.Tensor) -> float:
    """Return the sum of the ranks' shares of a loss."""
    x = share.detach().double().clone()
    dist.all_reduce(x)
    return x.item()


def numbers(system: System, dp: int, pp: int) -> tuple[float, float]:
    """Return how far the loss and the gradients lie from the dense model's: an SGD step of rate 1 takes off these."""
    config = CONFIGS["numbers"]
    tokens, params = [config.batches(i, 1)[0] for i in range(dp)], config.params()
    grads, loss = torch.func.grad_and_value(gpt_loss)(params, torch.cat(tokens))
    if system.name == "DeepSpeed":
        config = config._replace(dtype=torch.float32)  # it reduces no float64
    with shared_cache():
        built = system.build(config, dp, pp, True)
        values = total(built.train(tokens[built.part]))
    after = {path: x for own in everyones(built.weights()) for path, x in own.items()}
    before = by_path(params)
    far = [(before[path] - after[path] - g).abs().max() / g.abs().max() for path, g in by_path(grads).items()]
    return abs(values / loss.item() - 1), max(x.item() for x in far)


def alone(system: System, row: PipelineRow, config: PipelineConfig) -> "Runner":
    """Build a system, and measure what does not need the others."""
    settle()
    before, start = held_bytes(), time.perf_counter()
    with shared_cache():
        runner = Runner(system.build(config, row.ranks // row.pp, row.pp, False), config)
        row.losses.append(total(runner()))
    row.build = over_ranks(time.perf_counter() - start)
    row.losses += [total(runner()) for _ in range(WARM)]
    settle()
    row.state = int(over_ranks(held_bytes() - before))
    peaks = []
    for _ in range(MEASURED):
        settle()
        restart()
        share = runner()
        peaks.append(most_bytes() - before)
        row.losses.append(total(share))
    row.peaks = everyones(min(peaks))
    row.peak = max(row.peaks)
    with Leaving() as leaving:
        runner()
    row.messages, row.collectives_sent = everyones(leaving.messages), everyones(int(leaving.collectives))
    row.sent = max(a + b for a, b in zip(row.messages, row.collectives_sent, strict=True))
    return runner


class Runner:
    """A system that was built, and its batches."""

    def __init__(self, built: Built, config: PipelineConfig) -> None:
        self.train, self.batches, self.steps = built.train, config.batches(built.part, BATCHES), 0

    def __call__(self) -> torch.Tensor:
        batch = self.batches[self.steps % BATCHES]
        self.steps += 1
        return self.train(batch)


def together(runners: dict[str, Runner], rows: dict[str, PipelineRow], rounds: int) -> None:
    """Time all in turn; each round begins with another."""
    keys = list(runners)
    for i in range(rounds + 1):
        start = i * max(1, len(keys) // (rounds + 1)) % len(keys)
        for key in keys[start:] + keys[:start]:
            dist.barrier()
            begun, used = time.perf_counter(), time.process_time()
            runners[key]()
            used = time.process_time() - used
            dist.barrier()
            if i:  # the first round warms up
                rows[key].seconds.append(over_ranks(time.perf_counter() - begun))
                rows[key].processor.append(sum(everyones(used)))


def measure(system: System, name: str, pp: int, check: bool) -> tuple[PipelineRow, Runner]:
    """Measure one system's numbers and memory."""
    config, ranks = CONFIGS[name], dist.get_world_size()
    about = (system.name, system.stage, system.variant, name, config.micro_batches, ranks)
    row = PipelineRow(*about, state=0, schedule=system.schedule, pp=pp)
    if check:
        row.loss_off, row.grads_off = numbers(system, ranks // pp, pp)
    runner = alone(system, row, config)
    if dist.get_rank() == 0:
        shown = ", ".join([f"{x / 1e6:.1f}" for x in row.peaks])
        print(f"{system.key}: peaks {shown} MB, grads {row.grads_off:.0e}", file=sys.stderr, flush=True)
    return row, runner


def main() -> None:
    """Measure, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--pp", type=int, required=True)
    parser.add_argument("--config", choices=CONFIGS, default="activations")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--systems", nargs="+", default=[""])
    parser.add_argument("--no-numbers", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    fzero.mesh(simulate=False, dp=-1)
    systems = choose(args.systems, dist.get_world_size() // args.pp)
    rows, runners = {}, {}
    with fresh_cache():
        for s in systems:
            rows[s.key], runners[s.key] = measure(s, args.config, args.pp, not args.no_numbers)
    together(runners, rows, args.rounds)
    if dist.get_rank() == 0:
        args.out.write_text(json.dumps([asdict(row) for row in rows.values()]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
