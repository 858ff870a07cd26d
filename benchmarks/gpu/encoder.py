"""The transformer encoder that the parts train, of words or of images, in plain torch; each of its parts a function."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import fzero
from fzero import optim
from tests.helpers import train_step_for

__all__ = ["HALF", "Config", "batch_of", "init", "loss_fn", "train_step_of"]

HALF = fzero.Precision(param=torch.bfloat16, reduce=torch.bfloat16)


class Config(NamedTuple):
    """A transformer encoder.

    Attributes:
        width: of the stream.
        layers: of them.
        heads: of each.
        hidden: width of the feed-forward part.
        context: words, or patches and one more.
        classes: words to tell apart, or classes of images.
        pixels: values in a patch; 0 for words.
        batch: sequences or images a rank.
    """

    width: int
    layers: int
    heads: int
    hidden: int
    context: int
    classes: int
    pixels: int
    batch: int


def init(c: Config) -> dict[str, Any]:
    """Make the parameters on the default device: embeddings, repeated blocks, a head."""

    def linear(rows: int, columns: int) -> dict[str, Tensor]:
        return {"w": torch.randn(rows, columns) / rows**0.5, "b": torch.zeros(columns)}

    def norm() -> dict[str, Tensor]:
        return {"scale": torch.ones(c.width), "shift": torch.zeros(c.width)}

    def block() -> dict[str, Any]:
        attention = {"norm1": norm(), "qkv": linear(c.width, 3 * c.width), "proj": linear(c.width, c.width)}
        return {**attention, "norm2": norm(), "up": linear(c.width, c.hidden), "down": linear(c.hidden, c.width)}

    inputs = linear(c.pixels, c.width) if c.pixels else {"w": torch.randn(c.classes, c.width) / 50}
    return {
        "inputs": inputs,
        "places": torch.randn(c.context, c.width) / 50,
        "blocks": [block() for _ in range(c.layers)],
        "norm": norm(),
        "head": linear(c.width, c.classes),
    }


def embed(c: Config, params: Any, x: Tensor) -> Tensor:
    """Return the stream of words, or of patches after the place of the class: [batch, context, width]."""
    if not c.pixels:
        return F.embedding(x, params["inputs"]["w"]) + params["places"]
    patches = x.to(params["places"].dtype) @ params["inputs"]["w"] + params["inputs"]["b"]
    return F.pad(patches, (0, 0, 1, 0)) + params["places"]


def attend(c: Config, p: Any, x: Tensor) -> Tensor:
    """Return what attention adds to the stream [batch, context, width]."""
    normal = F.layer_norm(x, (c.width,), p["norm1"]["scale"], p["norm1"]["shift"])
    mixed = normal @ p["qkv"]["w"] + p["qkv"]["b"]
    q, k, v = mixed.unflatten(-1, (3, c.heads, -1)).movedim(-2, -4).unbind(-2)  # each [batch, heads, context, depth]
    attended = F.scaled_dot_product_attention(q, k, v).movedim(-3, -2).flatten(-2)
    return attended @ p["proj"]["w"] + p["proj"]["b"]


def feed(c: Config, p: Any, x: Tensor) -> Tensor:
    """Return what the feed-forward part adds to the stream [batch, context, width]."""
    normal = F.layer_norm(x, (c.width,), p["norm2"]["scale"], p["norm2"]["shift"])
    hidden = F.gelu(normal @ p["up"]["w"] + p["up"]["b"])
    return hidden @ p["down"]["w"] + p["down"]["b"]


def head_loss(c: Config, params: Any, x: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross entropy of every word, or of the class of an image."""
    last = F.layer_norm(x[:, 0] if c.pixels else x, (c.width,), params["norm"]["scale"], params["norm"]["shift"])
    logits = last @ params["head"]["w"] + params["head"]["b"]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide.flatten(0, -2), target.flatten())


def loss_fn(c: Config, params: Any, batch: Any) -> Tensor:
    """Predict every word, or the class of an image. Blocks are pre-norm, in both."""
    x = embed(c, params, batch[0])
    for p in params["blocks"]:
        x = x + attend(c, p, x)
        x = x + feed(c, p, x)
    return head_loss(c, params, x, batch[1])


def batch_of(c: Config) -> tuple[Tensor, Tensor]:
    """Make a batch on the default device: words to reconstruct, or patches and a class."""
    if c.pixels:
        return torch.randn(c.batch, c.context - 1, c.pixels), torch.randint(c.classes, (c.batch,))
    words = torch.randint(c.classes, (c.batch, c.context))
    return words, words.clone()


def train_step_of(c: Config, opt: optim.Optimizer, precision: fzero.Precision | None = None) -> Callable[..., Any]:
    """Make the train step of a user."""
    return train_step_for(functools.partial(loss_fn, c), opt, precision=precision)
