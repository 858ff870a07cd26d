"""A value of the wrong type: the error names the argument, what was given, and what is expected."""

import inspect
from collections.abc import Callable
from typing import Any, Optional, Protocol

import pytest
import torch

import fzero
from fzero import random
from fzero._call_hints import _classes
from fzero.parallel import context
from fzero.parallel import tensor as tp

KEY = random.key(0)
ANY: Any = None
CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "a mesh": (
        lambda: fzero.data.batch_plan(mesh=ANY or 4),
        "batch_plan(): mesh is 4: expected a Mesh, as in fzero.data.batch_plan(global_batch=512,",
    ),
    "a mesh by position": (
        lambda: context.split(ANY or "x", torch.ones(1, 4)),
        "split(): mesh is 'x': expected a Mesh, as in context.split(mesh, torch.arange(8).view(1, 8))",
    ),
    "a number": (
        lambda: random.bernoulli(KEY, ANY or "x"),
        "bernoulli(): p is 'x': expected a number or a torch.Tensor, as in random.bernoulli(",
    ),
    "a tensor": (
        lambda: random.dropout(KEY, ANY or [1.0], 1),  # an int is a number
        "dropout(): x is [1.0]: expected a torch.Tensor, as in random.dropout(",
    ),
    "a tensor or None": (
        lambda: fzero.nn.linear_cross_entropy(
            torch.ones(1, 2), torch.ones(3, 2), torch.zeros(1, dtype=torch.long), ANY or [0.0] * 3
        ),
        "bias is [0.0, 0.0, 0.0]: expected a torch.Tensor or None",
    ),
    "a tensor that torch refuses": (
        lambda: tp.cross_entropy(torch.ones(2, 3), ANY or [0, 1]),
        "targets is [0, 1]: expected a torch.Tensor",
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_value_of_a_wrong_type_is_named_with_the_type_that_is_expected(case):
    call, message = CALLS[case]
    with pytest.raises(TypeError) as caught:
        call()
    assert message in str(caught.value)
    assert isinstance(caught.value.__cause__, TypeError | AttributeError)


class Lazy:
    """A value of the user, with a fault of its own."""

    @property
    def shape(self) -> Any:
        return ANY.missing


def test_an_error_of_the_users_code_stays():
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'missing'"):
        random.dropout(KEY, Lazy(), 0.5)  # pyright: ignore


def test_a_message_that_is_raised_stays():
    with pytest.raises(TypeError, match=r"^key is None: expected an int64 tensor of shape \[\]"):
        random.dropout(ANY, torch.ones(1), 0.5)


def test_an_error_of_right_types_stays():
    with pytest.raises(TypeError, match="NoneType"):
        random.uniform(KEY, ANY)


class Sized(Protocol):
    """What no class says."""

    def size(self) -> int: ...


@pytest.mark.parametrize("annotation", [Any, object, Sized, Sized | None, list[int], "Mesh", Callable[..., Any]])
def test_an_annotation_that_says_more_than_a_class_is_left_out(annotation):
    assert _classes(annotation) == ()
    assert _classes(Optional[int]) == (int, type(None))  # noqa: UP045


def test_the_annotations_of_public_functions_are_read():
    modules = (fzero, fzero.data, fzero.nn, fzero.optim, random, context, tp)
    functions = [f for m in modules for name in m.__all__ if inspect.isfunction(f := getattr(m, name))]
    annotations = [p.annotation for f in functions for p in inspect.signature(f).parameters.values()]
    classes = [_classes(annotation) for annotation in annotations]
    assert not any(isinstance(Sized, found) for found in classes)
    assert sum(map(bool, classes)) > len(classes) // 2
