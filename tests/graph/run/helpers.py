"""Traced graphs, a stand-in for Inductor, and steps whose batches differ in length."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, Interpreter

from fzero import _torch
from fzero.graph.ir import is_input
from fzero.graph.run import _auto_backend, _backends, _segment_compiler

Value = torch.Tensor


def trace_graph(f: Callable[..., Any], args: Sequence[Value]) -> Graph:
    stand_ins = _torch.stand_ins_like(args)
    graph = _torch.trace(f, stand_ins).graph
    for n, x in zip([n for n in graph.nodes if is_input(n)], stand_ins, strict=True):
        n.meta["val"] = x
    return graph


Inductor = Callable[[GraphModule, Any, Any], Any]


def interpret(gm: GraphModule, stand_ins: Any, outputs: Any) -> Any:
    """Run the operations one by one, in Inductor's place."""

    def run(args: list[Any]) -> list[Any]:
        mine = tuple(args)
        args.clear()
        return list(Interpreter(gm).run(*mine))

    return run


def in_inductors_place(patch: pytest.MonkeyPatch, inductor: Inductor) -> None:
    patch.setattr(_segment_compiler, "inductor", inductor)
    patch.setattr(_backends, "is_compiled", lambda code: True)
    patch.setattr(_auto_backend, "is_compiled", lambda code: True)


def attention(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    q = (x @ w).unflatten(-1, (2, 4)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)


def attend_by_products(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    scores = (x @ w) @ x.transpose(1, 2) + torch.arange(x.shape[1]).to(x.dtype)
    return scores.softmax(-1).reshape(x.shape[0], -1).reshape(x.shape[0], x.shape[1], -1) @ x


STEPS = {
    "attention": attention,
    "attention by products": attend_by_products,
    "shifted": lambda x, w: F.pad(x[:, 1:], (0, 0, 0, 1), value=-1.0) + x[:, :1],
    "means": lambda x, w: x - x.mean(1, keepdim=True) * x.shape[1],
    "tokens in one row": lambda x, w: (x.reshape(-1, 8) @ w).reshape(x.shape),
    "summed up": lambda x, w: x.transpose(1, 2).contiguous().cumsum(-1).transpose(1, 2) / x.shape[1],
    "cut": lambda x, w: torch.cat([x[:, : x.shape[1] // 1 - 1], x[:, -1:] * w.sum()], 1),
}


def tokens_loss(params: Any, batch: Any) -> torch.Tensor:
    x = params["table"][batch["x"]]
    for p in params["blocks"]:
        x = x + attention(x, p["w"])
    labels = F.pad(batch["x"], (0, 1), value=-100)[:, 1:]
    return F.cross_entropy((x @ params["table"].T).flatten(0, 1), labels.flatten())


def tokens_params() -> Any:
    g = torch.Generator().manual_seed(0)
    blocks = [{"w": torch.randn(8, 8, generator=g, dtype=torch.float64) / 3} for _ in range(2)]
    return {"table": torch.randn(11, 8, generator=g, dtype=torch.float64), "blocks": blocks}


def tokens(length: int) -> Any:
    return {"x": torch.randint(11, (4, length), generator=torch.Generator().manual_seed(length))}
