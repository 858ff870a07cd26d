"""Checks of arguments: what passes, and what an error says."""

import re

import pytest
import torch

import fzero
from fzero._arguments import check_callable, check_choice, check_int, check_remat, did_you_mean, is_int


@pytest.mark.parametrize("value", [True, False, 1.0, "1", None, torch.tensor(1)])
def test_check_int_refuses_values_that_are_no_ints(value):
    assert not is_int(value) and is_int(0) and is_int(-1)
    with pytest.raises(ValueError, match=r"steps=.*: expected an int, at least 0"):
        check_int("steps", value, 0)


def test_check_int_returns_an_int_in_range():
    assert [check_int("k", k, 1, maximum=3) for k in (1, 2, 3)] == [1, 2, 3]
    for k in (0, 4):
        with pytest.raises(ValueError, match=f"k={k}: expected the number of experts, an int from 1 to 3$"):
            check_int("k", k, 1, "the number of experts", maximum=3)
    assert check_int("steps", 7, 7) == 7
    with pytest.raises(ValueError, match=r"size=6: expected a number of bytes, an int, at least 7$"):
        check_int("size", 6, 7, "a number of bytes")


def test_check_choice_returns_the_listed_value():
    choices = ("first", True, None)
    for value in choices:
        check_choice("check", value, choices)
    for value in (1, False, "last", 0, [], torch.ones(2)):
        with pytest.raises(ValueError, match=r'check=.*: expected "first", True or None$'):
            check_choice("check", value, choices)
    with pytest.raises(ValueError, match=r"moments='fp8': expected \"int8\"$"):
        check_choice("moments", "fp8", ("int8",))


def test_check_callable_refuses_other_values_and_shows_short_ones():
    check_callable("f", torch.sin)
    with pytest.raises(TypeError, match=r"f is \{'w': 1\}: expected a function of leaves$"):
        check_callable("f", {"w": 1}, "a function of leaves")
    with pytest.raises(TypeError, match=r"f is a list: expected a function$"):
        check_callable("f", [*range(99)])


@pytest.mark.parametrize("value", [None, True, False, "matmuls", "host", callable])
def test_check_remat_takes_names_and_functions(value):
    check_remat("remat", value)
    with pytest.raises(ValueError, match=r"save=3: expected None, \"matmuls\", \"host\", or a function"):
        check_remat("save", 3)


NEAREST = {
    'did you mean "fx"?': lambda: fzero.jit(torch.sum, backend="fxx"),
    'did you mean "matmuls"?': lambda: fzero.remat(torch.sum, save="matmul"),  # pyright: ignore
    'did you mean "int8"?': lambda: fzero.codecs.Codec("int9"),
    'did you mean "FIRST"?': lambda: check_choice("order", "first", ("last", "FIRST")),
    "did you mean fzero.collectives?": lambda: getattr(fzero, "collectivs"),  # noqa: B009
    "did you mean fzero.optim.adamw?": lambda: getattr(fzero.optim, "adamW"),  # noqa: B009
    "here it is fzero.tree.map": lambda: getattr(fzero.tree, "tree_map"),  # noqa: B009
    "here it is fzero.collectives.psum": lambda: getattr(fzero.collectives, "all_reduce"),  # noqa: B009
}


@pytest.mark.parametrize("hint", NEAREST)
def test_an_error_of_an_unknown_name_has_the_nearest_one(hint):
    with pytest.raises((ValueError, AttributeError), match=re.escape(hint)):
        NEAREST[hint]()


def test_an_error_has_no_hint_where_no_name_is_near():
    assert did_you_mean("zzz", ("first", None, True)) == did_you_mean(3, ("3",)) == ""
    with pytest.raises(AttributeError, match=r"'fzero.optim' has no attribute 'zzz'$"):
        getattr(fzero.optim, "zzz")  # noqa: B009


MESH = fzero.mesh(dp=2)
CALLS = {
    "value_and_grad": lambda: fzero.value_and_grad(torch.sum, micro_batches=True),
    "prefetch": lambda: fzero.data.prefetch([], MESH, ahead=True),
    "batches": lambda: fzero.data.batches([1, 2], MESH, global_batch=True),
    "padding": lambda: fzero.data.padding([1, 2], global_batch=1, buckets=True),
    "by_size": lambda: fzero.sharding.by_size({"w": torch.ones(2)}, max_numel=True),
    "log": lambda: fzero.observe.log(every=True),
    "route": lambda: fzero.parallel.experts.route(torch.ones(2, 4), True),
    "groups": lambda: fzero.parallel.experts.route(torch.ones(2, 4), 1, groups=(True, True)),
    "packed": lambda: fzero.parallel.tensor.packed(True),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_argument_checks_refuse_bools_as_numbers(call):
    with pytest.raises(ValueError, match="True"):
        call()
