"""Lightning's Trainer, sharded by a strategy: the numbers of the same Trainer unsharded; and what is refused."""

import csv
import functools
import json
import pathlib
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch import callbacks as callbacks_of_lightning
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.utils.data import DataLoader

import fzero
from fzero.plugs import lightning as plug
from fzero.zero import STAGES
from tests.distributed.launch import python, torchrun, world
from tests.helpers import ALL_STAGES, cases
from tests.plugs.helpers import assert_shards_are_masters, documents, llama
from tests.plugs.lightning_helpers import Recorder, Regression, loader, make_trainer, train, weights

pytestmark = pytest.mark.filterwarnings("ignore")


def assert_alike(plain: Any, sharded: Any, atol: float = 1e-5) -> None:
    """Compare the weights, what was logged, the rates and the outputs of two runs of `train`."""
    (module, trainer, recorder), (actual, found_trainer, found_recorder) = plain, sharded
    assert len(recorder.logged) == len(found_recorder.logged) > 0
    torch.testing.assert_close(found_recorder.logged, recorder.logged, rtol=1e-5, atol=atol)
    torch.testing.assert_close(found_recorder.outputs, recorder.outputs, rtol=1e-5, atol=atol)
    assert found_recorder.rates == recorder.rates
    assert found_trainer.global_step == trainer.global_step
    assert found_trainer.callback_metrics.keys() == trainer.callback_metrics.keys()
    torch.testing.assert_close(weights(actual), weights(module), rtol=1e-5, atol=atol)


