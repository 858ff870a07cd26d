"""Flip bits, and count which are found, which change nothing, and which are missed by `check=Rerun`; and its cost.

python benchmarks/flips.py [--flips 100] [--seed 0] [--cost ROUNDS]

Each flip strikes a run of 24 steps of two ranks in lockstep at stage 3, in float32 with AdamW, at a random step, place
and bit. It is found if an error comes, harmless if the run ends with the bits of one without it, and else missed. The
cost is that of a step of 16.8 million parameters between two processes, with and without the check, in turns.
"""

import argparse
import pathlib
import random
import statistics
import sys
import tempfile
import warnings
from collections import Counter
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import fzero
from benchmarks.report import table
from fzero import optim, tree
from fzero.errors import CheckpointError, CorruptionError
from fzero.zero import Rerun
from tests.distributed.launch import world

STEPS, BATCH = 24, 8
NEVER = 10**9
OPT = optim.adamw(1e-2)
MESH = fzero.mesh(dp=2, simulate="lockstep")


class Row(NamedTuple):
    """What is flipped, and how the step looks for it."""

    what: str
    every: int
    swap: str | None = None


ROWS = (
    Row("a parameter between steps", 10),
    Row("a moment between steps", 10),
    Row("a gradient, once", 10),
    Row("a gradient, once", 1),
    Row("a gathered parameter, once", 10),
    Row("a gathered parameter, once", 1),
    Row("a gradient in each step, anywhere", 10),
    Row("a gathered parameter in each step, always the same bit", 10),
    Row("a gathered parameter in each step, always the same bit", 10, "dp"),
    Row("a file of a checkpoint", 10),
)


def params() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return {"w": torch.randn(8, 16, generator=g) / 3, "b": torch.zeros(16), "v": torch.randn(16, 3, generator=g) / 4}


def batch_at(i: int) -> Any:
    g = torch.Generator().manual_seed(1000 + i)
    return MESH.split({"x": torch.randn(BATCH, 8, generator=g), "y": torch.randn(BATCH, 3, generator=g)})


