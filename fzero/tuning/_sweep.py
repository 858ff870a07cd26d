"""Plan several models, numbers of ranks, batches, lengths and machines with one command."""

import argparse
import itertools
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from fzero._format import format_bytes, format_seconds
from fzero.tuning._page import Case
from fzero.tuning._table_views import format_limits
from fzero.tuning.models import PRESETS

__all__ = ["case_arguments", "list_choices", "render_cases"]

# The options that may have several values, and the names of their columns.
_SIZES = {"world": "ranks", "batch": "batch", "length": "length", "machine": "machine"}


def case_arguments(args: argparse.Namespace) -> list[argparse.Namespace]:
    """Return the arguments of each case: all combinations of the models and of the values of `_SIZES`.

    Raises:
        ValueError: if several models are not all models by name.
    """
    return [argparse.Namespace(**{**vars(args), **values}) for values in _argument_combinations(args)]


def _argument_combinations(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    models = _parse_models(args.model)
    lists = [getattr(args, name) or (None,) for name in _SIZES]
    for model, *values in itertools.product(models, *lists):
        yield {"model": model, **dict(zip(_SIZES, values, strict=True))}


def _parse_models(text: str | None) -> tuple[str | None, ...]:
    names = (text or "").split(",")
    if len(names) == 1 or pathlib.Path(text or "").exists():
        return (text,)
    unknown = [name for name in names if name not in PRESETS and not pathlib.Path(name).exists()]
    if unknown:
        raise ValueError(
            f"model {unknown[0]!r} of {text!r}: several models are models by name ({', '.join(PRESETS)}), or files"
        )
    return tuple(names)


def list_choices(args: argparse.Namespace) -> dict[str, Any]:
    """Return the values of a case, by the names of their columns."""
    values = {column: getattr(args, option) for option, column in _SIZES.items()}
    return {"model": args.model, **{column: value for column, value in values.items() if value is not None}}


def render_cases(cases: Sequence[Case]) -> Any:
    """Render a row for each case: its best configuration, how fast it is, and what limits it."""
    from rich.table import Table as RichTable

    grid = RichTable(box=None, pad_edge=False, header_style="bold")
    varying = [name for name in cases[0].choices if len({str(case.choices.get(name)) for case in cases}) > 1]
    for name in [*varying, "best", "peak", "seconds", "a second and rank", "limited by"]:
        grid.add_column(name, justify="left" if name in ("model", "machine", "best", "limited by") else "right")
    for case in cases:
        values = [str(case.choices.get(name, "")) for name in varying]
        if not case.table.fitting:
            grid.add_row(*values, "nothing fits", style="dim")
            continue
        row = case.table.best().row
        rate = float(case.choices["batch"]) / row.seconds / float(case.choices["ranks"])
        length = case.choices.get("length")
        speed = f"{rate:.3g} samples" if length is None else f"{rate * length:,.0f} tokens"
        peak, seconds = format_bytes(row.peak_bytes), format_seconds(row.seconds)
        grid.add_row(*values, str(row.config), peak, seconds, speed, format_limits(row.limits))
    return grid
