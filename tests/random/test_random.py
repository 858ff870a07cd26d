"""Random numbers by key: one draw for one key, on every rank, at every stage, in every world; and good numbers."""

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import fzero
from fzero import PerRank, optim, random, tree
from fzero.random import _seeded
from fzero.random._keys import bits
from fzero.testing import assert_trees_close
from tests.helpers import ALL_STAGES, LEAST, cases, either, examples
from tests.random.helpers import BATCH, PARAMS, keyed_step, made_by, masks

N = 1 << 16
seeds = st.integers(-(2**70), 2**70)


def sigmas(x: torch.Tensor, mean: float, variance: float) -> float:
    """Return how many standard deviations lie between the mean of x and the expected one."""
    return abs(x.double().mean().item() - mean) * math.sqrt(x.numel() / variance)


@pytest.fixture
def untouched():
    """torch's own generator is as it was."""
    before = torch.get_rng_state()
    yield
    assert torch.equal(before, torch.get_rng_state())


@given(seed=seeds, data=st.integers(-(2**40), 2**40))
@settings(max_examples=30)
def test_keys_are_functions_of_their_numbers(seed, data):
    k = random.key(seed)
    assert k.shape == () and k.dtype == torch.int64 and k == random.key(seed)
    assert random.fold_in(k, data) == random.fold_in(k, torch.tensor(data))
    assert len({int(k), *[int(random.fold_in(k, data + i)) for i in range(3)], *random.split(k, 3).tolist()}) == 7
    a, b = random.fold_in(random.fold_in(k, 1), 2), random.fold_in(random.fold_in(k, 2), 1)
    assert a != b and int(random.key(seed + 1)) != int(k)


def test_all_keys_made_of_a_key_differ_from_each_other_and_from_its_draws():
    k = random.key(0)
    folded = torch.vmap(lambda i: random.fold_in(k, i))(torch.arange(N))
    twice = torch.vmap(lambda i: random.fold_in(random.fold_in(k, i), 1))(torch.arange(N))
    seeded = torch.stack([random.key(i) for i in range(1000)])
    everything = torch.cat([folded, twice, seeded, random.split(k, N), bits(k, (N,))])
    assert everything.unique().numel() == everything.numel()


@pytest.mark.parametrize("wrong", [3, torch.ones(2, dtype=torch.int64), torch.ones(()), torch.Generator()])
def test_random_functions_refuse_a_value_that_is_no_key(wrong):
    for f in (random.split, lambda k: random.fold_in(k, 0), lambda k: random.uniform(k, (2,)), random.seeded(len)):
        with pytest.raises(TypeError, match=r"expected an int64 tensor of shape \[\]"):
            f(wrong)


def test_random_functions_refuse_wrong_numbers():
    k = random.key(0)
    for wrong in (1.5, "a", torch.tensor(1), True, None):
        with pytest.raises(TypeError, match=r"seed=.*expected an int"):
            random.key(wrong)  # pyright: ignore[reportArgumentType]
    for wrong in (1.5, True, None, torch.tensor(1.0), torch.ones(2, dtype=torch.int64), torch.tensor(True)):
        with pytest.raises(TypeError, match=r"expected an int, or an integer tensor of shape \[\]"):
            random.fold_in(k, wrong)  # pyright: ignore[reportArgumentType]
    for p in (-0.1, 1.5, math.nan):
        with pytest.raises(ValueError, match="a probability is between 0 and 1"):
            random.bernoulli(k, p)
    assert random.key(2**64 + 3) == random.key(3)
    assert random.fold_in(k, 7) == random.fold_in(k, torch.tensor(7, dtype=torch.int32))


