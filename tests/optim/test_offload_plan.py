"""The plan of an offload: which share of each unit lies on the host."""

from fractions import Fraction
from typing import Any

import torch

import fzero
from fzero import optim
from fzero.collectives import to_host
from fzero.optim._offload_plan import _to_fraction, plan_offload
from fzero.sharding._boxes import Shard
from fzero.sharding._spec import lookup_spec


def params_at(stage: int, **leaves: torch.Tensor) -> Any:
    """Return the parameters of a step as this stage lays them out."""
    step = fzero.shard(lambda params, opt_state, batch: (params, opt_state), stage, fzero.mesh(dp=2))
    return step.init(leaves, optim.sgd(0.1))[0]


def test_an_offload_ratio_is_the_decimal_fraction_that_was_written():
    """In binary 0.1 is more than a tenth: of ten elements the host would hold two."""
    assert _to_fraction(0.1) == Fraction(1, 10) != Fraction(0.1)


def test_a_unit_that_only_the_state_has_takes_the_average_share():
    plan = plan_offload(params_at(3, w=torch.ones(64)), 0.25)
    state = params_at(3, v=torch.ones(3, 32))
    assert lookup_spec(plan._spec_id_in_pieces(state["v"].spec_id)).host == Fraction(1, 4)


def test_full_parameters_stay_whole_where_boxes_alone_are_split():
    params = params_at(1, w=torch.ones(64))
    plan = plan_offload(params, 0.5)
    assert plan.to_pieces(params, to_host, boxes_only=True)["w"] is params["w"]
    assert isinstance(plan.to_pieces(params, to_host)["w"], Shard)
