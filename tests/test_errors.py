"""Bad input: each mistake raises an error that names the argument or the leaf, what was given and what to do."""

import os
import pickle
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

import fzero
from fzero import nn, optim, tree
from fzero._notice import warn_once
from fzero.testing import assert_trees_close
from tests.helpers import LEAST, cases, train_step_for

TWO, FOUR = fzero.mesh(dp=2), fzero.mesh(dp=4)
STAGES = range(4)
SHARDED = range(1, 4)


def loss_of(params: Any, x: torch.Tensor) -> torch.Tensor:
    """Uses every leaf, whatever the tree."""
    return x.mean() * sum(leaf.square().sum() for leaf in tree.tensors(params))


PARAMS: dict[str, Any] = {"a": {"w": torch.ones(3, 2), "b": torch.ones(2)}, "c": torch.ones(5)}
X = torch.ones(8, 3)
OPT = optim.adamw(0.1)
TRAIN_STEP = train_step_for(loss_of, OPT)


def step_of(
    stage: Any, mesh: fzero.ranks.Mesh = TWO, train_step: Any = TRAIN_STEP, **options: Any
) -> fzero.zero.ShardedStep:
    return fzero.shard(train_step, stage, mesh, **options)


def init(stage: int, mesh: fzero.ranks.Mesh = TWO, params: Any = PARAMS) -> tuple[Any, Any]:
    return step_of(stage, mesh).init(params, OPT)


def run(stage: int, params: Any, state: Any, mesh: fzero.ranks.Mesh = TWO, batch: Any = None, **options: Any) -> Any:
    return step_of(stage, mesh, **options)(params, state, mesh.split(X) if batch is None else batch)


def spmd(program: Callable[..., Any], *args: Any) -> Any:
    return TWO.spmd(program)(*args)


BOXES, BOXED_STATE = init(3)
SHARD, SLOT = BOXES["a"]["w"], BOXES["a"]["b"]
PIECES = TWO.split(X)

Row = tuple[
    Callable[[], Any], type[Exception] | tuple[type[Exception], ...], str
]  # what is done, the error, a pattern in its message


def check(row: Row) -> None:
    action, error, message = row
    with pytest.raises(error, match=message):
        action()


# ---------------------------------------------------------------- fzero.shard and meshes

