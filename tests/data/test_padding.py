"""Padding: few lengths, chosen to pad least, the same on all ranks; what is padded counts nowhere."""

import itertools
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero import data, optim
from fzero.testing import assert_trees_close
from tests.helpers import cases, examples

SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=12)


def round_up(n: int, buckets: Any) -> int:
    return min(b for b in buckets if b >= n)


def on_average(lengths: list[int], buckets: Any, batch: int) -> float:
    """The length of a batch, on average over all draws with replacement, one by one."""
    draws = list(itertools.product(lengths, repeat=batch))
    return sum(round_up(max(draw), buckets) for draw in draws) / len(draws)


@examples(40, 300)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    count=st.integers(1, 4),
    multiple=st.sampled_from([1, 4, 8]),
    batch=st.integers(1, 3),
)
def test_the_chosen_bucket_lengths_pad_least(lengths, count, multiple, batch):
    pad = data.padding(lengths, global_batch=batch, buckets=count, multiple=multiple)
    assert len(pad.buckets) <= count and list(pad.buckets) == sorted({*pad.buckets})
    assert all(n % multiple == 0 for n in pad.buckets) and pad.buckets[-1] - max(lengths) < multiple
    places = sorted({-(-n // multiple) * multiple for n in lengths})
    others = [(*some, places[-1]) for some in itertools.combinations(places[:-1], min(count, len(places)) - 1)]
    best = min(on_average(lengths, some, batch) for some in others)
    assert on_average(lengths, pad.buckets, batch) == pytest.approx(best)
    assert pad.share == pytest.approx(1 - sum(lengths) / len(lengths) / best)


@examples(40, 300)
@given(lengths=SIZES, seed=st.integers(0, 9))
def test_a_padded_example_is_the_example_followed_by_padding(lengths, seed):
    g = torch.Generator().manual_seed(seed)
    pad = data.padding(lengths, global_batch=1, buckets=3, fill={"labels": -100, "scores": 0.5})
    for i, n in enumerate(lengths):
        tokens = torch.randint(1, 9, (n,), generator=g)
        sample = {
            "input_ids": tokens.tolist(),
            "labels": tokens,
            "scores": torch.rand(n, 2, generator=g),
            "id": i,
            "name": "x",
        }
        length = pad.padded_length([i])
        got = pad.pad_example(sample, length)
        assert got["id"] == i and got["name"] == "x" and "attention_mask" not in sample
        for name, filled in (("input_ids", 0), ("labels", -100), ("scores", 0.5)):
            assert len(got[name]) == length and got[name].dtype == torch.as_tensor(sample[name]).dtype
            assert torch.equal(got[name][:n], torch.as_tensor(sample[name])) and (got[name][n:] == filled).all()
        assert got["attention_mask"].tolist() == [1] * n + [0] * (length - n)
        assert pad.pad_example(tokens, length).tolist() == [*tokens.tolist(), *[0] * (length - n)]


def texts(count: int) -> list[dict[str, Any]]:
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 40, (count,), generator=g).tolist()
    return [{"input_ids": (x := torch.randint(1, 9, (n,), generator=g)), "labels": x} for n in lengths]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_padded_batches_have_one_length_on_all_ranks_and_do_not_depend_on_the_mesh(ranks, workers):
    result = texts(24)
    pad = data.padding([len(x["input_ids"]) for x in result], global_batch=4, buckets=3)
    numbered = data.batches(result, fzero.mesh(dp=ranks), global_batch=4, seed=3, pad=pad, num_workers=workers)
    for i, batch in numbered.steps(0, 8):
        indices = numbered.indices(i)
        longest = max(len(result[j]["input_ids"]) for j in indices)
        tokens = batch.value["input_ids"].flatten(0, 1)
        assert tokens.shape == (4, round_up(longest, pad.buckets))
        for row, j in zip(tokens, indices, strict=True):
            assert torch.equal(row[: len(result[j]["input_ids"])], result[j]["input_ids"])
    assert "3 lengths, " in repr(numbered) and "% padded" in repr(numbered)


def test_evaluation_batches_are_padded():
    result = texts(5)
    pad = data.padding([len(x["input_ids"]) for x in result], global_batch=2, buckets=2)
    got = [
        (batch.value["attention_mask"].sum().item(), int(rows))
        for batch, rows in data.epoch(result, fzero.mesh(dp=2), global_batch=2, pad=pad)
    ]
    sizes = [len(x["input_ids"]) for x in result]
    assert got == [(sizes[0] + sizes[1], 2), (sizes[2] + sizes[3], 2), (2 * sizes[4], 1)]


EMBED = {
    "table": torch.linspace(-1, 1, 9 * 4, dtype=torch.float64).view(9, 4),
    "head": torch.linspace(1, -1, 36, dtype=torch.float64).view(4, 9),
}


def mixing_loss(params: Any, batch: Any) -> Any:
    """Sum a small model's losses, and count them. Each token sees all others that are not masked."""
    x = params["table"][batch["input_ids"]]
    mask = batch["attention_mask"][:, None, :] * torch.eye(x.shape[1], dtype=x.dtype).logical_not()
    weights = (x @ x.mT).masked_fill(mask == 0, -torch.inf).softmax(-1)
    logits = torch.tanh(weights @ x) @ params["head"]
    each = torch.nn.functional.cross_entropy(logits.mT, batch["labels"], reduction="sum")
    return each, (batch["labels"] != -100).sum()


@pytest.mark.parametrize("stage", cases((3,), [0, 2]))
def test_padding_changes_no_loss_and_no_gradient(stage):
    """Training on padded batches is training on each example by itself, weighted by its tokens."""
    actual = texts(12)
    pad = data.padding([len(x["input_ids"]) for x in actual], global_batch=4, buckets=2)
    opt, mesh = optim.sgd(0.5), fzero.mesh(dp=2)

    def train_step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = fzero.value_and_grad(mixing_loss, reduce="weighted")(params, batch)
        updates, state = opt.update(grads, state, params)
        return optim.apply_updates(params, updates), state, loss

    def one_by_one(params: Any, indices: list[int]) -> Any:
        parts = []
        for j in indices:
            x = {name: value[None] for name, value in actual[j].items()}
            x["attention_mask"] = torch.ones_like(x["input_ids"])
            parts.append(mixing_loss(params, x))
        return sum(p for p, _ in parts) / sum(n for _, n in parts)

    step = fzero.shard(train_step, stage, mesh)
    jitted = fzero.jit(step, backend="fx")
    numbered = data.batches(actual, mesh, global_batch=4, pad=pad)
    params, state = step.init(EMBED, opt)
    whole = EMBED
    for i, batch in numbered.steps(0, 6):
        params, state, loss = jitted(params, state, batch)
        grads, expected = torch.func.grad_and_value(one_by_one)(whole, numbered.indices(i))
        whole = {name: whole[name] - 0.5 * grads[name] for name in whole}
        assert_trees_close(loss, expected)
    assert_trees_close(step.gather(params), whole)
    assert jitted.traces <= 2


@pytest.mark.parametrize(
    "options, message",
    [
        ({"lengths": []}, "lengths is empty"),
        ({"global_batch": 0}, "global_batch=0: expected a number"),
        ({"multiple": True}, "multiple=True"),
        ({"buckets": 0}, "buckets=0: expected the lengths, or their number, an int"),
        ({"buckets": []}, r"buckets=\[\]: expected lengths"),
        ({"buckets": (4, 8)}, r"example 2 has 9 tokens, and the longest of buckets=\[4, 8\] is 8"),
    ],
)
def test_wrong_arguments_of_padding_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        data.padding(**{"lengths": [3, 5, 9], "global_batch": 2, **options})


def test_a_padding_of_another_data_set_is_refused():
    actual, mesh = texts(6), fzero.mesh(dp=2)
    pad = data.padding([len(x["input_ids"]) for x in actual], global_batch=2)
    with pytest.raises(ValueError, match="pad has the lengths of 6 examples, but the data set has 5"):
        data.batches(actual[:5], mesh, global_batch=2, pad=pad)
    with pytest.raises(ValueError, match="pad was made for global_batch=2, not for global_batch=4"):
        data.epoch(actual, mesh, global_batch=4, pad=pad)
    wrong = data.padding([1] * 6, global_batch=2, multiple=1)
    with pytest.raises(ValueError, match=r"input_ids has \d+ tokens, more than the 1 of its batch"):
        data.batches(actual, mesh, global_batch=2, pad=wrong)[0]
    with pytest.raises(ValueError, match=re.escape("an example has no sequence to pad: ['x']")):
        pad.pad_example({"x": 1}, 3)


def test_buckets_for_many_lengths_are_chosen_quickly():
    lengths = torch.randint(1, 200_000, (20_000,), generator=torch.Generator().manual_seed(0)).tolist()
    pad = data.padding(lengths, global_batch=8, buckets=6)
    assert len(pad.buckets) == 6 and pad.share < 0.6 and len(str(pad).splitlines()) == 9
