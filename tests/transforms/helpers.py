"""What the tests of remat share."""

import shutil
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
needs_compiler = pytest.mark.skipif(not COMPILER, reason="no compiler")
SAVES = (None, "matmuls", "host", lambda op: "tanh" in str(op))


def block(p: Any, x: torch.Tensor, scale: float = 1.0) -> Any:
    return {"y": torch.tanh(x @ p["w"] + p["b"]) * scale + x, "layers": 1, "none": None}


def inputs(rows: int = 5) -> Any:
    g = torch.Generator().manual_seed(0)
    w, b, x = [torch.randn(s, generator=g, dtype=torch.float64) for s in ((4, 4), (4,), (rows, 4))]
    return {"w": w, "b": b}, x


def loss_of(f: Any) -> Any:
    return lambda p, x: (f(p, x, scale=0.5)["y"] ** 3).sum()


class Counting(TorchDispatchMode):
    """Counts the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.count: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").split(".")[0]
        self.count[name] = self.count.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def ops(f: Any, *args: Any) -> dict[str, int]:
    with Counting() as counting:
        f(*args)
    return counting.count