def flip(x: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """Return a tensor of float32 with another bit."""
    y = x.detach().clone().reshape(-1).view(torch.int32)
    mask = torch.zeros_like(y)
    mask[rng.randrange(len(y))] = 1 << rng.randrange(31)
    return (y ^ mask).view(torch.float32).view(x.shape)


class Planted:
    """A train step, and the flip within it: in the run of a number, or in all from it, on rank 1."""

    def __init__(self, what: str, run: int, rng: random.Random) -> None:
        self.what, self.run, self.rng = what, run, rng
        self.runs = 0
        self.leaf, self.seed = rng.choice(("w", "b", "v")), rng.random()

    def strikes(self) -> bool:
        once = self.runs == self.run if "once" in self.what else self.runs >= self.run
        return once and int(fzero.axes.axis_index()) == 1

    def loss(self, params: Any, batch: Any) -> torch.Tensor:
        if "gathered" in self.what and self.strikes():
            x = params[self.leaf]
            rng = random.Random(self.seed) if "same bit" in self.what else self.rng
            params = {**params, self.leaf: x + (flip(x, rng) - x.detach())}
        return (torch.tanh(batch["x"] @ params["w"] + params["b"]) @ params["v"] - batch["y"]).square().mean()

    def __call__(self, params: Any, opt_state: Any, batch: Any) -> Any:
        self.runs += int(fzero.axes.axis_index()) == 0
        loss, grads = fzero.value_and_grad(self.loss)(params, batch)
        if "gradient" in self.what and self.strikes():
            path = self.rng.randrange(len(tree.tensors(grads)))
            count = iter(range(100))
            grads = tree.map(lambda x: flip(x, self.rng) if next(count) == path else x, grads)
        updates, opt_state = OPT.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, loss


def in_memory(state: Any, what: str, rng: random.Random) -> None:
    """Flip a bit of the state, behind torch's back."""
    values = tree.tensors(state[0] if "parameter" in what else state[1])
    x = rng.choice([x for x in values if x.dtype == torch.float32 and x.numel()]).detach()
    data = x.numpy().reshape(-1).view("uint8")
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def run(row: Row, at: int, rng: random.Random) -> tuple[list[torch.Tensor] | None, int]:
    """Train, and return the state at the end; None and the number of steps from the flip if it was found."""
    planted = Planted(row.what, NEVER, rng)
    step = fzero.shard(planted, stage=3, mesh=MESH, check=Rerun(row.every, row.swap))
    state: Any = step.init(params(), OPT)
    for i in range(STEPS):
        if i == at and "between" not in row.what:
            planted.run = planted.runs + 1
        if i == at and "between" in row.what:
            in_memory(state, row.what, rng)
        try:
            *state, _ = step(*state, batch_at(i))
        except CorruptionError:
            return None, i - at + 1
    return [x.clone() for x in tree.tensors(state)], 0


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def in_a_file(rng: random.Random, state: Any, fresh: Any) -> str:
    """Flip a bit of a checkpoint, and read it."""
    with tempfile.TemporaryDirectory() as folder:
        with fzero.checkpoint.checkpoints(folder, MESH) as runs:
            runs.save(1, state)
        file = rng.choice([p for p in pathlib.Path(folder).rglob("*") if p.is_file() and p.stat().st_size])
        content = bytearray(file.read_bytes())
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        file.write_bytes(content)
        before = [x.clone() for x in tree.tensors(fresh)]
        try:
            restored = fzero.checkpoint.checkpoints(folder, MESH).restore(fresh)
        except CheckpointError:
            return "found"
        if same(tree.tensors(restored), tree.tensors(state)):
            return "harmless"
        return "found" if same(tree.tensors(restored), before) else "missed"  # the checkpoint was skipped with a notice


def count(row: Row, flips: int, seed: int, clean: list[torch.Tensor]) -> list[Any]:
    """Return a row of the table."""
    rng, outcomes, waits = random.Random(f"{seed} {row}"), Counter[str](), []
    step = fzero.shard(Planted("", NEVER, rng), stage=3, mesh=MESH)
    state = step.init(params(), OPT)
    for _ in range(flips):
        if "file" in row.what:
            outcomes[in_a_file(rng, state, step.init(tree.map(torch.zeros_like, params()), OPT))] += 1
            continue
        end, wait = run(row, rng.randrange(2, 12), rng)
        outcome = "found" if end is None else "harmless" if same(end, clean) else "missed"
        outcomes[outcome] += 1
        waits += [wait] if end is None else []
    steps = f"{statistics.median(waits):g}, at most {max(waits)}" if waits else ""
    how = "" if "file" in row.what else f"every={row.every}" + (", swap" if row.swap else "")
    return [row.what, how, *[str(outcomes[x]) for x in ("found", "harmless", "missed")], steps]


COST = """
import statistics, sys, time, torch, fzero
from fzero import optim
torch.set_num_threads(1)
mesh, rounds, opt = fzero.mesh(dp=-1), int(sys.argv[1]), optim.adamw(1e-3)

def loss_fn(params, x):
    for block in params["blocks"]:
        x = x + torch.tanh(x @ block["w"]) @ block["v"]
    return x.square().mean()

def train_step(params, opt_state, x):
    loss, grads = fzero.value_and_grad(loss_fn)(params, x)
    updates, opt_state = opt.update(grads, opt_state, params)
    return optim.apply_updates(params, updates), opt_state, loss

choices = {"none": False, "memory": fzero.zero.Rerun(10**6), "rerun": fzero.zero.Rerun(10)}
blocks = [{"w": torch.randn(512, 2048) / 99, "v": torch.randn(2048, 512) / 99} for _ in range(8)]
batch = mesh.split(torch.ones(512, 512))
runs = {}
for name, check in choices.items():
    step = fzero.shard(train_step, stage=3, mesh=mesh, check=check)
    state = step.init({"blocks": blocks}, opt)
    step = fzero.jit(step, backend="fx")
    for _ in range(11 if name == "rerun" else 2):
        *state, _ = step(*state, batch)
    runs[name] = [step, state]
times, cpu = {x: [] for x in runs}, {x: [] for x in runs}
for i in range(rounds):
    for name in [*runs] if i % 2 == 0 else [*reversed(runs)]:
        step, state = runs[name]
        begin, used = time.perf_counter(), time.process_time()
        for _ in range(10):
            *state, _ = step(*state, batch)
        runs[name][1] = state
        times[name].append((time.perf_counter() - begin) / 10)
        cpu[name].append((time.process_time() - used) / 10)
if mesh.rank == 0:
    for name in runs:
        print(name, *times[name], *cpu[name])
"""


def cost(rounds: int) -> list[list[str]]:
    """Measure a step without a check, with that of memory alone, and with a second run of each tenth step."""
    done = world(2, "-c", COST, str(rounds))
    assert not done.returncode, done.stderr
    rows = []
    for line in done.stdout.splitlines():
        name, *numbers = line.split()
        clock, cpu = [sorted(map(float, part)) for part in (numbers[:rounds], numbers[rounds:])]
        show = [f"{statistics.median(x):.3f} ({x[len(x) // 4]:.3f} to {x[-1 - len(x) // 4]:.3f})" for x in (clock, cpu)]
        rows.append([name, *show])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=100, help="of each kind, of which there are ten")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cost", type=int, default=0, help="rounds of ten steps; 0 flips bits")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if args.cost:
        print(table(["check", "seconds of a step, by the clock", "of the processor"], cost(args.cost)))
        return
    clean, _ = run(Row("", 1000), 0, random.Random(0))
    assert clean is not None
    rows = [count(row, args.flips, args.seed, clean) for row in ROWS]
    print(table(["a flipped bit in", "check", "found", "harmless", "missed", "steps until found"], rows))


if __name__ == "__main__":
    main()
