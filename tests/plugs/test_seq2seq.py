"""T5 in a Seq2SeqTrainer: a decoder with a configuration of its own, and texts whose lengths differ by rank."""

import json

import pytest

from fzero.plugs import transformers as plug
from tests.distributed.launch import torchrun
from tests.plugs.helpers import list_logged
from tests.plugs.train_seq2seq import make


def test_an_eager_step_trains_an_encoder_and_decoder_as_the_plain_trainer(tmp_path):
    plain, sharded = make(tmp_path, 3), plug.shard_trainer(make(tmp_path, 3), stage=3, backend=None)
    for trainer in (plain, sharded):
        trainer.train()
    assert list_logged(sharded, "loss", "grad_norm") == pytest.approx(list_logged(plain, "loss", "grad_norm"), abs=1e-4)
    rows = plain.eval_dataset
    assert (sharded.predict(rows).predictions == plain.predict(rows).predictions).all()


@pytest.mark.slow
def test_ranks_generate_texts_of_different_lengths(tmp_path):
    done = torchrun(2, "-m", "tests.plugs.train_seq2seq", str(tmp_path))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    expected, texts = json.loads((tmp_path / "texts.json").read_text())
    assert texts == expected
    assert len({row.index(1) if 1 in row else 9 for row in texts}) > 1
