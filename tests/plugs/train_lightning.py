"""A process of `test_processes_train_as_ddp_does`: Lightning's DDP and a sharded strategy train alike."""

import json
import os
import pathlib
import sys
import warnings

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DistributedSampler

from fzero.plugs import lightning as plug
from tests.plugs.lightning_helpers import Recorder, Regression, dataset, loader, make_trainer, weights


def main(folder: pathlib.Path, stage: int, epochs: int, dropout: float) -> None:
    results = []
    for name, strategy in (("ddp", DDPStrategy()), ("sharded", plug.Strategy(stage))):
        lightning.seed_everything(0, verbose=False)
        if dist.is_initialized() and dist.get_rank():
            torch.manual_seed(1)  # the first rank's weights count
        module, recorder = Regression(dropout), Recorder()
        torch.manual_seed(0)
        saving = ModelCheckpoint(folder / name, "{epoch}", every_n_epochs=1, save_top_k=-1)
        options = {"enable_checkpointing": True, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
        options |= {"max_epochs": epochs, "max_steps": -1}
        trainer = make_trainer(folder, strategy, devices=2, callbacks=[recorder, saving], **options)
        rank = int(os.environ.get("LOCAL_RANK", 0))
        rows = DistributedSampler(dataset(80), num_replicas=2, rank=rank, shuffle=False)  # Lightning's own one shuffles
        trainer.fit(module, loader(80, sampler=rows), loader(24, seed=2))
        assert trainer.world_size == dist.get_world_size() == 2
        results.append((recorder, weights(module)))
    (plain, plain_weights), (sharded, actual) = results
    assert len(plain.logged) == 10 * epochs
    for name in ("logged", "outputs"):
        torch.testing.assert_close(getattr(sharded, name), getattr(plain, name), rtol=1e-5, atol=1e-5)
    assert sharded.rates == plain.rates
    torch.testing.assert_close(actual, plain_weights, rtol=1e-5, atol=1e-5)
    engine = trainer.strategy._engine
    total = sum(x.numel() for x in actual.values())
    held = sum(x.data.numel() for x in engine.params.values() if hasattr(x, "data"))
    assert stage < 3 or held <= 0.55 * total, (held, total)
    every = [None, None]
    dist.all_gather_object(every, (sharded.logged, {name: x.tolist() for name, x in actual.items()}))
    assert every[0] == every[1]  # what is logged is the ranks' mean
    if dist.get_rank() == 0:
        (folder / "done.json").write_text(json.dumps(sharded.logged))
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