@pytest.mark.parametrize("stage", cases([3], range(3)))
def test_every_stage_has_the_losses_and_dropout_of_the_lightning_trainer(tmp_path, stage):
    options: dict[str, Any] = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}  # 10 batches an epoch
    plain, sharded = train(tmp_path, **options), train(tmp_path, plug.Strategy(stage), **options)
    assert plain[1].global_step == 20 and len(plain[0].losses) == 50
    assert_alike(plain, sharded)
    module = sharded[0]
    assert module is sharded[1].model
    # the module itself ran: it kept what its steps stored, and it has its parameters again
    torch.testing.assert_close(module.losses, plain[0].losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(module.predictions, plain[0].predictions, rtol=1e-5, atol=1e-5)
    assert all(type(p) is torch.nn.Parameter and p.requires_grad for p in module.parameters())
    assert "forward" not in vars(module.blocks[0])
    batch = loader(4).dataset[:4]
    torch.testing.assert_close(module.eval().loss(batch), plain[0].eval().loss(batch), rtol=1e-5, atol=1e-5)


def test_lightning_clips_gradients_by_value(tmp_path):
    options: dict[str, Any] = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value", "max_steps": 6}
    assert_alike(train(tmp_path, **options), train(tmp_path, plug.Strategy(2), **options))


class SkipsUpdates(Regression):
    """Warms its rate up by hand, and updates at every second batch only; the other gradients are dropped."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2:
            optimizer_closure()
            return
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * min(1.0, (self.global_step + 1) / 4)
        optimizer.step(closure=optimizer_closure)


@pytest.mark.slow
def test_a_lightning_module_may_skip_updates(tmp_path):
    plain, sharded = [train(tmp_path, s, SkipsUpdates, max_epochs=1, max_steps=-1) for s in ("auto", plug.Strategy(3))]
    assert_alike(plain, sharded)


class Normalized(Regression):
    """A module with running statistics, a metric, a frozen layer, tied weights, and Plateau as its schedule."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        import torchmetrics

        self.norm = torch.nn.BatchNorm1d(4)
        self.error = torchmetrics.MeanAbsoluteError()
        self.fixed = torch.nn.Linear(4, 4).requires_grad_(False)
        self.blocks[1] = self.blocks[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.fixed(self.norm(x)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.error(self(batch[0]).detach(), batch[1])
        self.log("error", self.error, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        opt = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, "max", patience=0)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_statistics_metrics_frozen_and_tied_weights_are_as_in_plain_lightning(tmp_path, stage):
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "max_epochs": 3, "max_steps": -1}
    plain, sharded = (
        train(tmp_path, "auto", Normalized, **options),
        train(tmp_path, plug.Strategy(stage), Normalized, **options),
    )
    assert_alike(plain, sharded)
    assert len({rates[0] for rates in plain[2].rates}) > 1
    module = sharded[0]
    assert module.blocks[1] is module.blocks[0] and not module.fixed.weight.requires_grad
    assert int(module.norm.num_batches_tracked) == 60


def test_callbacks_of_lightning_see_the_values_of_a_plain_run(tmp_path):
    def run(strategy: Any, name: str) -> Any:
        logger = CSVLogger(tmp_path, name)
        stopping = EarlyStopping("val_loss", patience=1, min_delta=0.05)
        # the second loss is larger, so the first checkpoint is removed
        best = ModelCheckpoint(tmp_path / name, "{step}", "val_loss", save_top_k=1, save_last="link", mode="max")
        callbacks = [LearningRateMonitor("step"), stopping, best]
        options: dict[str, Any] = {"max_epochs": 8, "max_steps": -1, "logger": logger, "log_every_n_steps": 1}
        result = train(tmp_path, strategy, callbacks=callbacks, enable_checkpointing=True, **options)
        return result, best, stopping, logger

    plain, best, stopping, logger = run("auto", "plain")
    sharded, found_best, found_stopping, found_logger = run(plug.Strategy(3), "sharded")
    assert_alike(plain, sharded)
    assert 0 < stopping.stopped_epoch == found_stopping.stopped_epoch
    files = [pathlib.Path(x.log_dir, "metrics.csv") for x in (logger, found_logger)]
    rows = [list(csv.DictReader(path.read_text().splitlines())) for path in files]
    assert len(rows[0]) > 20 and "lr-AdamW/pg2" in rows[0][0] and "loss_epoch" in rows[0][0]
    expected, actual = [[float(x) for row in values for x in row.values() if x] for values in rows]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    folder = tmp_path / "sharded"
    kept = [pathlib.Path(best.best_model_path).name, (folder / "last.ckpt").resolve().name]
    # of removed checkpoints nothing is left, neither file nor shards
    names = {path.name for path in folder.iterdir() if not path.name.startswith("version")}
    assert names == {"last.ckpt", *[name + end for name in kept for end in ("", ".fzero")]}
    loaded, original = [Regression.load_from_checkpoint(x.best_model_path) for x in (found_best, best)]
    torch.testing.assert_close(weights(loaded), weights(original), rtol=1e-5, atol=1e-5)
    actual = sharded[1].test(loaded, loader(12, seed=2), ckpt_path="best", verbose=False)
    expected = plain[1].test(original, loader(12, seed=2), verbose=False)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    # resume from the link, at another stage
    again = train(tmp_path, plug.Strategy(1), ckpt_path=folder / "last.ckpt", max_epochs=8, max_steps=-1)
    plain_again = train(tmp_path, "auto", ckpt_path=tmp_path / "plain" / "last.ckpt", max_epochs=8, max_steps=-1)
    assert_alike(plain_again, again)


@pytest.mark.slow
def test_lightning_on_processes_trains_as_ddp_and_one_process_resumes(tmp_path):
    done = world(2, "-m", "tests.plugs.train_lightning", str(tmp_path), "3", "2", "0.0")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    logged = json.loads((tmp_path / "done.json").read_text())
    # one process goes on at another stage, with the same global batches
    lightning.seed_everything(1, verbose=False)
    module, recorder = Regression(dropout=0.0), Recorder()
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "max_epochs": 2, "max_steps": -1}
    trainer = make_trainer(tmp_path, plug.Strategy(1), callbacks=[recorder], **options)
    trainer.fit(module, loader(80, 8), loader(24, seed=2), ckpt_path=tmp_path / "sharded" / "epoch=0.ckpt")
    assert trainer.global_step == 10
    losses, expected = [[row["loss_step"] for row in rows] for rows in (recorder.logged, logged[10:])]
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("stage", cases((0, 3), ALL_STAGES))
def test_lightning_on_processes_has_ddps_losses_over_twenty_steps(tmp_path, stage):
    done = torchrun(2, "-m", "tests.plugs.train_lightning", str(tmp_path), str(stage), "4", "0.1")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.slow
def test_lightning_may_launch_the_processes(tmp_path):
    done = python("-m", "tests.plugs.train_lightning", str(tmp_path), "2", "1", "0.1")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert (tmp_path / "done.json").exists()


def test_lightning_validates_without_fit_and_fits_a_second_time(tmp_path):
    plain, sharded = Regression(), Regression()
    sharded.load_state_dict(plain.state_dict())
    results = []
    for module, strategy in ((plain, "auto"), (sharded, plug.Strategy(3))):
        trainer = make_trainer(tmp_path, strategy, max_steps=3)
        before = trainer.validate(module, loader(12), verbose=False) + trainer.test(module, loader(12), verbose=False)
        predicted = torch.cat(trainer.predict(module, loader(12)))
        lightning.seed_everything(0, verbose=False)
        trainer.fit(module, loader(40))
        trainer.fit_loop.epoch_loop.max_steps = 5
        trainer.fit(module, loader(40))
        results.append((before, predicted, weights(module)))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)


