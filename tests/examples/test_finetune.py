"""The fine-tuning examples: the numbers of a run are those of any other stage, and of the model that it saves."""

import json
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
SMALL = [str(PATH), "--context", "64", "--backend", "eager"]


def rows(folder: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_finetuning_in_float16_has_the_same_losses_at_every_stage(tmp_path):
    words = [*SMALL, "--steps", "4", "--precision", "float16"]
    for stage in ("0", "3"):
        run(*words, "--stage", stage, "--out", str(tmp_path / stage))
    first, last = rows(tmp_path / "0"), rows(tmp_path / "3")
    assert len(first) == 4 and first[-1]["loss"] < first[0]["loss"] - 0.3
    assert [row["loss"] for row in last] == pytest.approx([row["loss"] for row in first], rel=1e-3)
    assert [row["scale"] for row in first + last] == [256.0] * 8  # none overflowed


@pytest.mark.slow
def test_a_run_goes_on_at_another_stage_and_starts_from_the_folder_that_it_saved(tmp_path):
    whole, rest, again = (tmp_path / name for name in ("whole", "rest", "again"))
    words = [*SMALL, "--precision", "float32", "--every", "2"]
    run(*words, "--steps", "4", "--out", str(whole))
    (rest / "checkpoints").mkdir(parents=True)
    (whole / "checkpoints" / "step-00000002").rename(rest / "checkpoints" / "step-00000002")
    run(*words, "--steps", "4", "--stage", "1", "--out", str(rest))
    expected = [row["loss"] for row in rows(whole)]
    assert [row["loss"] for row in rows(rest)] == pytest.approx(expected[2:], abs=1e-4)
    run(*words, "--steps", "1", "--lr", "0", "--model", str(whole / "model"), "--out", str(again))
    (only,) = rows(again)
    assert only["held-out loss"] == pytest.approx(rows(whole)[-1]["held-out loss"], abs=1e-5)
    assert only["held-out loss"] < expected[0] - 0.3


@pytest.mark.slow
def test_a_killed_finetuning_resumes_and_transformers_reads_its_model(tmp_path):
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
