"""Faults that break a law of `make cuda`: a table."""

from collections.abc import Callable
from typing import Any, NamedTuple

from tests.mutants.changes import Change, always, becomes, skipped

Facts = dict[str, Any]


class LaneFault(NamedTuple):
    """A fault, the task that shows it, and the law: whether it holds of the facts of a stage."""

    file: str
    symbol: str
    change: Change
    task: str
    backend: str
    law: Callable[[Facts], bool]


def never_waits(step: Facts) -> bool:
    return step["waits"] == []


def waits_for_each_copy(step: Facts) -> bool:
    return step["waits"] == ["event wait"] * step["counts"]["copy: device to pinned"]


def requests_its_plan(step: Facts) -> bool:
    return step["requested"] <= 1.05 * (step["plan"] + step["workspace"])


def awaits_its_collectives(step: Facts) -> bool:
    return all(products is not None for _, products, _ in step["collectives"])


def frees_nothing_early(step: Facts) -> bool:
    return step["early_frees"] == []


def launches_for_many_leaves(step: Facts) -> bool:
    return step["counts"]["kernel"] <= 70


ON_ANOTHER_STREAM = """
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    A = B(C).copy_(C, non_blocking=True)
"""
ON_ANOTHER_STREAM_IN_TIME = ON_ANOTHER_STREAM.replace("with", "side.wait_stream(torch.cuda.current_stream())\nwith", 1)
WAIT_ELSEWHERE = """lambda x: [
    stream := torch.cuda.stream(torch.cuda.Stream()),
    stream.__enter__(),
    torch.ops._c10d_functional.wait_tensor(x),
    stream.__exit__(None, None, None),
][2]"""
FAULTS = {
    "values are held until the end of the step": LaneFault(
        "graph/run/_program.py",
        "_record_frees",
        becomes("A._replace(free=B)", "A._replace(free=[])"),
        "toy",
        "inductor",
        requests_its_plan,
    ),
    "a second copy of each unit": LaneFault(
        "graph/_entry.py",
        "Entry.run",
        becomes("[x.detach() if A else x for x in B]", "[x.clone() for x in B]"),
        "toy",
        "fx",
        requests_its_plan,
    ),
    "a constant is copied to the device in each step": LaneFault(
        "graph/trace/_trace.py",
        "_lift_constants",
        skipped("_place_constants(A)"),
        "dense, moments in int8",
        "fx",
        never_waits,
    ),
    "a table of numbers is copied from pageable memory": LaneFault(
        "_torch/accelerator.py",
        "tensor_on",
        always("not A or B"),
        "dense, moments in int8",
        "eager",
        never_waits,
    ),
    "a number is read from the device": LaneFault(
        "sharding/elements/_leaf_ids.py",
        "global_norm",
        becomes("torch.stack(A).sum().sqrt()", "torch.stack(A).sum().sqrt() + 0 * torch.stack(A).sum().item()"),
        "dense",
        "eager",
        never_waits,
    ),
    "each unit is updated by launches of its own": LaneFault(
        "tree.py",
        "elementwise",
        becomes("not can_group(A)", "can_group(A)"),
        "dense",
        "eager",
        launches_for_many_leaves,
    ),
    "a collective's result is used before it has come": LaneFault(
        "graph/run/_executable.py",
        "_REPLACEMENTS",
        becomes(
            "{**A, **B, C: D}", f"{{**A, **B, C: D, torch.ops._c10d_functional.wait_tensor.default: {WAIT_ELSEWHERE}}}"
        ),
        "dense",
        "fx",
        awaits_its_collectives,
    ),
    "a block is freed while a copy reads it": LaneFault(
        "collectives/_spaces.py",
        "_enqueue_copy",
        becomes("A = B(C).copy_(C, non_blocking=True)", ON_ANOTHER_STREAM_IN_TIME),
        "offload, host update",
        "fx",
        frees_nothing_early,
    ),
    "a copy to the host is read before it has come": LaneFault(
        "collectives/_spaces.py",
        "wait_to_host",
        skipped("A.event.synchronize()"),
        "offload, host update",
        "fx",
        waits_for_each_copy,
    ),
    "a copy to the host waits as it starts": LaneFault(
        "collectives/_spaces.py",
        "_enqueue_copy",
        becomes("A(B).copy_(B, non_blocking=True)", "A(B).copy_(B)"),
        "offload, host update",
        "fx",
        waits_for_each_copy,
    ),
}
