"""A tree as one rank of another world holds it: without memory, and in time that grows with the leaves."""

from typing import Any

import torch

import fzero
from fzero import optim
from fzero.graph import _one_rank
from fzero.sharding import lookup_spec
from fzero.sharding._boxes import Shard


def test_the_spec_of_a_unit_is_converted_once_whatever_its_leaves(monkeypatch):
    """Each leaf has a row in its unit's spec, so to convert it for each leaf would take the square of their number."""
    converted: list[Any] = []
    convert = _one_rank._spec_on_mesh
    monkeypatch.setattr(
        _one_rank, "_spec_on_mesh", lambda spec, sizes: (converted.append(spec), convert(spec, sizes))[1]
    )
    step = fzero.shard(lambda p, s, b: (p, s), 3, fzero.mesh(dp=2), units=lambda path, leaf: path.split(".")[0])
    params, _ = step.init({"a": [torch.ones(2) for _ in range(9)], "b": [torch.ones(4)]}, optim.sgd(0.1))
    moved = _one_rank.one_rank_tree(params, {"dp": 8}, all_ranks=True)
    assert len(converted) == 2
    shards = [x for x in (*moved["a"], *moved["b"]) if isinstance(x, Shard)]
    assert [dict(lookup_spec(x.spec_id).sharded_over) for x in shards] == [{"dp": 8}] * 2
    assert all(x.data.is_meta for x in shards)
