"""A process of `test_processes_train_as_ddp_does`: accelerate's DDP and a sharded step train alike."""

import pathlib
import sys
import warnings
from typing import Any

import torch.distributed as dist
from accelerate import DataLoaderConfiguration

from tests.plugs.accelerate_helpers import assert_alike, with_accelerate, with_fzero


def main(folder: pathlib.Path, epochs: int, stages: list[int]) -> None:
    plain = with_accelerate(epochs, 0.1, rows=80)
    assert dist.get_world_size() == 2 and plain.losses
    for stage in stages:
        assert_alike(with_fzero(epochs, 0.1, stage, rows=80), plain)
    # one process goes on: it steps a schedule as often only if loaders split the batch
    splits = DataLoaderConfiguration(split_batches=True)
    options: dict[str, Any] = {"rows": 80, "batch": 8, "shuffle": False, "dataloader_config": splits}
    with_fzero(1, 0.0, stages[0], save=str(folder / "state"), **options)
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]), [int(x) for x in sys.argv[3]])
