"""A wrong mesh, step or batch, and what is taken for something else: each error names it and says what to do."""

import os
from typing import Any

import numpy
import pytest
import torch

import fzero
from fzero import optim
from tests.errors.helpers import (
    FOUR,
    PARAMS,
    PIECES,
    STAGES,
    TRAIN_STEP,
    TWO,
    Row,
    X,
    check,
    init,
    loss_of,
    run,
    step_of,
)

NUMBERS = f"expected a stage of ZeRO, 0 to {STAGES[-1]}"


class Unknown(torch.optim.SGD):
    """An optimizer that fzero has no equivalent of."""


MAKING: dict[str, Row] = {
    "a stage too many": (lambda: step_of(len(STAGES)), ValueError, rf"stage={len(STAGES)}: {NUMBERS}"),
    "stage -1": (lambda: step_of(-1), ValueError, rf"stage=-1: {NUMBERS}"),
    "stage as a string": (lambda: step_of("2"), ValueError, rf"stage='2': {NUMBERS}"),
    "stage as a float": (lambda: step_of(2.0), (TypeError, ValueError), rf"stage=2.0: {NUMBERS}"),
    "unknown axis": (lambda: step_of(2, axis="tp"), ValueError, r"axis='tp': 'tp' is not an axis of Mesh\(dp=2"),
    "empty axis": (
        lambda: step_of(2, axis=()),
        ValueError,
        r"axis=\(\).*pass a batch that all ranks share without splitting it",
    ),
    "no argument at param_argnums=": (
        lambda: step_of(2, param_argnums=7)(*init(2), PIECES),
        ValueError,
        r"param_argnums=\(7,\): the step was called with 3 positional arguments",
    ),
    "no result at param_argnums=": (
        lambda: step_of(0, train_step=lambda p, s, x: (p, s), param_argnums=2)(PARAMS, (), {"w": X}),
        ValueError,
        r"param_argnums=\(2,\): the step returned 2 results",
    ),
    "two axes of any size": (lambda: fzero.mesh(dp=-1, tp=-1), ValueError, r"dp and tp are -1: only one axis"),
    "an option for an axis": (
        lambda: fzero.mesh(dp=2, simulte="lockstep"),  # pyright: ignore
        TypeError,
        r"simulte='lockstep': did you mean simulate=\?",
    ),
    "a plan without arguments": (
        lambda: fzero.plan(step_of(2)),
        ValueError,
        r"called with 0 positional arguments: a step, fzero.plan and step.plan take the arguments of train_step",
    ),
    "no axes": (lambda: fzero.mesh(), ValueError, r"at least one axis, such as mesh\(dp=4\)"),
    "size 0": (lambda: fzero.mesh(dp=0), ValueError, r"dp=0: an axis has at least one rank; -1 means"),
    "size -2": (lambda: fzero.mesh(dp=-2), ValueError, r"dp=-2: an axis has at least one rank"),
    "size as a float": (lambda: fzero.mesh(dp=2.5), (TypeError, ValueError), r"dp=2.5"),  # pyright: ignore
    "no world": (
        lambda: fzero.mesh(dp=2, simulate=False),
        ValueError,
        r"simulate=False, but there is no world: launch with torchrun",
    ),
}


@pytest.mark.parametrize("name", MAKING)
def test_a_wrong_mesh_or_step_is_refused(name):
    check(MAKING[name])


