"""The main law: a sharded step equals the unsharded one, whatever the tree, stage, world size and optimizer."""

from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st

import fzero
from fzero import optim, tree
from fzero.testing import assert_equivalent, optimizers, stages, trees, world_sizes
from tests.helpers import examples, train_step_for
from tests.zero.helpers import RULES, loss_of_tree


@examples(8, 100)
@given(
    params=trees(),
    opt=optimizers(),
    stage=stages(),
    n=world_sizes(),
    micro_batches=st.integers(1, 3),
    reduce=st.sampled_from(["mean", "sum"]),
    seed=st.integers(0, 99),
)
@example({"first": torch.ones(()), "rest": [torch.ones(0), {"a": torch.ones(7)}]}, optim.sgd(0.1), 1, 8, 3, "mean", 0)
def test_every_stage_equals_unsharded_training(params, opt, stage, n, micro_batches, reduce, seed):
    params = tree.map(lambda x: x.double(), params)
    g = torch.Generator().manual_seed(seed)
    batches = [{"x": torch.randn(n * micro_batches * 2, generator=g, dtype=torch.float64)} for _ in range(3)]
    if reduce == "sum":  # a loss that the user normalises: the sum over ranks of parts of the global mean

        def loss(params: Any, batch: Any) -> torch.Tensor:
            count = fzero.collectives.psum(torch.tensor(float(len(batch["x"])))) * micro_batches
            return loss_of_tree(params, batch) * len(batch["x"]) / count.double()
    else:
        loss = loss_of_tree
    step = train_step_for(loss, opt, micro_batches=micro_batches, reduce=reduce)
    assert_equivalent(step, params, opt, batches, stages=(stage,), world_sizes=(n,))


@examples(6, 40)
@given(params=trees(dtypes=[torch.float64, torch.float32]), stage=stages(), n=world_sizes(), k=st.integers(1, 2))
def test_mixed_dtypes_equal_unsharded_training(params, stage, n, k):
    opt = optim.chain(optim.clip_by_global_norm(0.5), optim.sgd(0.1, momentum=0.9))
    batches = [{"x": torch.linspace(-1, 1 + i, n * k, dtype=torch.float64)} for i in range(3)]
    step = train_step_for(loss_of_tree, opt, micro_batches=k)
    assert_equivalent(step, params, opt, batches, stages=(stage,), world_sizes=(n,), rtol=1e-5)


@examples(7, 50)
@given(params=trees(), rule=st.sampled_from(sorted(RULES)), stage=stages(), n=world_sizes(5), k=st.integers(1, 2))
def test_any_unit_rule_equals_unsharded_training(params, rule, stage, n, k):
    opt = optim.chain(optim.clip_by_global_norm(0.5), optim.adam(1e-2, eps=1e-3))
    batches = [{"x": torch.linspace(-1, 1 + i, n * k, dtype=torch.float64)} for i in range(3)]
    step = train_step_for(loss_of_tree, opt, micro_batches=k)
    assert_equivalent(step, params, opt, batches, stages=(stage,), world_sizes=(n,), units=RULES[rule])


@examples(6, 25)
@given(stage=stages(), n=world_sizes(4), k=st.integers(1, 2), seed=st.integers(0, 9))
def test_integer_trees_beside_the_parameters_pass_through(stage, n, k, seed):
    """Integer leaves live in an argument that is not differentiated; they come back as they went in."""
    g = torch.Generator().manual_seed(seed)
    params = {"emb": torch.randn(5, 3, generator=g, dtype=torch.float64)}
    table = {"ids": torch.tensor([4, 0, 2]), "flag": torch.tensor(True), "none": None}
    opt = optim.sgd(0.1)

    def loss(params: Any, batch: Any, table: Any) -> torch.Tensor:
        return (params["emb"][table["ids"]].sum(0) * batch["x"]).square().mean() * table["flag"]

    def train_step(params: Any, state: Any, batch: Any) -> Any:
        (params, table), opt_state = params, state
        value, grads = fzero.value_and_grad(loss, micro_batches=k, batch_argnums=1)(params, batch, table)
        params, opt_state = fzero.transforms.step(opt)(params, grads, opt_state)
        return (params, table), opt_state, value, table

    init = optim.Optimizer(lambda both: opt.init(both[0]), opt.update, exact_on_shards=True)
    batches = [{"x": torch.randn(n * k * 2, 3, generator=g, dtype=torch.float64)} for _ in range(2)]
    assert_equivalent(train_step, (params, table), init, batches, stages=(stage,), world_sizes=(n,))
