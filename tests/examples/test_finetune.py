"""The finetuning example: the numbers of a run are those of any other stage, and of the model that it saves."""

import importlib.util
import pathlib
import re
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.examples.test_examples import run

PATH = pathlib.Path(__file__).parents[2] / "examples" / "finetune_hf.py"
SMALL = ["--no-jit", "--steps", "4", "--eval-every", "2", "--eval-batches", "2", "--context", "64", "--dropout", "0.1"]


def losses(out: str) -> list[float]:
    return [float(x) for x in re.findall(r"step \d+: loss (\S+),", out)]


def held(out: str) -> list[int]:
    found = re.findall(r"holds (\S+) bytes of parameters, (\S+) of optimizer state, (\S+) of frozen ones", out)[0]
    return [int(x.replace(",", "")) for x in found]


@pytest.fixture
def example() -> Any:
    spec = importlib.util.spec_from_file_location("finetune_hf", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_stages_print_the_same_in_float16():
    outs = [run(str(PATH), *SMALL, "--precision", "float16", "--stage", stage) for stage in ("0", "3")]
    first, last = [losses(out) for out in outs]
    assert len(first) == 4 and first[-1] < first[0] - 0.3
    assert last == pytest.approx(first, rel=1e-3)
    assert (
        re.findall(r"scale (\S+),", outs[0]) == re.findall(r"scale (\S+),", outs[1]) == ["256"] * 4
    )  # none overflowed
    parameters, state, frozen = held(outs[0])
    assert state - 6 * parameters == 28 and frozen == 0  # master and moments; a count, scale, growth, skipped
    assert held(outs[1])[0] * 2 == parameters


def test_adapters_are_saved_merged(tmp_path, example):
    words = ["--precision", "float32", "--lora", "4", "--lora-alpha", "32", "--lr", "0.02", "--save", str(tmp_path)]
    out = run(str(PATH), *SMALL, *words)
    found = losses(out)
    assert len(found) == 4 and found[-1] < found[0] - 0.1
    saved: Any = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    # per block 2 x 4 projections of attention, of 64 to 64 and 32, and 3 of the MLP, 64 and 128; a pair 4 (in + out)
    adapters = 2 * 4 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))
    base = sum(p.numel() for p in saved.parameters())
    assert held(out) == [4 * adapters / 2, 8 * adapters / 2 + 8, 4 * base / 2]  # of 2 ranks
    batch = example.collate(example.load_documents()[1][:16], example.encoder(None), 64)
    logits = saved(input_ids=batch["tokens"]).logits.flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, batch["labels"].flatten())
    before, *after = [float(x) for x in re.findall(r"validation loss(?: before:)? (\S+)", out)]
    assert after[-1] == pytest.approx(loss.item(), abs=2e-4) and after[-1] < before - 0.1


@pytest.mark.slow
def test_merged_weights_give_the_adapters_logits(tmp_path, example):
    class Args:
        model, lora, lora_alpha, dropout = None, 4, 16.0, 0.1

    torch.manual_seed(0)
    model, _ = example.build(Args)
    for layer in model.modules():
        if isinstance(layer, example.LoRA):
            torch.nn.init.normal_(layer.b, std=0.1)
    model.eval().save_pretrained(tmp_path, state_dict=example.merge(model, dict(model.named_parameters())))
    saved: Any = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    tokens = torch.arange(32)[None]
    torch.testing.assert_close(saved(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_two_jitted_processes_print_what_a_simulation_does():
    words = [str(PATH), "--backend", "fx", "--lora", "4", *SMALL[1:]]
    launched, alone = run(*words, ranks=2), run(*words)
    assert losses(launched) == pytest.approx(losses(alone), abs=1e-3) and losses(alone)
