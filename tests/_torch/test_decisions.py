"""Private torch APIs that find what a function decides by a size."""

import pytest
import torch
import torch.nn.functional as F

from fzero import _torch

CPU = torch.device("cpu")


def holds(f, shape=(20, 8), dims=(0,), sizes=(0, 1, 2, 10, 11, 300)):
    result = _torch.decisions(f, [torch.zeros(shape)], [(0, d) for d in dims], CPU)
    return [n for n in sizes if result(n)]


def test_a_function_that_decides_nothing_is_the_same_for_all_sizes_from_2_on():
    assert holds(lambda x: x @ x.T) == [2, 10, 11, 300]
    assert holds(lambda x: x[:-1] + x[1:].mean(0)) == [10, 11, 300]  # x[:-1] of two rows would broadcast


def test_decisions_list_branches_of_python_and_of_operations():
    assert holds(lambda x: x * 2 if x.shape[0] > 10 else x) == [11, 300]
    assert holds(lambda x: x[:15]) == [300]  # of fewer rows it takes all
    assert holds(lambda x: x * 2 if x.shape[0] // 2 % 2 else x, (20, 8)) == [300]
    assert holds(lambda x: torch.func.grad(lambda y: (y * (3 if y.numel() < 100 else 4)).sum())(x)) == [300]


def test_operations_that_read_sizes_in_cpp_are_decomposed_to_follow_decisions():
    w = torch.zeros(8, 8)

    def f(x):
        x = F.dropout(F.linear(x.T.contiguous().T, w), 0.1, True)
        x = F.dropout(x, 0.1, True, inplace=True)
        x = F.pad(torch.dropout(x, 0.5, True), (0, 0, 1, 0), value=1.0)
        q = x[None, None]
        return F.scaled_dot_product_attention(q, q, q, None, 0.1, is_causal=True)

    assert holds(f) == [2, 10, 11, 300]
    assert holds(lambda x: torch.func.grad(lambda y: f(y).sum())(x)) == [2, 10, 11, 300]


@pytest.mark.parametrize(
    ("f", "why"),
    [
        (lambda x: x[: len(x) // 2].sum(), "needs the length as a number"),
        (lambda x: [x + i for i in range(x.shape[0])], "needs the length as a number"),
        (lambda x: x * {20: 2}[x.shape[0]], "unhashable type"),
        (lambda x: x + torch.tensor(x.shape[0]), "needs the length as a number"),
        (lambda x: x.chunk(3), "no polynomial"),
        (lambda x: x.new_zeros(x.shape[0] ** 3), "no polynomial"),
        (lambda x: x.new_zeros((x.shape[0] ** 2 + 1) // x.shape[0]), "no polynomial"),
        (lambda x: x.mean() * x.shape[0] ** 0.5, "not a whole number"),
        (lambda x: x * 2 if x.sum() > 0 else x, "GuardOnDataDependent|DataDependent|data-dependent"),
        (lambda x: x.nonzero(), "DynamicOutputShape"),
        (lambda x: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda x: F.dropout(x, x.shape[0] / 100), "dropout at .* gets a number that follows from the length"),
        (lambda x: x * (x.shape[0] in range(50, 10_000)), "compares the length more than 50 times"),
    ],
)
def test_a_decision_without_a_formula_is_an_error_that_says_why(f, why, monkeypatch):
    monkeypatch.setitem(_torch.decisions.__globals__, "_MAX_COMPARISONS", 50)
    with pytest.raises(_torch.FixedSizeError, match=why):
        _torch.decisions(f, [torch.zeros(20, 8)], [(0, 0)], CPU)


def test_a_function_cannot_catch_the_error_of_an_undecidable_size():
    def f(x):
        try:
            return x.chunk(3)[0]
        except Exception:
            return x

    with pytest.raises(_torch.FixedSizeError, match="no polynomial"):
        _torch.decisions(f, [torch.zeros(20, 8)], [(0, 0)], CPU)


def test_two_sizes_that_change_together_are_one_length():
    assert holds(lambda x: x @ x, (20, 20), (0, 1)) == [2, 10, 11, 300]
    for f, shape in ((lambda x: x, (1, 8)), (lambda x: x, (0, 8))):  # torch has no symbols for these
        with pytest.raises(_torch.FixedSizeError, match="not one length"):
            _torch.decisions(f, [torch.zeros(shape)], [(0, 0)], CPU)
    with pytest.raises(_torch.FixedSizeError, match="not one length"):
        _torch.decisions(lambda x: x, [torch.zeros(20, 8)], [(0, 0), (0, 1)], CPU)


def test_strides_of_a_part_are_polynomials():
    assert holds(lambda x: x[1:].contiguous() @ x.T[:, 1:].contiguous(), (20, 20), (0, 1)) == [10, 11, 300]
    assert holds(lambda x: x.new_zeros(3, x.shape[0] - 1, 2)[:, :, 0].clone(), (20, 8))[-1] == 300


def test_a_second_run_follows_the_trace_and_draws_no_random_numbers():
    def f(x):
        assert _torch.is_tracing() and torch.compiler.is_compiling()
        return torch.rand_like(x)

    state = torch.get_rng_state()
    holds(f)
    assert torch.equal(torch.get_rng_state(), state) and not _torch.is_tracing()
