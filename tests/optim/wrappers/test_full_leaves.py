"""Optimizers that need whole matrices: `on_full_leaves`, `muon`, and the assignments that share its work out."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero import optim, tree
from fzero.sharding._owners import Matrix, OwnerAssignment
from fzero.testing import assert_equivalent, assert_trees_close
from tests.helpers import ALL_STAGES, cases, either, train_step_for
from tests.optim.helpers import RTOL, batches_of, loss_of, normal, params_of
from tests.zero.helpers import RULES, loss_of_tree


def whiten(g: torch.Tensor, s: Any, params: torch.Tensor | None = None) -> Any:
    """A Muon that a user might write: the whole direction of a matrix, the sign of all else."""
    if g.ndim < 2:
        return -0.1 * g.sign(), s
    u, _, v = torch.linalg.svd(g, full_matrices=False)
    return -0.1 * (u @ v), s


WHITE = optim.Optimizer(lambda p: (), whiten)
EXACT = optim.muon(0.05, fallback=optim.adamw(1e-2, eps=1e-3), ns_dtype=None)


def test_a_hand_written_muon_on_full_leaves_equals_unsharded():
    opt = optim.on_full_leaves(WHITE, reads_params=False)
    assert opt.exact_on_shards is True
    assert_equivalent(
        train_step_for(loss_of, opt), params_of(), opt, batches_of(2), world_sizes=either((3,), (1, 2, 3))
    )


@pytest.mark.slow
@pytest.mark.parametrize("opt", [optim.on_full_leaves(optim.lamb(1e-2, eps=1e-3)), EXACT], ids=["whole", "muon"])
@pytest.mark.parametrize("micro_batches", cases((3,), [1]))
def test_micro_batches_and_masters_equal_the_unsharded_optimizer(opt, micro_batches):
    opt = optim.master_weights(opt, fzero.Precision(param=torch.float64, master=torch.float64, reduce=torch.float64))
    step = train_step_for(loss_of, opt, micro_batches=micro_batches)
    assert_equivalent(step, params_of(), opt, batches_of(2), world_sizes=(2,))


@pytest.mark.slow
@pytest.mark.parametrize(
    "opt", [pytest.param(optim.on_full_leaves(WHITE), marks=pytest.mark.slow), EXACT], ids=["whole", "muon"]
)
@pytest.mark.parametrize(
    "mesh",
    [fzero.mesh(node=2, gpu=2), pytest.param(fzero.mesh(node=3, gpu=2, simulate="lockstep"), marks=pytest.mark.slow)],
    ids=["vmap", "lockstep"],
)
def test_several_axes_and_hybrid_sharding_equal_unsharded_training(opt, mesh):
    train_step = train_step_for(loss_of, opt)
    assert_equivalent(train_step, params_of(), opt, batches_of(2), meshes=[mesh])
    assert_equivalent(train_step, params_of(), opt, batches_of(2), meshes=[mesh], stages=(3,), over="gpu")


def tensor_parallel(params: Any, batch: torch.Tensor) -> torch.Tensor:
    """Columns, then rows; on no mesh plain."""
    tp = "tp" if "tp" in fzero.axes.axis_names() else ()
    h = torch.tanh(fzero.collectives.pvary(batch, tp) @ params["up"])
    return (fzero.collectives.psum_invariant(h @ params["down"], tp) + params["b"]).square().mean()


@pytest.mark.parametrize(
    "opt", [pytest.param(optim.on_full_leaves(WHITE), marks=pytest.mark.slow), EXACT], ids=["whole", "muon"]
)
def test_a_matrix_that_tensor_parallelism_splits_is_full_for_the_optimizer(opt):
    params = {"up": normal((5, 4), 0), "down": normal((4, 3), 1), "b": normal((3,), 2)}
    split = {"up": {"tp": 1}, "down": {"tp": 0}}
    assert_equivalent(
        train_step_for(tensor_parallel, opt),
        params,
        opt,
        batches_of(2),
        meshes=[fzero.mesh(dp=2, tp=2)],
        axis="dp",
        split=lambda path, leaf: split.get(path),
    )


def test_the_state_of_a_full_optimizer_is_sharded_whatever_its_shapes():
    def init(p: torch.Tensor) -> Any:
        return {"left": p.new_zeros(40, 40), "count": torch.zeros((), dtype=torch.int64)}

    opt = optim.on_full_leaves(optim.Optimizer(init, lambda g, s, params=None: (-0.1 * g, s)))
    step = fzero.shard(train_step_for(loss_of_tree, opt), 3, fzero.mesh(dp=4))
    _, state = step.init({"w": torch.ones(40, 2), "b": torch.ones(7)}, opt)
    assert step.state_bytes(state) == 2 * (4 * 1600 // 4 + 8)
    assert step.gather(state)["w"]["left"].shape == (40, 40)


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("stage", cases((0, 3), ALL_STAGES))
def test_an_optimizer_on_full_leaves_gathers_gradients_and_state_once(stage, reads):
    opt = optim.on_full_leaves(optim.Optimizer(lambda p: p * 0, lambda g, s, params=None: (-0.1 * g, s + g)), reads)
    n, params = 4, {"w": torch.ones(10, 8), "v": torch.ones(3, 5)}
    step = fzero.shard(train_step_for(loss_of_tree, opt), stage, fzero.mesh(dp=n))
    state = step.init(params, opt)
    with fzero.collectives.record() as log:
        step(*state, step.mesh.split({"x": torch.ones(n)}))
    numel = 80 + 16  # padded
    # gradients and state; parameters where no rank has them whole
    assert log.elements - 2 * numel == {0: -2, 3: (2 + reads) * numel}.get(stage, 2 * numel)


def test_on_full_leaves_refuses_an_optimizer_with_master_weights():
    with pytest.raises(ValueError, match=r"around on_full_leaves, since .* optim.master_weights\("):
        optim.on_full_leaves(optim.master_weights(optim.sgd(0.1), fzero.Precision(torch.bfloat16)))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"adjust_lr_fn": "match_rms_adamw", "nesterov": False, "momentum": 0.8, "weight_decay": 0.0, "ns_steps": 3},
        {"adjust_lr_fn": "original", "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3, "momentum": 0.3},
    ],
)
def test_ten_steps_equal_torch_muon(options, dtype):
    params = [normal(shape, i, dtype) for i, shape in enumerate([(16, 33), (33, 16), (8, 8), (1, 5)])]
    theirs = [p.clone().requires_grad_() for p in params]
    other, opt = torch.optim.Muon(theirs, lr=0.05, **options), optim.muon(0.05, **options)
    state = opt.init(params)
    for i in range(10):
        grads = [normal(tuple(p.shape), 10 * i + j, dtype) for j, p in enumerate(params)]
        for p, g in zip(theirs, grads, strict=True):
            p.grad = g
        other.step()
        updates, state = opt.update(grads, state, params)
        params = optim.apply_updates(params, updates)
    assert_trees_close(params, [p.detach() for p in theirs], RTOL[dtype])


@pytest.mark.slow
@pytest.mark.parametrize("n", cases((5,), range(1, 6)))
def test_muon_at_every_stage_equals_unsharded(n):
    batches = [normal((12 if 12 % n == 0 else 10, 5), i) for i in range(2)]
    for units in either((None, RULES["one unit"]), (None, RULES["one unit"], RULES["a unit a leaf"])):
        assert_equivalent(train_step_for(loss_of, EXACT), params_of(), EXACT, batches, world_sizes=(n,), units=units)


@pytest.mark.slow
def test_muon_in_half_precision_stays_near():
    """The default: what is sent and iterated is bfloat16, as torch's is."""
    opt = optim.muon(0.05, fallback=optim.adamw(1e-2))
    step = train_step_for(loss_of, opt)
    assert_equivalent(step, params_of(torch.float32), opt, batches_of(3, torch.float32), world_sizes=(3,), rtol=0.02)


