"""Wrong calls of collectives and of value_and_grad: each error names the leaf or the argument."""

from typing import Any

import pytest
import torch

import fzero
from tests.errors.helpers import PARAMS, PIECES, SHARD, STAGES, Row, X, check, init, loss_of, run, spmd, value_and_grad

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
    "all_gather along a text": (
        lambda: spmd(lambda: fzero.collectives.all_gather(X, dim="0")),  # pyright: ignore
        ValueError,
        r"all_gather: dim='0' is not a dimension of a tensor \[8, 3\]: expected -2 to 1",
    ),
    "broadcast from a text": (
        lambda: spmd(lambda: fzero.collectives.broadcast(X, source="0")),  # pyright: ignore
        ValueError,
        r"source='0': expected a rank, 0 to 1",
    ),
    "ppermute to half a rank": (
        lambda: spmd(lambda: fzero.collectives.ppermute(X, perm=[(0, 0.5)])),  # pyright: ignore
        ValueError,
        r"perm=\[\(0, 0\.5\)\]: expected pairs \(from, to\) of ranks 0 to 1, in which no rank receives twice",
    ),
    "ppermute to two ranks": (
        lambda: spmd(lambda: fzero.collectives.ppermute(X, perm=[(0, 1), (0, 0)])),
        ValueError,
        r"perm=.*: expected pairs \(from, to\) of ranks 0 to 1, in which no rank sends twice",
    ),
    "ppermute by ranks without pairs": (
        lambda: spmd(lambda: fzero.collectives.ppermute(X, perm=[0, 1])),  # pyright: ignore
        ValueError,
        r"perm=\[0, 1\]: expected pairs \(from, to\) of ranks 0 to 1, such as \[\(0, 1\)\]",
    ),
    "ppermute by a rank": (
        lambda: spmd(lambda: fzero.collectives.ppermute(X, perm=1)),  # pyright: ignore
        ValueError,
        r"perm=1: expected pairs \(from, to\) of ranks 0 to 1, such as",
    ),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_wrong_collective_is_refused(name):
    check(COLLECTIVES[name])


def pair_loss(params: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return loss_of(params, batch["x"]) + batch["y"].sum()


DIFFERENTIATION: dict[str, Row] = {
    "reduce": (
        lambda: value_and_grad(reduce="avg"),
        ValueError,
        r"reduce='avg': expected \"mean\", \"weighted\" or \"sum\"",
    ),
    "no micro-batch": (
        lambda: value_and_grad(micro_batches=0),
        ValueError,
        r"micro_batches=0: expected an int, at least 1",
    ),
    "negative micro-batches": (
        lambda: value_and_grad(micro_batches=-2),
        ValueError,
        r"micro_batches=-2: expected an int, at least 1",
    ),
    "a batch that does not divide by micro_batches": (
        lambda: value_and_grad(pair_loss, micro_batches=3)(PARAMS, {"x": X, "y": X}),
        ValueError,
        r"micro_batches=3 does not divide .*batch: argument 1, leaf 'x' of .* size 8",
    ),
    "a rank's batch that does not divide by micro_batches": (
        lambda: spmd(value_and_grad(micro_batches=8), PARAMS, PIECES),
        ValueError,
        r"micro_batches=8 does not divide .*batch: argument 1 of .* size 4",
    ),
    "micro-batch leaves of different sizes": (
        lambda: value_and_grad(pair_loss, micro_batches=2)(PARAMS, {"x": X, "y": torch.ones(6)}),
        ValueError,
        r"micro_batches=2.*\"argument 1, leaf 'x'\": 8, \"argument 1, leaf 'y'\": 6.*batch_argnums=",
    ),
    "micro-batch arguments of different sizes": (
        lambda: value_and_grad(lambda p, x, y: loss_of(p, x) + y.sum(), micro_batches=2)(PARAMS, X, torch.ones(6)),
        ValueError,
        r"micro_batches=2: each of the arguments \[1, 2\] may be the batch; name the batch with batch_argnums=",
    ),
    "a micro-batch without a dimension": (
        lambda: value_and_grad(lambda p, x: loss_of(p, X) + x, micro_batches=2)(PARAMS, torch.ones(())),
        ValueError,
        r"micro_batches=2.*argument 1.*0-d",
    ),
    "a batch passed by name with micro_batches": (
        lambda: value_and_grad(micro_batches=2)(PARAMS, x=X),
        ValueError,
        r"micro_batches=2.*position",
    ),
    "batch_argnums out of range": (
        lambda: value_and_grad(micro_batches=2, batch_argnums=5)(PARAMS, X),
        ValueError,
        r"batch_argnums=5: expected positions below 2",
    ),
    "argnums out of range": (
        lambda: value_and_grad(argnums=5)(PARAMS, X),
        ValueError,
        r"argnums=5: the function was called with 2 positional arguments",
    ),
    "parameters passed by name": (
        lambda: value_and_grad()(params=PARAMS, x=X),
        ValueError,
        r"argnums=0: the function was called with 0 positional arguments",
    ),
    "a loss that is not 0-d": (
        lambda: value_and_grad(lambda p, x: p["c"])(PARAMS, X),
        TypeError,
        r"must return a 0-d floating-point loss, but it returned float32 \[5\]; reduce it with .mean\(\)",
    ),
    "an integer loss": (
        lambda: value_and_grad(lambda p, x: torch.tensor(3))(PARAMS, X),
        TypeError,
        r"0-d floating-point loss, but it returned int64 \[\]",
    ),
    "no loss": (lambda: value_and_grad(lambda p, x: None)(PARAMS, X), TypeError, r"0-d floating-point loss.*NoneType"),
    "a pair without has_aux": (
        lambda: value_and_grad(lambda p, x: (loss_of(p, x), x))(PARAMS, X),
        TypeError,
        r"0-d floating-point loss.*tuple.*has_aux",
    ),
    "has_aux without a pair": (
        lambda: value_and_grad(has_aux=True)(PARAMS, X),
        TypeError,
        r"has_aux=True: loss_of must return \(loss, aux\), but it returned float32 \[\]",
    ),
    "has_aux with three results": (
        lambda: value_and_grad(lambda p, x: (loss_of(p, x), x, x), has_aux=True)(PARAMS, X),
        TypeError,
        r"has_aux=True: <lambda> must return \(loss, aux\), but it returned a tuple",
    ),
    "complex parameters": (
        lambda: value_and_grad()({"z": torch.ones(2, dtype=torch.complex64)}, X),
        TypeError,
        r"leaf 'z' is complex64 \[2\]",
    ),
    "a number among the parameters": (lambda: value_and_grad()({"n": {"x": 3.0}}, X), TypeError, r"leaf 'n.x' is 3.0"),
}


@pytest.mark.parametrize("name", DIFFERENTIATION)
def test_a_wrong_call_of_value_and_grad_is_refused(name):
    check(DIFFERENTIATION[name])


INTEGERS = {**PARAMS, "n": {"ids": torch.arange(3)}}
NO_GRADIENT = r"argument 0 is differentiated, and its leaf 'n.ids' is int64 \[3\], which cannot be differ"


def test_integer_parameters_are_not_differentiated_unsharded():
    with pytest.raises(TypeError, match=NO_GRADIENT):
        value_and_grad()(INTEGERS, X)


@pytest.mark.parametrize("stage", STAGES)
def test_integer_parameters_are_not_differentiated_in_a_step(stage):
    with pytest.raises(TypeError, match=NO_GRADIENT):
        run(stage, *init(stage, params=INTEGERS))
