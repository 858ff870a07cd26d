"""Laws of launches: a steady step beside FSDP2's with fused AdamW, the same model in one run, at two ranks."""

import pytest

from tests.cuda.processes import measure_task, peer

FX = "an operation is a launch: 12 forward and 20 backward are as many as the goal, and an update of 4 units takes 60"
EAGER = "AdamW's formula takes 15 launches for all units together, where torch's fused kernel takes 1"


def kernels(backend: str, stage: int = 3) -> int:
    return measure_task("dense", backend, stage, ranks=2)[stage]["counts"]["kernel"]


@pytest.mark.parametrize(
    ("backend", "compiled", "share"),
    [
        ("inductor", True, 0.6),
        pytest.param("fx", False, 0.5, marks=pytest.mark.xfail(strict=True, reason=FX)),
        pytest.param("eager", False, 1.0, marks=pytest.mark.xfail(strict=True, reason=EAGER)),
        ("eager", False, 1.2),
    ],
)
def test_a_step_launches_no_more_than_its_share_of_fsdp2s(backend, compiled, share):
    assert kernels(backend) <= share * peer(compiled=compiled)["counts"]["kernel"]


def test_an_eager_update_of_more_leaves_launches_no_more_kernels():
    """At stage 0 the update is of 8 leaves, at stage 3 of 4 units: only their norms are computed one by one."""
    assert kernels("eager", 0) - kernels("eager") <= 2 * 4


def test_a_step_has_no_more_collectives_than_fsdp2():
    def collectives(counts: dict[str, int]) -> int:
        return sum(n for name, n in counts.items() if name.startswith("collective"))

    ours = measure_task("dense", "inductor", 3, ranks=2)[3]["counts"]
    assert collectives(ours) <= collectives(peer(compiled=True)["counts"])
