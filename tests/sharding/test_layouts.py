"""The table of layouts has a row for each leaf of a tree, with its shape and its ranks."""

import torch

import fzero
from fzero import optim


def test_the_table_of_layouts_has_a_row_for_every_leaf():
    mesh, opt = fzero.mesh(dp=2, tp=2), optim.adam(1e-3)
    step = fzero.shard(
        lambda p, s, b: (p, s), 3, mesh, axis="dp", split=lambda path, leaf: {"tp": 0} if path == "a.w" else None
    )
    params, opt_state = step.init({"a": {"w": torch.ones(4, 3), "b": torch.ones(5)}, "c": torch.ones(7)}, opt)
    results = {x.path: x for x in fzero.sharding.layouts(params).leaves}
    assert {path: x.shape for path, x in results.items()} == {"a.w": (4, 3), "a.b": (5,), "c": (7,)}
    assert "over dp=2, part of tp=2" in results["a.w"].layout and "over dp=2: 4 of 7" in results["c"].layout
    counted = {x.path: x.layout for x in fzero.sharding.layouts(opt_state).leaves}
    assert counted["count"] == "replicated" and "unit 'c'" in counted["mu.c"]


def test_layouts_of_per_rank_boxes_and_of_values_that_are_no_tensors():
    mesh = fzero.mesh(dp=2)
    table = fzero.sharding.layouts({"x": mesh.split(torch.ones(4, 2)), "name": "run", "y": torch.ones(3)})
    assert [(x.path, x.layout) for x in table.leaves] == [("x", "differs by rank"), ("y", "replicated")]
    assert fzero.sharding.layouts({}).leaves == () and str(fzero.sharding.layouts({})) == ""
    assert "differs by rank" in table._repr_html_() and repr(table) == str(table)
