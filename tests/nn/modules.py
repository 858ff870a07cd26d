"""Small modules, and batches for them."""

from typing import Any

import torch
from torch import nn


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def build(make: Any, seed: int = 0) -> Any:
    """Build a float64 module from a seed."""
    torch.manual_seed(seed)
    return make().double()


class Tied(nn.Module):
    """A language model's skeleton: blocks, and a head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.LayerNorm(5)) for _ in range(2)])
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Norms(nn.Module):
    """BatchNorm1d and 2d."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)
        self.norm2d = nn.BatchNorm2d(3)
        self.norm1d = nn.BatchNorm1d(3, momentum=0.3)
        self.out = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.norm2d(self.conv(x)).exp()).mean((-1, -2))
        return self.out(self.norm1d(x))[:, 0]


IDS = torch.randint(0, 11, (3, 12, 4), generator=torch.Generator().manual_seed(0))  # three batches
IMAGES = randn(3, 12, 2, 5, 5)


MODULES = {
    "linear": (lambda: nn.Linear(5, 3), randn(12, 5)),
    "sequential": (lambda: nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)), randn(12, 5)),
    "convolution": (
        lambda: nn.Sequential(nn.Conv1d(2, 3, 3), nn.GELU(), nn.Flatten(), nn.Linear(12, 2)),
        randn(4, 2, 6),
    ),
    "group norm": (lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.Linear(6, 2)), randn(4, 4, 6)),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 12, dropout=0, batch_first=True), randn(3, 4, 8)),
    "batch norm": (Norms, IMAGES[0]),
    "tied": (Tied, IDS[0]),
}
