"""torch.compile(step, fullgraph=True) gives the numbers of the eager step; the distributed half is in distributed/."""

import shutil
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import fzero
from fzero import optim
from fzero.testing import assert_trees_close
from tests.helpers import cases, mlp_batch, mlp_params, train_step_for

PARAMS = {"b": [{"w": mlp_params()["blocks"][0]["w"]}], "h": torch.ones(3).double()}


def loss(params: Any, batch: Any) -> torch.Tensor:
    h = torch.tanh(batch["x"] @ params["b"][0]["w"])
    return (h[:, :3] * params["h"] - batch["y"]).square().mean()


def matrices(params: Any) -> Any:
    return fzero.tree.map(lambda p: p.ndim >= 2, params)


def check_compiled(stage: int, n: int, opt: Any, backend: str, k: int = 1) -> None:
    torch.compiler.reset()
    mesh = fzero.mesh(dp=n)
    step = fzero.shard(train_step_for(loss, opt, micro_batches=k), stage=stage, mesh=mesh)
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    state = other = step.init(PARAMS, opt)
    for i in range(3):
        batch = mesh.split(mlp_batch(12, seed=i))
        *state, expected = step(*state, batch)
        *other, got = compiled(*other, batch)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    assert_trees_close(step.gather(list(other)), step.gather(list(state)))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_under_torch_compile_equals_eager(stage):
    """Everything at once: schedule, clipping, decay mask, micro-batches."""
    rate = optim.warmup_cosine(1e-2, 1, 10)
    opt = optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(rate, eps=1e-3, mask=matrices))
    check_compiled(stage, 3, opt, "aot_eager", k=2)


@pytest.mark.parametrize("stage", cases([1], [0]))
def test_a_step_under_torch_compile_equals_eager_at_the_other_stages(stage):
    check_compiled(stage, 2, optim.sgd(0.1, momentum=0.9), "aot_eager")


@pytest.mark.skipif(not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")), reason="no compiler")
@pytest.mark.slow
def test_a_step_under_torch_compile_with_inductor_equals_eager():
    check_compiled(3, 2, optim.adam(1e-2, eps=1e-3), "inductor")


@pytest.mark.slow
def test_an_unsharded_step_runs_under_torch_compile():
    opt = optim.adam(1e-2, eps=1e-3)
    step = train_step_for(loss, opt)
    state = PARAMS, opt.init(PARAMS)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(*state, mlp_batch(4))
    assert_trees_close(got, step(*state, mlp_batch(4)))


def test_a_result_that_differs_by_rank_is_an_error_while_compiling():
    mesh = fzero.mesh(dp=2)
    program = torch.compile(mesh.spmd(lambda x: {"loss": x.sum()}), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"result leaf \\*'loss\\*' differs by rank") as caught:
        program(mesh.split(torch.ones(4)))
    chain: list[BaseException] = [caught.value]
    while inner := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(inner)
    if torch.__version__ < "2.15":  # which keeps the message, and of the exception nothing else
        assert any(isinstance(error, fzero.errors.DiffersByRankError) for error in chain)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [None, *[pytest.param(i, marks=pytest.mark.slow) for i in (0, 1, 3)]])
def test_torch_compile_compiles_a_training_loop_once(stage):
    """Each step's parameters are new tensors: nothing may depend on which they are."""
    torch.compiler.reset()
    counter, mesh, opt = CompileCounter(), fzero.mesh(dp=2), optim.adam(1e-2, eps=1e-3)
    step, state, batch = train_step_for(loss, opt), (PARAMS, opt.init(PARAMS)), mlp_batch(4)
    if stage is not None:
        step = fzero.shard(step, stage=stage, mesh=mesh)
        state, batch = step.init(PARAMS, opt), mesh.split(batch)
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for _ in range(3):
        *state, _ = compiled(*state, batch)
    assert counter.frame_count == 1


def test_tied_leaves_are_one_leaf_while_compiling():
    w = torch.ones(3)
    compiled = torch.compile(lambda t: fzero.tree.map(lambda x: x + 1, t), fullgraph=True, backend="eager")
    tied, apart = compiled({"a": w, "b": w}), compiled({"a": w, "b": w.clone()})
    assert tied["a"] is tied["b"] and apart["a"] is not apart["b"]
