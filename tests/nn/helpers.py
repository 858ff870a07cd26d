"""Running a split module."""

from typing import Any


def run(made: Any, params: Any, batch: Any) -> Any:
    x, given = made.first(params["rest"], batch), made.block_arguments(batch)
    for i, p in enumerate(params["blocks"]):
        x = made.block(p, x, given, i)
    return made.last(params["rest"], x, batch)