MAKING: dict[str, Row] = {
    "stage 4": (lambda: step_of(4), ValueError, r"stage=4: expected a stage of ZeRO, 0 to 3"),
    "stage -1": (lambda: step_of(-1), ValueError, r"stage=-1: expected a stage of ZeRO, 0 to 3"),
    "stage as a string": (lambda: step_of("2"), ValueError, r"stage='2': expected a stage of ZeRO, 0 to 3"),
    "stage as a float": (lambda: step_of(2.0), (TypeError, ValueError), r"stage=2.0: expected a stage of ZeRO, 0 to 3"),
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


# ---------------------------------------------------------------- batches

BATCHES: dict[str, Row] = {
    "does not split": (
        lambda: TWO.split({"x": torch.ones(8, 3), "y": torch.ones(7, 3)}),
        ValueError,
        r"batch leaf 'y' is \[7, 3\]: dimension 0 must be divisible by the 2 ranks of Mesh\(dp=2.*drop or pad",
    ),
    "split of a 0-d leaf": (
        lambda: TWO.split({"x": X, "lr": torch.ones(())}),
        ValueError,
        r"batch leaf 'lr' is \[\]: dimension 0 must be divisible by the 2 ranks",
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


# ---------------------------------------------------------------- collectives

COLLECTIVES: dict[str, Row] = {
    "arithmetic with a value that mesh.split made": (
        lambda: torch.add(fzero.mesh(dp=2).split(X), 1),
        TypeError,
        r"PerRank.*pass it to a sharded step or to a function made by mesh.spmd, where it arrives without the box",
    ),
    "psum over an unknown axis": (
        lambda: spmd(lambda: fzero.collectives.psum(X, "tp")),
        ValueError,
        r"axis 'tp' is not bound here: the bound axes are 'dp'",
    ),
    "psum over an axis outside any mesh": (
        lambda: fzero.collectives.psum(X, "dp"),
        ValueError,
        r"axis 'dp' is not bound here: no rank program is running; .* outside of one step.gather",
    ),
    "axis_index of an unknown axis": (lambda: fzero.axes.axis_index("tp"), ValueError, r"axis 'tp' is not bound"),
    "axis_size of an unknown axis": (lambda: fzero.axes.axis_size("tp"), ValueError, r"axis 'tp' is not bound"),
    "value_and_grad over an unknown axis": (
        lambda: spmd(lambda p: fzero.value_and_grad(loss_of, axis="tp")(p, X), PARAMS),
        ValueError,
        r"axis 'tp' is not bound here: the bound axes are 'dp'",
    ),
    "partition over an unknown axis": (
        lambda: spmd(lambda p: fzero.partition(p, "tp"), PARAMS),
        ValueError,
        r"axis 'tp' is not bound here: the bound axes are 'dp'",
    ),
    "psum of a number": (
        lambda: spmd(lambda: fzero.collectives.psum({"count": 3})),
        TypeError,
        r"leaf 'count' is 3; make it a torch.tensor",
    ),
    "pmean of a string": (
        lambda: fzero.collectives.pmean([X, "x"]),
        TypeError,
        r"leaf '1' is 'x'; make it a torch.tensor",
    ),
    "psum of shards": (  # each rank holds another part: the sum means nothing
        lambda: spmd(lambda p: fzero.collectives.psum(fzero.partition(p)), PARAMS),
        TypeError,
        r"'a\.w'.*Shard\('a'",
    ),
    "pmean of gradient shards": (
        lambda: spmd(
            lambda p: fzero.collectives.pmean(fzero.value_and_grad(loss_of)(fzero.partition(p), X)[1]), PARAMS
        ),
        TypeError,
        r"'a\.w'.*Shard\('a'",
    ),
    "all_gather of a number": (lambda: spmd(lambda: fzero.collectives.all_gather(3.0)), TypeError, r"all_gather.*3\.0"),  # pyright: ignore
    "all_gather of a box": (
        lambda: spmd(lambda: fzero.collectives.all_gather(SHARD)),
        TypeError,
        r"all_gather.*Shard\('a'",
    ),
    "psum_scatter of a tree": (
        lambda: spmd(lambda: fzero.collectives.psum_scatter({"x": X})),
        TypeError,
        r"psum_scatter",
    ),  # pyright: ignore
    "psum_scatter that does not divide": (
        lambda: spmd(lambda: fzero.PerRank(fzero.collectives.psum_scatter(X, dim=-1))),
        ValueError,
        r"splits dimension 1 of a tensor \[8, 3\] into 2 equal parts, but 3 is not divisible by 2; pad it",
    ),
    "all_gather along no dimension": (
        lambda: spmd(lambda: fzero.collectives.all_gather(X, dim=2)),
        ValueError,
        r"dim=2 is not a dimension of a tensor \[8, 3\]",
    ),
    "psum_scatter along no dimension": (
        lambda: spmd(lambda: fzero.collectives.psum_scatter(torch.ones(()))),
        ValueError,
        r"dim=0 is not a dimension of a tensor \[\]",
    ),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_wrong_collective_is_refused(name):
    check(COLLECTIVES[name])


# ---------------------------------------------------------------- value_and_grad


def vag(f: Any = loss_of, **options: Any) -> Any:
    return fzero.value_and_grad(f, **options)


def pair_loss(params: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return loss_of(params, batch["x"]) + batch["y"].sum()


DIFFERENTIATION: dict[str, Row] = {
    "reduce": (lambda: vag(reduce="avg"), ValueError, r"reduce='avg': expected \"mean\", \"weighted\" or \"sum\""),
    "no micro-batch": (lambda: vag(micro_batches=0), ValueError, r"micro_batches=0: expected an int, at least 1"),
    "negative micro-batches": (
        lambda: vag(micro_batches=-2),
        ValueError,
        r"micro_batches=-2: expected an int, at least 1",
    ),
    "a batch that does not divide by micro_batches": (
        lambda: vag(pair_loss, micro_batches=3)(PARAMS, {"x": X, "y": X}),
        ValueError,
        r"micro_batches=3 does not divide .*batch: argument 1, leaf 'x' of .* size 8",
    ),
    "a rank's batch that does not divide by micro_batches": (
        lambda: spmd(vag(micro_batches=8), PARAMS, PIECES),
        ValueError,
        r"micro_batches=8 does not divide .*batch: argument 1 of .* size 4",
    ),
    "micro-batch leaves of different sizes": (
        lambda: vag(pair_loss, micro_batches=2)(PARAMS, {"x": X, "y": torch.ones(6)}),
        ValueError,
        r"micro_batches=2.*\"argument 1, leaf 'x'\": 8, \"argument 1, leaf 'y'\": 6.*batch_argnums=",
    ),
    "micro-batch arguments of different sizes": (
        lambda: vag(lambda p, x, y: loss_of(p, x) + y.sum(), micro_batches=2)(PARAMS, X, torch.ones(6)),
        ValueError,
        r"micro_batches=2: each of the arguments \[1, 2\] may be the batch; name the batch with batch_argnums=",
    ),
    "a micro-batch without a dimension": (
        lambda: vag(lambda p, x: loss_of(p, X) + x, micro_batches=2)(PARAMS, torch.ones(())),
        ValueError,
        r"micro_batches=2.*argument 1.*0-d",
    ),
    "a batch passed by name with micro_batches": (
        lambda: vag(micro_batches=2)(PARAMS, x=X),
        ValueError,
        r"micro_batches=2.*position",
    ),
    "batch_argnums out of range": (
        lambda: vag(micro_batches=2, batch_argnums=5)(PARAMS, X),
        ValueError,
        r"batch_argnums=5: expected positions below 2",
    ),
    "argnums out of range": (
        lambda: vag(argnums=5)(PARAMS, X),
        ValueError,
        r"argnums=5: the function was called with 2 positional arguments",
    ),
    "parameters passed by name": (
        lambda: vag()(params=PARAMS, x=X),
        ValueError,
        r"argnums=0: the function was called with 0 positional arguments",
    ),
    "a loss that is not 0-d": (
        lambda: vag(lambda p, x: p["c"])(PARAMS, X),
        TypeError,
        r"must return a 0-d floating-point loss, but it returned torch.float32 \[5\]; reduce it with .mean\(\)",
    ),
    "an integer loss": (
        lambda: vag(lambda p, x: torch.tensor(3))(PARAMS, X),
        TypeError,
        r"0-d floating-point loss, but it returned torch.int64 \[\]",
    ),
    "no loss": (lambda: vag(lambda p, x: None)(PARAMS, X), TypeError, r"0-d floating-point loss.*NoneType"),
    "a pair without has_aux": (
        lambda: vag(lambda p, x: (loss_of(p, x), x))(PARAMS, X),
        TypeError,
        r"0-d floating-point loss.*tuple.*has_aux",
    ),
    "has_aux without a pair": (
        lambda: vag(has_aux=True)(PARAMS, X),
        TypeError,
        r"has_aux=True: loss_of must return \(loss, aux\), but it returned torch.float32 \[\]",
    ),
    "has_aux with three results": (
        lambda: vag(lambda p, x: (loss_of(p, x), x, x), has_aux=True)(PARAMS, X),
        TypeError,
        r"has_aux=True: <lambda> must return \(loss, aux\), but it returned a tuple",
    ),
    "complex parameters": (
        lambda: vag()({"z": torch.ones(2, dtype=torch.complex64)}, X),
        TypeError,
        r"leaf 'z' is torch.complex64 \[2\]",
    ),
    "a number among the parameters": (lambda: vag()({"n": {"x": 3.0}}, X), TypeError, r"leaf 'n.x' is 3.0"),
}


@pytest.mark.parametrize("name", DIFFERENTIATION)
def test_a_wrong_call_of_value_and_grad_is_refused(name):
    check(DIFFERENTIATION[name])


INTEGERS = {**PARAMS, "n": {"ids": torch.arange(3)}}
NO_GRADIENT = r"argument 0 is differentiated, and its leaf 'n.ids' is torch.int64 \[3\], which cannot be differ"


def test_integer_parameters_are_not_differentiated_unsharded():
    with pytest.raises(TypeError, match=NO_GRADIENT):
        vag()(INTEGERS, X)


@pytest.mark.parametrize("stage", STAGES)
def test_integer_parameters_are_not_differentiated_in_a_step(stage):
    with pytest.raises(TypeError, match=NO_GRADIENT):
        run(stage, *init(stage, params=INTEGERS))


# ---------------------------------------------------------------- boxes where tensors belong

NOT_A_TENSOR = r"Shard\('a', float32 \[3, 2\], 4 of 8 elements, dp=2\).*fzero\.value_and_grad.*fzero\.gather"

PLAIN: dict[str, Callable[[Any], Any]] = {
    "torch.sum(box)": lambda box: torch.sum(box),
    "torch.stack([box])": lambda box: torch.stack([box]),
    "linear(x, box)": lambda box: torch.nn.functional.linear(X, box),
    "layer_norm(x, weight=box)": lambda box: torch.nn.functional.layer_norm(X, (3,), weight=box),
    "torch.zeros_like(box)": lambda box: torch.zeros_like(box),
    "torch.where(c, box, 0)": lambda box: torch.where(X > 0, box, 0.0),
    "x.add(box)": lambda box: X.add(box),
    "x @ box": lambda box: X @ box,
    "box @ x": lambda box: box @ X,
    "x + box": lambda box: X + box,
    "x - box": lambda box: X - box,
    "x * box": lambda box: X * box,
    "x / box": lambda box: X / box,
    "x ** box": lambda box: X**box,
    "box < x": lambda box: box < X,
    "2 * box": lambda box: 2 * box,
    "box + 1": lambda box: box + 1,
    "box / 2": lambda box: box / 2,
    "-box": lambda box: -box,
    "box[0]": lambda box: box[0],
    "box.T": lambda box: box.T,
    "box.sum()": lambda box: box.sum(),
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_box_in_plain_torch_is_refused(name):
    with pytest.raises((TypeError, AttributeError), match=NOT_A_TENSOR):
        PLAIN[name](SHARD)


@pytest.mark.parametrize("name", ["torch.sum(box)", "linear(x, box)", "x @ box", "x + box"])
def test_a_slot_in_plain_torch_is_refused(name):
    with pytest.raises(TypeError, match=r"Slot\('a', 1, float32 \[2\]\).*fzero\.value_and_grad.*fzero\.gather"):
        PLAIN[name](SLOT)


@pytest.mark.parametrize("name", ["torch.sum(box)", "x @ box", "2 * box", "box.sum()"])
def test_a_batch_in_plain_torch_is_refused(name):
    with pytest.raises((TypeError, AttributeError), match=r"PerRank\(.*mesh\.spmd|PerRank\(.*fzero\.shard"):
        PLAIN[name](PIECES)


def test_a_box_does_not_hide_what_python_asks_of_an_object():
    assert not hasattr(SHARD, "__len__") and not hasattr(SHARD, "no_such_attribute")
    assert SHARD == SHARD and bool(SHARD)


APPLY, WEIGHTS, BUFFERS = nn.functional(torch.nn.Sequential(torch.nn.Linear(3, 2)))

INTO_MODULES: dict[str, Row] = {
    "parameters": (
        lambda: APPLY(fzero.mesh(dp=2).spmd(fzero.partition)(WEIGHTS), BUFFERS, X),
        TypeError,
        r"Sequential was given Shard\('0', float32 \[2, 3\], .* for '0.weight'.*fzero.gather\(params\)",
    ),
    "buffers": (
        lambda: APPLY(WEIGHTS, TWO.split({"mean": torch.ones(2)}), X),  # pyright: ignore
        TypeError,
        r"buffers is a PerRank.*expected a dict",
    ),
    "input": (lambda: APPLY(WEIGHTS, BUFFERS, PIECES), TypeError, r"PerRank\(torch.float32 \[2, 4, 3\]\)"),
}


@pytest.mark.parametrize("name", INTO_MODULES)
def test_a_box_in_a_module_is_refused(name):
    check(INTO_MODULES[name])


# ---------------------------------------------------------------- results that differ by rank

DIFFERS = (
    r"differs by rank, and a plain result must be replicated: "
    r"reduce it with fzero.collectives.pmean.*fzero.axes.assume_replicated"
)


@pytest.mark.parametrize("stage", STAGES)
def test_a_result_that_differs_by_rank_is_named(stage):
    def train_step(params: Any, state: Any, x: torch.Tensor) -> Any:
        params, state, loss = TRAIN_STEP(params, state, x)
        return params, state, {"loss": loss, "accuracy": x.mean()}  # a forgotten pmean

    with pytest.raises(ValueError, match=f"result 2, leaf 'accuracy' {DIFFERS}"):
        run(stage, *init(stage), train_step=train_step)


def test_a_rank_programs_only_result_that_differs_by_rank_is_refused():
    with pytest.raises(ValueError, match=DIFFERS):
        spmd(lambda x: x.sum(), PIECES)


def test_gradients_that_were_never_reduced_are_named():
    def train_step(params: Any, state: Any, x: torch.Tensor) -> Any:
        updates, state = OPT.update(torch.func.grad(loss_of)(params, x), state, params)
        return optim.apply_updates(params, updates), state

    with pytest.raises(ValueError, match=f"result 0, leaf 'a.w' {DIFFERS}"):
        run(0, *init(0), train_step=train_step)


# ---------------------------------------------------------------- layouts that do not meet

RECUT = r"was sharded for dp=2, and this mesh has dp=4; gather it with the step that sharded it.*step.partition"

LAYOUTS: dict[str, Row] = {
    "a state cut for another mesh": (
        lambda: run(2, PARAMS, init(2)[1], FOUR),
        ValueError,
        rf"argument 1, leaf 'mu.a.w' {RECUT}",
    ),
    "parameters cut for another mesh": (
        lambda: run(3, init(3)[0], init(3, FOUR)[1], FOUR),
        ValueError,
        rf"argument 0, leaf 'a.w' {RECUT}",
    ),
    "parameters cut for another mesh, gathered": (
        lambda: step_of(3, FOUR).gather(BOXES),
        ValueError,
        rf"leaf 'a.w' {RECUT}",
    ),
    "parameters cut for another mesh, in a rank program": (
        lambda: FOUR.spmd(fzero.gather)(BOXES),
        ValueError,
        r"is \[2, 4\].*Mesh\(dp=4, simulated\) has 4.*gather parameters and state.*step.partition",
    ),
    "stage 3's parameters at stage 0": (
        lambda: run(0, BOXES, init(0)[1]),
        ValueError,
        r"argument 0 \(parameters\) is sharded, and stage 0 takes it plain: gather it",
    ),
    "stage 3's parameters at stage 2": (
        lambda: run(2, *init(3)),
        ValueError,
        r"argument 0 \(parameters\) is sharded, and stage 2 takes it plain: gather it",
    ),
    "plain parameters at stage 3": (
        lambda: run(3, PARAMS, BOXED_STATE),
        ValueError,
        r"argument 0 \(parameters\) is plain, and stage 3 takes it sharded: params, opt_state = step.init",
    ),
    "plain parameters at stage 3, with a unit rule": (
        lambda: run(3, PARAMS, BOXED_STATE, units=lambda path, leaf: "all"),
        ValueError,
        r"argument 0 \(parameters\) is plain, and stage 3 takes it sharded",
    ),
    "a plain state at stage 2": (lambda: run(2, *init(0)), ValueError, r"'a\.w'.*Shard\('a'.*step.init"),
    "a plain state at stage 3": (lambda: run(3, BOXES, init(0)[1]), ValueError, r"'a\.w'.*Shard\('a'.*step.init"),
    "a cut state at stage 0": (lambda: run(0, PARAMS, BOXED_STATE), ValueError, r"'a\.w'.*Shard\('a'.*step.init"),
    "stage 1's state at stage 2": (lambda: run(2, *init(1)), ValueError, r"'a\.w'.*Shard\('a'.*step.init"),
    "stage 2's state at stage 1": (lambda: run(1, *init(2)), ValueError, r"'a\.w'.*Shard\('a'.*step.init"),
    "a partition of boxes": (
        lambda: spmd(fzero.partition, BOXES),
        ValueError,
        r"params is sharded already: leaf 'a.w' is Shard\('a', float32 \[3, 2\], .*; gather it with the step",
    ),
    "init with boxes at stage 3": (lambda: step_of(3).init(BOXES, OPT), ValueError, r"sharded already: leaf 'a.w'"),
    "init with boxes at stage 0": (lambda: step_of(0).init(BOXES, OPT), ValueError, r"sharded already: leaf 'a.w'"),
    "reduce_grads= of partition": (
        lambda: spmd(lambda p: fzero.partition(p, reduce_grads="twice"), PARAMS),
        ValueError,
        r"reduce_grads='twice': expected \"each\" or \"once\"",
    ),
    "gather of part of a unit": (
        lambda: step_of(3).gather({"bias": BOXES["a"]["b"]}),
        ValueError,
        r"leaf 'bias' lies in the shard of unit 'a', which is not in this tree; pass a tree that holds whole units",
    ),
    "gradients of part of a unit": (
        lambda: spmd(lambda p: vag()(p, X)[0], {"bias": BOXES["a"]["b"]}),
        ValueError,
        r"leaf 'bias' lies in the shard of unit 'a', which is not in this tree",
    ),
    "gather outside a rank program": (
        lambda: fzero.gather(BOXES),
        ValueError,
        r"axis 'dp' is not bound here: no rank program is running; .* outside of one step.gather",
    ),
    "value_and_grad of boxes outside a rank program": (
        lambda: vag()(BOXES, X),
        ValueError,
        r"axis 'dp' is not bound here: no rank program is running",
    ),
    "gather of what has another size": (
        lambda: step_of(3).gather(tree.map(lambda x: x[:, :1], BOXES)),
        ValueError,
        r"Shard\('a', float32 \[3, 2\], 4 of 8 elements, dp=2\) holds a tensor \[1\], and its spec says \[4\]",
    ),
    "gradients of another structure": (
        lambda: spmd(lambda p: fzero.reduce_scatter({"a": p["a"]}, like=fzero.partition(p)), PARAMS),
        ValueError,
        r"leaf 'c'",
    ),
    "gradients of another shape": (
        lambda: spmd(lambda p: fzero.reduce_scatter({**p, "c": X}, like=fzero.partition(p)), PARAMS),
        ValueError,
        r"grads leaf 'c' is \[8, 3\]: expected shape \[5\], as in like",
    ),
    "plain updates to cut parameters": (
        lambda: spmd(lambda p: optim.apply_updates(fzero.partition(p), p), PARAMS),
        ValueError,
        r"'a\.w'.*Shard\('a'.*torch.float32 \[3, 2\]",
    ),
    "cut updates to plain parameters": (
        lambda: spmd(lambda p: optim.apply_updates(p, fzero.partition(p)), PARAMS),
        ValueError,
        r"'a\.w'.*Shard\('a'",
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_wrong_layout_is_refused(name):
    check(LAYOUTS[name])


WHOLE = optim.Optimizer(OPT.init, OPT.update, exact_on_shards=False)


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("opt", [WHOLE, optim.chain(optim.clip_by_global_norm(1.0), WHOLE)], ids=["pair", "chain"])
def test_an_optimizer_that_needs_whole_leaves_is_refused_on_shards(opt, stage):
    message = (
        rf"stage={stage} runs the optimizer on flat shards.*exact_on_shards=False.*optim.on_full_leaves.*use stage=0"
    )
    with pytest.raises(ValueError, match=message):
        step_of(stage).init(PARAMS, opt)
    step_of(0).init(PARAMS, opt)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("opt", [OPT, optim.chain(optim.clip_by_global_norm(1.0), OPT)], ids=["pair", "chain"])
def test_swapped_arguments_are_named(stage, opt):
    params, state = step_of(stage).init(PARAMS, opt)
    message = r"argument 0 \(parameters\) is the state of an optimizer, .*AdamState.*train_step's order"
    for step in (step_of(stage), fzero.jit(step_of(stage), backend="fx", **LEAST)):
        with pytest.raises(TypeError, match=message):
            step(state, params, PIECES)


def test_swapped_arguments_are_named_for_the_state_of_every_optimizer():
    states = [x for name, x in vars(optim).items() if name.endswith("State") and name in optim.__all__ and x is not Any]
    assert optim.MuonState in states and len(states) > 10
    for kind in states:
        state = kind(*[None] * len(kind._fields))
        with pytest.raises(TypeError, match=rf"is the state of an optimizer, {kind.__name__}: pass the arguments in"):
            step_of(0)(state, PARAMS, PIECES)


def test_a_state_of_another_stage_is_taken_over_as_the_errors_say():
    """The two calls that they name put parameters and state into the stage's layout."""
    zero, three = step_of(0), step_of(3)
    params, state, _ = zero(*zero.init(PARAMS, OPT), PIECES)
    with pytest.raises(ValueError, match=r"takes it sharded: .*of another stage trained, step.partition\(params\)"):
        three(params, state, PIECES)
    cut = three.partition(params)
    with pytest.raises(
        ValueError, match=r"step.partition\(other.gather\(state\), like=step.init\(params, opt\)\[1\]\)"
    ):
        three(cut, state, PIECES)
    moved = three.partition(zero.gather(state), like=three.init(params, OPT)[1])
    expected, got = zero(params, state, PIECES), three(cut, moved, PIECES)
    assert_trees_close(three.gather(got[:2]), tuple(expected[:2]))


@pytest.mark.parametrize("simulate", ["vmap", "lockstep"])
def test_a_shape_error_of_a_simulation_says_that_sizes_count_ranks(simulate: Any):
    mesh = fzero.mesh(dp=4, simulate=simulate)
    with pytest.raises(RuntimeError, match="shapes") as caught:
        mesh.spmd(lambda x: x @ torch.ones(2, 2))(mesh.split(torch.ones(8, 7)))
    notes = "".join(getattr(caught.value, "__notes__", ()))
    assert ("shapes in this message may include the 4 simulated ranks" in notes) == (simulate == "vmap")


# ---------------------------------------------------------------- trees that change between steps

CHANGED = {
    "new leaf": ({**PARAMS, "new": torch.ones(3)}, r"'new'"),
    "lost leaf": ({"a": PARAMS["a"]}, r"'c'"),
    "other shape": ({**PARAMS, "c": torch.ones(6)}, r"'c'"),
    "other dtype": ({**PARAMS, "c": torch.ones(5, dtype=torch.float64)}, r"'c'.*float(32|64)"),
}


@pytest.mark.parametrize("name, stage", [(n, s) for n in CHANGED for s in STAGES if s or not n.startswith("other")])
def test_parameters_that_changed_since_the_state_was_made_are_named(name, stage):
    params, message = CHANGED[name]
    with pytest.raises(ValueError, match=message):
        run(stage, init(stage, params=params)[0], init(stage)[1])


UNLIKE = r"result 0 is not like argument 0 \(parameters\)"
IN_ORDER = "where the new parameters belong: return params, opt_state, loss, in the order of the arguments"
FORGOTTEN = (
    r"train_step takes an optimizer's state \(argument 1, AdamState\), changes the parameters and returns no state: "
    r"return params, opt_state, loss; a function that only reads its state is step.program\(f\)"
)

RESULTS: dict[str, tuple[Callable[..., Any], str]] = {
    "new leaf": (lambda p, s, loss: ({**p, "new": torch.ones(3)}, s, loss), rf"{UNLIKE}.*'new'"),
    "lost leaf": (
        lambda p, s, loss: ({"a": p["a"]}, s, loss),
        rf"{UNLIKE}: trees differ in structure: the old tree has leaf 'c' .*, and the new tree has not",
    ),
    "list": (lambda p, s, loss: (list(p.values()), s, loss), rf"{UNLIKE}.*'a.w'"),
    "number": (lambda p, s, loss: ({**p, "c": 3.0}, s, loss), rf"{UNLIKE}.*'c'"),
    "None": (lambda p, s, loss: ({**p, "c": None}, s, loss), rf"{UNLIKE}.*'c'"),
    "other dtype": (
        lambda p, s, loss: (tree.map(lambda x: x.double(), p), s, loss),
        rf"{UNLIKE}: leaf 'a.w' was torch.float32.*became torch.float64.*apply_updates keeps",
    ),
    "other shape": (
        lambda p, s, loss: (tree.map(lambda x: x[..., None], p), s, loss),
        rf"{UNLIKE}: leaf 'a.w' was torch.float32.*apply_updates keeps",
    ),
    "state first": (lambda p, s, loss: (s, p, loss), rf"result 0 is AdamState, {IN_ORDER}"),
    "loss first": (lambda p, s, loss: (loss, p, s), rf"result 0 is torch.float32 \[\], {IN_ORDER}"),
    "only the loss": (lambda p, s, loss: loss, rf"result 0 is torch.float32 \[\], {IN_ORDER}"),
    "nothing": (lambda p, s, loss: None, "train_step returned None: return the new params, opt_state and loss"),
    "no state": (lambda p, s, loss: (p, loss), FORGOTTEN),
    "no state, in a dict": (lambda p, s, loss: (p, {"loss": loss}), FORGOTTEN),
}


@pytest.mark.parametrize("stage", cases((STAGES[0], STAGES[-1]), STAGES))
@pytest.mark.parametrize("name", RESULTS)
def test_new_parameters_that_are_not_like_the_old_are_named(name, stage):
    change, message = RESULTS[name]
    with pytest.raises(ValueError, match=message):
        run(stage, *init(stage), train_step=lambda *args: change(*TRAIN_STEP(*args)))


@pytest.mark.parametrize("stage", STAGES)
def test_a_forgotten_state_is_refused_under_jit_and_in_a_chain(stage):
    opt = optim.chain(optim.clip_by_global_norm(1.0), OPT)
    train_step = train_step_for(loss_of, opt)
    step = fzero.shard(lambda p, s, x: train_step(p, s, x)[::2], stage, TWO)
    with pytest.raises(ValueError, match=r"argument 1, \(\(\), AdamState\).*returns no state"):
        fzero.jit(step, backend="fx")(*step.init(PARAMS, opt), PIECES)


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_that_only_reads_its_state_need_not_return_it(stage):
    params, state = init(stage)
    kept, count = run(stage, params, state, train_step=lambda p, s, x: (p, s.count))
    assert_trees_close(step_of(stage).gather(kept), PARAMS)
    assert count == 0


@pytest.mark.parametrize("stage", STAGES)
def test_a_forgotten_count_is_a_notice_since_a_constant_rate_does_not_read_it(stage, caplog):
    warn_once.cache_clear()
    opt = optim.sgd(0.1)
    step = step_of(stage, train_step=lambda p, s, x: train_step_for(loss_of, opt)(p, s, x)[::2])
    for _ in range(2):
        step(*step.init(PARAMS, opt), PIECES)
    (message,) = [r.message for r in caplog.records if "returns no state" in r.message]
    assert "argument 1, SgdState" in message


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_that_failed_leaves_no_axis_bound(stage):
    with pytest.raises(ValueError, match="differs by rank"):
        run(stage, *init(stage), train_step=lambda p, s, x: (p, s, x.sum()))
    with pytest.raises(ValueError, match="no rank program is running"):
        fzero.axes.axis_index("dp")
    assert fzero.axes.axis_size() == 1
    run(stage, *init(stage))


def test_a_batch_that_was_forgotten_to_be_split_is_noticed(caplog):
    warn_once.cache_clear()
    for _ in range(2):
        run(2, *init(2), batch=X)
    (message,) = [r.message for r in caplog.records if "every rank computes the same" in r.message]
    assert "mesh.split(batch)" in message and "mesh.local(batch)" in message


# ---------------------------------------------------------------- what is taken for something else


def with_torch_optimizer() -> Any:
    opt = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=0.25)

    def train_step(params: Any, opt_state: Any, x: Any) -> Any:
        fzero.value_and_grad(loss_of)(params, x)
        opt.step()
        return params, opt_state

    return train_step


TORCH_OPT = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=0.25)
TAKEN: dict[str, Row] = {
    "stage True": (lambda: step_of(True), ValueError, r"stage=True: expected a stage of ZeRO, 0 to 3"),
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
            lambda s=_stage: step_of(s).init(PARAMS, torch.optim.RMSprop),
            TypeError,
            r"torch.optim.RMSprop.* fzero.optim has sgd, adam, adamw, adagrad, adafactor",
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
def test_arguments_in_the_wrong_place_are_named(name):
    check(TAKEN[name])


@pytest.mark.parametrize("kind", [numpy.int64, numpy.uint8])
def test_a_stage_may_be_numpys(kind):
    assert step_of(kind(2)).stage == 2 and type(step_of(kind(2)).stage) is int


def test_a_number_that_differs_by_rank_is_told_to_be_a_tensor():
    mesh = fzero.mesh(dp=2)
    for run in (lambda: mesh.spmd(lambda x: x)(fzero.PerRank(3)), lambda: mesh.split({"n": 3})):
        with pytest.raises(
            TypeError, match=r"is 3: a value that differs by rank must be a tensor; pass torch.as_tensor"
        ):
            run()


def test_a_step_that_is_no_function_is_told_its_form():
    with pytest.raises(TypeError, match=r"train_step is 3: expected a function, \(params, opt_state, batch\) -> "):
        fzero.shard(3, stage=1, mesh=fzero.mesh(dp=2))  # pyright: ignore


@pytest.mark.parametrize("name", fzero.errors.__all__)
def test_an_error_is_found_where_its_name_says(name):
    """A pickle looks there, as when a process hands its error to another."""
    error = getattr(fzero.errors, name)
    assert error.__module__ == "fzero.errors" and pickle.loads(pickle.dumps(error)) is error


def test_trees_in_another_layout_are_a_layout_error():
    other = fzero.shard(TRAIN_STEP, 3, FOUR).init(PARAMS, OPT)
    for state, stage in ((init(3), 0), (init(0), 3), (other, 3), ((init(2)[0], init(0)[1]), 2)):
        with pytest.raises(fzero.errors.LayoutError):
            run(stage, *state)


def test_replicas_in_another_layout_are_told_of_their_own_load():
    def make(stage: int) -> Any:
        mesh = fzero.mesh(replica=2, dp=2)
        return fzero.local_sgd.local_steps(fzero.shard(TRAIN_STEP, stage, mesh, axis="dp"), every=2)

    with pytest.raises(fzero.errors.LayoutError) as caught:
        make(3)(*make(0).init(PARAMS, OPT), fzero.mesh(replica=2, dp=2).split(X))
    assert any("new.load(path" in note for note in caught.value.__notes__)
