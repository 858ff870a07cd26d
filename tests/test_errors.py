"""The classes of fzero.errors: where they are found, and which trees raise a LayoutError."""

import pickle
from typing import Any

import pytest

import fzero
from tests.errors.helpers import FOUR, OPT, PARAMS, TRAIN_STEP, X, init, run


@pytest.mark.parametrize("name", fzero.errors.__all__)
def test_every_error_class_is_importable_from_fzero_errors(name):
    """A pickle looks there, as when a process hands its error to another."""
    error = getattr(fzero.errors, name)
    assert error.__module__ == "fzero.errors" and pickle.loads(pickle.dumps(error)) is error


def test_trees_in_another_layout_raise_a_layout_error():
    other = fzero.shard(TRAIN_STEP, 3, FOUR).init(PARAMS, OPT)
    for state, stage in ((init(3), 0), (init(0), 3), (other, 3), ((init(2)[0], init(0)[1]), 2)):
        with pytest.raises(fzero.errors.LayoutError):
            run(stage, *state)


def test_the_error_for_replicas_in_another_layout_advises_their_load():
    def make(stage: int) -> Any:
        mesh = fzero.mesh(replica=2, dp=2)
        return fzero.local_sgd.local_steps(fzero.shard(TRAIN_STEP, stage, mesh, axis="dp"), every=2)

    with pytest.raises(fzero.errors.LayoutError) as caught:
        make(3)(*make(0).init(PARAMS, OPT), fzero.mesh(replica=2, dp=2).split(X))
    assert any("new.load(path" in note for note in caught.value.__notes__)
