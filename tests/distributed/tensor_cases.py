"""Tensor parallelism on real processes: training on a mesh of ranks is dense training; see test_gloo.py."""

import warnings

import torch

import fzero
from fzero.parallel import tensor as tp
from fzero.testing import assert_trees_close
from tests.distributed.harness import Cases, into, run
from tests.helpers import LEAST, either, train_step_for
from tests.parallel.tensor.model import OPT, SPLIT, batch_of, loss_for, params_of

CASES: Cases = {}
SLOW: Cases = {}  # of them; only make test-all runs these
case, slow_case = into(CASES), into(CASES, SLOW)


@case
def training_with_parts_of_layers_is_dense_training(_: fzero.ranks.Mesh) -> None:
    """The residual stream is split or not, the embeddings are tied or not; eager and jitted."""
    mesh = fzero.mesh(dp=-1, tp=2)
    batches = [batch_of(seed=i) for i in range(2)]
    few = ((3, True, True, False),)
    many = (*few, (0, False, False, True), (0, True, False, True), (1, False, True, False))
    for stage, sequence, remat, tied in either(few, many):
        train_step, params = train_step_for(loss_for(sequence, remat), OPT), params_of(tied)
        expected = [(params, OPT.init(params), None)]
        for batch in batches:
            expected.append(train_step(*expected[-1][:2], batch))
        step = fzero.shard(train_step, stage=stage, mesh=mesh, axis="dp", split=SPLIT, check=True)
        for run_step in (step, fzero.jit(step, backend="fx", **LEAST)) if stage == either(None, 3) else (step,):
            state = step.init(params, OPT)
            for i, batch in enumerate(batches):
                *state, loss = run_step(*state, mesh.split(batch, "dp"))
                assert_trees_close(loss, expected[i + 1][2])
            assert_trees_close(step.gather(tuple(state)), expected[-1][:2])


@slow_case
def a_model_of_transformers_trains_by_its_own_plan(_: fzero.ranks.Mesh) -> None:
    from tests.parallel.tensor.models import losses_of, model_of, step_and_params  # transformers takes long

    mesh = fzero.mesh(dp=-1, tp=2)
    for stage, sequence in either(((3, True),), ((2, False), (3, True))):
        model = model_of("llama")
        expected, losses = losses_of(model)
        layers = tp.layers(model, sequence=sequence)
        train_step, params, batches = step_and_params(model, layers)
        step = fzero.shard(train_step, stage=stage, mesh=mesh, axis="dp", split=layers.split, check=True)
        for run_step in (step, fzero.jit(step, backend="fx", **LEAST)) if stage == 3 else (step,):
            state = step.init(params, OPT)
            for batch, wanted in zip(batches, losses, strict=True):
                *state, loss = run_step(*state, mesh.split(batch, "dp"))
                torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
            assert_trees_close(layers.pack(step.gather(state[0])), expected)


@case
def copies_that_are_used_as_one_value_are_refused(_: fzero.ranks.Mesh) -> None:
    mesh = fzero.mesh(dp=-1, tp=2)
    params = {"up": torch.ones(3, 4), "down": torch.ones(4, 2)}

    def loss(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return fzero.collectives.psum(torch.tanh(x @ p["up"]) @ p["down"], "tp").square().mean()

    step = fzero.shard(
        train_step_for(loss, OPT), stage=2, mesh=mesh, axis="dp", split=tp.split_rule({"up": 1, "down": 0})
    )
    state = step.init(params, OPT)
    for run_step in (step, fzero.jit(step, backend="fx", **LEAST)):
        try:
            run_step(*state, mesh.split(torch.ones(4, 3), "dp"))
        except ValueError as error:
            assert "psum over 'tp' gives each rank a copy" in str(error), error
        else:
            raise AssertionError("trained on a gradient twice too large")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    run(CASES)
