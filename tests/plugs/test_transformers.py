"""Trainer, sharded: the numbers of the same Trainer unsharded, whatever its settings; and what it refuses."""

import json
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, Trainer, TrainerCallback

import fzero
from fzero.plugs import transformers as plug
from fzero.plugs._param_groups import _OPTIMIZERS
from tests.distributed.launch import torchrun, world
from tests.helpers import ALL_STAGES, cases, either
from tests.plugs.helpers import assert_shards_are_masters, documents, list_logged, llama, make_trainer, weights

NUMBERS = ("loss", "grad_norm", "eval_loss")


def assert_trains_alike(tmp_path: Any, stage: int = 3, backend: Any = "fx", atol: float = 1e-5, **options: Any) -> Any:
    """Train twice, unsharded and sharded, evaluate, and compare all numbers and the weights; return the sharded one."""
    plain = make_trainer(tmp_path, **options)
    plain.train()
    plain.evaluate()
    sharded = plug.shard_trainer(make_trainer(tmp_path, **options), stage=stage, backend=backend)
    sharded.train()
    sharded.evaluate()
    assert len(list_logged(plain, *NUMBERS)) > plain.state.max_steps
    torch.testing.assert_close(list_logged(sharded, *NUMBERS), list_logged(plain, *NUMBERS), rtol=1e-5, atol=atol)
    full = plug.full_model(sharded)
    torch.testing.assert_close(weights(full), weights(plain.model), rtol=1e-5, atol=atol)
    assert list_logged(sharded, "learning_rate") == list_logged(plain, "learning_rate")
    return sharded


QUICK = [(3, "fx"), (1, None)]
OTHERS = [(stage, backend) for stage in ALL_STAGES for backend in ("fx", None) if (stage, backend) not in QUICK]


@pytest.mark.parametrize("stage,backend", [*QUICK, *[pytest.param(*x, marks=pytest.mark.slow) for x in OTHERS]])
def test_every_stage_has_the_losses_and_dropout_of_trainer(tmp_path, stage, backend):
    options = {"gradient_accumulation_steps": 3, "lr_scheduler_type": "cosine", "warmup_steps": 2}
    options["max_steps"] = either(6, 20)
    assert_trains_alike(tmp_path, stage, backend, dropout=0.1, max_grad_norm=0.5, **options)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [pytest.param("fx", marks=pytest.mark.slow), None])
def test_dropout_of_trainer_continues_after_an_evaluation(tmp_path, backend):
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 5}
    assert_trains_alike(tmp_path, 3, backend, dropout=0.1, activation_checkpointing=backend is None, **options)


@pytest.mark.slow
def test_training_with_inductor_has_the_losses_of_trainer(tmp_path):
    assert_trains_alike(tmp_path, 3, "inductor", gradient_accumulation_steps=3)


@pytest.mark.slow
def test_the_last_step_of_an_epoch_has_fewer_micro_batches(tmp_path):
    # 20 batches an epoch: 6 steps of 3, and one of 2
    assert_trains_alike(tmp_path, 3, either(None, "fx"), gradient_accumulation_steps=3, max_steps=either(7, 9))


