"""tiled: a function of single tokens, applied to some of them at a time."""

from collections.abc import Callable
from typing import Any

import torch

from fzero import tree
from fzero._arguments import check_callable, check_int, is_int
from fzero._torch import in_chunk
from fzero._tracebacks import api_boundary
from fzero.transforms import remat

__all__ = ["tiled"]


@api_boundary
def tiled(f: Callable[..., Any], chunk: int, *, dim: int = -2) -> Callable[..., Any]:
    """Apply a function of single tokens to `chunk` tokens at a time, in the forward and in the backward pass.

    An MLP, a norm or a head treats each token by itself, so tiles of a sequence give tiles of the result. Each tile
    saves only its input, and is computed again for the backward pass. So the activations of one tile are alive.
    Arguments besides x are passed whole to each tile: a tree of weights that was gathered is gathered once.

    Args:
        f: `(x, *args) -> y`, where x has tokens along `dim`, and y is a tensor with as many, or a tree of such tensors.
            It must treat tokens alike and by themselves. Weights must be arguments, as for `fzero.remat`.
        chunk: the number of tokens of a tile; the last tile may be smaller.
        dim: the dimension of tokens, of x and of the results.

    Returns:
        A function of the same arguments and results.

    Raises:
        ValueError: if `chunk` is not positive; at a call, if x has no such dimension, or a result has another number of
            tokens than its tile.

    Example:
        >>> params = {"up": torch.randn(4, 16), "down": torch.randn(16, 4)}
        >>> mlp = lambda x, p: torch.relu(x @ p["up"]) @ p["down"]
        >>> x = torch.randn(2, 10, 4)
        >>> torch.allclose(tiled(mlp, chunk=3)(x, params), mlp(x, params), atol=1e-5)
        True

    References:
        Bekman et al.: Arctic Long Sequence Training, arXiv:2506.13996.
    """
    check_callable("f", f, "a function of tokens, as in fzero.nn.tiled(f, chunk)(x)")
    check_int("chunk", chunk, 1)

    def run_tile(index: int, x: torch.Tensor, *args: Any) -> Any:
        with in_chunk(index):  # in both passes
            return f(x, *args)

    run_tile_again: Callable[..., Any] = remat(run_tile)

    @api_boundary
    def call(x: torch.Tensor, *args: Any) -> Any:
        if not is_int(dim) or not -x.ndim <= dim < x.ndim:
            raise ValueError(f"dim={dim!r}: x is {list(x.shape)}, and has no such dimension of tokens")
        tiles = x.split(chunk, dim)
        if len(tiles) == 1:
            return f(x, *args)
        results = []
        for i, tile in enumerate(tiles):
            results.append(run_tile_again(i, tile, *args))
            tree.map_with_path(lambda path, y, tile=tile: _check_tile(path, y, tile, dim), results[-1])
        return tree.map(lambda *ys: torch.cat(ys, dim), *results)

    return call


def _check_tile(path: str, y: Any, tile: torch.Tensor, dim: int) -> None:
    tokens = tile.shape[dim]
    if not isinstance(y, torch.Tensor) or not -y.ndim <= dim < y.ndim or y.shape[dim] != tokens:
        kind = list(y.shape) if isinstance(y, torch.Tensor) else type(y).__name__
        raise ValueError(
            f"{tree.leaf_name('result', path)} is {kind} for a tile of {tokens} tokens: expected {tokens} "
            f"along dimension {dim}, since f is applied to one tile at a time"
        )