def blocks_of(count: int) -> Any:
    return {"blocks": [{"up": normal((8, 4), i), "down": normal((4, 8), i + 9)} for i in range(count)]}


@pytest.mark.parametrize("stage", cases((2, 3), ALL_STAGES))
def test_muon_moves_a_shard_there_and_back(stage):
    """There are as many blocks as ranks: each sends its shard to the owners, in half precision, and gets as much."""
    n, params, opt = 4, blocks_of(4), optim.muon(0.1)
    step = fzero.shard(train_step_for(loss_of_tree, opt), stage, fzero.mesh(dp=n))
    state = step.init(params, opt)
    with fzero.collectives.record() as log:
        step(*state, step.mesh.split({"x": torch.ones(n, dtype=torch.float64)}))
    numel = 4 * 64
    messages = [(e.kind, e.elements, e.dtype) for e in log.other_events if e.kind == "all_to_all"]
    assert messages == [("all_to_all", numel // n, torch.bfloat16)] * (2 if stage else 0)
    assert log.elements == 2 * numel  # and nothing is gathered for the update


def test_the_plan_counts_what_muon_moves():
    n, params, opt = 2, blocks_of(2), optim.muon(0.1)
    step = fzero.shard(train_step_for(loss_of_tree, opt), 2, fzero.mesh(dp=n))
    batch = step.mesh.split({"x": torch.ones(n, dtype=torch.float64)})
    plan = fzero.plan(step, *step.init(params, opt), batch)
    assert [c.elements for c in plan.collectives if c.kind == "all_to_all"] == [64, 64]


def test_each_rank_runs_newton_schulz_on_its_share_of_the_matrices():
    """Twelve matrices of each shape on four ranks: three of each."""
    assignment = OwnerAssignment(4, (64,) * 12, tuple(Matrix(i, 0, 16, 16) for i in range(12)))
    assert assignment.stack_sizes == (3,)
    assert sorted(i for rank in assignment.owner_stacks for i in rank[0]) == list(range(12))
    assert assignment.part_numel == assignment.used_numel == 192  # 12 shards of 64 elements, a quarter to each owner


@given(
    shapes=st.lists(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4)), max_size=4), min_size=1, max_size=4),
    n=st.integers(1, 6),
)
def test_every_element_of_every_matrix_arrives_once_and_returns(shapes, n):
    sizes = [max(sum(r * c for r, c in unit), 1) for unit in shapes]
    matrices = tuple(
        Matrix(u, sum(a * b for a, b in unit[:i]), r, c)
        for u, unit in enumerate(shapes)
        for i, (r, c) in enumerate(unit)
        if r
    )
    assignment = OwnerAssignment(n, tuple(-(-size // n) for size in sizes), matrices)
    for owner in range(n):
        own = [i for stack in assignment.owner_stacks[owner] for i in stack if i is not None]
        got = [(p.matrix, p.size) for parts in assignment.ranges for p in parts[owner]]
        for i in own:
            assert sum(size for m, size in got if m == i) == matrices[i].rows * matrices[i].columns
        assert {m for m, _ in got} == set(own)
    assert assignment.used_numel <= sum(assignment.shard_numels)  # never more than an all_gather


def test_muon_orthogonalises_each_stacked_matrix_that_its_mask_names():
    experts = normal((3, 4, 5), 0)
    every = optim.muon(0.1, fallback=optim.sgd(0.1), mask=lambda p: tree.map(lambda x: x.ndim >= 2, p), ns_dtype=None)
    updates, _ = every.update({"e": experts}, every.init({"e": experts}), {"e": experts})
    alone = optim.muon(0.1, ns_dtype=None)
    for i, matrix in enumerate(experts):
        expected, _ = alone.update({"e": matrix}, alone.init({"e": matrix}), {"e": matrix})
        torch.testing.assert_close(updates["e"][i], expected["e"])
    opt, params = every, {"e": experts, "w": normal((4, 5), 1)}
    batches = [{"x": torch.linspace(-1, 1, 6, dtype=torch.float64)}]
    assert_equivalent(train_step_for(loss_of_tree, opt), params, opt, batches, world_sizes=(2, 3))


def test_muon_names_leaves_that_are_no_matrices():
    params = {"w": torch.ones(2, 2), "norm": torch.ones(2)}
    for bad in (params, {"w": torch.ones(2, 2, 2)}):
        with pytest.raises(ValueError, match=r"leaf '(norm|w)'.*fallback=optim.adamw\(3e-4\)"):
            optim.muon(0.1).init(bad)
    with pytest.raises(ValueError, match="fallback= too"):
        optim.muon(0.1, mask={"w": True, "norm": False})
    with pytest.raises(ValueError, match=r"mask= selects leaf 'norm'.*; let the mask leave it to fallback="):
        optim.muon(0.1, fallback=optim.sgd(0.1), mask={"w": True, "norm": True}).init(params)


@pytest.mark.parametrize(
    "call,answer",
    [
        (lambda: optim.adamw(lr=1e-3), r"adamw takes learning_rate=, and not lr=: adamw\(learning_rate=0.001\)"),
        (lambda: optim.adam(1e-3, betas=(0.9, 0.95)), r"takes b1= and b2=, and not betas=: adam\(b1=0.9, b2=0.95\)"),
        (lambda: optim.adam(1e-3, weight_decay=0.1), r"optim.adamw\(..., weight_decay=0.1\)"),
        (lambda: optim.sgd(lr=0.1, momentum=0.9), r"sgd takes learning_rate="),
        (lambda: optim.muon(lr=0.1), "muon takes learning_rate="),
        (lambda: optim.sgd(0.1, dampening=0.5), "optim.scale"),
        (lambda: optim.adamw(1e-3, fused=True), "fzero.jit makes one program"),
        (lambda: optim.adafactor(0.1, d=2.0), r"clipping_threshold=2.0"),
        (lambda: optim.adafactor(0.1, beta2_decay=-0.8), r"decay_rate, its negative"),
        (lambda: optim.clip(clip_value=1.0), r"clip takes max_delta="),
        (lambda: optim.adamw(torch.nn.Linear(2, 2).parameters()), r"step.init\(params, opt\)"),
        (lambda: optim.adamw(torch.nn.Linear(2, 2)), r"step.init\(params, opt\)"),
        (lambda: optim.adamw(params=[torch.ones(2)], lr=1e-3), r"step.init\(params, opt\)"),
        (lambda: optim.sgd(0.1, foo=1), "its arguments are learning_rate, momentum, nesterov"),
    ],
)
def test_muon_refuses_the_argument_names_of_torch_with_fzeros(call, answer):
    with pytest.raises(TypeError, match=answer):
        call()
