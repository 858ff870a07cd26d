"""The private torch API that shows operations with their values: what fails here says what broke when torch changed."""

from typing import Any

import torch

from fzero._torch.call_site import _CallSite, current_call_site
from fzero._torch.memory import is_real, tensor_memory
from fzero._torch.watched import WatchedOperation, record_node_lines, watch_operations, without_watchers


def shown(f: Any, *args: Any) -> list[tuple[WatchedOperation, _CallSite]]:
    results: list[tuple[WatchedOperation, _CallSite]] = []
    # code that is generated is nobody's, so that the line is that of `f`
    after = eval(
        "lambda operation, *_: found.append((operation, current_call_site()))",
        {"found": results, "current_call_site": current_call_site},
    )
    with record_node_lines(), watch_operations(lambda operation: None, after):
        f(*args)
    assert not torch.is_anomaly_enabled()
    return results


def test_a_watcher_is_given_each_operations_arguments_and_the_ones_it_writes():
    def f(x: torch.Tensor) -> None:
        y = x.masked_fill(x > 0, -1.5)
        y.add_(x)
        torch._foreach_mul_([x, y], 2.0)
        torch.mul(x, y, out=y)

    x = torch.ones(2)
    results = {operation.name: operation for operation, _ in shown(f, x)}
    assert results["aten::masked_fill"].numbers == [-1.5] and not results["aten::masked_fill"].mutated_arguments
    assert (
        len(results["aten::add_"].mutated_arguments) == 1 and len(results["aten::_foreach_mul_"].mutated_arguments) == 2
    )
    assert len(results["aten::mul"].mutated_arguments) == 1 and len(results["aten::mul"].arguments) == 3


def test_an_operation_of_a_backward_pass_has_its_node_and_the_forward_line():
    def loss(x: torch.Tensor) -> torch.Tensor:
        return x.sqrt().sum()

    results = [(operation.name, place) for operation, place in shown(torch.func.grad(loss), torch.ones(2))]
    line = f"{__file__}:{loss.__code__.co_firstlineno + 1}"
    places = {place._replace(sequence_number=-1) for _, place in results}
    assert _CallSite(line, "SqrtBackward0", False) in places and _CallSite(line, "", False, forward=True) in places
    forward = next(place for name, place in results if name == "aten::sqrt")
    assert {p.sequence_number for _, p in results if p.backward == "SqrtBackward0"} == {forward.sequence_number}


def test_the_memory_of_a_tensor_is_known_by_its_bytes_and_not_kept_alive():
    x = torch.zeros(4, 3)
    whole, row = tensor_memory(x), tensor_memory(x[1])
    assert whole.storage == row.storage and (whole.first, whole.stop, row.first, row.stop) == (0, 48, 12, 24)
    assert tensor_memory(x.t())[:3] == whole[:3] and tensor_memory(x[:, 1])[1:3] == (4, 44)
    del x
    assert whole.is_freed and row.is_freed


def test_tensors_without_values_are_not_real():
    assert is_real(torch.ones(2)) and not is_real(torch.ones(0)) and not is_real(torch.ones(2, device="meta"))
    assert not is_real(torch.ones(2).to_sparse())


def test_operations_within_without_watchers_are_not_shown():
    results: list[str] = []
    with watch_operations(lambda operation: results.append(operation.name), lambda *_: None):
        torch.ones(2).sin()
        with without_watchers():
            torch.ones(2).cos()
    assert results == ["aten::ones", "aten::sin"]
