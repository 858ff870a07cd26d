"""The cases of a model: few, and each pair of settings is in one of them for some model."""

from typing import NamedTuple

from tests.sweep.families import Model

__all__ = ["Case", "cases_of"]


class Case(NamedTuple):
    """One training run, in Inductor, in "fx", and unsharded.

    Attributes:
        name: what it is called.
        stage: of ZeRO.
        mesh: axes and their sizes.
        attention: "sdpa" or "eager".
        mask: whether the batch has an attention mask.
        dtype: of the parameters.
        remat: whether blocks run again in the backward pass.
        micro_batches: of a rank.
        processes: whether ranks are processes.
    """

    name: str
    stage: int
    mesh: dict[str, int]
    attention: str = "sdpa"
    mask: bool = False
    dtype: str = "float32"
    remat: bool = False
    micro_batches: int = 1
    processes: bool = False


CASES = [
    Case("one rank", 3, {"dp": 1}),
    Case("eager attention, masked, micro-batches", 2, {"dp": 2}, "eager", True, micro_batches=2),
    Case("bfloat16, masked, remat", 0, {"dp": 2}, mask=True, dtype="bfloat16", remat=True),
    Case("pipeline", 1, {"dp": 1, "pp": 2}, micro_batches=2),
    Case("tensor parallel", 3, {"dp": 1, "tp": 2}),
    Case("bfloat16, eager attention, remat, micro-batches", 3, {"dp": 2}, "eager", False, "bfloat16", True, 2),
]
PROCESSES = [
    Case("processes", 3, {"dp": 2}, processes=True),
    Case("processes, bfloat16, masked", 0, {"dp": 2}, mask=True, dtype="bfloat16", processes=True),
    Case("processes, eager attention, micro-batches", 2, {"dp": 2}, "eager", micro_batches=2, processes=True),
]


def cases_of(model: Model, number: int) -> list[Case]:
    """List the cases of a model; every third has one on processes."""
    language = model.kind in ("causal", "masked", "seq2seq")
    results = [
        case
        for case in CASES
        if (language or not case.mask or "bfloat16" in case.dtype)
        and (model.library == "transformers" or not ({"pp", "tp"} & case.mesh.keys() or case.remat))
    ]
    processes = [PROCESSES[number // 3 % len(PROCESSES)]] if number % 3 == 0 else []
    return [case._replace(mask=case.mask and language) for case in [results[0], *processes, *results[1:]]]
