"""The options of `fzero plan` and `fzero calibrate`: a table by group, and how each text becomes a value."""

import argparse
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from fzero.codecs import CODECS
from fzero.tuning._search_space import EVERY_SECOND, USUAL_REMATS
from fzero.tuning.exports import EXPORTS
from fzero.tuning.machines import MACHINES
from fzero.tuning.models import PRESETS

__all__ = ["AUTO", "SEARCH_ROWS", "parser"]

_UNITS = {"": 1, "B": 1, **{f"{x}B": 1000**i for i, x in enumerate("KMGT", 1)}}
_UNITS |= {f"{x}IB": 1024**i for i, x in enumerate("KMGT", 1)}
_TIMES = {"": 1.0, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
AUTO = "auto"
SEARCH_ROWS = 12  # of a search over all sizes of an axis
_REMAT = {"no": False, "matmuls": "matmuls", EVERY_SECOND: EVERY_SECOND, "yes": True}


class _CommandOption(NamedTuple):
    """An option of the command: its name, its text for --help, and the other arguments of `add_argument`."""

    name: str
    help: str
    settings: dict[str, Any]


def _make_option(name: str, help: str, **settings: Any) -> _CommandOption:
    return _CommandOption(name, help, settings)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    result = argparse.ArgumentParser("fzero", description="Plan training before it runs; nothing is downloaded or run.")
    commands = result.add_subparsers(dest="command", required=True)
    measure = commands.add_parser("calibrate", help="measure this machine for --machine calibrated")
    measure.add_argument("--seconds", type=float, default=5.0, help="about how many seconds to take")
    plan = commands.add_parser("plan", help="list which settings fit, and how fast they are by a cost model")
    for title, options in _PLAN.items():
        group = plan.add_argument_group(title)
        for option in options:
            group.add_argument(option.name, help=option.help, **option.settings)
    return result


def _parse_bytes(text: str) -> float:
    match = re.fullmatch(r"([\d.]+(?:e\d+)?)\s*([a-z]*)", text.strip().lower())
    if not match or match[2].upper() not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a size such as 80GB, 74.5GiB or 8e10")
    return float(match[1]) * _UNITS[match[2].upper()]


def _parse_seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if not match or match[2] not in _TIMES:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a time such as 45000h, 5min or 30s")
    return float(match[1]) * _TIMES[match[2]]


def _parse_bandwidths(text: str) -> dict[str, float]:
    pairs = [part.partition("=") for part in text.split(",")]
    if any(not axis or not speed for axis, _, speed in pairs):
        raise argparse.ArgumentTypeError(f"{text!r}: expected axes and bytes a second, such as dp=40GB,ep=300GB")
    return {axis: _parse_bytes(speed) for axis, _, speed in pairs}


def _list_parser(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    def values(text: str) -> tuple[Any, ...]:
        return tuple([kind(part) for part in text.split(",")])

    values.__name__ = "list"  # for argparse's error
    return values


def _parse_sizes(text: str) -> tuple[int, ...] | str:
    if text == AUTO:
        return AUTO
    try:
        return _list_parser(int)(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: expected sizes such as 1,8, or auto") from error


def _parse_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected an int, at least 1")
    return int(text)


def _parse_export(text: str) -> tuple[str, pathlib.Path | None]:
    system, _, path = text.partition("=")
    if system not in EXPORTS:
        raise argparse.ArgumentTypeError(f"{text!r}: expected one of {', '.join(EXPORTS)}, and =FILE to write a file")
    return system, pathlib.Path(path) if path else None


def _parse_remat(text: str) -> bool | str:
    if text not in _REMAT:
        raise argparse.ArgumentTypeError(f"{text!r}: expected no, matmuls, every-2 or yes")
    return _REMAT[text]


_PLAN = {
    "the run": [
        _make_option(
            "model", f"{', '.join(PRESETS)}, or several; a config.json or its folder; or module:make_step", nargs="?"
        ),
        _make_option("--world", "all ranks; several are compared", type=_list_parser(int), metavar="8,64"),
        _make_option("--batch", "samples of one step, over all ranks", type=_list_parser(int), metavar="512"),
        _make_option("--length", "tokens of a sequence, or the side of an image in pixels", type=_list_parser(int)),
        _make_option("--depth", "number of blocks; with module:make_step, it must build config.depth", type=int),
    ],
    "the machine": [
        _make_option("--machine", f"of {', '.join(MACHINES)}, calibrated", type=_list_parser(str), default=("h100",)),
        _make_option("--memory", "memory of a device, such as 80GB; by default that of --machine", type=_parse_bytes),
        _make_option("--margin", "the share of --memory that plans do not count; 0.07 on a GPU", type=float),
        _make_option(
            "--network-bandwidth",
            "bytes a second that a device sends between hosts; by default that of --machine",
            type=_parse_bytes,
            metavar="5GB",
        ),
        _make_option(
            "--axis-bandwidths",
            "bytes a second of collectives along an axis",
            type=_parse_bandwidths,
            metavar="dp=40GB",
        ),
    ],
    "settings to try": [
        _make_option("--stages", "ZeRO stages", type=_list_parser(int), default=(1, 2, 3), metavar="1,2,3"),
        _make_option(
            "--micro-batches", "by default 1 to 16, as far as they divide", type=_list_parser(int), metavar="1,2,4"
        ),
        _make_option(
            "--remat",
            "what the backward pass recomputes of each block: nothing, all but matrix products, every second one, all",
            type=_list_parser(_parse_remat),
            default=USUAL_REMATS,
            metavar="no,matmuls,every-2,yes",
        ),
        _make_option(
            "--precision",
            "dtypes of the computation; half precision has float32 masters",
            type=_list_parser(str),
            default=("bfloat16",),
            metavar="bfloat16,float32",
        ),
        _make_option(
            "--offload", "shares of the state on the host", type=_list_parser(float), default=(0.0,), metavar="0,0.5,1"
        ),
        _make_option(
            "--ep",
            "ranks that experts are split over; by default 1, and up to 8",
            type=_list_parser(int),
            metavar="1,8",
        ),
        _make_option(
            "--host",
            "hosts of an axis of their own: a unit then passes the link between hosts once a step",
            type=_parse_sizes,
            default=(1,),
            metavar="1,8 or auto",
        ),
        _make_option("--cp", "ranks that share each sequence", type=_parse_sizes, default=(1,), metavar="1,8 or auto"),
        _make_option("--tp", "ranks that share each matrix", type=_parse_sizes, default=(1,), metavar="1,8 or auto"),
        _make_option("--pp", "ranks along a pipeline", type=_parse_sizes, default=(1,), metavar="1,4 or auto"),
        _make_option(
            "--schedule", "pipeline schedules", type=_list_parser(str), default=("1f1b",), metavar="1f1b,interleaved:4"
        ),
        _make_option(
            "--rows",
            f"how many to plan, those first that may be fastest; by default all, or {SEARCH_ROWS} if an axis is auto",
            type=_parse_count,
            metavar="12",
        ),
    ],
    "the step": [
        _make_option(
            "--chunked-loss",
            "compute the loss from chunks of classes, without all logits at once; a third more work for the head",
            action="store_true",
        ),
        _make_option(
            "--explicit-attention",
            "write attention out, so that its weights are saved for the backward pass",
            action="store_true",
        ),
        _make_option("--compile", "count fused operations once, as Inductor compiles a step", action="store_true"),
        _make_option("--gather", "gather parameters in these numbers", choices=[*CODECS]),
        _make_option("--reduce", "sum gradients over ranks in these numbers", choices=[*CODECS]),
        _make_option("--moments", "how the optimizer keeps its moments", choices=["int8", "bfloat16"]),
        _make_option("--float8", "multiply in float8 within blocks, so scaled", choices=["tensorwise", "rowwise"]),
    ],
    "a long run": [
        _make_option(
            "--local-steps", "plan local SGD beside it: its replicas average every so many steps", type=_parse_count
        ),
        _make_option("--replicas", "with --local-steps: by default a replica on each host", type=_parse_count),
        _make_option(
            "--mtbf", "time between failures of a device: prints goodput", type=_parse_seconds, metavar="45000h"
        ),
        _make_option("--save-time", "with --mtbf: how long a save stops the steps", type=_parse_seconds, metavar="5s"),
        _make_option(
            "--restart-time", "with --mtbf: from a failure to the next step", type=_parse_seconds, metavar="5min"
        ),
        _make_option(
            "--repair-time", "with --mtbf: go on without a lost host so long", type=_parse_seconds, metavar="2h"
        ),
        _make_option("--days", "with --mtbf: the days of the run, by default 30", type=float),
    ],
    "output": [
        _make_option("--json", "write the table", type=pathlib.Path, metavar="FILE"),
        _make_option("--csv", "write the rows", type=pathlib.Path, metavar="FILE"),
        _make_option("--html", "write one page for any browser", type=pathlib.Path, metavar="FILE"),
        _make_option("--plot", "draw peak against seconds", type=pathlib.Path, metavar="FILE"),
        _make_option(
            "--export",
            f"print the best row as the configuration of {', '.join(EXPORTS)}, or write it into a file",
            type=_parse_export,
            action="append",
            default=[],
            metavar="SYSTEM[=FILE]",
        ),
        _make_option("--compare", "compare two tables that --json wrote", nargs=2, type=pathlib.Path, metavar="FILE"),
        _make_option("--workers", "processes to plan on", type=int, default=os.cpu_count() or 1),
        _make_option(
            "--no-cache", "plan all rows anew; rows of models by name are cached otherwise", action="store_true"
        ),
    ],
}
