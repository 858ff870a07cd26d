"""Losses of trees, and models that are parallel along several axes."""

from typing import Any

import torch

import fzero
from fzero import tree


def along(names: tuple[str, ...]) -> dict[str, Any]:
    """The collectives over the axes of these names."""
    table: dict[str, Any] = {
        "psum": lambda x: fzero.collectives.psum(x, names),
        "pmean": lambda x: fzero.collectives.pmean(x, names),
        "all_gather": lambda x: fzero.collectives.all_gather(x, names, dim=1),
        "psum_scatter": lambda x: fzero.collectives.psum_scatter(x, names, dim=1),
        "all_to_all": lambda x: fzero.collectives.all_to_all(x, names, split_dim=1, concat_dim=0),
        "broadcast": lambda x: fzero.collectives.broadcast(x, names, source=max(fzero.axes.axis_size(names) - 2, 0)),
    }
    if len(names) == 1:
        table["ppermute"] = lambda x: fzero.collectives.ppermute(x, names, perm=[(0, fzero.axes.axis_size(names) - 1)])
    return table


def parallel_loss(params: Any, batch: Any) -> torch.Tensor:
    """A tensor parallel MLP, and experts that all_to_all sends every token to; dense outside any mesh."""
    tp, ep = (name if name in fzero.axes.axis_names() else () for name in ("tp", "ep"))
    x = batch["x"]
    for block in params["blocks"]:
        h = torch.tanh(fzero.collectives.pvary(x, tp) @ block["up"])
        x = x + fzero.collectives.psum_invariant(h @ block["down"], tp) + block["bias"]
    scores = torch.softmax(x @ params["router"], -1)  # [t, E]
    xs = x.unsqueeze(0).expand(scores.shape[1], *x.shape)  # [E, t, d]
    xs = fzero.collectives.all_to_all(xs, ep, split_dim=0, concat_dim=1)  # [E / ep, t ep, d]
    ys = torch.tanh(torch.einsum("etd,edf->etf", xs, params["experts"]["w"]))
    ys = fzero.collectives.all_to_all(ys, ep, split_dim=1, concat_dim=0)
    return (torch.einsum("etf,te->tf", ys, scores) - batch["y"]).square().mean()


def parallel_params() -> dict[str, Any]:
    def normal(*shape: int, seed: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) / 2

    return {
        "blocks": [
            {"up": normal(5, 8, seed=i), "down": normal(8, 5, seed=i + 10), "bias": normal(5, seed=i + 20)}
            for i in range(2)
        ],
        "router": normal(5, 4, seed=30),
        "experts": {"w": normal(4, 5, 5, seed=31)},
    }


def parts(path: str, leaf: torch.Tensor) -> dict[str, int] | None:
    """Return how the leaves of `parallel_params` are split: columns, rows, experts."""
    if path.startswith("experts"):
        return {"ep": 0} if "ep" in fzero.axes.axis_names() else None
    if "tp" in fzero.axes.axis_names():
        return {"tp": 1} if path.endswith("up") else {"tp": 0} if path.endswith("down") else None
    return None


ARRANGEMENTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "hybrid": ({"replica": 2, "shard": 2}, {"over": "shard"}),
    "hybrid, uneven": ({"replica": 3, "shard": 2}, {"over": ("shard",)}),
    "one unit sharded in the node, others everywhere": (
        {"replica": 2, "shard": 2},
        {"over": lambda path, leaf: "shard" if path.startswith("blocks") else ("replica", "shard")},
    ),
    "small leaves on every rank": (
        {"a": 2, "b": 2},
        {"over": lambda path, leaf: () if leaf.ndim < 2 else ("a", "b")},
    ),
    "both axes": ({"a": 2, "b": 3}, {}),
    "the hosts gathered first": ({"host": 2, "dp": 2}, {"axis": ("dp", "host")}),
    "the first two of three axes gathered first": ({"a": 2, "b": 3, "c": 2}, {"axis": ("c", "a", "b")}),
    "three axes": ({"a": 2, "b": 3, "c": 2}, {}),
    "tensor parallel": ({"dp": 2, "tp": 2}, {"axis": "dp", "split": parts}),
    "tensor parallel, in units of leaves": (
        {"dp": 3, "tp": 2},
        {"axis": "dp", "split": parts, "units": lambda path, leaf: path},
    ),
    "tensor parallel, one unit": ({"tp": 4, "dp": 2}, {"axis": "dp", "split": parts, "units": lambda p, x: "all"}),
    "experts over dp, the rest over both": ({"dp": 2, "ep": 2}, {"split": parts}),
    "experts in fours": ({"dp": 2, "ep": 4}, {"split": parts}),
    "only experts": ({"ep": 2}, {"split": parts}),
    "all three": ({"dp": 2, "ep": 2, "tp": 2}, {"axis": ("dp", "ep"), "split": parts}),
    "all three, hybrid": ({"dp": 2, "ep": 2, "tp": 2}, {"axis": ("dp", "ep"), "over": "dp", "split": parts}),
    "no unit for the experts": (
        {"dp": 2, "ep": 2},
        {"split": parts, "units": lambda path, leaf: None if leaf.ndim != 2 else "matrices"},
    ),
}


def loss_of_tree(params: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """A smooth loss in which every element of every leaf matters, and differently for each sample."""
    total = torch.zeros((), dtype=torch.float64)
    for i, leaf in enumerate(tree.tensors(params)):
        weights = torch.cos(torch.arange(leaf.numel(), dtype=leaf.dtype) + i).reshape(leaf.shape)
        # [b, *shape]: each sample scales the leaf in its own way
        scaled = batch["x"].to(leaf.dtype).reshape(-1, *[1] * leaf.ndim) * (weights * leaf)
        total = total + torch.sin(scaled).sum().double() / len(batch["x"]) + (leaf.double() ** 2).sum() / 7
    return total


RULES = {
    "one unit": lambda path, leaf: "all",
    "a unit a leaf": lambda path, leaf: path,
    "interleaved units": lambda path, leaf: str(len(path) % 2),
    "nothing cut": lambda path, leaf: None,
    "small leaves replicated": lambda path, leaf: "big" if leaf.numel() > 5 else None,
}