def pad(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Collate documents of different lengths: each batch is as long as its longest."""
    lengths = [5 + int(x["input_ids"][0]) % 4 for x in batch]
    rows = {k: [x[k][:n] for x, n in zip(batch, lengths, strict=True)] for k in ("input_ids", "labels")}
    ids = torch.nn.utils.rnn.pad_sequence(rows["input_ids"], batch_first=True)
    labels = torch.nn.utils.rnn.pad_sequence(rows["labels"], batch_first=True, padding_value=-100)
    return {
        "input_ids": ids,
        "labels": labels,
        "attention_mask": (torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]).long(),
    }


@pytest.mark.slow
@pytest.mark.parametrize("backend", [pytest.param("fx", marks=pytest.mark.slow), None])
def test_micro_batches_of_different_lengths_train_alike(tmp_path, backend):
    assert_trains_alike(tmp_path, 3, backend, data_collator=pad, gradient_accumulation_steps=2)


def test_custom_losses_train_as_in_the_plain_trainer(tmp_path):
    def shifted_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        flat = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return torch.nn.functional.cross_entropy(*flat, reduction="sum") / num_items_in_batch

    few = ({"label_smoothing_factor": 0.1}, {"compute_loss_func": shifted_loss})
    more = ({"average_tokens_across_devices": False}, {"activation_checkpointing": True})
    for options in either(few, (*few, *more)):
        assert_trains_alike(tmp_path, 3, None, gradient_accumulation_steps=2, **options)


class ReadsNumbers(Trainer):
    """A trainer whose loss reads numbers and keeps them, as TRL's do."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        self.seen = [*getattr(self, "seen", []), round(outputs.logits.detach().std().item(), 4)]
        penalty = 1e-3 * model.lm_head.weight.square().sum()
        if self.seen[-1] > 0:
            loss = loss + penalty
        return (loss, outputs) if return_outputs else loss


@pytest.mark.slow
def test_a_loss_that_reads_numbers_runs_at_each_step(tmp_path):
    sharded = plug.shard_trainer(make_trainer(tmp_path, ReadsNumbers), stage=3)
    assert not sharded._fzero.engine.is_jitted
    plain = make_trainer(tmp_path, ReadsNumbers)
    for trainer in (sharded, plain):
        trainer.train()
        trainer.evaluate()
    assert sharded.seen == plain.seen and len(set(plain.seen)) > 2
    torch.testing.assert_close(list_logged(sharded, *NUMBERS), list_logged(plain, *NUMBERS), rtol=1e-5, atol=1e-5)


class OldFunction(torch.autograd.Function):
    """Doubles the gradient; torch.func refuses it, because it has no `setup_context`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


class AppliesOldFunction(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        return (OldFunction.apply(loss[0]), loss[1]) if isinstance(loss, tuple) else OldFunction.apply(loss)


@pytest.mark.slow
def test_a_loss_with_an_old_autograd_function_trains_alike(tmp_path):
    assert_trains_alike(tmp_path, 3, None, kind=AppliesOldFunction, max_grad_norm=0.0)


def made(name: str) -> Any:
    """Make torch's optimizer of this name, with its own defaults."""
    return lambda groups: getattr(torch.optim, name)(groups, lr=1e-2)


OPTIMIZERS = {name: made(name) for name in _OPTIMIZERS} | {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.95), eps=1e-6),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.3, momentum=0.9, nesterov=True),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2, initial_accumulator_value=0.1),
}


def test_the_usual_optimizers_of_torch_are_translated():
    assert {"Adagrad", "Adam", "AdamW", "SGD"} <= {*_OPTIMIZERS}


@pytest.mark.parametrize("name", cases(["AdamW", "Adam", "SGD"], OPTIMIZERS))
def test_optimizers_with_groups_train_as_in_the_plain_trainer(tmp_path, name):  # masks select the groups within a unit
    def options() -> dict[str, Any]:
        model = llama()
        named = dict(model.named_parameters())
        head = [named.pop("lm_head.weight")]
        groups = [{"params": named.values(), "weight_decay": 0.1}, {"params": head, "lr": 0.02, "weight_decay": 0.0}]
        return {"model": model, "optimizers": (OPTIMIZERS[name](groups), None)}

    plain, sharded = make_trainer(tmp_path, **options()), make_trainer(tmp_path, **options())
    sharded = plug.shard_trainer(sharded, stage=3, backend=None)
    plain.train()
    sharded.train()
    torch.testing.assert_close(weights(plug.full_model(sharded)), weights(plain.model), rtol=1e-5, atol=1e-5)


