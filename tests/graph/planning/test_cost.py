"""The cost model's clocks: the device's, in whose order its copies stand, and the host's."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

import fzero
from fzero import optim
from fzero._torch import scaled_mm
from fzero.graph.planning._clocks import LIMITS, Interval, estimate_seconds, seconds_by_bound, timeline
from fzero.graph.planning._hardware import HARDWARE, Hardware
from tests.helpers import examples, mlp_batch, mlp_loss, mlp_params, train_step_for

X = torch.ones(4)  # 16 bytes
# an operation of the device takes 1 s, a copy 1 s, and one of the host of 32 bytes 4 s
DEVICE = Hardware(
    "gpu",
    flops=1e30,
    memory_bandwidth=1e30,
    link_bandwidth=1e30,
    latency_seconds=0,
    launch_seconds=1,
    host_memory_bandwidth=8,
    host_link_bandwidth=16,
)


def trace_node(f: Any) -> Graph:
    graph = make_fx(f, tracing_mode="fake")(X).graph
    next(iter(graph.nodes)).meta["space"] = "device"
    return graph


def down_up(x: torch.Tensor) -> torch.Tensor:
    below = fzero.collectives.to_host(x.sin())
    return fzero.collectives.to_device(below * 2, "cpu") + x.cos().tan()


def test_host_and_device_overlap_if_the_devices_work_is_issued_first():
    def fill_during_copy(x: torch.Tensor) -> torch.Tensor:
        below = fzero.collectives.to_host(x.sin())
        z = x.cos().tan()
        return fzero.collectives.to_device(below * 2, "cpu") + z

    # 2 down, 6 on the host, 7 up, then three of the device
    assert estimate_seconds(trace_node(down_up), hardware=DEVICE) == 10
    assert estimate_seconds(trace_node(fill_during_copy), hardware=DEVICE) == 8


def test_the_cost_model_counts_work_on_the_host():
    def f(x: torch.Tensor) -> Any:
        below = fzero.collectives.to_host(x.view(2, 2)).view(4)
        first, second = below * 2, below * 3
        return first, second, x.sin()

    assert estimate_seconds(trace_node(f), hardware=DEVICE) == 1 + 4 + 4


def test_a_cpu_device_shares_the_hosts_clock():
    # operations, of which two are copies
    assert estimate_seconds(trace_node(down_up)) == pytest.approx(7 * HARDWARE["cpu"].launch_seconds)
    apart = DEVICE._replace(host_memory_bandwidth=0, host_link_bandwidth=0)
    assert (
        estimate_seconds(trace_node(down_up), hardware=apart) == 4
    )  # without those of the host, and without the copies


def check_timeline(actual: list[Interval], seconds: float) -> None:
    """Check that compute fills the step without gaps, and that no stream does two things at once."""
    for stream in ("compute", "communication", "host"):
        own = sorted([x for x in actual if x.stream == stream], key=lambda x: x.start)
        ends = [x.start + x.seconds for x in own]
        for end, after in zip(ends, own[1:], strict=False):
            gap = after.start - end
            assert gap == pytest.approx(0, abs=1e-9 * seconds) if stream == "compute" else gap >= -1e-9 * seconds
        assert max(ends, default=0) <= seconds * (1 + 1e-9)
    assert sum(seconds_by_bound(actual).values()) == pytest.approx(seconds)


@pytest.mark.slow
@pytest.mark.parametrize("stage,k", [(3, 1), (3, 4), (1, 4)])
def test_a_timeline_has_the_seconds_of_the_step_and_the_bound_of_each_operation(stage, k):
    opt = optim.adam(1e-3)
    step = fzero.shard(train_step_for(mlp_loss, opt, micro_batches=k), stage=stage, mesh=fzero.mesh(dp=2))
    jitted = fzero.jit(step, backend="fx")
    args = (*step.init(mlp_params(), opt), step.mesh.split(mlp_batch(16)))
    for name in ("cpu", "cuda"):
        rank = fzero.graph.step_of_rank(jitted, *args, world_size=64, hardware=name)
        plan, actual = rank.plan(), rank.timeline()
        check_timeline(actual, plan.seconds)
        assert plan.limits == pytest.approx(seconds_by_bound(actual)) and set(plan.limits) <= {*LIMITS}
        assert plan.limits["wire"] > 0  # so small a model waits for its collectives
        messages = [x for x in actual if x.stream == "communication"]
        assert len(messages) == sum(c.times for c in plan.collectives) and {x.limit for x in messages} == {"wire"}
        names = ("mm", "addmm", "bmm")
        products = [o for o in plan.operations if o.target in [f"aten.{name}.default" for name in names]]
        assert sum(x.name in names for x in actual) == sum(o.times for o in products) > 0


def test_a_timeline_has_intervals_of_host_and_copies():
    result = timeline(trace_node(down_up), hardware=DEVICE)
    check_timeline(result, 10)
    assert [(x.stream, x.start, x.seconds, x.name, x.limit) for x in result] == [
        ("compute", 0, 1, "sin", "launches"),
        ("compute", 1, 1, "to_host", "host link"),
        ("host", 2, 4, "mul", "host"),
        ("compute", 2, 4, "wait", "host"),
        ("compute", 6, 1, "to_device", "host link"),
        *[("compute", 7 + i, 1, name, "launches") for i, name in enumerate(("cos", "tan", "add"))],
    ]


def test_an_operation_is_bounded_by_its_flops_or_its_bytes():
    slow = CARD._replace(memory_bandwidth=1e-3, launch_seconds=1e-9)
    operands = [torch.empty(64, 64, dtype=torch.bfloat16) for _ in range(2)]
    graph = make_fx(torch.matmul, tracing_mode="fake")(*operands).graph
    assert set(seconds_by_bound(timeline(graph, CARD))) == {"products"}
    assert set(seconds_by_bound(timeline(graph, slow))) == {"memory"}


speeds = st.floats(1, 1e3)


@examples(20, 100)
@given(host=speeds, link=speeds, slower=st.floats(0.1, 1))
def test_a_slower_host_or_link_makes_no_step_faster(host, link, slower):
    graph = trace_node(down_up)

    def takes(host: float, link: float) -> float:
        return estimate_seconds(graph, hardware=DEVICE._replace(host_memory_bandwidth=host, host_link_bandwidth=link))

    assert takes(host * slower, link) >= takes(host, link) and takes(host, link * slower) >= takes(host, link)


FUSING = Hardware("cuda", 1e30, 1.0, 1e30, 0, 0, fuses=True)  # a byte a second


def planned_seconds(f: Any, *args: torch.Tensor, hardware: Hardware = FUSING, backend: Any = "inductor") -> float:
    return fzero.plan(fzero.jit(f, backend=backend), *args, hardware=hardware).seconds


@pytest.mark.slow
@examples(15, 60)
@given(st.lists(st.sampled_from((torch.sin, torch.exp, torch.abs)), min_size=1, max_size=5), st.integers(1, 3))
def test_a_fused_kernel_reads_each_operand_once_and_writes_its_result(chain, operands):
    """It is launched once; unfused, each operation reads and writes."""

    def f(*xs: torch.Tensor) -> torch.Tensor:
        y = sum(xs[1:], xs[0] * 2) + xs[0]
        for g in chain:
            y = g(y)
        return y

    xs = [torch.empty(8, 4, device="meta") for _ in range(operands)]
    assert planned_seconds(f, *xs) == 128 * (operands + 1)
    assert planned_seconds(f, *xs, hardware=FUSING._replace(memory_bandwidth=1e30, launch_seconds=1)) == 1
    unary, binary = 1 + len(chain), operands
    for other in ({"hardware": FUSING._replace(fuses=False)}, {"backend": "fx"}):
        assert planned_seconds(f, *xs, **other) == 128 * (2 * unary + 3 * binary)


def test_a_product_or_a_second_reader_ends_a_kernel():
    """A reduction ends one after it has read. A view costs nothing, and an expanded one its elements."""
    x, w, row = torch.empty(8, 4, device="meta"), torch.empty(4, 4, device="meta"), torch.empty(4, device="meta")
    product = 128 + 64 + 128
    assert planned_seconds(lambda x, w: x.sin().exp() @ w, x, w) == 2 * 128 + product
    assert planned_seconds(lambda x, w: (x @ w).sin().exp(), x, w) == product + 2 * 128
    assert planned_seconds(lambda x: x.sin().exp().sum(), x) == 128 + 4
    assert planned_seconds(lambda x: x.sin().exp().amax(1), x) == 128 + 32
    assert planned_seconds(lambda x, row: (x.sin() + row.expand(8, 4)).exp(), x, row) == 128 + 16 + 128
    assert planned_seconds(lambda x: x.sin().view(4, 8).exp(), x) == 2 * 128
    assert planned_seconds(lambda x: (x.sin().exp(), x.cos()), x) == 2 * (2 * 128)


# Products and attention by their shapes.


CARD = Hardware("gpu", 1.0, 1e30, 1e30, 0, 0, product_flops=1024.0, half_depth=64.0, processors=4, attention_flops=8.0)
sizes = st.sampled_from((1, 64, 100, 128, 200, 256, 300, 512))


def product_seconds(hardware: Hardware, *shapes: tuple[int, ...], op: Any = torch.matmul) -> float:
    """Return the seconds of one product of half precision, without memory."""
    operands = [torch.empty(s, dtype=torch.bfloat16, device="cpu") for s in shapes]
    return estimate_seconds(make_fx(op, tracing_mode="fake")(*operands).graph, hardware)


@examples(15, 200)
@given(m=sizes, k=sizes, n=sizes, more=st.integers(1, 3))
def test_no_product_is_faster_than_its_card_and_none_of_more_work_takes_less(m, k, n, more):
    seconds = product_seconds(CARD, (m, k), (k, n))
    assert seconds >= 2 * m * k * n / CARD.product_flops * (1 + CARD.half_depth / k) * (1 - 1e-9)
    for larger in ((m * more, k, n), (m, k * more, n), (m, k, n * more)):
        rows, depth, columns = larger
        assert product_seconds(CARD, (rows, depth), (depth, columns)) >= seconds * (1 - 1e-9)


def test_a_product_that_fills_all_processors_reaches_its_rate():
    """Four tiles of 128 x 256 are one wave of four processors; a fifth begins another wave."""
    full = product_seconds(CARD, (256, 64), (64, 512))
    assert full == pytest.approx(2 * 2 * 256 * 64 * 512 / 1024)  # half of the rate, at the depth of 64
    assert product_seconds(CARD, (129, 64), (64, 257)) == pytest.approx(full)
    assert product_seconds(CARD, (257, 64), (64, 512)) == pytest.approx(2 * full)
    assert product_seconds(CARD, (4, 128, 64), (4, 64, 256), op=torch.bmm) == pytest.approx(full)
    added = product_seconds(CARD, (512,), (256, 64), (64, 512), op=torch.addmm)
    assert added == pytest.approx(full)
    assert product_seconds(CARD._replace(half_depth=0.0, processors=0), (256, 64), (64, 512)) == pytest.approx(full / 2)


def float8_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    one = torch.ones((), device=a.device)
    return scaled_mm(a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), one, one, torch.bfloat16, False)


@examples(10, 100)
@given(m=sizes, k=st.sampled_from((16, 64, 256)), n=st.sampled_from((16, 256)), float8=st.floats(1, 2))
def test_a_product_of_float8_has_the_rate_of_its_shape_times_that_of_float8(m, k, n, float8):
    seconds = product_seconds(CARD._replace(float8_speedup=float8), (m, k), (n, k), op=float8_product)
    assert seconds == pytest.approx(product_seconds(CARD, (m, k), (k, n)) / float8)
    plain = CARD._replace(float8_speedup=float8, product_flops=0.0)
    assert product_seconds(plain, (m, k), (n, k), op=float8_product) == pytest.approx(2 * m * k * n / float8)


def test_the_cost_model_has_a_rate_for_attention():
    q = (1, 2, 32, 16)
    seconds = product_seconds(CARD, q, q, q, op=torch.nn.functional.scaled_dot_product_attention)
    assert seconds == pytest.approx(2 * 2 * 2 * 32 * 32 * 16 / CARD.attention_flops)


def test_without_a_rate_of_products_every_shape_reaches_the_mean():
    plain = CARD._replace(product_flops=0.0)
    assert product_seconds(plain, (3, 5), (5, 7)) == 2 * 3 * 5 * 7
