"""Print what one rank of 8 needs to train a GPT in bfloat16: by formula, plan and measurement, with and without remat.

python benchmarks/training_memory.py [--write]

Stages 0 to 3, 1 and 4 micro-batches. Adam with float32 masters, gradients summed in bfloat16: ZeRO's 16 bytes. The rank
is this process in a world of 8 of which the others do not exist (benchmarks/one_rank.py), on the backend "fx"; the
counting allocator (benchmarks/allocator.py) measures a step. The formula is that of docs/training.md: the step's
arguments, the gradients that the update is given, and at stage 1 with several micro-batches their whole accumulator.
`--write` keeps the tables in training_memory.md; three minutes.
"""

import itertools
import pathlib
import sys
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import fzero
from benchmarks.allocator import peak_bytes
from benchmarks.one_rank import alone
from benchmarks.report import publish, table
from examples.train_gpt import init, losses_of
from fzero import optim, tree

RANKS, MB, BATCH = 8, 1e6, 4
MODEL = {"layers": 8, "heads": 8, "width": 256, "context": 256}
PRECISION = fzero.Precision(param=torch.bfloat16, reduce=torch.bfloat16)


class Row(NamedTuple):
    """One step, in bytes."""

    micro_batches: int
    remat: bool
    stage: int
    formula: int
    plan: int
    measured: int

    @property
    def cells(self) -> list[Any]:
        """The row of the table."""
        remat = "remat" if self.remat else "-"
        shown = [self.formula, self.plan, self.measured]
        apart = f"{self.measured / self.plan - 1:+.2%}"
        return [self.micro_batches, remat, self.stage, *[f"{x / MB:,.1f}" for x in shown], apart]


def measure(k: int, remat: bool, stage: int, mesh: fzero.ranks.Mesh) -> Row:
    """Plan a step, and run it."""
    opt = optim.master_weights(optim.scale_by_adam(), PRECISION)

    def loss(params: Any, tokens: torch.Tensor) -> torch.Tensor:
        return losses_of(params, tokens, remat).mean()

    def train_step(params: Any, opt_state: Any, tokens: torch.Tensor) -> Any:
        value, grads = fzero.value_and_grad(loss, micro_batches=k, precision=PRECISION)(params, tokens)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, value

    step = fzero.shard(train_step, stage=stage, mesh=mesh, check=False)
    state = [*step.init(init(MODEL), opt)]
    psi = sum(x.numel() for x in tree.tensors(init(MODEL)))
    batch = mesh.local(torch.randint(256, (BATCH * k, MODEL["context"] + 1)))
    jitted = fzero.jit(step, backend="fx")
    plan = jitted.plan(*state, batch)

    def run() -> None:
        state[:] = jitted(*state, batch)[:2]

    run()
    measured = plan.argument_bytes + min(peak_bytes(run) for _ in range(3))
    grads = 2 * psi if stage == 0 or (stage == 1 and k > 1) else 2 * psi // RANKS
    return Row(k, remat, stage, plan.argument_bytes + grads, plan.peak_bytes, measured)


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    rows = []
    with alone(dp=RANKS) as mesh:
        for k, remat, stage in itertools.product((1, 4), (False, True), range(len(fzero.zero.STAGES))):
            rows.append(measure(k, remat, stage, mesh))
            print(rows[-1], file=sys.stderr, flush=True)
    verdicts = []
    for (k, remat), group in itertools.groupby(rows, lambda r: r[:2]):
        peaks = list(group)
        for what in ("plan", "measured"):
            values = [getattr(r, what) for r in peaks]
            good = all(b <= a for a, b in itertools.pairwise(values))
            shown = " ≥ ".join(f"{x / MB:,.1f}" for x in values)
            name = f"{k} micro-batches{', remat' if remat else ''}: {what}, stages 0 to {len(fzero.zero.STAGES) - 1}"
            verdicts.append([name, shown, "met" if good else "missed"])
    psi = sum(x.numel() for x in tree.tensors(init(MODEL)))
    parts = [
        f"{psi / 1e6:.2f} million parameters, {MODEL['layers']} layers of width {MODEL['width']}, micro-batches of "
        f"{BATCH} x {MODEL['context']} bytes, {RANKS} ranks; in MB (1e6 bytes) of one rank. What the plan adds to the "
        "formula is activations, the unit that is gathered, and temporaries. The plan does not know what attention "
        "takes on a CPU while it runs (0.5 MB here).",
        table(["micro-batches", "remat", "stage", "formula", "plan", "measured", "apart"], [r.cells for r in rows]),
        "Peaks fall with the stage:",
        table(["what", "MB", "goal"], verdicts),
    ]
    publish(__file__, "python benchmarks/training_memory.py", parts, "--write" in sys.argv)


if __name__ == "__main__":
    main()
