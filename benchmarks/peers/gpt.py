"""The GPT that all systems train: one set of functions, as a tree for fzero and as a module for the others."""

from typing import Any, NamedTuple

import torch
from torch import nn

from tests.tiny_gpt import gpt_block, gpt_loss, gpt_params

__all__ = ["CONFIGS", "Config", "Gpt", "gpt_loss"]


class Config(NamedTuple):
    """A model and the part of the batch that a rank computes at once."""

    width: int
    layers: int
    batch: int
    context: int

    def params(self) -> dict[str, Any]:
        """Make the parameters, the same at each call."""
        return gpt_params(self.width, self.layers, vocab=256, context=self.context)

    def batches(self, micro_batches: int, rank: int, count: int) -> list[torch.Tensor]:
        """Make a rank's batches of tokens, int64 [micro_batches * batch, context + 1]."""
        g = torch.Generator().manual_seed(rank)
        shape = (micro_batches * self.batch, self.context + 1)
        return [torch.randint(256, shape, generator=g) for _ in range(count)]


CONFIGS = {"tiny": Config(32, 2, 2, 16), "A": Config(256, 4, 4, 128), "B": Config(512, 8, 1, 128)}


class Block(nn.Module):
    """One layer."""

    def __init__(self, params: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.names = list(params)
        for name, x in params.items():
            self.register_parameter(name, nn.Parameter(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gpt_block({name: getattr(self, name) for name in self.names}, x)


class Gpt(nn.Module):
    """The model; called with tokens [b, context + 1] it returns the loss."""

    def __init__(self, params: dict[str, Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(p) for p in params["blocks"]])
        self.names = [name for name in params if name != "blocks"]
        for name in self.names:
            self.register_parameter(name, nn.Parameter(params[name]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        params = {name: getattr(self, name) for name in self.names}
        return gpt_loss({**params, "blocks": self.blocks}, tokens, block=lambda block, x: block(x))
