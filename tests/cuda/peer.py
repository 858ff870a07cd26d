"""One process of `make cuda` that trains the perceptron with torch's FSDP2 and fused AdamW. It prints facts as JSON.

    python -m tests.cuda.peer --compile

Each layer is a unit, as in fzero's step. Its product and its sum are one `nn.Linear`, as FSDP2's users write them.
"""

import argparse
import json

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend

from tests.cuda import log
from tests.cuda.steps import WIDTH

LAYERS, ROWS = 4, 32


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, device="cuda")

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.linear(x)) + x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--compile", action="store_true", help="compile each layer, as torch's own pages do")
    args = parser.parse_args()
    backend = "cpu:fake,cuda:nccl" if log.without_gpu() else "fake"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=args.ranks)
    model = nn.Sequential(*[Layer() for _ in range(LAYERS)])
    for layer in model:
        if args.compile:
            layer.compile()
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), 3e-4, fused=True)
    x, y = (torch.randn(ROWS, WIDTH, device="cuda") for _ in range(2))

    def step() -> None:
        ((model(x) - y) ** 2).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()

    for _ in range(3):
        step()
    _, events = log.record(step)
    print("FACTS", json.dumps({"counts": log.counts(events), "waits": log.waits(events)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
