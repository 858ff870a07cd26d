"""step.init refuses to put more into host memory than is free there, before it makes any of it."""

from typing import Any

import pytest
import torch

import fzero
from fzero import optim, tree
from fzero.zero import _bytes
from tests.helpers import ALL_STAGES, cases

PARAMS = {"w": torch.ones(64, 64), "v": torch.ones(32)}
META = {path: x.to("meta") for path, x in PARAMS.items()}
HELD = 2 * 4 * (64 * 64 + 32)  # two moments in float32


def init(opt: Any, stage: int = 2, params: Any = PARAMS, n: int = 2) -> Any:
    return fzero.shard(lambda p, s: (p, s), stage, fzero.mesh(dp=n)).init(params, opt)


@pytest.fixture
def free(monkeypatch):
    return lambda count: monkeypatch.setattr(_bytes, "_free_bytes", lambda: count)


@pytest.mark.parametrize("stage", cases((2, 3), ALL_STAGES))
@pytest.mark.parametrize("low", [False, True])
def test_init_accepts_host_memory_that_just_fits(free, stage, low):
    low = low and stage == 3
    opt = optim.offload(optim.adam(0.1), 1.0, params=low)
    needed = HELD * (2 if stage == 0 else 1) + (HELD // 2 if low else 0)
    free(needed)
    init(opt, stage)
    free(needed - 1)
    with pytest.raises(MemoryError, match=r"offload: this host needs .* for its 2 ranks, and .* are free, 100%"):
        init(opt, stage)


def test_the_check_of_host_memory_counts_all_processes_of_a_host(free, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    opt, mesh = optim.offload(optim.adam(0.1), 1.0), fzero.mesh(dp=1)
    free(8 * HELD - 1)
    _bytes.check_host_memory(opt.init, META, PARAMS, opt, mesh)  # a simulation has all in one process
    real: Any = type("Real", (), {"simulated": False, "size": 16, "shape": (("dp", 16),), "axis_names": ("dp",)})()
    with pytest.raises(MemoryError, match="for its 8 ranks"):
        _bytes.check_host_memory(opt.init, META, PARAMS, opt, real)


def test_init_skips_the_check_of_host_memory_that_is_unknown(free):
    free(0)
    init(optim.adam(0.1))  # no offload
    init(optim.offload(optim.adam(0.1), 1.0), params={"w": torch.ones(4, device="meta")})

    def reads(params: Any) -> Any:
        return tree.map(lambda x: x * float(x.sum()), params)

    optimizer = optim.offload(optim.Optimizer(reads, lambda g, s, params=None: (g, s)), 1.0)
    _bytes.check_host_memory(optimizer.init, META, PARAMS, optimizer, fzero.mesh(dp=1))
    free(None)
    init(optim.offload(optim.adam(0.1), 1.0))


def test_a_chain_is_checked_for_the_host_memory_of_its_links(free):
    free(0)
    with pytest.raises(MemoryError):
        init(optim.chain(optim.clip_by_global_norm(1.0), optim.offload(optim.adam(0.1), 0.5)))


def test_free_host_memory_is_the_lesser_of_machine_and_cgroup(monkeypatch, tmp_path):
    monkeypatch.setattr(_bytes, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(_bytes, "_CGROUP", tmp_path)
    assert _bytes._free_bytes() is None
    (tmp_path / "meminfo").write_text("MemTotal: 90 kB\nMemAvailable:   50 kB\n")
    assert _bytes._free_bytes() == 50 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    assert _bytes._free_bytes() == 50 * 1024
    (tmp_path / "memory.max").write_text("30000\n")
    (tmp_path / "memory.current").write_text("20000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 4000\n")
    assert _bytes._free_bytes() == 14000