def test_a_lightning_callback_reads_weights_within_fit_and_saves_after_it(tmp_path):
    class Looks(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            assert all(p.is_meta for p in pl_module.parameters())
            copied = plug.full_model(trainer)
            records.append(weights(copied.eval()))
            assert copied(torch.ones(2, 4)).shape == (2, 1)

    records: list[Any] = []
    module, trainer, _ = train(tmp_path, plug.Strategy(3), callbacks=[Looks()], max_epochs=1, max_steps=-1)
    torch.testing.assert_close(records, [weights(module)], rtol=0, atol=0)
    with pytest.raises(TypeError, match="runs nothing"):
        plug.full_model(trainer)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    again, _, _ = train(tmp_path, plug.Strategy(0), ckpt_path=tmp_path / "end.ckpt", max_epochs=2, max_steps=-1)
    whole, _, _ = train(tmp_path, max_epochs=2, max_steps=-1)
    assert len(again.losses) == 10 and len(whole.losses) == 20


def test_lightning_builds_a_module_on_meta_that_is_too_large_for_the_host(tmp_path):
    strategy = plug.Strategy(3, full_weights=False)
    saving = ModelCheckpoint(tmp_path, "{step}")
    options: dict[str, Any] = {"callbacks": [saving], "enable_checkpointing": True, "max_epochs": 1, "max_steps": -1}
    module, trainer, _ = train(tmp_path, strategy, **options)
    assert all(p.is_meta for p in module.parameters())
    with pytest.raises(ValueError, match=r"Regression has no weights.*ckpt_path="):
        trainer.validate(module, loader(12), verbose=False)
    actual = trainer.validate(module, loader(12), ckpt_path=saving.best_model_path, verbose=False)
    loaded = Regression.load_from_checkpoint(saving.best_model_path)
    expected = make_trainer(tmp_path).validate(loaded, loader(12), verbose=False)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


TRUE = {"bf16-true": torch.bfloat16, "64-true": torch.float64}


@pytest.mark.slow
@pytest.mark.parametrize("precision", TRUE)
def test_lightnings_true_precision_trains_in_its_dtype(tmp_path, precision):
    make, options = functools.partial(Regression, 0.0), {"max_steps": 8, "precision": precision}
    plain, sharded = train(tmp_path, make=make, **options), train(tmp_path, plug.Strategy(3), make, **options)
    dtypes = {x.dtype for x in [*sharded[1].strategy._engine.params.values(), *sharded[0].parameters()]}
    assert dtypes == {TRUE[precision]}
    tolerance = 1e-9 if precision == "64-true" else 2e-2
    torch.testing.assert_close(sharded[2].outputs, plain[2].outputs, rtol=tolerance, atol=tolerance)


class SkipsFirst(Regression):
    """A module that skips its first updates, as a loss scale does that is too large."""

    skipped = 0

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx < self.skipped:
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precisions_keep_master_weights(tmp_path, precision, monkeypatch):
    make = functools.partial(SkipsFirst, 0.0)
    # by the setting Lightning refuses float16 on the CPU
    scaler = torch.amp.GradScaler("cpu", enabled=False) if precision == "16-mixed" else None
    plugins = [MixedPrecision(precision, "cpu", scaler)]
    module, trainer, recorder = train(tmp_path, plug.Strategy(3), make, max_steps=8, plugins=plugins)
    engine = trainer.strategy._engine
    assert_shards_are_masters(engine)
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    skipped = int(fzero.optim.loss_scale(engine.opt_state).skipped) if scaler else 0
    assert (0 < skipped < 5) == (scaler is not None)
    monkeypatch.setattr(SkipsFirst, "skipped", skipped)
    _, _, plain = train(tmp_path, "auto", make, max_steps=8)
    torch.testing.assert_close(recorder.outputs, plain.outputs[:8], rtol=2e-2, atol=2e-2)


class FrozenEmbed(Regression):
    """A network whose first layer is not trained."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.embed.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


@pytest.mark.parametrize("stage", cases([3], [0, 1, 2]))
def test_half_precision_rounds_no_weight_that_is_frozen(tmp_path, stage):
    """After fit the module holds them as they were given, and runs: all its weights have one dtype."""
    (plain, *_), (module, *_) = (
        train(tmp_path, strategy, FrozenEmbed, max_steps=3, precision="bf16-mixed")
        for strategy in ("auto", plug.Strategy(stage))
    )
    torch.testing.assert_close(module.embed.weight, plain.embed.weight, rtol=0, atol=0)
    assert module(torch.ones(2, 4)).dtype == torch.float32


class LanguageModel(lightning.LightningModule):
    """A model of transformers, which generates in validation, with its cache."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama(0.1)
        self.model.config.use_cache = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.model(**batch).loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        ids = batch["input_ids"][:, :4]
        self.generated = self.model.generate(ids, max_new_tokens=3, do_sample=False, use_cache=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_transformers_model_trains_under_lightning_as_in_the_plain_loop(tmp_path, stage):
    results = []
    for strategy in ("auto", plug.Strategy(stage)):
        lightning.seed_everything(0, verbose=False)
        module, recorder = LanguageModel(), Recorder()
        options: dict[str, Any] = {"callbacks": [recorder], "accumulate_grad_batches": 2, "max_steps": 5}
        trainer = make_trainer(tmp_path, strategy, **options)
        trainer.fit(module, DataLoader(documents(40), 4), DataLoader(documents(4), 4))
        results.append((recorder.outputs, weights(module), module.generated))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
    assert len(results[0][0]) == 10 and results[0][2].shape == (4, 7)


class FailsOnce(Regression):
    """A module whose third training step raises an error."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if len(self.losses) == 2:
            self.losses.append(0.0)
            raise RuntimeError("a bad batch")
        return super().training_step(batch, batch_idx)


def test_an_error_in_a_step_loses_nothing(tmp_path):
    module, recorder = FailsOnce(), Recorder()
    trainer = make_trainer(tmp_path, plug.Strategy(3), callbacks=[recorder], max_steps=4)
    before = weights(module)
    with pytest.raises(RuntimeError, match="a bad batch"):
        trainer.fit(module, loader(40))
    after = weights(module)  # of the latest good step
    assert len(recorder.logged) == 2 and any(not torch.equal(before[name], after[name]) for name in before)
    trainer.fit(module, loader(40))
    assert trainer.global_step == 4


class Manually(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def overrides(name: str) -> type[Regression]:
    """Make a module that overrides a hook."""
    return type("Overrides", (Regression,), {name: lambda self, *args, **kwargs: None})


def calls_back(name: str) -> list[Callback]:
    return [type("LooksAtGradients", (Callback,), {name: lambda self, *args, **kwargs: None})()]


def optimizes(make: Any) -> type[Regression]:
    """Make a module with another optimizer."""
    return type("Optimizes", (Regression,), {"configure_optimizers": make})


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "manual": (Manually, {}, "Manually.automatic_optimization is False"),
    "backward": (overrides("backward"), {}, "Overrides overrides backward"),
    "on_after_backward": (overrides("on_after_backward"), {}, "Overrides overrides on_after_backward"),
    "on_before_zero_grad": (overrides("on_before_zero_grad"), {}, "Overrides overrides on_before_zero_grad"),
    "step": (overrides("on_before_optimizer_step"), {}, "Overrides overrides on_before_optimizer_step"),
    "clip": (overrides("configure_gradient_clipping"), {}, "overrides configure_gradient_clipping.*gradient_clip_val"),
    "callback": (Regression, {"callbacks": calls_back("on_after_backward")}, "callback LooksAtGradients overrides"),
    "average": (
        Regression,
        {"callbacks": [callbacks_of_lightning.StochasticWeightAveraging(1e-2)]},
        "callback StochasticWeightAveraging reads or changes weights",
    ),
    "batchnorm": (Regression, {"sync_batchnorm": True}, "sync_batchnorm=True"),
    "lbfgs": (
        optimizes(lambda self: torch.optim.LBFGS(self.parameters())),
        {},
        "configure_optimizers: torch.optim.lbfgs.LBFGS.*expected one of torch.optim's Adagrad, Adam, AdamW",
    ),
    "part": (
        optimizes(lambda self: torch.optim.AdamW(self.head.parameters())),
        {},
        r"configure_optimizers: no group holds 'blocks.0.0.bias' and 5 other",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unsupported_setting_of_the_lightning_strategy_is_named(tmp_path, name):
    kind, options, message = REFUSED[name]
    module = kind()
    trainer = make_trainer(tmp_path, plug.Strategy(3), **options)
    with pytest.raises(ValueError, match=message):
        trainer.fit(module, loader(8))
    assert not any(p.is_meta for p in module.parameters())  # nothing that was refused has used it up


def test_other_unsupported_settings_of_lightning_are_refused(tmp_path):
    with pytest.raises(ValueError, match=f"stage={len(STAGES)}: expected a stage of ZeRO"):
        plug.Strategy(len(STAGES))

    class Skips(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None

    with pytest.raises(TypeError, match=r"Skips.training_step returned NoneType.*multiplied by 0"):
        make_trainer(tmp_path, plug.Strategy(3)).fit(Skips(), loader(8))

    class KeepsGradients(Regression):
        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            pass

    with pytest.raises(ValueError, match=r"KeepsGradients.optimizer_zero_grad left out optimizer.zero_grad"):
        make_trainer(tmp_path, plug.Strategy(3)).fit(KeepsGradients(), loader(8))

    class Cycles(Regression):
        def configure_optimizers(self) -> Any:
            opt = torch.optim.AdamW(self.parameters())
            schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=20)
            return [opt], [{"scheduler": schedule, "interval": "step"}]

    with pytest.raises(ValueError, match=r"betas of the optimizer's group 0 was .* pass cycle_momentum=False"):
        make_trainer(tmp_path, plug.Strategy(3)).fit(Cycles(), loader(8))

    saving = ModelCheckpoint(tmp_path, "plain")
    train(tmp_path, callbacks=[saving], enable_checkpointing=True, max_epochs=1, max_steps=-1)
    with pytest.raises(ValueError, match=r"plain.ckpt' has no folder .*Regression.load_from_checkpoint"):
        train(tmp_path, plug.Strategy(3), ckpt_path=saving.best_model_path, max_epochs=2, max_steps=-1)
