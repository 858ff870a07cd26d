"""A compiled step runs the forward hooks that its model had; hooks that come later are refused, not ignored."""

from typing import Any

import pytest
from transformers import TrainerCallback

from fzero.plugs import transformers as plug
from tests.plugs.helpers import list_logged, make_trainer


def make_sharded(folder: Any, backend: Any, **options: Any) -> Any:
    return plug.shard_trainer(make_trainer(folder, **options), stage=3, backend=backend)


def test_noise_on_embeddings_trains_as_in_the_plain_trainer(tmp_path):
    plain = make_trainer(tmp_path, neftune_noise_alpha=5.0)
    plain.train()
    eager = make_sharded(tmp_path, None, neftune_noise_alpha=5.0)
    eager.train()
    assert list_logged(eager, "loss", "grad_norm") == pytest.approx(list_logged(plain, "loss", "grad_norm"), abs=1e-5)


def test_a_compiled_step_refuses_a_hook_that_was_added_after_it(tmp_path):
    message = r"forward hook 'neftune_post_forward_hook' on 'model.embed_tokens' was added .* pass backend=None"
    with pytest.raises(ValueError, match=message):
        make_sharded(tmp_path, "fx", neftune_noise_alpha=5.0).train()


def test_a_compiled_step_with_blocks_that_run_again_runs_hooks_and_refuses_their_removal(tmp_path):
    options: dict[str, Any] = {"activation_checkpointing": True, "neftune_noise_alpha": 5.0}
    plain = make_trainer(tmp_path, **options)
    plain.train()
    trainer = make_sharded(tmp_path, "fx", **options)
    trainer.train()
    assert list_logged(trainer, "loss", "grad_norm") == pytest.approx(list_logged(plain, "loss", "grad_norm"), abs=1e-5)
    trainer.neftune_noise_alpha = None
    with pytest.raises(ValueError, match=r"'neftune_post_forward_hook' on 'model.embed_tokens' was removed"):
        trainer.train()


class AddsHook(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.lm_head.register_forward_hook(lambda module, args, out: out * 2)


def test_a_hook_of_a_callback_is_named(tmp_path):
    with pytest.raises(ValueError, match="forward hook '<lambda>' on 'lm_head' was added"):
        make_sharded(tmp_path, "fx", callbacks=[AddsHook()]).train()
