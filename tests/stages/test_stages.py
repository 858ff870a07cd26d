"""The table of stages, and names that it had before."""

import pytest

import fzero
from fzero import transforms


def test_a_stage_is_a_row_of_layouts():
    steps = [fzero.shard(lambda p, s, x: (p, s), stage=stage, mesh=fzero.mesh(dp=2)) for stage in range(4)]
    assert [step.layout.params for step in steps] == ["replicated"] * 3 + ["sharded"]
    assert [step.layout.grads for step in steps] == ["replicated", "once", "each", "each"]
    assert [step.layout.opt_state for step in steps] == ["replicated"] + ["sharded"] * 3


@pytest.mark.parametrize(
    "module,name,now",
    [
        (fzero, "Layout", fzero.StageLayouts),
        (transforms, "Layout", fzero.StageLayouts),
        (transforms, "shard", fzero.shard),
        (transforms, "ShardedStep", fzero.ShardedStep),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_name_that_changed_warns_and_works(module, name, now):
    with pytest.warns(DeprecationWarning, match=f"{name} is fzero"):
        assert getattr(module, name) is now
    with pytest.raises(AttributeError):
        module.no_such_name  # noqa: B018
