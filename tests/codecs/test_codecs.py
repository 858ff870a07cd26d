"""Laws of the codecs: how large the error is, what is exact, and what is sent."""

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fzero import codecs
from fzero.codecs import Codec
from fzero.testing import _awkward_shapes
from tests.helpers import examples

KINDS = [*codecs.KINDS]
# of each kind, the bits of a code, its largest number, and the next smaller one
TABLE = {
    "int8": (8, 127.0, 126.0),
    "int4": (4, 7.0, 6.0),
    "float8_e4m3": (8, 448.0, 416.0),
    "float8_e5m2": (8, 57344.0, 49152.0),
}
BLOCKS = [2, 3, 16, 256]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16]


def all_codecs() -> st.SearchStrategy[Codec]:
    def make(kind: str, block: int, is_stochastic: bool) -> Codec:
        return Codec(kind, block, "stochastic" if is_stochastic and kind.startswith("int") else "nearest")

    return st.builds(make, st.sampled_from(KINDS), st.sampled_from(BLOCKS), st.booleans())


def make_spread(shape: Any, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers whose blocks have very different magnitudes."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g) * 10 ** (4 * torch.rand(shape, generator=g) - 2)
    return x.to(dtype)


def test_each_kind_has_a_row():
    assert {*TABLE} == {*KINDS}, "TABLE in tests/codecs/test_codecs.py has a row for each"


@pytest.mark.parametrize("kind", TABLE)
def test_the_numbers_of_a_kind_are_those_of_its_row(kind):
    """They are exact, and there is none between the two."""
    bits, largest, below = TABLE[kind]
    middle = (largest + below) / 2
    x = torch.tensor([largest, below, -below, middle * 1.001, middle * 0.999])
    assert Codec(kind, 16).round(x).tolist() == [largest, below, -below, largest, below]
    assert Codec(kind, 16).num_bytes(1600) == 200 * bits + 400
    assert codecs.KINDS[kind].largest == largest


@examples(40, 400)
@example(codec=Codec("int8", 16), shape=(511,), dtype=torch.bfloat16, seed=57)  # rounds at the middle of two codes
@given(
    codec=all_codecs(),
    shape=st.one_of(_awkward_shapes(), st.sampled_from([(511,), (3, 257), (1024,)])),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_the_error_of_rounding_is_within_the_codecs_bound(codec, shape, dtype, seed):
    x = make_spread(shape, seed, dtype)
    encoded = codec.encode(x)
    assert encoded.payload.dtype == torch.uint8
    assert encoded.payload.numel() + 4 * encoded.magnitudes.numel() == codec.num_bytes(x.numel())
    y = codec.decode(encoded, x.shape)
    assert y.shape == x.shape and y.dtype == torch.float32
    assert ((y - x.float()).abs() <= codec.error_bound(x)).all()
    assert torch.equal(codec.round(x), y.to(dtype))


@examples(20, 100)
@given(codec=all_codecs(), rows=st.integers(1, 4), seed=st.integers(0, 99))
def test_a_block_depends_on_its_elements_alone(codec, rows, seed):
    """What other blocks hold changes nothing: scales are not shared, and the largest element of integers is exact."""
    x = make_spread((rows, codec.block), seed)
    alone = torch.stack([codec.round(row) for row in x])
    if codec.is_stochastic:  # where a block stands, too
        alone[1:] = codec.round(x)[1:]
    assert torch.equal(codec.round(x), alone)
    at = x.abs().argmax(1, keepdim=True)
    largest = 2**-4 if codec.kind == "float8_e4m3" else 2**-3 if codec.code_kind.is_float else 1e-6
    torch.testing.assert_close(codec.round(x).gather(1, at), x.gather(1, at), rtol=largest, atol=0)


@pytest.mark.parametrize("kind,largest", [("int8", 127), ("int4", 7)])
def test_integers_up_to_the_largest_code_are_exact(kind, largest):
    """Each code, also an odd number of them: no sign and no half of a byte is lost."""
    x = torch.arange(-largest, largest + 1.0)
    assert x.numel() % 2
    assert torch.equal(Codec(kind, block=x.numel()).round(x), x)


@pytest.mark.parametrize("kind,dtype", [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_float8_is_torchs_own(kind, dtype):
    """With a largest element of the dtype's largest number the scale is 1, and the code is torch's cast."""
    x = torch.cat([make_spread((999,), 0), torch.tensor([torch.finfo(dtype).max])])
    assert torch.equal(codecs.float8(kind, block=1000).round(x), x.to(dtype).float())


@pytest.mark.parametrize("value", [0.3, -0.3, 0.71])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_stochastic_rounding_has_the_right_mean(kind, value):
    """The mean of many elements is right to five standard errors; rounding to nearest is off by more."""
    codec = Codec(kind, rounding="stochastic")
    x = torch.full((1 << 16,), value)
    x[::256] = 1.0
    mean = codec.round(x)[x == value].mean().item()
    step = 1 / codec.code_kind.largest
    error = 5 * step / 2 / math.sqrt((x == value).sum())
    assert abs(mean - value) < error
    nearest = Codec(kind).round(x)[x == value].mean().item()
    assert abs(nearest - value) > error
    assert codec.round(x)[x == value].unique().numel() == 2


def test_stochastic_rounding_is_a_function_of_place_and_value():
    x = make_spread((512,), 0)
    codec = codecs.int4(rounding="stochastic")
    assert torch.equal(codec.round(x), codec.round(x.clone()))
    halves = torch.cat([codec.round(x[:256]), codec.round(x[256:])])
    assert torch.equal(codec.round(x)[:256], halves[:256]) and not torch.equal(codec.round(x), halves)


@examples(10, 50)
@given(codec=all_codecs(), value=st.sampled_from([math.inf, -math.inf, math.nan]), at=st.integers(0, 9))
def test_a_nonfinite_number_makes_its_block_nan(codec, value, at):
    x = make_spread((10,), 1)
    y = codec.round(x)
    x[at] = value
    block = at // codec.block
    bad = torch.arange(10) // codec.block == block
    after = codec.round(x)
    assert after[bad].isnan().all()
    assert torch.equal(after[~bad], y[~bad])


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_and_the_smallest_numbers_stay_finite(kind):
    codec = Codec(kind)
    assert torch.equal(codec.round(torch.zeros(3, 5)), torch.zeros(3, 5))
    tiny = torch.tensor([1e-45, -1e-40, 1e-38])
    assert (codec.round(tiny) - tiny).abs().max() <= torch.finfo(torch.float32).tiny
    large = torch.tensor([3e38, -1.0])
    assert codec.round(large).isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_differentiates_as_the_identity(kind):
    x, w = make_spread((5, 9), 0), make_spread((5, 9), 1)
    codec = Codec(kind, block=4)
    assert torch.equal(torch.func.grad(lambda x: (codec.round(x) * w).sum())(x), w)
    assert torch.equal(torch.func.jvp(codec.round, (x,), (w,))[1], w)
    hessian = torch.func.hessian(lambda x: (codec.round(x) ** 2).sum())(x[0])
    assert torch.equal(hessian, 2 * torch.eye(9))
    assert torch.equal(torch.vmap(codec.round)(x), torch.stack([codec.round(row) for row in x]))
    assert torch.equal(torch.vmap(codec.round, in_dims=1)(x), torch.stack([codec.round(col) for col in x.T]))


@pytest.mark.parametrize(
    "make,error,text",
    [
        (lambda: Codec("int5"), ValueError, "expected one of .*int8"),
        (lambda: codecs.int8(1), ValueError, "at least 2"),
        (lambda: codecs.int8(2.0), ValueError, "at least 2"),  # pyright: ignore[reportArgumentType]
        (lambda: codecs.int4(rounding="down"), ValueError, "'nearest' or 'stochastic'"),
        (lambda: Codec("float8_e4m3", rounding="stochastic"), ValueError, "use int8 or int4"),
        (lambda: codecs.float8("e3m4"), ValueError, 'kind=\'e3m4\': expected "e4m3" or "e5m2"'),
    ],
)
def test_the_error_of_a_codec_names_its_wrong_argument(make, error, text):
    with pytest.raises(error, match=text):
        make()


NUMBERS = torch.tensor([1.0, -0.5, 0.25, 2.0])
IN_8_BITS, COUNTS = codecs.int8().encode(NUMBERS), torch.ones(2, dtype=torch.int64)


@pytest.mark.parametrize(
    "decode,error,text",
    [
        (lambda: codecs.int8().decode(IN_8_BITS, (5,)), ValueError, r"uint8 \[4\]: .* uint8 \[5\]"),
        (
            lambda: codecs.int8().decode(IN_8_BITS, (3,)),
            ValueError,
            r"for the shape \[3\] by Codec",
        ),
        (lambda: codecs.int4().decode(IN_8_BITS, (4,)), ValueError, r"uint8 \[4\]: .* uint8 \[2\]"),
        (
            lambda: codecs.int8(2).decode(IN_8_BITS, (4,)),
            ValueError,
            r"magnitudes is float32 \[1\]",
        ),
        (
            lambda: codecs.int8().decode(codecs.EncodedTensor(NUMBERS, torch.ones(1)), (4,)),
            ValueError,
            r"decode: the payload is float32 \[4\]: expected uint8 \[4\]",
        ),
        (lambda: codecs.int8().decode(IN_8_BITS, 4), TypeError, r"shape=4: expected the sizes"),  # pyright: ignore
        (lambda: codecs.int8().decode(NUMBERS, (4,)), TypeError, "expected what encode returned"),  # pyright: ignore
        (lambda: codecs.int8().encode([1, 2]), TypeError, r"encode: x=.*: expected a tensor of"),  # pyright: ignore
        (
            lambda: codecs.int8().encode(torch.ones(2, dtype=torch.int64)),
            TypeError,
            r"encode: x=int64 \[2\]: expected a",
        ),
        (lambda: codecs.int8().round(COUNTS), TypeError, r"round: x=int64 \[2\]: expected a"),
        (lambda: codecs.int8().error_bound([1.0]), TypeError, "error_bound: x=.*: expected a"),  # pyright: ignore
    ],
)
def test_a_codec_decodes_its_own_codes_alone(decode, error, text):
    """A wrong shape would add zeros or lose elements, and another codec's bytes would be numbers of no meaning."""
    with pytest.raises(error, match=text):
        decode()
