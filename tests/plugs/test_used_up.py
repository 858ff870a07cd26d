"""What a sharded trainer leaves to others: the trainer that it was made from, its checkpoints, and callbacks."""

from typing import Any

import pytest
from transformers import TrainerCallback

from fzero.errors import CheckpointError
from fzero.plugs import transformers as plug
from tests.plugs.helpers import make_trainer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: Any) -> str:
    folder = tmp_path_factory.mktemp("saved")
    trainer = make_trainer(folder, save_strategy="steps", save_steps=2, max_steps=2)
    plug.shard_trainer(trainer, stage=3, backend=None).train()
    return str(folder / "checkpoint-2")


@pytest.mark.parametrize("name", ["train", "evaluate", "predict", "save_model"])
def test_a_trainer_that_was_sharded_names_the_one_to_use(tmp_path, name):
    trainer = make_trainer(tmp_path)
    sharded = plug.shard_trainer(trainer, stage=3, backend=None)
    with pytest.raises(RuntimeError, match=f"^{name}: this trainer was given to shard_trainer, and is used up"):
        getattr(trainer, name)()
    with pytest.raises(TypeError, match="given to shard_trainer before"):
        plug.shard_trainer(trainer, stage=3)
    assert sharded.evaluate()["eval_loss"] > 0


def test_a_trainer_without_shards_does_not_resume_without_moments(tmp_path, checkpoint):
    with pytest.raises(ValueError, match="different number of parameter groups"):
        make_trainer(tmp_path).train(resume_from_checkpoint=checkpoint)
    plug.shard_trainer(make_trainer(tmp_path), stage=1, backend=None).train(resume_from_checkpoint=checkpoint)


@pytest.mark.parametrize("options", [{"optim": "sgd"}, {"bf16": True}, {"max_grad_norm": 0.0}])
def test_a_checkpoint_of_other_settings_names_them(tmp_path, checkpoint, options):
    trainer = plug.shard_trainer(make_trainer(tmp_path, **options), stage=3, backend=None)
    with pytest.raises(CheckpointError) as error:
        trainer.train(resume_from_checkpoint=checkpoint)
    assert "resumes with the optim, bf16 and fp16" in error.value.__notes__[-1]


def test_a_folder_without_a_sharded_state_is_named(tmp_path):
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2, "save_only_model": True}
    trainer = plug.shard_trainer(make_trainer(tmp_path, **options), stage=3, backend=None)
    trainer.train()
    with pytest.raises(ValueError, match=r"checkpoint-2' has no folder 'fzero'.*save_only_model=True"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    with pytest.raises(ValueError, match="checkpoint-4' is not a folder"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


class LooksAtGradients(TrainerCallback):
    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        pass


@pytest.mark.parametrize("callback", [LooksAtGradients, LooksAtGradients()])
def test_a_callback_for_gradients_that_is_added_later_is_refused(tmp_path, callback):
    trainer = plug.shard_trainer(make_trainer(tmp_path), stage=3, backend=None)
    with pytest.raises(ValueError, match="callback LooksAtGradients has on_pre_optimizer_step"):
        trainer.add_callback(callback)


def test_a_trainer_that_generates_in_its_steps_is_refused(tmp_path):
    trainer = make_trainer(tmp_path)
    vars(trainer.args)["num_generations"] = 2  # as GRPO's arguments have it
    with pytest.raises(ValueError, match=r"num_generations=2\) is refused: the trainer generates within training_step"):
        plug.shard_trainer(trainer, stage=3)