def test_a_mesh_whose_size_is_not_the_worlds_is_refused_before_anything_starts(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    message = r"dp=2, but the world has 4 processes: launch with torchrun --nproc-per-node 2, or pass dp=-1"
    with pytest.raises(ValueError, match=message):
        fzero.mesh(dp=2)
    with pytest.raises(ValueError, match=r"dp=4, tp=2, but the world has 4 processes"):
        fzero.mesh(dp=4, tp=2)
    with pytest.raises(ValueError, match=r"dp=-1, tp=3, but the world has 4 processes: 4 is not divisible by 3"):
        fzero.mesh(dp=-1, tp=3)
    with pytest.raises(ValueError, match="dp=0: an axis has at least one rank"):
        fzero.mesh(dp=0)
    assert not torch.distributed.is_initialized() and dict(os.environ) == before
    assert fzero.mesh(dp=2, simulate=True).simulated


BATCHES: dict[str, Row] = {
    "does not split": (
        lambda: TWO.split({"x": torch.ones(8, 3), "y": torch.ones(7, 3)}),
        ValueError,
        r"batch leaf 'y' is \[7, 3\]: dimension 0 must be divisible by the 2 ranks of Mesh\(dp=2.*drop or pad",
    ),
    "split of a 0-d leaf": (
        lambda: TWO.split({"x": X, "lr": torch.ones(())}),
        ValueError,
        r"batch leaf 'lr' is a tensor of shape \[\], which cannot be split over the 2 ranks",
    ),
    "split of a string": (lambda: TWO.split({"x": "hello"}), TypeError, r"batch leaf 'x' is 'hello'.*tensor"),
    "split of a number": (lambda: TWO.split([X, 3]), TypeError, r"batch leaf '1' is 3.*tensor"),
    "split of a split batch": (lambda: TWO.split(PIECES), (TypeError, ValueError), r"batch.*PerRank"),  # pyright: ignore
    "local of a wrong leading size": (
        lambda: TWO.local({"x": torch.ones(3, 5)}),
        ValueError,
        r"batch leaf 'x' is \[3, 5\].*dimension 0.*is the rank, and Mesh\(dp=2, simulated\) has 2; split",
    ),
    "local of a 0-d leaf": (lambda: TWO.local({"x": torch.ones(())}), ValueError, r"batch leaf 'x' is \[\]"),
    "local of a string": (lambda: TWO.local({"x": "hello"}), TypeError, r"batch leaf 'x' is 'hello'.*tensor"),
    "local of different sizes": (
        lambda: TWO.local(lambda rank: {"x": torch.ones(rank + 1)}),
        ValueError,
        r"rank 1's batch leaf 'x'",
    ),
    "local of different structures": (
        lambda: TWO.local(lambda rank: {"x": X, "y": X} if rank else {"x": X}),
        ValueError,
        r"'y'",
    ),
    "a batch split for another mesh": (
        lambda: run(2, *init(2), batch=FOUR.split(X)),
        ValueError,
        r"argument 2.* is \[4, 2, 3\].*Mesh\(dp=2, simulated\) has 2; split a batch with mesh.split",
    ),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_wrong_batch_is_refused(name):
    check(BATCHES[name])


@pytest.mark.parametrize("simulate", ["vmap", "lockstep"])
def test_a_shape_error_of_a_simulation_says_that_sizes_count_ranks(simulate: Any):
    mesh = fzero.mesh(dp=4, simulate=simulate)
    with pytest.raises(RuntimeError, match="shapes") as caught:
        mesh.spmd(lambda x: x @ torch.ones(2, 2))(mesh.split(torch.ones(8, 7)))
    notes = "".join(getattr(caught.value, "__notes__", ()))
    assert ("shapes in this message may include the 4 simulated ranks" in notes) == (simulate == "vmap")


def with_torch_optimizer() -> Any:
    opt = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=0.25)

    def train_step(params: Any, opt_state: Any, x: Any) -> Any:
        fzero.value_and_grad(loss_of)(params, x)
        opt.step()
        return params, opt_state

    return train_step


TORCH_OPT = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=0.25)
TAKEN: dict[str, Row] = {
    "stage True": (lambda: step_of(True), ValueError, rf"stage=True: {NUMBERS}"),
    "a step that is jitted already": (
        lambda: step_of(2, train_step=fzero.jit(TRAIN_STEP)),
        TypeError,
        r"train_step is .*, jitted already.*: shard first, then jit, step = fzero.jit\(fzero.shard\(train_step",
    ),
    "a module as a step": (
        lambda: step_of(2, train_step=torch.nn.Linear(2, 2)),
        TypeError,
        r"train_step is a module, Linear: fzero.shard takes a function.*fzero.nn.functional\(module\).apply",
    ),
    "check 1": (lambda: step_of(2, check=1), ValueError, r'check=1: expected "first", True or False'),
    "a step that runs torch.optim": (
        lambda: step_of(2, train_step=with_torch_optimizer()),
        TypeError,
        r"train_step calls 'opt': opt is a torch.optim.AdamW, .* fzero.optim.adamw\(0.25\)",
    ),
    "fzero.transforms.step of torch.optim": (
        lambda: fzero.transforms.step(TORCH_OPT),
        TypeError,
        r"fzero.optim.adamw\(0.25\)",
    ),
    "fzero.transforms.step of a function": (
        lambda: fzero.transforms.step(optim.adamw),
        TypeError,
        r"which makes an optimizer: call it",
    ),
}
for _stage in STAGES:
    TAKEN |= {
        f"torch.optim at {_stage}": (
            lambda s=_stage: step_of(s).init(PARAMS, TORCH_OPT),
            TypeError,
            r"opt is a torch.optim.AdamW, which writes into parameters.* fzero.optim.adamw\(0.25\)",
        ),
        f"a class of torch.optim at {_stage}": (
            lambda s=_stage: step_of(s).init(PARAMS, torch.optim.SGD),
            TypeError,
            r"opt is a torch.optim.SGD.* fzero.optim.sgd\(1e-3\)",
        ),
        f"torch.optim without an equivalent at {_stage}": (
            lambda s=_stage: step_of(s).init(PARAMS, Unknown),
            TypeError,
            r"opt is an optimizer of torch, .*Unknown, .* fzero.optim has adafactor, .*, sgd, and links",
        ),
        f"a function at {_stage}": (
            lambda s=_stage: step_of(s).init(PARAMS, optim.adamw),
            TypeError,
            r"opt is <function adamw .*, which makes an optimizer: call it, such as fzero.optim.adamw\(1e-3\)",
        ),
        f"no init at {_stage}": (
            lambda s=_stage: step_of(s).init(PARAMS, 0.1),
            TypeError,
            r"opt is 0.1, which has no init: expected an \(init, update\) pair",
        ),
        f"a module as parameters at {_stage}": (
            lambda s=_stage: run(s, torch.nn.Linear(3, 2), ()),
            TypeError,
            r"argument 0 \(parameters\) is a module, .*step.init\(module, opt\)",
        ),
    }


@pytest.mark.parametrize("name", TAKEN)
def test_arguments_passed_in_a_wrong_position_are_named(name):
    check(TAKEN[name])


@pytest.mark.parametrize("kind", [numpy.int64, numpy.uint8])
def test_a_stage_may_be_a_numpy_integer(kind):
    assert step_of(kind(2)).stage == 2 and type(step_of(kind(2)).stage) is int


def test_the_error_for_a_number_that_differs_by_rank_advises_a_tensor():
    mesh = fzero.mesh(dp=2)
    for call in (lambda: mesh.spmd(lambda x: x)(fzero.PerRank(3)), lambda: mesh.split({"n": 3})):
        with pytest.raises(
            TypeError, match=r"is 3: a value that differs by rank must be a tensor; pass torch.as_tensor"
        ):
            call()


def test_the_error_for_a_step_that_is_no_function_shows_the_signature():
    with pytest.raises(TypeError, match=r"train_step is 3: expected a function, \(params, opt_state, batch\) -> "):
        fzero.shard(3, stage=1, mesh=fzero.mesh(dp=2))  # pyright: ignore
