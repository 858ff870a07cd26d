"""A Seq2SeqTrainer on processes that generates texts of different lengths: run by test_seq2seq.py."""

import json
import pathlib
import sys
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, Seq2SeqTrainer, Seq2SeqTrainingArguments, set_seed

from fzero.plugs import transformers as plug

VOCAB = 24


def make(folder: pathlib.Path, max_steps: int = 30) -> Any:
    """Make a trainer of a tiny T5 that copies the beginning of its input, up to an end that differs by sample."""
    set_seed(0)
    sizes: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": VOCAB}
    config = AutoConfig.for_model("t5", **sizes, decoder_start_token_id=0, dropout_rate=0.0)
    inputs = torch.randint(2, VOCAB, (64, 8), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": x, "labels": torch.where(torch.arange(8) < i % 8, x, 1)} for i, x in enumerate(inputs)]
    options: dict[str, Any] = {"predict_with_generate": True, "generation_max_length": 9, "learning_rate": 1e-2}
    options |= {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    options |= {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 1, "max_steps": max_steps}
    args = Seq2SeqTrainingArguments(str(folder), **options)
    return Seq2SeqTrainer(AutoModelForSeq2SeqLM.from_config(config), args, train_dataset=rows, eval_dataset=rows[:12])


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    texts = []
    for trainer in (make(folder), plug.shard_trainer(make(folder), stage=3, backend=None)):
        trainer.train()
        texts.append(trainer.predict(trainer.eval_dataset).predictions.tolist())
    if trainer.is_world_process_zero():
        (folder / "texts.json").write_text(json.dumps(texts))
    torch.distributed.destroy_process_group()
