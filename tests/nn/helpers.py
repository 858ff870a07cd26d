"""Running a split module."""

from typing import Any


def run(made: Any, params: Any, batch: Any) -> Any:
    x, arguments = made.first(params["rest"], batch), made.block_arguments(batch)
    for i, p in enumerate(params["blocks"]):
        x = made.block(p, x, arguments, i)
    return made.last(params["rest"], x, batch)
