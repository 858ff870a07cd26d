"""Laws of kernels: attention is flash's, half-precision products are half-precision kernels, on each architecture."""

import pytest

from tests.cuda.log import WAITS, is_flash_attention
from tests.cuda.processes import has_gpu, measure_task, targets

ARCHITECTURES = {"A100": "sm_80", "H100": "sm_90a", "B200": "sm_100a"}
HALF_PRODUCTS = {"cublasLtMatmul", "cublasGemmEx", "cublasGemmStridedBatchedEx"}  # the others are of float32 or float64


def kernels(backend: str, card: str) -> list[str]:
    return measure_task("toy, bfloat16", backend, 3, card="" if has_gpu() else card)[3]["kernels"]


@pytest.mark.parametrize("card", ARCHITECTURES)
@pytest.mark.parametrize("backend", ("fx", "inductor"))
def test_attention_is_flash(backend, card):
    result = kernels(backend, card)
    assert any(is_flash_attention(name) for name in result)
    assert not any("softmax" in name.lower() or "fmha" in name for name in result)


@pytest.mark.skipif("has_gpu()", reason="a GPU's own names do not tell the dtype of a product")
@pytest.mark.parametrize("card", ARCHITECTURES)
@pytest.mark.parametrize("backend", ("fx", "inductor"))
def test_half_precision_products_are_computed_in_half_precision(backend, card):
    results = {name for name in kernels(backend, card) if name.startswith("cublas")}
    assert results and results <= HALF_PRODUCTS


@pytest.mark.skipif("has_gpu()", reason="a GPU's own names do not tell the dtype of a product")
@pytest.mark.parametrize(
    ("task", "backend"), [("toy, float8", "fx"), ("toy, float8", "inductor"), ("toy, float8 rowwise", "fx")]
)
def test_float8_products_are_float8_kernels(task, backend):
    """Each of the four linear layers of four blocks has three products, and no scale is read on the host.

    torch checks the form of the operands on the way to cuBLAS, as on a card.
    """
    actual = measure_task(task, backend, 3, card="H100")[3]
    assert {name for name in actual["kernels"] if name.startswith("cublas")} == {"cublasLtMatmul of float8"}
    assert actual["counts"]["product"] == 4 * 4 * 3 and not {*WAITS} & actual["counts"].keys()


@pytest.mark.skipif("has_gpu()", reason="a GPU has one architecture, and its step runs in other tests")
@pytest.mark.parametrize("card", ARCHITECTURES)
def test_triton_compiles_for_the_card(card):
    """Inductor asks torch for the card, Triton writes PTX for it, and the ptxas of its wheel makes it code."""
    results = [name for name in kernels("inductor", card) if name.startswith("triton_")]
    assert len(results) > 10 and set(targets(card)) == {ARCHITECTURES[card]}
