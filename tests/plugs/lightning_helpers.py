"""What tests of the Lightning plug share: a small module, random data, and a Trainer that runs them."""

import pathlib
from collections.abc import Callable
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, TensorDataset

STEPS = 20


class Regression(lightning.LightningModule):
    """A residual network with dropout, whose steps log, count and keep what they saw."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(4, 8)
        blocks = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Dropout(dropout)) for _ in "ab"]
        self.blocks = torch.nn.ModuleList(blocks)
        self.head = torch.nn.Linear(8, 1)
        self.losses: list[float] = []
        self.predictions: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    def loss(self, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.losses.append(float(loss))
        self.latest = loss  # with its graph
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("batch", float(batch_idx), sync_dist=True)
        return {"loss": loss, "scaled": 2 * loss}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)
        self.predictions.append(self(batch[0]))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        rest = [*self.blocks.parameters(), *self.head.parameters()]
        groups = [{"params": self.embed.parameters()}, {"params": rest, "lr": 0.02, "weight_decay": 0.0}]
        opt = torch.optim.AdamW(groups, lr=0.01)
        return [opt], [{"scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS), "interval": "step"}]


class Recorder(Callback):
    """Keeps what is logged, the learning rates, and the losses in the outputs of steps."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.rates: list[list[float]] = []
        self.outputs: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.logged.append({name: float(x) for name, x in trainer.callback_metrics.items()})
        self.rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])
        self.outputs.append(float(outputs["loss"]) + float(outputs.get("scaled", 0)))


def dataset(count: int, seed: int = 1) -> TensorDataset:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def loader(count: int, batch: int = 4, seed: int = 1, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset(count, seed), batch, **options)


def make_trainer(folder: pathlib.Path, strategy: Any = "auto", **options: Any) -> lightning.Trainer:
    """Make a quiet Trainer on the CPU, which runs 20 steps by default."""
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    defaults = {"max_steps": STEPS, "accelerator": "cpu", "devices": 1, "enable_checkpointing": False}
    return lightning.Trainer(default_root_dir=folder, strategy=strategy, **{**quiet, **defaults, **options})


def train(
    folder: pathlib.Path,
    strategy: Any = "auto",
    make: Callable[[], lightning.LightningModule] = Regression,
    batch: int = 4,
    ckpt_path: Any = None,
    **options: Any,
) -> tuple[Any, lightning.Trainer, Recorder]:
    """Train a module, by default a Regression, with validation at each epoch."""
    lightning.seed_everything(0, verbose=False)
    module = make()
    recorder = Recorder()
    callbacks = [recorder, *options.pop("callbacks", [])]
    trainer = make_trainer(folder, strategy, callbacks=callbacks, **options)
    trainer.fit(module, loader(40, batch, shuffle=True), loader(12, seed=2), ckpt_path=ckpt_path)
    return module, trainer, recorder


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: x.detach().clone() for name, x in module.state_dict().items()}
