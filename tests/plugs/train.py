"""A process of `test_processes_train_as_ddp_does_and_one_goes_on`: DDP and stage 3 train alike."""

import json
import pathlib
import sys

import torch
import torch.distributed as dist

from fzero.plugs import transformers as plug
from tests.plugs.helpers import list_logged, make_trainer, weights


def main(folder: pathlib.Path) -> None:
    options = {"gradient_accumulation_steps": 1, "save_strategy": "steps", "save_steps": 3}
    plain = make_trainer(folder / "plain", gradient_accumulation_steps=1)
    plain.train()
    plain.evaluate()
    sharded = plug.shard_trainer(make_trainer(folder, **options), stage=3, backend="fx")
    sharded.train()
    sharded.evaluate()
    for name in ("loss", "grad_norm", "eval_loss"):
        torch.testing.assert_close(list_logged(sharded, name), list_logged(plain, name), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weights(plug.full_model(sharded)), weights(plain.model), rtol=1e-5, atol=1e-5)
    held = sum(x.data.numel() for x in sharded._fzero.engine.params.values() if hasattr(x, "data"))
    total = sum(p.numel() for p in weights(plain.model))
    assert held <= 0.55 * total, (held, total)
    if dist.get_rank() == 0:
        (folder / "logged.json").write_text(json.dumps(list_logged(sharded, "loss")))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
