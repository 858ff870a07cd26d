"""Arguments in another order, and values that are no trees: the error says which argument comes first."""

import pytest
import torch

import fzero
from fzero import optim, random
from fzero.local_sgd import SyncSchedule
from tests.errors.helpers import check

PARAMS = {"w": torch.ones(3)}
MESH = fzero.mesh(dp=2)
STEP = fzero.shard(lambda params, opt_state, batch: (params, opt_state), stage=3, mesh=MESH)
SGD = optim.sgd(0.1)

ROWS = {
    "updates are missing": (
        lambda: optim.apply_updates(PARAMS, None),
        ValueError,
        r"params has leaf 'w' .*, and updates has not$",
    ),
    "another tree of a map": (
        lambda: fzero.tree.map(torch.add, PARAMS, {"v": 1}),
        ValueError,
        r"tree has leaf 'w' .*, and rest\[0\] has not$",
    ),
    "a link that is a string": (
        lambda: optim.chain(SGD, "clip"),
        TypeError,
        r"^opts\[1\] is 'clip', which has no init",
    ),
    "a ratio first": (lambda: optim.offload(1.0, SGD), TypeError, r"^ratio is an optimizer, .*: it comes first"),
    "a shape first": (lambda: random.normal((3,), random.key(0)), TypeError, r"^key is \(3,\), .*the key comes first"),
    "no key": (
        lambda: random.seeded(torch.relu)(torch.ones(3)),
        TypeError,
        r"^key is float32 \[3\]: expected an int64",
    ),
    "a list of numbers": (lambda: MESH.split([1, 2]), TypeError, r"or, if it .*, pass it to the step as an argument"),
    "more parts than steps": (lambda: SyncSchedule(4, parts=5), ValueError, r"^parts=5: expected at most every=4"),
    "a number to gather": (lambda: fzero.gather(3), TypeError, r"^params is 3: .*, as in fzero.gather\(params\)$"),
    "a number to partition": (lambda: fzero.partition(3), TypeError, r"^params is 3: .* fzero.partition\(params\)$"),
    "an optimizer to gather": (lambda: STEP.gather(SGD), TypeError, r"^params is Optimizer\(.*: expected a tree"),
}


@pytest.mark.parametrize("name", ROWS)
def test_the_argument_is_named(name):
    check(ROWS[name])


def test_a_leaf_before_its_folder_is_refused(tmp_path):
    fzero.save(tmp_path, PARAMS).wait()
    with pytest.raises(
        TypeError, match=r"is a folder, and path='w' is not: expected fzero.checkpoint.read\(path, name"
    ):
        fzero.checkpoint.read("w", tmp_path)
    assert torch.equal(fzero.checkpoint.read(tmp_path, "w"), PARAMS["w"])


@pytest.mark.parametrize("gather", [fzero.gather, STEP.gather, fzero.partition])
def test_trees_with_other_leaves_pass(gather):
    values = {"count": 3, "none": None}
    assert gather(values) == values and gather(None) is None and gather(()) == ()
