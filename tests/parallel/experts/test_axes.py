"""The axis that experts are split over, the one that tokens travel along and those of the data fit, or are refused."""

from typing import Any

import pytest
import torch

import fzero
from fzero.parallel import experts as moe
from tests.helpers import train_step_for
from tests.parallel.experts.model import OPT, batch_of, experts_params, ffn, loss_for, params_of


def train(split: Any, capacity: float | None = 1.0, axis: Any = None, **options: Any) -> Any:
    mesh = fzero.mesh(dp=2, ep=2, **options)
    step = fzero.shard(train_step_for(loss_for(2, capacity), OPT), stage=3, mesh=mesh, split=split, axis=axis)
    return step(*step.init(params_of(), OPT), mesh.split(batch_of(8), axis))


@pytest.mark.parametrize("capacity", [None, 1.0])
@pytest.mark.parametrize("simulate", ["vmap", "lockstep"])
def test_experts_that_are_split_over_another_axis_are_refused(capacity, simulate):
    """Both axes have two ranks, so that all shapes fit, and ranks along ep would have the same experts."""
    with pytest.raises(ValueError, match=r"axis='ep': .*experts.split_rule\(axis='dp'\).* give both the same axis"):
        train(moe.split_rule("experts", axis="dp"), capacity, simulate=simulate)


def test_a_list_of_rules_that_splits_experts_over_another_axis_is_refused():
    rules = [moe.split_rule("experts", axis="dp"), lambda path, leaf: None]
    with pytest.raises(ValueError, match=r"axis='ep': .*experts.split_rule\(axis='dp'\).* give both the same axis"):
        train(rules, None)


def test_a_hand_written_rule_that_splits_experts_over_another_axis_is_refused():
    """A simulation knows by type that no leaf differs along ep."""
    with pytest.raises(ValueError, match=r"axis='ep': .*equal on the 2 ranks along 'ep'"):
        train(lambda path, leaf: {"dp": 0} if "experts" in path else None)


@pytest.mark.parametrize("capacity", [None, 1.0])
@pytest.mark.parametrize("simulate", ["vmap", "lockstep"])
def test_an_expert_axis_outside_of_the_axes_of_the_data_is_refused(capacity, simulate):
    """Ranks along ep would send the same tokens, and an expert's gradient would be twice what it is."""
    with pytest.raises(ValueError, match=r"axis='ep': .*data .*\('dp',\).* set fzero.shard\(axis=\('dp', 'ep'\)\)"):
        train(moe.split_rule("experts"), capacity, axis="dp", simulate=simulate)


def test_experts_made_within_the_program_pass():
    """One leaf that differs is enough: others may be equal on all ranks."""

    def program() -> Any:
        x = batch_of(2)["x"]
        experts = fzero.tree.map(lambda v: v.view(2, 2, *v.shape[1:])[fzero.axes.axis_index("ep")], experts_params(4))
        experts["bias"] = torch.zeros(2, 10, dtype=torch.float64)
        return fzero.PerRank(moe.layer(ffn, experts, x, moe.route(x @ params_of()["layer"]["router"], 2)))

    assert fzero.mesh(ep=2).spmd(program)().value.isfinite().all()
