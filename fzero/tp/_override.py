"""What a module finds in the places of its parameters and attributes for a while."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["override_parameters"]


@contextmanager
def override_parameters(
    module: torch.nn.Module, tensors: Mapping[str, Any], attributes: Mapping[str, Any]
) -> Iterator[None]:
    """Put tensors in the places of some parameters of a module, and values in those of attributes, for a while."""
    parameters: dict[str, Any] = module._parameters
    before = {name: parameters[name] for name in tensors}, {name: vars(module)[name] for name in attributes}
    try:
        parameters.update(tensors)
        vars(module).update(attributes)
        yield
    finally:
        parameters.update(before[0])
        vars(module).update(before[1])
