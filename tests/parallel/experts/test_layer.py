"""Laws of a layer of experts on one rank: it is the sum over choices, by either way, and its gradients are finite."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fzero import tree
from fzero.parallel import experts as moe
from tests.helpers import examples
from tests.parallel.experts.model import D, batch_of, experts_params, ffn, loss_for, normal, params_of, sum_by_hand


@settings(max_examples=25)
@given(
    st.integers(1, 3), st.integers(0, 6), st.sampled_from([1, 2, 4, 8]), st.data(), st.booleans(), st.integers(0, 99)
)
def test_a_layer_is_the_sum_over_choices_of_gate_times_expert(s, t, count, data, normalize, seed):
    """It goes by positions and by sorting; with more experts than tokens, choices of all experts, or no token."""
    k = data.draw(st.integers(1, count))
    g = torch.Generator().manual_seed(seed)
    x, p = normal(g, s, t, D), experts_params(count, seed)
    routing = moe.route(normal(g, s, t, count), k, normalize=normalize)
    expected = sum_by_hand(p, x, routing) if t else x
    for capacity in (None, float(count)):
        if t or capacity is None:
            torch.testing.assert_close(moe.layer(ffn, p, x, routing, capacity=capacity), expected, rtol=0, atol=1e-13)


@examples(8, 15)
@given(st.integers(1, 4), st.sampled_from(["batch", "sequence"]), st.integers(0, 99))
def test_sorting_and_positions_for_all_have_the_same_gradients(k, over, seed):
    params, batch = params_of(4, seed), batch_of(3, 5, seed)
    one, other = (torch.func.grad(loss_for(k, capacity, over))(params, batch) for capacity in (None, 4.0))
    tree.map(lambda a, b: torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13), one, other)


@pytest.mark.parametrize("capacity", [None, 1.0])
def test_experts_without_tokens_have_gradients_of_exactly_zero(capacity):
    """A router that sends all tokens to expert 2: the others starve, and nothing diverges."""
    params, batch = params_of(), batch_of()
    loss = loss_for(1, capacity, score="sigmoid", normalize=False, bias=torch.tensor([0.0, 0, 9, 0]).double())
    grads = torch.func.grad(loss)(params, batch)["layer"]
    for leaf in grads["experts"].values():
        assert [bool(part.any()) for part in leaf] == [False, False, True, False] and leaf.isfinite().all()
    assert grads["router"].isfinite().all()


def test_a_token_whose_choices_are_all_dropped_is_zeros():
    x, p = batch_of(2, 6)["x"], experts_params(4)
    logits = torch.tensor([9.0, 8.0, 0.0, 0.0], dtype=torch.float64).expand(2, 6, 4)
    y = moe.layer(ffn, p, x, moe.route(logits, 2), capacity=1.0)  # 3 positions an expert, and all want the same two
    assert not y[:, 3:].any() and y[:, :3].all()


def test_half_precision_goes_through_torchs_kernel():
    x, p = batch_of(2, 6)["x"].bfloat16(), tree.map(torch.Tensor.bfloat16, experts_params(4))
    p = {"up": torch.cat([p["up"]] * 2, 1)[:, :8], "bias": p["bias"], "down": torch.cat([p["down"]] * 2, 2)[..., :8]}
    x = torch.cat([x, x], -1)[..., :8]
    p = {"up": p["up"][..., :8], "bias": p["bias"][..., :8], "down": p["down"][:, :8]}
    routing = moe.route(normal(torch.Generator().manual_seed(0), 2, 6, 4), 2)

    def loss(p, capacity):
        return moe.layer(ffn, p, x, routing, capacity=capacity).float().square().sum()

    for one, other in zip(*[torch.func.grad(loss)(p, c).values() for c in (None, 4.0)], strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)


def test_queues_over_a_sequence_do_not_depend_on_the_rest_of_the_batch():
    """The choices that are dropped of it do not depend on what else is in the batch."""
    params, batch = params_of()["layer"], batch_of(4)
    routing = moe.route(batch["x"] @ params["router"], 2)
    whole = moe.layer(ffn, params["experts"], batch["x"], routing, capacity=0.5)
    for i in range(4):
        one = moe.Routing(*[v[i : i + 1] for v in routing])
        alone = moe.layer(ffn, params["experts"], batch["x"][i : i + 1], one, capacity=0.5)
        torch.testing.assert_close(alone[0], whole[i], rtol=0, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [None, 1.0])
def test_torch_compile_takes_a_layer_as_one_graph(capacity):
    params, batch = params_of(), batch_of()
    loss = loss_for(2, capacity)
    compiled = torch.compile(torch.func.grad(loss), fullgraph=True, backend="aot_eager")
    tree.map(
        lambda a, b: torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13),
        compiled(params, batch),
        torch.func.grad(loss)(params, batch),
    )
