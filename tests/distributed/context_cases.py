"""Context parallelism on processes: training with split sequences is training with whole ones; see test_gloo.py."""

from typing import Any

import pytest
import torch

import fzero
from fzero.parallel import context
from fzero.parallel import experts as moe
from fzero.testing import assert_trees_close
from tests.distributed.checkpoint_cases import folder
from tests.distributed.harness import Cases, into, run
from tests.helpers import LEAST, either, train_step_for
from tests.parallel.context.model import (
    OPT,
    assert_trains_as_whole,
    batch_of,
    expert_loss,
    expert_params,
    loss_for,
    params_of,
)

CASES: Cases = {}
case = into(CASES)


@case
def training_with_split_sequences_is_training_with_whole_ones(_: fzero.ranks.Mesh) -> None:
    """It runs by a ring and by heads, with documents and a window; eager and jitted."""
    few: tuple[tuple[int, Any, bool, Any], ...] = ((3, "ring", True, None),)
    many = (*few, (2, None, False, 5), (0, "ring", False, None), (1, "ring", True, 3), (3, None, True, None))
    for stage, method, documents, window in either(few, many):
        batches = [batch_of(i, documents) for i in range(2)]
        train_step = train_step_for(loss_for(causal=True, method=method, window=window), OPT)
        for axes in either(({"dp": 1, "cp": -1},), ({"dp": 1, "cp": -1}, {"dp": 2, "cp": -1})):
            step = fzero.shard(train_step, stage=stage, mesh=fzero.mesh(**axes), check=True)
            for run_step in (step, fzero.jit(step, backend="fx", **LEAST)) if stage == either(None, 3) else (step,):
                assert_trains_as_whole(train_step, params_of(), run_step, batches)


@case
def experts_over_an_axis_of_their_own_beside_split_sequences(_: fzero.ranks.Mesh) -> None:
    """Each sequence has a balance loss; on two ranks experts are split over the axis of tokens."""
    is_joint = torch.distributed.get_world_size() < 4
    axes, axis = ({"dp": 1, "cp": 2}, "cp") if is_joint else ({"dp": -1, "cp": 2, "ep": 2}, "ep")
    train_step = train_step_for(expert_loss("ring", axis, "sequence"), OPT)
    step = fzero.shard(train_step, stage=3, mesh=fzero.mesh(**axes), split=moe.split_rule("experts", axis=axis))
    assert_trains_as_whole(train_step, expert_params(), step, [batch_of(i, True) for i in range(2)])


@case
def files_do_not_know_how_sequences_were_split(_: fzero.ranks.Mesh) -> None:
    """Saved where the world splits each sequence, and read where it splits samples."""
    train_step, batches = train_step_for(loss_for(causal=True), OPT), [batch_of(i) for i in range(2)]
    mesh, samples = fzero.mesh(dp=1, cp=-1), fzero.mesh(dp=-1)
    step, resumed = (fzero.shard(train_step, stage=stage, mesh=m) for stage, m in ((3, mesh), (2, samples)))
    *expected, _ = train_step(params_of(), OPT.init(params_of()), batches[0])
    *state, _ = step(*step.init(params_of(), OPT), context.split(mesh, batches[0]))
    with folder(mesh) as path:
        fzero.checkpoint.save(path, tuple(state), mesh)
        zeros = fzero.tree.map(torch.zeros_like, params_of())
        state = fzero.checkpoint.load(path, resumed.init(zeros, OPT), samples)
        *state, loss = resumed(*state, samples.split(batches[1]))
    *expected, wanted = train_step(*expected, batches[1])
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
    assert_trees_close(resumed.gather(tuple(state)), tuple(expected), rtol=1e-11)


@case
def loaded_samples_are_split_into_the_tokens_of_a_global_batch(_: fzero.ranks.Mesh) -> None:
    """A loader that gives ranks of the axis other samples is refused."""
    mesh = fzero.mesh(dp=1, cp=-1)
    n = dict(mesh.shape)["cp"]
    x = torch.arange(8 * n).view(2, 4 * n)
    data = fzero.data.batches(x, mesh, global_batch=2, shuffle=False, axis="dp")
    assert torch.equal(context.split(mesh, data[0]).value, context.split(mesh, x).value)
    wrong = fzero.data.batches(x.view(2 * n, 4), mesh, global_batch=n)[0]
    with pytest.raises(ValueError, match="the batch was split into samples over it"):
        mesh.spmd(lambda x: context.all_gather(x))(wrong)


@case
def a_convolution_reads_the_tokens_of_neighbours(_: fzero.ranks.Mesh) -> None:
    """Its value and its gradients, within documents and across them."""
    mesh = fzero.mesh(dp=1, cp=-1)
    tokens = 8 * dict(mesh.shape)["cp"]
    torch.manual_seed(0)
    x, weight = torch.randn(2, 3, tokens, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    documents = (torch.arange(tokens) >= 5).long().expand(2, tokens)

    def loss(x: torch.Tensor, weight: torch.Tensor, documents: Any) -> torch.Tensor:
        return context.causal_conv1d(x, weight, documents=documents).square().sum()

    own = context.split(mesh, {"x": x, "documents": documents}, dims={"x": 2, "documents": 1})
    for numbers in (None, documents):
        expected = torch.func.grad(loss)(x, weight, numbers)

        def grad_of(own: Any, numbers: Any = numbers) -> Any:
            grads = torch.func.grad(loss)(own["x"], weight, None if numbers is None else own["documents"])
            return context.all_gather(grads, dim=2)

        assert torch.allclose(mesh.spmd(grad_of)(own), expected, rtol=1e-12, atol=1e-12)


if __name__ == "__main__":
    run(CASES)
