"""Stages 1 and 2 hold the leaves of a unit side by side; the others, as they were."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero import optim, tree
from fzero._torch import find_buffers, storage_id
from fzero.zero._unit_buffers import copy_to_unit_buffers
from tests.helpers import mlp_loss, mlp_params, train_step_for
from tests.memory import peak_bytes

OPT = optim.adamw(1e-2)


def step_at(stage: Any, **options: Any) -> fzero.zero.ShardedStep:
    return fzero.shard(train_step_for(mlp_loss, OPT), stage=stage, mesh=fzero.mesh(dp=2), **options)


def memories(values: Any) -> list[int]:
    """Number the memory of each leaf by the first leaf that lies in it."""
    ids = [storage_id(x) for x in tree.tensors(values)]
    return [ids.index(i) for i in ids]


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_leaves_of_a_unit_lie_side_by_side_where_ranks_update_parts_of_it(stage, donate):
    """A unit of one leaf stays alone. In a tree's order: two blocks of two leaves, the head, a scale."""
    step, values = step_at(stage), mlp_params()
    expected = tree.map(torch.clone, values)
    params, _ = step.init(values, OPT, donate=donate)
    assert memories(params) == ([0, 1, 2, 3, 4, 5] if stage == 0 else [0, 0, 2, 2, 4, 5])
    assert len(find_buffers(tree.tensors(params))) == (0 if stage == 0 else 2)
    for x, y in zip(tree.tensors(params), tree.tensors(expected), strict=True):
        assert torch.equal(x, y) and x.is_contiguous()


def test_partition_lays_the_leaves_of_a_unit_side_by_side():
    step = step_at(1)
    params, _ = step.init(mlp_params(), OPT)
    for made in (step.partition(mlp_params()), step.partition(mlp_params(), like=params)):
        assert memories(made) == [0, 0, 2, 2, 4, 5]
        assert all(torch.equal(x, y) for x, y in zip(tree.tensors(made), tree.tensors(mlp_params()), strict=True))


@given(st.integers(1, 4), st.booleans(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_init_keeps_tied_integer_and_empty_leaves(blocks, tied, dtype):
    values = {
        str(i): {"w": torch.full((2, 3), float(i)), "e": torch.zeros(0, 2), "s": torch.tensor(1.0)}
        for i in range(blocks)
    }
    values["table"] = values["0"]["w"] if tied else torch.ones(2)
    opt = OPT if dtype == torch.float32 else optim.master_weights(OPT, fzero.Precision(param=dtype))
    if opt is OPT:
        values["n"] = torch.tensor(3)
    params, _ = step_at(2).init(values, opt)
    assert (params["table"] is params["0"]["w"]) == tied
    assert opt is not OPT or params["n"].dtype == torch.int64
    for name, block in params.items():
        if isinstance(block, dict):
            assert len(set(memories(block))) == 1 and block["w"].dtype == dtype
            assert {k: torch.equal(x, values[name][k].to(dtype)) for k, x in block.items()} == dict.fromkeys(
                "wes", True
            )


def test_a_unit_of_two_dtypes_becomes_two_buffers():
    values = {"a": {"w": torch.ones(2), "h": torch.ones(4).half(), "v": torch.ones(3), "g": torch.ones(2).half()}}
    params, _ = step_at(1, units=lambda path, leaf: "all").init(values, OPT)
    assert memories(params) == [0, 1, 0, 1]  # in the order of the keys: g and h, v and w


def test_init_holds_at_most_one_unit_beside_the_leaves():
    width, blocks = 64, 6
    unit = (width * width + width) * 4

    def made(**options: Any) -> Any:
        return [{"w": torch.zeros(width, width, **options), "b": torch.zeros(width, **options)} for _ in range(blocks)]

    sharded = step_at(1).program(fzero.partition)(made(device="meta"))
    assert peak_bytes(lambda: copy_to_unit_buffers(tree.tensors(made()), sharded)) == (blocks + 1) * unit


def test_unit_buffers_work_on_a_mesh_of_one_rank():
    step = fzero.shard(train_step_for(mlp_loss, OPT), stage=1, mesh=fzero.mesh(dp=1), units=lambda path, leaf: None)
    params, _ = step.init(mlp_params(), OPT)
    assert memories(params) == [0, 1, 2, 3, 4, 5]
