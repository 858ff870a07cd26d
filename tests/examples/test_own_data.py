"""The ready programs on a model and data of one's own: what they evaluate is what transformers and peft compute."""

import itertools
import json
import pathlib
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.distributed.launch import python
from tests.examples.helpers import run

WORDS = ("--batch", "4", "--backend", "fx", "--steps")
IGNORED = ("-W", "ignore::FutureWarning")  # peft asks a model for a name that is deprecated


def turns(a: int, b: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{a} + {b}"}, {"role": "assistant", "content": f"{a + b}"}]


def lines(file: pathlib.Path, rows: list[Any]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def last(folder: pathlib.Path) -> dict[str, float]:
    return json.loads((folder / "log.jsonl").read_text().splitlines()[-1])


def mean_loss(model: Any, examples: list[list[tuple[list[int], bool]]]) -> float:
    """Return the mean loss of the tokens that count, of examples that are lists of tokens and whether these count."""
    total = count = 0.0
    for example in examples:
        tokens = torch.tensor([t for part, _ in example for t in part])
        counts = torch.tensor([counted for part, counted in example for _ in part])[1:]
        losses = torch.nn.functional.cross_entropy(model(tokens[None]).logits[0, :-1], tokens[1:], reduction="none")
        total, count = total + losses[counts].sum().item(), count + counts.sum().item()
    return total / count


@pytest.fixture(scope="module")
def start(tmp_path_factory: Any) -> pathlib.Path:
    """The folder of a model that has learnt the form of the answers, so that a wrong mask changes its loss."""
    out = tmp_path_factory.mktemp("start")
    done = python("examples/sft.py", "--steps", "30", "--every", "30", "--out", str(out))
    assert done.returncode == 0, done.stderr
    return out / "model"


@pytest.mark.slow
@torch.no_grad()
def test_finetuning_on_packed_conversations_counts_the_answers_alone(start, tmp_path):
    chats = [turns(a, a) + turns(a, 7) * (a % 3) for a in range(60)]
    data = lines(tmp_path / "chats.jsonl", [{"messages": chat} for chat in chats])
    words = ["--model", str(start), "--data", data, "--lr", "0", "--every", "1", "--out", str(tmp_path)]
    run("examples/sft.py", *WORDS, "1", *words, "--context", "256")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(start), AutoTokenizer.from_pretrained(start)

    def said(m: dict[str, str]) -> list[tuple[list[int], bool]]:
        texts = f"{m['role']}:", m["content"] + "</s>"
        return [(tokenizer(texts[0])["input_ids"], False), (tokenizer(texts[1])["input_ids"], m["role"] == "assistant")]

    examples = [[part for message in chat for part in said(message)] for chat in chats]
    ends = itertools.accumulate(sum(len(tokens) for tokens, _ in example) for example in examples)
    examples = [example for example, end in zip(examples, ends, strict=True) if end <= 256]  # those of the first row
    expected = mean_loss(model, examples)
    assert last(tmp_path)["held-out loss"] == pytest.approx(expected, rel=0.01)
    everything = mean_loss(model, [[(part, True) for part, _ in example] for example in examples])
    assert abs(everything - expected) > 0.1 * expected


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_peft_reads_the_adapters_that_finetuning_writes(start, tmp_path):
    peft = pytest.importorskip("peft")
    rows = [{"prompt": f"user:{a % 9} + 5</s>assistant:", "completion": f"{a % 9 + 5}"} for a in range(60)]
    words = ["--model", str(start), "--data", lines(tmp_path / "answers.jsonl", rows), "--lr", "0.02"]
    run(*IGNORED, "examples/lora.py", *WORDS, "16", *words, "--every", "16", "--out", str(tmp_path))
    base, tokenizer = AutoModelForCausalLM.from_pretrained(start), AutoTokenizer.from_pretrained(start)
    pairs = [[tokenizer(text)["input_ids"] for text in (row["prompt"], row["completion"] + "</s>")] for row in rows[:6]]
    examples = [[(asked, False), (said, True)] for asked, said in pairs]
    before = mean_loss(base, examples)
    after = mean_loss(peft.PeftModel.from_pretrained(base, tmp_path / "adapters"), examples)
    assert last(tmp_path)["held-out loss"] == pytest.approx(after, abs=5e-3) and after < before - 0.03


@pytest.mark.slow
def test_dpo_learns_preferences_and_distillation_halves_a_teacher(start, tmp_path):
    wrong = [{"role": "assistant", "content": "?"}]
    rows = [{"prompt": turns(a, 3)[:1], "chosen": turns(a, 3)[1:], "rejected": wrong} for a in range(60)]
    words = ["--model", str(start), "--data", lines(tmp_path / "preferences.jsonl", rows), "--every", "8"]
    run("examples/dpo.py", *WORDS, "8", *words, "--lr", "0.002", "--out", str(tmp_path / "dpo"))
    assert last(tmp_path / "dpo")["held-out accuracy"] == 1 and last(tmp_path / "dpo")["loss"] < 0.6

    (tmp_path / "text.txt").write_text("user:1 + 2</s>assistant:3</s>" * 400)
    words = ["--model", str(start), "--data", str(tmp_path / "text.txt"), "--every", "4", "--context", "32"]
    run("examples/distill.py", *WORDS, "4", *words, "--out", str(tmp_path / "half"))
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "half" / "model")
    assert student.config.num_hidden_layers == 1 and last(tmp_path / "half")["held-out divergence"] > 0


@pytest.mark.parametrize("words", [("--data", "nothing.jsonl"), ("--model", "nothing")], ids=["data", "model"])
def test_dpo_with_data_but_no_model_is_refused(words, tmp_path):
    done = python("examples/dpo.py", *words, "--out", str(tmp_path))
    assert done.returncode == 2 and "--model and --data go together" in done.stderr


def test_a_pattern_without_files_is_named_and_every_0_saves_at_the_end(tmp_path):
    done = python("examples/pretrain.py", "--data", str(tmp_path / "*.bin"), "--out", str(tmp_path))
    assert done.returncode == 2 and "no data" in done.stderr
    run("examples/train_gpt.py", *WORDS, "2", "--every", "0", "--out", str(tmp_path))
    assert last(tmp_path)["step"] == 2