def test_a_resumed_trainer_equals_an_uninterrupted_one(tmp_path):
    options: dict[str, Any] = {"dropout": 0.1, "lr_scheduler_type": "cosine", "gradient_accumulation_steps": 2}
    options |= {"save_strategy": "steps", "save_steps": 3}
    whole = plug.shard_trainer(make_trainer(tmp_path, **options), stage=3, backend=either(None, "fx"))
    whole.train()
    resumed = plug.shard_trainer(make_trainer(tmp_path, **options), stage=1, backend=None)  # at another stage
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.state.global_step == 6
    torch.testing.assert_close(list_logged(resumed, "loss"), list_logged(whole, "loss"), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(weights(plug.full_model(resumed)), weights(plug.full_model(whole)), rtol=1e-5, atol=1e-6)


def test_folders_that_the_trainer_saves_load_in_transformers(tmp_path):
    trainer = plug.shard_trainer(make_trainer(tmp_path), stage=3, backend=either(None, "fx"))
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(weights(loaded), weights(plug.full_model(trainer)), rtol=0, atol=0)
    assert (tmp_path / "saved" / "model.safetensors").exists()


@pytest.mark.parametrize("bf16", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_trainer_loads_the_best_model_at_the_end(tmp_path, bf16):
    options: dict[str, Any] = {"save_strategy": "steps", "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    options |= {"load_best_model_at_end": True, "greater_is_better": True}  # the largest loss is the first
    plain = make_trainer(tmp_path / "plain", **options)
    plain.train()
    sharded = plug.shard_trainer(
        make_trainer(tmp_path / "sharded", bf16=bf16, **options), stage=3, backend=either(None, "fx")
    )
    sharded.train()
    assert plain.state.best_global_step == sharded.state.best_global_step == 2
    full = weights(plug.full_model(sharded))
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "sharded" / "checkpoint-2")
    torch.testing.assert_close(full, weights(saved), rtol=0, atol=0)
    if not bf16:
        torch.testing.assert_close(full, weights(plain.model), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_trainer_on_processes_trains_as_ddp_and_one_process_resumes(tmp_path):
    done = either(world, torchrun)(2, "-m", "tests.plugs.train", str(tmp_path))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    # one process goes on, with the same global batch
    resumed = plug.shard_trainer(
        make_trainer(tmp_path, save_strategy="steps", save_steps=3, per_device_train_batch_size=4),
        stage=2,
        backend=None,
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    whole = json.loads((tmp_path / "logged.json").read_text())
    torch.testing.assert_close(list_logged(resumed, "loss"), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_bf16_keeps_master_weights(tmp_path):
    plain = make_trainer(tmp_path)
    sharded = plug.shard_trainer(make_trainer(tmp_path, bf16=True), stage=3, backend=either(None, "fx"))
    plain.train()
    sharded.train()
    assert_shards_are_masters(sharded._fzero.engine)
    assert {p.dtype for p in weights(plug.full_model(sharded))} == {torch.float32}
    torch.testing.assert_close(list_logged(sharded, "loss"), list_logged(plain, "loss"), rtol=1e-2, atol=1e-2)


def test_fp16_skips_a_step_whose_gradients_overflow(tmp_path):
    def overflows_once(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        calls.append(None)
        return outputs["logits"].float().square().mean() * (1e30 if len(calls) == 3 else 1.0)

    calls: list[None] = []
    options: dict[str, Any] = {"fp16": True, "compute_loss_func": overflows_once, "lr_scheduler_type": "linear"}
    sharded = plug.shard_trainer(make_trainer(tmp_path, **options), stage=3, backend=None)
    sharded.train()
    assert int(sharded._fzero.engine.metrics["skipped"]) == 1
    rates = list_logged(sharded, "learning_rate")
    assert len(set(rates)) == 6 - 1 and rates[2] == rates[3]  # the schedule waits too


class Normalized(torch.nn.Module):
    """A model with running statistics, whose output is a dict with the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(97, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, 97)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.norm(self.embed(input_ids).flatten(0, 1)))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels.flatten()), "logits": logits}


@pytest.mark.slow
def test_running_statistics_pass_from_one_micro_batch_to_the_next(tmp_path):
    plain = make_trainer(tmp_path, model=Normalized(), gradient_accumulation_steps=2)
    sharded = plug.shard_trainer(
        make_trainer(tmp_path, model=Normalized(), gradient_accumulation_steps=2),
        stage=2,
        backend=either(None, "fx"),
    )
    plain.train()
    sharded.train()
    plain_state, state = plain.model.state_dict(), plug.full_model(sharded).state_dict()
    assert plain_state["norm.num_batches_tracked"] == state["norm.num_batches_tracked"] == 12
    torch.testing.assert_close(state, plain_state, rtol=1e-5, atol=1e-5)


def test_predictions_of_the_sharded_trainer_equal_trainers(tmp_path):
    plain, sharded = make_trainer(tmp_path), plug.shard_trainer(make_trainer(tmp_path), stage=3)
    expected, actual = plain.predict(documents(5)), sharded.predict(documents(5))
    assert actual.predictions.shape == (5, 8, 97)
    torch.testing.assert_close(actual.predictions, expected.predictions, rtol=1e-5, atol=1e-5)


class FailsOnce(Trainer):
    """A trainer whose third loss raises an error."""

    calls = 0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == 3:
            raise RuntimeError("a bad batch")
        return super().compute_loss(*args, **kwargs)


def test_an_error_in_a_step_loses_nothing(tmp_path):
    sharded = plug.shard_trainer(make_trainer(tmp_path, FailsOnce, gradient_accumulation_steps=2), stage=3)
    with pytest.raises(RuntimeError, match="a bad batch"):
        sharded.train()
    before = weights(plug.full_model(sharded))
    assert sharded.evaluate()["eval_loss"] > 0
    sharded.train()  # from the weights of the last good step
    assert sharded.state.global_step == 6
    assert any(not torch.equal(p, q) for p, q in zip(before, weights(plug.full_model(sharded)), strict=True))


class LooksAtGradients(TrainerCallback):
    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        pass


class ShortStream(torch.utils.data.IterableDataset[Any]):
    """Three batches of two documents, or four."""

    def __iter__(self) -> Any:
        return iter(documents(7))


@pytest.mark.slow
@pytest.mark.parametrize("backend", [None, pytest.param("fx", marks=pytest.mark.slow)])
def test_a_stream_that_ends_within_a_step_leaves_gradients_for_the_next(tmp_path, backend):
    # Trainer does not know its length: 4 batches by 3, and the fourth one's gradients go into the next epoch's step
    options: dict[str, Any] = {"train_dataset": ShortStream(), "gradient_accumulation_steps": 3}
    plain = make_trainer(tmp_path, **options)
    sharded = plug.shard_trainer(make_trainer(tmp_path, **options), stage=3, backend=backend)
    plain.train()
    sharded.train()
    torch.testing.assert_close(list_logged(sharded, "grad_norm"), list_logged(plain, "grad_norm"), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weights(plug.full_model(sharded)), weights(plain.model), rtol=1e-5, atol=1e-5)


class StopsWithinStep(TrainerCallback):
    """Stops at the first micro-batch of the third step."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 2


@pytest.mark.slow
@pytest.mark.parametrize("backend", [None, pytest.param("fx", marks=pytest.mark.slow)])
def test_a_run_after_a_stop_within_a_step_begins_afresh(tmp_path, backend):
    options: dict[str, Any] = {"gradient_accumulation_steps": 2}
    plain = make_trainer(tmp_path, callbacks=[StopsWithinStep()], **options)
    sharded = plug.shard_trainer(
        make_trainer(tmp_path, callbacks=[StopsWithinStep()], **options), stage=3, backend=backend
    )
    losses = []
    for trainer in (plain, sharded):
        losses.append(trainer.train().training_loss)
        trainer.pop_callback(StopsWithinStep)
        trainer.train()
    if backend is None:  # a compiled step computes the loss with its last micro-batch
        assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    torch.testing.assert_close(weights(plug.full_model(sharded)), weights(plain.model), rtol=1e-5, atol=1e-5)


def clamp(model: Any) -> None:
    with torch.no_grad():
        model.lm_head.weight.clamp_(-0.01, 0.01)


def scale_buffers(model: Any) -> None:
    next(model.buffers()).mul_(1.1)


BETWEEN_STEPS = {
    "clamp": (clamp, "clamp_ on 'lm_head.weight': between sharded steps"),
    "data": (lambda model: model.lm_head.weight.data.mul_(0.5), "mul_ on 'lm_head.weight'"),
    "average": (lambda model: torch.optim.swa_utils.AveragedModel(model), "clone on 'model.embed_tokens.weight'"),
    "buffers": (scale_buffers, "mul_ on 'model.rotary_emb.inv_freq'"),
    "norm": (lambda model: model.lm_head.weight.norm(), "norm on 'lm_head.weight'.*full_model"),
    "freeze": (lambda model: model.lm_head.requires_grad_(False), "requires_grad of 'lm_head.weight' was changed"),
    "loss": (lambda model: model(torch.zeros(1, 2, dtype=torch.long)), "embedding on 'model.embed_tokens.weight'"),
}


@pytest.mark.parametrize("name", BETWEEN_STEPS)
def test_weights_cannot_be_read_or_changed_between_steps(tmp_path, name):
    act, message = BETWEEN_STEPS[name]

    class Acts(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            assert model.num_parameters() > 0 and model.lm_head.weight.requires_grad_().grad is None
            act(model)

    trainer = make_trainer(tmp_path, callbacks=[Acts()])
    own_model = trainer.model
    sharded = plug.shard_trainer(trainer, stage=3, backend=None)
    with pytest.raises(RuntimeError, match=message):
        sharded.train()
    with pytest.raises(RuntimeError, match=message):
        act(own_model)


class Autocasts(Trainer):
    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
        return torch.autocast("cpu", torch.bfloat16)


class ChangesLimit(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        args.max_grad_norm = 0.5


def test_changing_max_grad_norm_during_training_is_refused(tmp_path):
    sharded = plug.shard_trainer(make_trainer(tmp_path, callbacks=[ChangesLimit()]), stage=3, backend=None)
    with pytest.raises(ValueError, match=r"max_grad_norm was 1\.0 and is 0\.5 now"):
        sharded.train()


REFUSED = {
    "bf16_full_eval": (lambda folder: make_trainer(folder, bf16_full_eval=True), "bf16_full_eval=True.*pass bf16=True"),
    "max_grad_norm": (lambda folder: make_trainer(folder, max_grad_norm=-1.0), "max_grad_norm=-1.0"),
    "best": (
        lambda folder: make_trainer(
            folder,
            load_best_model_at_end=True,
            save_only_model=True,
            **{"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 2, "save_steps": 2},
        ),
        "save_only_model=True.*load_best_model_at_end",
    ),
    "autocast": (lambda folder: make_trainer(folder, Autocasts), "Autocasts overrides autocast_smart_context_manager"),
    "torch_compile": (lambda folder: make_trainer(folder, torch_compile=True), "torch_compile=True"),
    "auto_find_batch_size": (lambda folder: make_trainer(folder, auto_find_batch_size=True), "auto_find_batch_size"),
    "optim": (lambda folder: make_trainer(folder, optim="adafactor"), "optim='adafactor'.*AdamW"),
    "callback": (lambda folder: make_trainer(folder, callbacks=[LooksAtGradients()]), "LooksAtGradients.*on_step_end"),
    "part": (
        lambda folder: make_trainer(
            folder, model=(m := llama()), optimizers=(torch.optim.AdamW(m.lm_head.parameters()), None)
        ),
        r"optimizers=: no group holds 'model.embed_tokens.weight' and \d+ other",
    ),
    "foreign": (
        lambda folder: make_trainer(folder, optimizers=(torch.optim.AdamW(llama().parameters()), None)),
        "optimizers=: group 0 holds a tensor .* that is not a parameter of the model",
    ),
    "amsgrad": (
        lambda folder: make_trainer(
            folder, model=(m := llama()), optimizers=(torch.optim.AdamW(m.parameters(), amsgrad=True), None)
        ),
        "amsgrad=True",
    ),
    "betas": (
        lambda folder: make_trainer(
            folder,
            model=(m := llama()),
            optimizers=(
                torch.optim.AdamW(
                    [{"params": m.model.parameters()}, {"params": m.lm_head.parameters(), "betas": (0.5, 0.9)}]
                ),
                None,
            ),
        ),
        "groups 0 and 1 have different betas",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unsupported_setting_of_the_trainer_is_named(tmp_path, name):
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        plug.shard_trainer(make(tmp_path), stage=3)


def test_other_unsupported_settings_of_trainer_are_refused(tmp_path):
    trainer = make_trainer(tmp_path)
    with pytest.raises(ValueError, match="has 2 ranks, and Trainer runs in 1 processes"):
        plug.shard_trainer(trainer, stage=3, mesh=fzero.mesh(dp=2))
    with pytest.raises(TypeError, match="expected a transformers"):
        plug.shard_trainer(llama(), stage=3)
    with pytest.raises(TypeError, match="not sharded"):
        plug.full_model(trainer)
    with pytest.raises(ValueError, match="backend='eager': expected"):
        plug.shard_trainer(trainer, stage=3, backend="eager")
    with pytest.raises(ValueError, match="no trainable parameter"):
        plug.shard_trainer(make_trainer(tmp_path, model=llama().requires_grad_(False)), stage=3)
    model = trainer.model
    assert not any(p.is_meta for p in model.parameters())  # nothing that was refused has used it up
    sharded = plug.shard_trainer(trainer, stage=3)
    assert all(p.is_meta for p in model.parameters())  # whoever holds the model holds no memory
    with pytest.raises(TypeError, match="sharded already"):
        plug.shard_trainer(sharded, stage=3)
    trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=3)
    trainer.train()
    sharded = plug.shard_trainer(make_trainer(tmp_path), stage=3)
    with pytest.raises(ValueError, match="no folder 'fzero' with the state of a sharded trainer"):
        sharded.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