SEQUENCES = {
    "counted": lambda k: bits(k, (N,)),
    "folded": lambda k: torch.vmap(lambda i: bits(random.fold_in(k, i), ()))(torch.arange(N)),
    "folded twice": lambda k: torch.vmap(lambda i: random.fold_in(random.fold_in(k, i), 3))(torch.arange(N)),
    "split": lambda k: random.split(k, N),
    "short": lambda k: torch.vmap(lambda k: bits(k, (16,)))(random.split(k, N // 16)).flatten(),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_bits_are_balanced_and_neighbours_independent(name):
    z = SEQUENCES[name](random.key(7))
    for x in (z, z[1:] ^ z[:-1], z[2:] ^ z[:-2]):
        for b in range(64):
            assert sigmas((x >> b) & 1, 0.5, 0.25) < 4.5, (name, b)
    for shift in (0, 28, 58):  # pairs of neighbours' low, middle and high bits: chi-square with 4095 degrees of freedom
        a = (z >> shift) & 63
        counts = torch.bincount(a[1:] * 64 + a[:-1], minlength=4096).double()
        expected = a[1:].numel() / 4096
        assert abs(((counts - expected) ** 2 / expected).sum().item() - 4095) < 5 * math.sqrt(2 * 4095)


WORDS = {
    "counted": lambda k: random.words_at(*random.key_words(k, torch.tensor(7)), torch.arange(N, dtype=torch.int32)),
    "next key": lambda k: WORDS["counted"](k) ^ WORDS["counted"](random.fold_in(k, 0)),
    "next stream": lambda k: (
        WORDS["counted"](k) ^ random.words_at(*random.key_words(k, torch.tensor(8)), torch.arange(N, dtype=torch.int32))
    ),
    "halves": lambda k: (WORDS["counted"](k) >> 16 ^ WORDS["counted"](k)) & 0xFFFF,
}


@pytest.mark.parametrize("name", WORDS)
def test_words_are_balanced_and_independent_of_neighbours_keys_and_streams(name):
    z = WORDS[name](random.key(7))
    width = 16 if name == "halves" else 32
    for x in (z, z[1:] ^ z[:-1], z[2:] ^ z[:-2], z[256:] ^ z[:-256]):
        for b in range(width):
            assert sigmas((x >> b) & 1, 0.5, 0.25) < 4.5, (name, b)
    for shift in (0, 5, 10, 26)[: 3 if width == 16 else 4]:  # pairs of neighbours' bits, as for `bits`
        a = (z >> shift) & 63
        counts = torch.bincount(a[1:] * 64 + a[:-1], minlength=4096).double()
        expected = a[1:].numel() / 4096
        assert abs(((counts - expected) ** 2 / expected).sum().item() - 4095) < 5 * math.sqrt(2 * 4095)


def test_words_of_two_streams_are_no_permutations_and_places_beyond_32_bits_have_their_own():
    places, k = torch.arange(4096), random.key(5)
    words = [random.words_at(*random.key_words(k, torch.tensor(stream)), places) for stream in (1, 2)]
    assert torch.isin(*words).sum() == 0
    first = random.key_words(k, torch.tensor(1))
    assert torch.equal(random.words_at(*first, places.to(torch.int32)), words[0])
    near = random.words_at(first[0] ^ 1, first[1] ^ 1, places)
    assert torch.isin(near, words[0]).sum() == 0, "the first word alone would put the same words in another order"
    assert (random.words_at(*first, places + 2**32) == words[0]).sum() == 0


def test_draws_of_near_keys_are_no_permutations_of_each_other():
    """The counter is xored with the key: were that all, keys that differ in low bits had the same set of numbers."""
    k = random.key(5)
    for other in (k ^ 1, k ^ 255, k + 1):
        assert torch.isin(bits(k, (4096,)), bits(other, (4096,))).sum() == 0


def test_a_bit_of_the_key_changes_half_the_bits_of_a_draw():
    k = random.key(5)
    for bit in range(64):
        changed = bits(k ^ (1 << bit if bit < 63 else -(2**63)), (4096,)) ^ bits(k, (4096,))
        for b in range(64):
            assert sigmas((changed >> b) & 1, 0.5, 0.25) < 5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_uniform_and_normal_draws_have_their_distribution(dtype):
    k = random.key(3)
    u, x = random.uniform(k, (N,), dtype), random.normal(k, (N,), dtype)
    assert u.dtype == x.dtype == dtype and u.min() >= 0 and u.max() < 1
    half = 1 / 512 if dtype == torch.bfloat16 else 1 / 4096 if dtype == torch.float16 else 0  # of the lost digits
    assert sigmas(u, 0.5 - half, 1 / 12) < 4 and sigmas((u - 0.5) ** 2, 1 / 12, 1 / 180) < 4
    assert sigmas(x, 0, 1) < 4 and sigmas(x.double() ** 2, 1, 2) < 4 and sigmas(x.double() ** 4, 3, 96) < 4
    if dtype in (torch.float64, torch.float32):  # Kolmogorov and Smirnov
        steps = torch.arange(1, N + 1) / N
        for cdf in (u.double().sort().values, torch.special.ndtr(x.double().sort().values)):
            assert (cdf - steps).abs().max() * math.sqrt(N) < 2


def test_uniform_draws_in_float64_have_53_random_bits():
    u = random.uniform(random.key(0), (1000,), torch.float64) * 2**53
    assert u.equal(u.round()) and (u.long() & 1).sum() not in (0, 1000)


@given(seed=seeds, p=st.floats(0, 1), low=st.integers(-5, 5), size=st.integers(1, 9))
@settings(max_examples=20)
def test_events_and_integers_have_their_distribution(seed, p, low, size):
    k = random.key(seed)
    assert sigmas(random.bernoulli(k, p, (4096,)), p, max(p * (1 - p), 1e-3)) < 5
    x = random.randint(k, low, low + size, (4096,))
    assert x.min() == low and x.max() == low + size - 1
    assert sigmas(x, low + (size - 1) / 2, max((size**2 - 1) / 12, 1e-3)) < 5


def test_dropout_drops_scales_and_differentiates():
    x, k = torch.randn(N), random.key(0)
    for p in (0.0, 0.25, 1.0):
        y = random.dropout(k, x, p)
        mask = y != 0
        assert sigmas(mask, 1 - p, max(p * (1 - p), 1e-3)) < 4
        torch.testing.assert_close(y[mask], x[mask] / (1 - p) if p < 1 else y[mask])
        gradient = torch.func.grad(lambda x, p=p: random.dropout(k, x, p).sum())(x)
        torch.testing.assert_close(gradient, mask / (1 - p) if p < 1 else torch.zeros(N))
    with pytest.raises(ValueError, match=r"p=1\.5"):
        random.dropout(k, x, 1.5)
    with pytest.raises(ValueError, match="no integer from low=3 to high=3"):
        random.randint(k, 3, 3, ())
    with pytest.raises(TypeError, match=r"dtype=torch\.int64"):
        random.uniform(k, (), torch.int64)


@pytest.mark.slow
def test_compiled_draws_by_key_equal_the_eager_ones():
    """They do so in Inductor's C++ loops, which may assume that what counts elements does not overflow."""
    k = random.key(1)

    def draw(k):
        return torch.vmap(lambda i: random.uniform(random.fold_in(k, i), (1001,), torch.float64))(torch.arange(5))

    torch.compiler.reset()
    assert torch.compile(draw, fullgraph=True)(k).equal(draw(k))


# Seeded: torch's functions.


def test_draws_come_in_the_order_of_the_calls():
    def f(more):
        first = torch.rand(3)
        return (torch.randn(3), first) if more else first

    g, k = random.seeded(f), random.key(0)
    assert g(k, False).equal(g(k, True)[1])
    assert g(k, more=True)[0].equal(random.normal(random.fold_in(_own(k), 2), (3,)))


def _own(k: torch.Tensor, rank: int = 0, micro_batch: int = 0) -> torch.Tensor:
    return random.fold_in(random.fold_in(k, rank), micro_batch)


M = 4096
ones, halves = torch.ones(M), torch.full((M,), 0.5)
SAMPLES = {
    "dropout": lambda: F.dropout(ones, 0.3),
    "nn.Dropout in place": lambda: nn.Dropout(0.3, inplace=True)(ones.clone()),
    "torch.dropout": lambda: torch.dropout(ones, 0.3, True),
    "native_dropout": lambda: torch.native_dropout(ones, 0.3, True)[0],
    "alpha_dropout": lambda: F.alpha_dropout(torch.linspace(-1, 1, M), 0.3, training=True),
    "feature_alpha_dropout": lambda: F.feature_alpha_dropout(torch.ones(64, 64, 2, 2), 0.3, training=True)[..., 0, 0],
    "dropout1d": lambda: F.dropout1d(torch.ones(64, 64, 3), 0.3)[..., 0],
    "dropout1d of one": lambda: F.dropout1d(torch.ones(M, 3), 0.3)[..., 0],
    "dropout2d": lambda: F.dropout2d(torch.ones(64, 64, 2, 2), 0.3)[..., 0, 0],
    "dropout3d": lambda: F.dropout3d(torch.ones(64, 64, 2, 2, 2), 0.3)[..., 0, 0, 0],
    "dropout3d of one": lambda: F.dropout3d(torch.ones(M, 2, 2, 2), 0.3)[..., 0, 0, 0],
    "rrelu": lambda: F.rrelu(-ones, training=True),
    "gumbel_softmax": lambda: F.gumbel_softmax(torch.zeros(M, 2), hard=True)[:, 0],
    "rand": lambda: torch.rand(64, 64),
    "rand of a size": lambda: torch.rand(size=(M,), dtype=torch.float64, device="cpu", generator=None),
    "rand_like": lambda: torch.rand_like(ones),
    "randn": lambda: torch.randn([M]),
    "randn_like": lambda: torch.randn_like(ones, dtype=torch.float64),
    "randint": lambda: torch.randint(10, (M,)),
    "randint from": lambda: torch.randint(3, 7, size=(M,)),
    "randint by name": lambda: torch.randint(low=3, high=7, size=(M,), dtype=torch.int32),
    "randint_like": lambda: torch.randint_like(ones, 3, 7),
    "randperm": lambda: torch.randperm(M),
    "bernoulli": lambda: torch.bernoulli(halves),
    "bernoulli of p": lambda: ones.bernoulli(0.3),
    "normal": lambda: torch.normal(2.0, 3.0, (M,)),
    "normal of tensors": lambda: torch.normal(ones, halves),
    "normal around": lambda: torch.normal(ones),
    "uniform_": lambda: torch.empty(M).uniform_(2, 5),
    "uniform_ by name": lambda: torch.empty(M).uniform_(to=5),
    "normal_": lambda: torch.empty(M).normal_(2, std=3),
    "exponential_": lambda: torch.empty(M).exponential_(2.0),
    "bernoulli_": lambda: torch.empty(M).bernoulli_(0.3),
    "bernoulli_ of a tensor": lambda: torch.empty(M).bernoulli_(halves),
    "init.uniform_": lambda: nn.init.uniform_(torch.empty(M), 2, 5),
    "init.normal_": lambda: nn.init.normal_(torch.empty(M), 2, 3),
    "init.kaiming_uniform_": lambda: nn.init.kaiming_uniform_(torch.empty(M, 2, 3), a=2, mode="fan_in"),
    "init.kaiming_normal_": lambda: nn.init.kaiming_normal_(torch.empty(M, 2)),
    "init.xavier_uniform_": lambda: nn.init.xavier_uniform_(torch.empty(64, 64)),
    "init.trunc_normal_": lambda: nn.init.trunc_normal_(torch.empty(M)),
    "Linear": lambda: nn.Linear(64, 64).weight.detach(),
    "distributions": lambda: torch.distributions.Normal(2.0, 3.0, validate_args=False).rsample((M,)),
}


@pytest.mark.parametrize("name", cases([*SAMPLES][::2], SAMPLES))
def test_torch_functions_with_a_key_draw_as_torch_does_from_a_seed(name, untouched):
    f = SAMPLES[name]
    g = random.seeded(f)
    x = g(random.key(1))
    assert x.equal(g(random.key(1))) and not x.equal(g(random.key(2)))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        expected = f()
    assert x.shape == expected.shape and x.dtype == expected.dtype
    a, b = x.double().flatten(), expected.double().flatten()
    spread = math.sqrt(2 / a.numel()) * float(b.std())
    assert abs(a.mean() - b.mean()) < 4 * spread + 1e-12, name
    assert abs(a.std() / b.std() - 1) < 0.1
    if name not in ("init.trunc_normal_", "Linear"):  # their own code reads values, and writes into parameters
        assert make_fx(lambda k: g(k))(random.key(0))(random.key(1)).equal(x)
        assert torch.vmap(lambda _: g(random.key(1)), randomness="different")(torch.ones(2))[1].equal(x)


def test_operations_without_random_numbers_run_unchanged_under_seeded(untouched):
    def f(x):
        evaluation = nn.Dropout(0.5).eval()(F.dropout(x, 0.0)), F.rrelu(x), F.dropout2d(x, training=False)
        q = x.unflatten(-1, (2, 2))
        return *evaluation, F.scaled_dot_product_attention(q, q, q), torch.rand(3, generator=g)

    x, g = torch.randn(3, 2, 2, 4, generator=torch.Generator().manual_seed(0)), torch.Generator().manual_seed(1)
    *out, mine = random.seeded(f)(random.key(0), x)
    g.manual_seed(1)
    *expected, other = f(x)
    assert all(a.equal(b) for a, b in zip(out, expected, strict=True)) and mine.equal(other)


Q = torch.randn(2, 4, 5, 8, generator=torch.Generator().manual_seed(0))
K = torch.randn(2, 2, 6, 8, generator=torch.Generator().manual_seed(1))
ATTENTION = {
    "plain": {},
    "causal": {"is_causal": True},
    "allowed": {"attn_mask": torch.arange(6).expand(5, 6) % 2 == 0},
    "nowhere": {"attn_mask": torch.arange(5)[:, None].expand(5, 6) > 0},
    "added": {"attn_mask": torch.linspace(-2, 2, 30).view(5, 6), "scale": 0.5},
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_with_dropout_is_that_of_the_definition(name):
    options: Any = {**ATTENTION[name], "enable_gqa": True}
    expected = F.scaled_dot_product_attention(Q, K, K, **options)
    almost_none = random.seeded(lambda: F.scaled_dot_product_attention(Q, K, K, dropout_p=1e-12, **options))
    torch.testing.assert_close(almost_none(random.key(0)), expected, rtol=1e-5, atol=1e-6)
    some = random.seeded(lambda: F.scaled_dot_product_attention(Q, K, K, None, 0.5, enable_gqa=True))
    mean = torch.vmap(some)(random.split(random.key(0), 3000)).mean(0)
    torch.testing.assert_close(mean, F.scaled_dot_product_attention(Q, K, K, enable_gqa=True), rtol=0, atol=0.1)


@pytest.mark.parametrize("need_weights", cases([False], [True]))
def test_modules_within_a_seeded_function_draw_from_the_key(need_weights, untouched):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        attention, layer = nn.MultiheadAttention(8, 2, dropout=0.5), nn.TransformerEncoderLayer(8, 2, 16, 0.5)
    x = Q[:, 0]
    f = random.seeded(lambda x: layer(attention(x, x, x, need_weights=need_weights)[0]))
    k = random.key(0)
    assert f(k, x).equal(f(k, x)) and not f(k, x).equal(f(random.key(1), x))
    gradient = torch.func.grad(lambda x: f(k, x).square().sum())
    assert gradient(x).equal(make_fx(gradient)(x)(x))


LSTM = nn.LSTM(3, 3, 2, dropout=0.5)
REFUSED = {
    "multinomial": (lambda: torch.multinomial(torch.ones(3), 1), "aten.multinomial.default"),
    "lstm": (lambda: LSTM(torch.ones(2, 3)), "aten.bernoulli"),
    "poisson": (lambda: torch.poisson(torch.ones(3)), "aten.poisson.default"),
    "randn": (lambda: torch.randn(3, dtype=torch.complex64), "aten.randn.default"),
    "rand_like.default": (lambda: torch.ops.aten.rand_like.default(torch.ones(3)), "aten.rand_like.default"),
    "dropout": (lambda: torch.ops.aten.dropout(torch.ones(3), 0.5, True), "aten.bernoulli"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_random_operations_without_a_draw_by_key_are_refused_by_name(name, untouched):
    f, operation = REFUSED[name]
    g, one = random.seeded(f), torch.ones(2)
    for run in (
        lambda: g(random.key(0)),
        lambda: torch.func.grad(lambda x: (x.sum(), g(random.key(0)))[0])(one),
        lambda: torch.vmap(lambda x: (x, g(random.key(0)))[0], randomness="different")(one),
        lambda: make_fx(lambda x: (x, g(random.key(0)))[0])(one),
        lambda: fzero.mesh(dp=2).spmd(lambda: (one, g(random.key(0)))[0])(),
    ):
        with pytest.raises(RuntimeError, match=rf"torch's {name} \({operation}.*draws from torch's own generator"):
            run()
    assert torch.rand(0).shape == (0,) and F.dropout(one, 1.0).sum() == 0  # all modes are off again


def test_draws_that_would_repeat_in_a_nested_world_are_refused():
    drop, x, k = random.seeded(lambda x: F.dropout(x)), torch.ones(3, 64), random.key(0)
    for kind in ("error", "different"):
        with pytest.raises(RuntimeError, match="a vmap inside draws random numbers"):
            random.seeded(lambda x, kind=kind: torch.vmap(F.dropout, randomness=kind)(x))(k, x)
    same = random.seeded(lambda x: torch.vmap(F.dropout, randomness="same")(x))(k, x)
    assert same[0].equal(same[1])
    own = random.seeded(lambda x: torch.vmap(drop)(random.split(k, 3), x))(k, x)
    assert own.equal(torch.stack([drop(key, y) for key, y in zip(random.split(k, 3), x, strict=True)]))
    for simulate in ("vmap", "lockstep"):
        mesh = fzero.mesh(dp=2, simulate=simulate)
        with pytest.raises(RuntimeError, match=r"the function runs a rank program over \['dp'\]"):
            random.seeded(lambda mesh=mesh: mesh.spmd(lambda: PerRank(torch.rand(3)))())(k)


def test_a_nested_function_has_its_own_key():
    inner = random.seeded(lambda: torch.rand(3))
    outer = random.seeded(lambda: (torch.rand(3), inner(random.key(5)), torch.rand(3)))
    a, b, c = outer(random.key(0))
    assert b.equal(inner(random.key(5))) and not a.equal(c)
    plain = random.seeded(lambda: (torch.rand(3), torch.rand(3)))(random.key(0))
    assert a.equal(plain[0]) and c.equal(plain[1])


def test_a_block_under_remat_repeats_its_draws():
    """Remat runs a block again, with the key as an argument."""
    assert _seeded.next_key() is None
    block = lambda x: F.dropout(x, 0.5)  # noqa: E731

    def f(x):
        key = _seeded.next_key()
        return key, _seeded.call_with_key(key, block, x), torch.rand(3)

    key, y, after = random.seeded(f)(random.key(0), torch.ones(64))
    assert y.equal(_seeded.call_with_key(key, block, torch.ones(64)))
    assert after.equal(random.seeded(lambda: (torch.rand(()), torch.rand(3))[1])(random.key(0)))


def test_a_draw_without_a_size_raises_torchs_error(untouched):
    with pytest.raises(TypeError, match="rand"):
        random.seeded(lambda: torch.rand())(random.key(0))


DRAWS_OF_NOTHING = pytest.mark.skipif(torch.__version__ < "2.12", reason="Dynamo 2.11 hides torch.rand from modes")


@pytest.mark.slow
@pytest.mark.parametrize(
    "f",
    [
        lambda x: F.dropout(x, 0.5) + F.gumbel_softmax(x) + torch.empty(7).uniform_(),
        pytest.param(lambda x: F.dropout(x, 0.5) + torch.rand(7) + torch.randn(7), marks=DRAWS_OF_NOTHING),
    ],
)
def test_dynamo_traces_a_seeded_function(f, untouched):
    torch.compiler.reset()
    g = torch.func.grad(lambda x, k: random.seeded(f)(k, x).square().sum())
    compiled = torch.compile(g, fullgraph=True, backend="aot_eager")
    x, k = torch.ones(7), random.key(0)
    torch.testing.assert_close(compiled(x, k), g(x, k))


@given(
    shape=st.sampled_from([{"dp": 1}, {"dp": 2}, {"dp": 5}, {"dp": 2, "tp": 3}, {"a": 2, "b": 2, "c": 2}]),
    seed=seeds,
    size=st.integers(1, 5),
)
@examples(5, 15)
def test_both_simulations_draw_alike_and_ranks_draw_differently(shape, seed, size):
    k, x = random.key(seed), torch.ones(size, 4)
    program = lambda k, x: PerRank(random.seeded(masks)(k, k, x))  # noqa: E731
    n = math.prod(shape.values())
    by_vmap = fzero.mesh(**shape).spmd(program)(k, x).value
    in_lockstep = fzero.mesh(simulate="lockstep", **shape).spmd(program)(k, x).value
    alone = torch.stack([_seeded.call_with_key(_own(k, r), masks, k, x) for r in range(n)])
    assert by_vmap.equal(in_lockstep) and by_vmap.equal(alone)
    assert by_vmap.flatten(1).unique(dim=0).shape[0] == n
    assert by_vmap[0].equal(random.seeded(masks)(k, k, x))  # one process is rank 0


MESHES = ({"dp": 2}, {"dp": 4}, {"dp": 2, "tp": 2})


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes,k", cases(zip(MESHES, (3, 1, 3), strict=True), itertools.product(MESHES, (1, 3))), ids=str
)
def test_all_stages_and_simulations_drop_the_same(axes, k, untouched):
    opt, key, results = optim.adam(1e-2), random.key(1), []
    for stage in either((0, 3), ALL_STAGES):
        for simulate in ("vmap", "lockstep"):
            mesh = fzero.mesh(simulate=simulate, **axes)
            step = fzero.shard(keyed_step(opt, micro_batches=k), stage=stage, mesh=mesh, axis="dp")
            state, dropped = step.init(PARAMS, opt), []
            for i in range(2):
                *state, _, d = step(*state, mesh.split(BATCH, "dp"), random.fold_in(key, i))
                dropped.append(d.value)
            results.append((torch.stack(dropped), step.gather(state[0])))
    for dropped, params in results[1:]:
        assert dropped.equal(results[0][0])
        assert_trees_close(params, results[0][1])
    first = results[0][0][0]  # [ranks, ...]
    tp = axes.get("tp", 1)
    assert all(first[r].equal(first[r - r % tp]) for r in range(first.shape[0]))  # these compute one sample together
    assert first[::tp].flatten(1).unique(dim=0).shape[0] == axes["dp"]
    if k > 1:  # [ranks, micro-batches, ...]
        assert first[0].flatten(1).unique(dim=0).shape[0] == k
    assert not results[0][0][0].equal(results[0][0][1])  # the next step's


@pytest.mark.slow
@pytest.mark.parametrize("simulate", ["vmap", "lockstep"])
def test_parameters_are_made_by_key(simulate, untouched):
    for stage in ALL_STAGES:
        step = fzero.shard(keyed_step(optim.sgd(0.1)), stage=stage, mesh=fzero.mesh(dp=3, simulate=simulate))
        params, _ = step.init(lambda: made_by(random.key(2)), optim.sgd(0.1))
        assert_trees_close(step.gather(params), made_by(random.key(2)), rtol=0)


def test_a_resumed_step_draws_the_numbers_of_an_uninterrupted_one():
    opt, mesh, key = optim.adam(1e-2), fzero.mesh(dp=2), random.key(4)
    step = fzero.shard(keyed_step(opt), stage=2, mesh=mesh)

    def train(state, steps):
        for i in steps:
            *state, _, _ = step(*state, mesh.split(BATCH), random.fold_in(key, i))
        return state

    through = train(step.init(PARAMS, opt), range(4))
    saved = train(step.init(PARAMS, opt), range(2))
    random.seeded(masks)(key, key, torch.ones(3, 3))
    assert_trees_close(step.gather(train(saved, range(2, 4))), step.gather(through), rtol=0)


@pytest.mark.parametrize("stage", cases((3,), ALL_STAGES))
def test_a_jitted_step_draws_the_same_and_a_new_key_needs_no_trace(stage, untouched):
    opt, mesh, key = optim.adam(1e-2), fzero.mesh(dp=2), random.key(1)
    step = fzero.shard(keyed_step(opt, micro_batches=2), stage=stage, mesh=mesh)
    jitted = fzero.jit(step, backend="fx", **LEAST)
    state, other = step.init(PARAMS, opt), step.init(PARAMS, opt)
    for i in range(3):
        *state, loss, dropped = step(*state, mesh.split(BATCH), random.fold_in(key, i))
        *other, got, again = jitted(*other, mesh.split(BATCH), random.fold_in(key, i))
        assert got.equal(loss) and again.value.equal(dropped.value)
    assert jitted.traces == 1
    assert all(x.equal(y) for x, y in zip(tree.tensors(state), tree.tensors(other), strict=True))
    with pytest.raises(RuntimeError, match="torch's multinomial"):
        fzero.jit(random.seeded(lambda x: x * torch.multinomial(x, 1)), backend="fx")(key, torch.ones(3))
