"""The finetuning example: the numbers of a run are those of any other stage, and of the model that it saves."""

import importlib.util
import pathlib
import re
from typing import Any

import pytest
import tokenizers
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.distributed.launch import world
from tests.examples.helpers import run

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


def test_a_run_that_was_stopped_goes_on_and_starts_from_a_folder(tmp_path):
    """The same command again, at another stage; and what is saved is the folder that the next run reads."""
    words = [str(PATH), *SMALL, "--lr", "0.01", "--precision", "float32"]
    whole = run(*words, "--checkpoints", str(tmp_path / "whole"), "--save", str(tmp_path / "tuned"))
    (tmp_path / "stopped").mkdir()
    (tmp_path / "whole" / "step-00000002").rename(tmp_path / "stopped" / "step-00000002")
    rest = run(*words, "--checkpoints", str(tmp_path / "stopped"), "--stage", "1")
    assert len(losses(rest)) == 2 and losses(rest) == pytest.approx(losses(whole)[2:], abs=1e-4)
    last = re.findall(r"validation loss (\S+)", whole)[-1]
    (tmp_path / "tuned" / "tokenizer_config.json").unlink(missing_ok=True)
    again = run(*words, "--model", str(tmp_path / "tuned"), "--steps", "1")
    assert float(re.findall(r"loss before: (\S+)", again)[0]) == pytest.approx(float(last), abs=2e-4)
    assert held(again) == held(whole)


@pytest.mark.slow
def test_the_short_one_is_killed_goes_on_and_is_read_by_transformers(tmp_path):
    """examples/finetune.py, of at most 40 lines, on two processes and then on one."""
    body = PATH.with_name("finetune.py").read_text()
    assert len([line for line in body.splitlines() if line.strip()]) <= 40
    body = (
        body.replace("stage=3, mesh=mesh))", 'stage=3, mesh=mesh), backend="fx")')
        .replace("200", "20")
        .replace("50", "10")
    )
    (tmp_path / "killed.py").write_text(
        body.replace("        log(i + 1, found)\n", "        log(i + 1, found)\n        assert i < 14\n")
    )
    (tmp_path / "finetune.py").write_text(body)
    lines = [f"the {a} {b} the {c}" for a in ("cat", "dog") for b in ("sees", "hears") for c in ("bird", "fish")] * 8
    (tmp_path / "text").write_text("\n".join(lines))
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.train_from_iterator(lines, tokenizers.trainers.WordLevelTrainer(special_tokens=["?", "."]))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", eos_token=".").save_pretrained(tmp_path / "model")
    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=16
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    assert "AssertionError" in world(2, "killed.py", "model", "text", "out", cwd=tmp_path).stderr
    done = world(1, "finetune.py", "model", "text", "out", cwd=tmp_path)
    assert done.returncode == 0 and re.findall(r"step (\d+) of 20", done.stdout) == ["20"], done.stderr

    def loss(folder: pathlib.Path) -> float:
        tokens = AutoTokenizer.from_pretrained(folder)(lines[:8], return_tensors="pt").input_ids
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens, labels=tokens).loss.item()

    assert loss(tmp_path / "out") < loss(tmp_path / "model")


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
