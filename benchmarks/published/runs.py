"""Read the published runs, and say which half each belongs to."""

import csv
import hashlib
import math
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fzero.tuning import A100, A100_80GB, H100, H200, Configuration, Machine
from fzero.tuning.models import PRESETS, ModelShape

__all__ = ["CARDS", "GIB", "Run", "rows_of", "runs"]

FOLDER = pathlib.Path(__file__).parent
MIB, GIB = 2**20, 2**30
# What a site's network reached is not a constant of a card: it is fitted beside the card's (`fit.py`).
CARDS: dict[str, Machine] = {
    "a100_40gb": replace(A100, network_bandwidth=2.4e9),
    "a100_80gb": replace(A100_80GB, network_bandwidth=4.3e9),
    "h100_80gb": H100,
    "h100-96gb-hbm2e": replace(H100, device_bytes=0.93 * 96e9, memory_bandwidth=0.78 * 2.4e12),
    "h200": H200,
    "unknown": replace(A100, device_bytes=0.93 * 80e9),
}


@dataclass(frozen=True)
class Run:
    """A run that someone published, as fzero can say it.

    Attributes:
        family: who published it.
        card: the card, a key of `CARDS`.
        shape: the sizes of the model.
        length: tokens of a sequence, or the side of an image.
        config: the configuration.
        tokens: tokens a second on one card; nan where none were published.
        memory: the most bytes of the fullest card; nan where none were published.
        bfloat16_sums: whether gradients are summed over ranks in bfloat16.
        note: what the run did that fzero does not.
    """

    family: str
    card: str
    shape: ModelShape = field(repr=False)
    length: int
    config: Configuration
    tokens: float = math.nan
    memory: float = math.nan
    bfloat16_sums: bool = False
    note: str = ""

    @property
    def name(self) -> str:
        """The run as text. Its hash decides on the half."""
        c = self.config
        remat = {False: "", "every-2": " every second"}.get(c.remat, " remat")
        sizes = f"{self.length} x {c.micro_batch} x {c.accumulation}"
        float8 = ", float8" if c.float8 else ""
        return f"{self.family} {self.shape.name} {sizes}, stage {c.stage}{remat}, {c.world} x {self.card}{float8}"

    @property
    def is_held(self) -> bool:
        """Whether the run belongs to the half that no constant was fitted to, as all runs in float8 do."""
        is_usual = self.family == "llm-foundry" and self.config.float8 is None
        return not is_usual or bool(hashlib.sha256(self.name.encode()).digest()[0] % 2)


def runs() -> tuple[list[Run], list[str]]:
    """Return the runs that fzero can say, and the lines on those that it cannot."""
    runs, left = [], []
    for read in (_llm_foundry, _torchtitan, _deepspeed):
        some, others = read()
        runs += some
        left += others
    return runs, [*left, *[f"llama 3's own {r['gpus']} GPUs: {_LLAMA}" for r in rows_of("llama3_paper")]]


_LLAMA = "in benchmarks/published/parallel.md"


def rows_of(name: str) -> list[dict[str, str]]:
    """Read the rows of a file of published runs."""
    with (FOLDER / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def _llm_foundry() -> tuple[list[Run], list[str]]:
    some = []
    for r in rows_of("llm_foundry"):
        width, layers, heads, length, gpus, micro, times = (
            int(r[k]) for k in ("width", "layers", "heads", "sequence", "gpus", "micro_batch", "accumulation")
        )
        shape = ModelShape(
            f"mpt-{r['model']}", width, layers, heads, 4 * width, 50368, positions=length, tied=True, biases=""
        )
        stage = 3 if r["sharding"] == "FULL_SHARD" else 2
        config = Configuration(stage, micro, times, r["remat"] == "True", ranks=gpus, depth=layers)
        note = ""
        if r["precision"] == "amp_fp8":  # by Transformer Engine, whose kernels round as they compute
            config, note = replace(config, float8="tensorwise", compiled=True), "float8"
        tokens = float(r["tokens_per_s_per_gpu"])
        some.append(Run("llm-foundry", r["gpu"], shape, length, config, tokens, bfloat16_sums=True, note=note))
    return some, []


def code_of(row: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of a run of torchtitan by which its code is compiled, and multiplies."""
    return {"compiled": row["compile"] == "yes", "float8": "tensorwise" if row["float8"] != "no" else None}


def _torchtitan() -> tuple[list[Run], list[str]]:
    some, left = [], []
    for r in rows_of("torchtitan"):
        gpus, name = int(r["gpus"]), r["model"].replace("llama-3.1", "llama-3")
        if "tp" in r["parallel"] or "cp" in r["parallel"]:
            reason = "not built: async tp" if "async" in r["parallel"] else "in benchmarks/published/parallel.md"
            left.append(f"torchtitan {name}, {r['parallel']}, length {r['sequence']}: {reason}")
            continue
        shape = PRESETS[name]
        config = Configuration(3, int(r["local_batch"]), 1, "every-2", ranks=gpus, depth=shape.depth)
        measured = float(r["tokens_per_s_per_gpu"]), float(r["memory_gib"]) * GIB
        config, note = replace(config, **code_of(r)), "compiled" if r["compile"] == "yes" else "eager"
        note += ", float8" if r["float8"] != "no" else ""
        card, length = r["gpu"], int(r["sequence"])
        some.append(Run("torchtitan", card, shape, length, config, *measured, note=note))
    return some, left


def _deepspeed() -> tuple[list[Run], list[str]]:
    some = []
    for r in rows_of("deepspeed"):
        shape = PRESETS[r["model"]]
        stage, micro, gpus = (int(r[k]) for k in ("stage", "micro_batch", "gpus"))
        config = Configuration(stage, micro, 1, precision=r["precision"], ranks=gpus, depth=shape.depth)
        memory = float(r["memory_mib"]) * MIB
        some.append(Run("DeepSpeed", "unknown", shape, int(r["length"]), config, memory=memory))
    return some, []
