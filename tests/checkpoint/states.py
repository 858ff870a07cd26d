"""Training states in all layouts, to save and to load: what several tests of checkpoints use."""

from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

import fzero
from fzero import optim, tree
from fzero.sharding._boxes import PerRank, Shard, is_box

SIZES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.complex64])
OTHERS = st.sampled_from([torch.int64, torch.int32, torch.uint8, torch.bool, torch.float16])


class Layout(NamedTuple):
    """A mesh, a stage, and the axes that shard units and split leaves."""

    axes: dict[str, int]
    stage: int
    over: str | None = None
    split: bool = False
    simulate: str = "vmap"

    @property
    def mesh(self) -> fzero.ranks.Mesh:
        return fzero.mesh(simulate=self.simulate, **self.axes)


STAGES = st.integers(0, 3)
LAYOUTS = st.one_of(
    st.builds(lambda n, stage: Layout({"dp": n}, stage), st.integers(1, 8), STAGES),
    st.builds(lambda n, stage: Layout({"dp": n}, stage, simulate="lockstep"), st.integers(1, 3), STAGES),
    st.builds(
        lambda r, n, stage: Layout({"replica": r, "shard": n}, stage, "shard"),
        st.integers(1, 3),
        st.integers(1, 3),
        STAGES,
    ),
    st.builds(lambda n, stage: Layout({"dp": n, "tp": 2}, stage, "dp", split=True), st.integers(1, 3), STAGES),
    st.builds(lambda n, stage: Layout({"tp": 4, "dp": n}, stage, "dp", split=True), st.integers(1, 2), STAGES),
    st.builds(lambda n, m: Layout({"a": n, "b": m}, 3), st.integers(1, 3), st.integers(1, 3)),
)


@st.composite
def params_of(draw: Any) -> dict[str, Any]:
    """Parameters: blocks, some tied, 0-d and empty ones; those of even width can be split."""
    dtype = draw(DTYPES)
    leaves = {f"w{i}": torch.empty(shape, dtype=dtype) for i, shape in enumerate(draw(st.lists(SIZES, max_size=3)))}
    results: dict[str, Any] = {
        "blocks": [
            {"tp": torch.empty(4 * (i + 1), 3, 8, dtype=dtype), **leaves} for i in range(draw(st.integers(0, 2)))
        ],
        "table": torch.empty(draw(st.integers(0, 9)), dtype=draw(DTYPES)),
        "other": torch.empty(draw(SIZES), dtype=draw(OTHERS)),
        "nothing": draw(st.sampled_from([{}, [], None])),
    }
    results["head"] = results["table"] if draw(st.booleans()) else torch.empty(2, 3)
    return tree.map(torch.clone, results)


def shard_step(layout: Layout) -> fzero.zero.ShardedStep:
    """A step of a layout: only its layout is used."""
    options: dict[str, Any] = {
        "split": lambda path, x: {"tp": 2 if x.shape[0] == 4 else 0} if "tp" in path and x.is_floating_point() else None
    }
    return fzero.shard(
        lambda p, s, b: (p, s),
        stage=layout.stage,
        mesh=layout.mesh,
        axis=layout.over if layout.split else None,
        over=layout.over,
        **(options if layout.split else {}),
    )


def state_in(layout: Layout, params: Any, opt: Any = None) -> tuple[fzero.zero.ShardedStep, dict[str, Any]]:
    """A whole training state in a layout; what its tensors hold is not told."""
    step = shard_step(layout)
    p, s = step.init(params, optim.adamw(1e-3) if opt is None else opt)
    return step, {
        "params": p,
        "opt_state": s,
        "key": fzero.random.key(1),
        "step": 3,
        "data": {"epoch": 1, "files": ["a"]},
    }


def whole_of(step: fzero.zero.ShardedStep, state: dict[str, Any]) -> dict[str, Any]:
    """The state in plain tensors."""
    return {k: step.gather(v) if k in ("params", "opt_state") else v for k, v in state.items()}


def fill(step: fzero.zero.ShardedStep, state: dict[str, Any], seed: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fill a state with random bits, so that each element differs from others; return it, and it whole."""
    g = torch.Generator().manual_seed(seed)

    def random_bits(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not x.numel():
            return x
        bits = torch.randint(0, 2 if x.dtype == torch.bool else 256, (x.nbytes,), dtype=torch.uint8, generator=g)
        return bits.view(x.dtype).view(x.shape)

    whole = tree.map(random_bits, whole_of(step, state))
    shards = {k: step.partition(whole[k], like=state[k]) for k in ("params", "opt_state")}
    return {**whole, **shards}, whole


def same_bits(a: Any, b: Any) -> bool:
    """Return whether two trees of plain tensors hold the same bits, and the same other values."""
    (xs, one), (ys, other) = tree.flatten(a), tree.flatten(b)
    assert one == other, f"{one} is not {other}"
    for x, y in zip(xs, ys, strict=True):
        if not isinstance(x, torch.Tensor):
            assert x == y, f"{x} is not {y}"
        elif x.shape != y.shape or x.dtype != y.dtype or not torch.equal(as_bytes(x), as_bytes(y)):
            return False
    return True


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def boxes(values: Any) -> list[Shard | PerRank]:
    return [x for x in tree.flatten(values, is_box)[0] if isinstance(x, Shard | PerRank)]
