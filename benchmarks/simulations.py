"""Print how many eager steps of a small MLP each simulation runs in a second, on 1 to 8 ranks, at stage 3.

python benchmarks/simulations.py [--write]

The goal, on an idle machine: 20 steps a second in lockstep on 4 ranks. `--write` keeps the table in simulations.md.
"""

import pathlib
import statistics
import sys
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import fzero
from benchmarks.report import publish, table
from fzero import optim
from tests.helpers import mlp_batch, mlp_loss, mlp_params, train_step_for

STEPS = 40


def steps_a_second(simulate: str, ranks: int) -> float:
    """Return the median of the rates of single steps."""
    opt, mesh = optim.adam(1e-2), fzero.mesh(dp=ranks, simulate=simulate)
    step = fzero.shard(train_step_for(mlp_loss, opt), stage=3, mesh=mesh)
    state, batch = step.init(mlp_params(), opt), mesh.split(mlp_batch(2 * ranks))
    times = []
    for _ in range(STEPS + 5):
        start = time.perf_counter()
        *state, _ = step(*state, batch)
        times.append(time.perf_counter() - start)
    return 1 / statistics.median(times[5:])


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    ranks = (1, 2, 4, 8)
    rows = [[s, *[f"{steps_a_second(s, n):.0f}" for n in ranks]] for s in ("vmap", "lockstep")]
    head = ["steps a second", *[f"{n} rank{'s' * (n > 1)}" for n in ranks]]
    about = (
        "An MLP of two blocks of width 7, a scale and a head in float64: what is measured is Python and torch.func, "
        "not arithmetic. In lockstep each rank runs all of the Python; under vmap it runs once."
    )
    publish(__file__, "python benchmarks/simulations.py --write", [about, table(head, rows)], "--write" in sys.argv)


if __name__ == "__main__":
    main()
