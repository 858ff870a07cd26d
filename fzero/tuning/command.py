"""fzero plan: the command that lists which settings fit a machine, how fast they are, and the code of the best."""

import argparse
import importlib
import math
import os
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from fzero import tree
from fzero._format import format_bytes, format_seconds
from fzero.tuning._page import Case, page
from fzero.tuning._peer_estimates import peer_estimates
from fzero.tuning._recipe import recipe
from fzero.tuning._row import TableRow
from fzero.tuning._search_space import CODECS, EVERY_SECOND, USUAL_REMATS, min_stages_of
from fzero.tuning._sweep import case_arguments, choices_of, render_cases
from fzero.tuning._table_views import render_comparison, warnings_of, width_of
from fzero.tuning._tune import ConfigurationTable, tune
from fzero.tuning.exports import EXPORTS
from fzero.tuning.long_runs import Reliability, goodput
from fzero.tuning.machines import MACHINES, calibrate, machine_of, save
from fzero.tuning.models import (
    PRESETS,
    ModelShape,
    init,
    largest_sizes,
    model_step,
    powers_of_two,
    shape_of,
    usable_sizes,
)

__all__ = ["run"]

_UNITS = {"": 1, "B": 1, **{f"{x}B": 1000**i for i, x in enumerate("KMGT", 1)}}
_UNITS |= {f"{x}IB": 1024**i for i, x in enumerate("KMGT", 1)}
_TIMES = {"": 1.0, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_AUTO = "auto"
_ROWS = 12  # of a search over all sizes of an axis
_REMAT = {"no": False, "matmuls": "matmuls", EVERY_SECOND: EVERY_SECOND, "yes": True}


def run(argv: Sequence[str]) -> int:
    """Run a command.

    Returns:
        The exit code: 0, 1 if nothing fits, 2 for a wrong argument.
    """
    args = _parser().parse_args(argv)
    try:
        if args.command == "calibrate":
            return _calibrate(args)
        if args.compare:
            return _compare(args.compare)
        cases = case_arguments(args)
        return _plan(cases[0]) if len(cases) == 1 else _plan_cases(args, cases)
    except (ValueError, OSError) as error:
        print(f"fzero {args.command}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("fzero", description="Plan training before it runs; nothing is downloaded or run.")
    commands = parser.add_subparsers(dest="command", required=True)
    measure = commands.add_parser("calibrate", help="measure this machine for --machine calibrated")
    measure.add_argument("--seconds", type=float, default=5.0, help="about how many seconds to take")
    plan = commands.add_parser("plan", help="list which settings fit, and how fast they are by a cost model")
    group = plan.add_argument_group("the run")
    group.add_argument(
        "model", nargs="?", help=f"{', '.join(PRESETS)}, or several; a config.json or its folder; or module:make_step"
    )
    group.add_argument("--world", type=_list_of(int), metavar="8,64", help="all ranks; several are compared")
    group.add_argument("--batch", type=_list_of(int), metavar="512", help="samples of one step, over all ranks")
    group.add_argument("--length", type=_list_of(int), help="tokens of a sequence, or the side of an image in pixels")
    group.add_argument("--depth", type=int, help="number of blocks; with module:make_step, it must build config.depth")
    group = plan.add_argument_group("the machine")
    group.add_argument("--machine", type=_list_of(str), default=("h100",), help=f"of {', '.join(MACHINES)}, calibrated")
    group.add_argument("--memory", type=_bytes, help="memory of a device, such as 80GB; by default that of --machine")
    group.add_argument("--margin", type=float, help="the share of --memory that plans do not count; 0.07 on a GPU")
    group.add_argument("--links", type=_links, metavar="dp=40GB", help="bytes a second of collectives along an axis")
    group = plan.add_argument_group("settings to try")
    group.add_argument("--stages", type=_list_of(int), default=(1, 2, 3), metavar="1,2,3", help="ZeRO stages")
    group.add_argument(
        "--micro-batches", type=_list_of(int), metavar="1,2,4", help="by default 1 to 16, as far as they divide"
    )
    group.add_argument(
        "--remat",
        type=_list_of(_remat),
        default=USUAL_REMATS,
        metavar="no,matmuls,every-2,yes",
        help="what the backward pass recomputes of each block: nothing, all but matrix products, every second one, all",
    )
    group.add_argument(
        "--precision",
        type=_list_of(str),
        default=("bfloat16",),
        metavar="bfloat16,float32",
        help="dtypes of the computation; half precision has float32 masters",
    )
    group.add_argument(
        "--offload", type=_list_of(float), default=(0.0,), metavar="0,0.5,1", help="shares of the state on the host"
    )
    group.add_argument(
        "--ep", type=_list_of(int), metavar="1,8", help="ranks that experts are split over; by default 1, and up to 8"
    )
    group.add_argument("--cp", type=_sizes, default=(1,), metavar="1,8 or auto", help="ranks that share each sequence")
    group.add_argument("--tp", type=_sizes, default=(1,), metavar="1,8 or auto", help="ranks that share each matrix")
    group.add_argument("--pp", type=_sizes, default=(1,), metavar="1,4 or auto", help="ranks along a pipeline")
    group.add_argument(
        "--schedule", type=_list_of(str), default=("1f1b",), metavar="1f1b,interleaved:4", help="pipeline schedules"
    )
    group.add_argument(
        "--rows",
        type=_count,
        metavar="12",
        help=f"how many to plan, those first that may be fastest; by default all, or {_ROWS} if an axis is auto",
    )
    group = plan.add_argument_group("the step")
    group.add_argument(
        "--chunked-loss",
        action="store_true",
        help="compute the loss from chunks of classes, without all logits at once; a third more work for the head",
    )
    group.add_argument(
        "--explicit-attention",
        action="store_true",
        help="write attention out, so that its weights are saved for the backward pass",
    )
    group.add_argument(
        "--compile", action="store_true", help="count fused operations once, as Inductor compiles a step"
    )
    group.add_argument("--gather", choices=[*CODECS], help="gather parameters in these numbers")
    group.add_argument("--reduce", choices=[*CODECS], help="sum gradients over ranks in these numbers")
    group.add_argument("--moments", choices=["int8", "bfloat16"], help="how the optimizer keeps its moments")
    group.add_argument(
        "--float8", choices=["tensorwise", "rowwise"], help="multiply in float8 within blocks, so scaled"
    )
    group = plan.add_argument_group("a long run")
    group.add_argument(
        "--mtbf", type=_seconds, metavar="45000h", help="time between failures of a device: prints goodput"
    )
    group.add_argument("--save-time", type=_seconds, metavar="5s", help="with --mtbf: how long a save stops the steps")
    group.add_argument(
        "--restart-time", type=_seconds, metavar="5min", help="with --mtbf: from a failure to the next step"
    )
    group.add_argument(
        "--repair-time", type=_seconds, metavar="2h", help="with --mtbf: go on without a lost host so long"
    )
    group.add_argument("--days", type=float, help="with --mtbf: the days of the run, by default 30")
    group = plan.add_argument_group("output")
    group.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the table")
    group.add_argument("--csv", type=pathlib.Path, metavar="FILE", help="write the rows")
    group.add_argument("--html", type=pathlib.Path, metavar="FILE", help="write one page for any browser")
    group.add_argument("--plot", type=pathlib.Path, metavar="FILE", help="draw peak against seconds")
    group.add_argument(
        "--export",
        type=_export,
        action="append",
        default=[],
        metavar="SYSTEM[=FILE]",
        help=f"print the best row as the configuration of {', '.join(EXPORTS)}, or write it into a file",
    )
    group.add_argument(
        "--compare", nargs=2, type=pathlib.Path, metavar="FILE", help="compare two tables that --json wrote"
    )
    group.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes to plan on")
    group.add_argument(
        "--no-cache", action="store_true", help="plan all rows anew; rows of models by name are cached otherwise"
    )
    return parser


def _bytes(text: str) -> float:
    match = re.fullmatch(r"([\d.]+(?:e\d+)?)\s*([a-z]*)", text.strip().lower())
    if not match or match[2].upper() not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a size such as 80GB, 74.5GiB or 8e10")
    return float(match[1]) * _UNITS[match[2].upper()]


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if not match or match[2] not in _TIMES:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a time such as 45000h, 5min or 30s")
    return float(match[1]) * _TIMES[match[2]]


def _links(text: str) -> dict[str, float]:
    pairs = [part.partition("=") for part in text.split(",")]
    if any(not axis or not speed for axis, _, speed in pairs):
        raise argparse.ArgumentTypeError(f"{text!r}: expected axes and bytes a second, such as dp=40GB,ep=300GB")
    return {axis: _bytes(speed) for axis, _, speed in pairs}


def _list_of(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    def values(text: str) -> tuple[Any, ...]:
        return tuple([kind(part) for part in text.split(",")])

    values.__name__ = "list"  # for argparse's error
    return values


def _sizes(text: str) -> tuple[int, ...] | str:
    if text == _AUTO:
        return _AUTO
    try:
        return _list_of(int)(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: expected sizes such as 1,8, or auto") from error


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected an int, at least 1")
    return int(text)


def _export(text: str) -> tuple[str, pathlib.Path | None]:
    system, _, path = text.partition("=")
    if system not in EXPORTS:
        raise argparse.ArgumentTypeError(f"{text!r}: expected one of {', '.join(EXPORTS)}, and =FILE to write a file")
    return system, pathlib.Path(path) if path else None


def _remat(text: str) -> bool | str:
    if text not in _REMAT:
        raise argparse.ArgumentTypeError(f"{text!r}: expected no, matmuls, every-2 or yes")
    return _REMAT[text]


def _plan(args: argparse.Namespace) -> int:
    """Plan, print the table, the caveats and the lines to paste, and write the files of the options."""
    from rich.console import Console

    _check_required(args)
    what_fails = _what_fails(args)
    case, shape = _case_of(args)
    table, name = case.table, shape.name if shape else args.model
    console = Console(width=None if sys.stdout.isatty() else width_of(table, 180), highlight=False)
    console.print(f"{name}, {args.batch} samples a step, on {args.world} ranks", style="bold")
    console.print(table)
    if table.fitting and what_fails:
        console.print(_goodput_line(args, table, what_fails))
    estimates = _estimates(shape, args) if shape else []
    for line in estimates:
        console.print(f"other estimators: {line}", style="dim")
    for line in warnings_of(table):
        console.print(f"note: {line}", style="yellow")
    if table.fitting and args.export:
        _print_exports(args, case, console)
    elif table.fitting:
        console.print("\n" + recipe(table.best().config), markup=False)
    _write(args, case)
    if table.fitting:
        return 0
    try:
        table.best()
    except ValueError as error:
        print(f"fzero plan: {error}", file=sys.stderr)
    return 1


def _check_required(args: argparse.Namespace) -> None:
    required = ["model", "world", "batch"] + ([] if ":" in (args.model or "") else ["length"])
    missing = [f"--{name}" if name != "model" else "MODEL" for name in required if getattr(args, name) is None]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} missing: for example, fzero plan llama-3-8b --world 64 --batch 512 --length 8192"
        )


def _case_of(args: argparse.Namespace) -> tuple[Case, ModelShape | None]:
    """Plan the table of some arguments. The sizes are those of a model by name, else None."""
    make_step, shape = _make_step_of(args)
    depth = shape.depth if shape and args.depth is None else args.depth
    args.ep = _usual_ep(shape, args.world) if args.ep is None else args.ep
    _set_sizes(args, shape)
    table = _tune_with_progress(args, make_step, depth)
    return Case(choices_of(args), table, make_step), shape


def _plan_cases(args: argparse.Namespace, each: Sequence[argparse.Namespace]) -> int:
    """Plan several models or sizes, print a row of each, and write a page to choose from."""
    from rich.console import Console

    for option in ("json", "csv", "plot", "export", "mtbf"):
        if getattr(args, option):
            raise ValueError(f"--{option} is for one model and size, and these are {len(each)}; --html has all")
    for one in each:
        _check_required(one)
        machine_of(one.machine)  # an unknown one is an error before the first case is planned
    _what_fails(args)  # its options are wrong without --mtbf
    cases, errors = list[Case](), dict[str, ValueError]()
    for one in each:
        try:
            cases.append(_case_of(one)[0])
        except ValueError as error:  # such as a batch that some ranks do not divide; the other cases go on
            errors[", ".join([f"{name} {value}" for name, value in choices_of(one).items()])] = error
    if not cases:
        raise next(iter(errors.values()))
    console = Console(width=None if sys.stdout.isatty() else 180, highlight=False)
    console.print(render_cases(cases))
    for name, error in errors.items():
        console.print(f"not planned: {name}: {error}", style="yellow", markup=False)
    if args.html:
        args.html.write_text(page(cases), encoding="utf-8")
        print(f"wrote {args.html}", file=sys.stderr)
    return 0 if any(case.table.fitting for case in cases) else 1


def _what_fails(args: argparse.Namespace) -> Reliability | None:
    """Return the failures of a long run, checked before anything is planned; None without --mtbf."""
    times = {"save": args.save_time, "restart": args.restart_time, "repair": args.repair_time}
    known_times = {name: value for name, value in times.items() if value is not None}
    options = [*[f"--{name}-time" for name in known_times], *(["--days"] if args.days is not None else [])]
    if args.mtbf is None and options:
        raise ValueError(f"{options[0]} needs --mtbf, the time between failures of one device: --mtbf 45000h")
    if args.days is not None and not 0 < args.days < math.inf:
        raise ValueError(f"--days {args.days:g}: expected a number above 0")
    return None if args.mtbf is None else Reliability(args.mtbf, **known_times)


def _goodput_line(args: argparse.Namespace, table: ConfigurationTable, what_fails: Reliability) -> str:
    """Simulate a long run with the best row, and return its goodput as a line."""
    row = table.best().row
    together = row.config.cp * row.config.tp * row.config.pp  # devices of one replica of the model
    what_fails = replace(what_fails, devices_lost=max(int(table.machine.ranks), together))
    result = goodput(row.seconds, args.world, what_fails, days=args.days or 30.0)
    if not result.mean:
        return f"{result}. No step lasts: is {args.mtbf:g} s the time between failures of one device?"
    average = format_seconds(row.seconds / result.mean)
    return f"{result}. So a step takes {average} on average, where {format_seconds(row.seconds)} is planned"


def _make_step_of(args: argparse.Namespace) -> tuple[Callable[..., Any], ModelShape | None]:
    """Return `make_step`, and the sizes of a model by name; None for a function of the user's."""
    if ":" not in args.model or pathlib.Path(args.model).exists():
        return model_step(args.model, length=args.length, explicit=args.explicit_attention), shape_of(args.model)
    module, _, name = args.model.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), name), None
    except (ImportError, AttributeError) as error:
        raise ValueError(f"model {args.model!r}: expected module:function: {error}") from error


def _usual_ep(shape: ModelShape | None, world: int) -> tuple[int, ...]:
    """Return the default of --ep: 1, and for a mixture the most ranks of a machine that divide its experts."""
    size = math.gcd(shape.experts[0], world, 8) if shape and shape.experts[0] else 1
    return (1,) if size == 1 else (1, size)


def _set_sizes(args: argparse.Namespace, shape: ModelShape | None) -> None:
    """Replace "auto" by the sizes that the model, the ranks and the batch allow, and set the number of rows.

    Raises:
        ValueError: if the model is a function of the user's, or no sizes of the axes divide ranks and batch.
    """
    options = {name: getattr(args, name) for name in ("cp", "tp", "pp")}
    auto_names = [name for name, values in options.items() if values == _AUTO]
    if not auto_names:
        return
    if shape is None:
        raise ValueError(f"--{auto_names[0]} auto: only models by name say what divides them: give sizes, such as 1,8")
    depth = (args.depth or shape.depth) // min(map(min_stages_of, args.schedule))
    largest = largest_sizes(shape, args.length, int(machine_of(args.machine).ranks), depth)
    if args.explicit_attention:
        largest["cp"] = 1
    sizes = {name: powers_of_two(largest[name]) if name in auto_names else options[name] for name in options}
    for name, values in usable_sizes(sizes, args.world, args.batch).items():
        setattr(args, name, values)
    args.rows = _ROWS if args.rows is None else args.rows


def _tune_with_progress(
    args: argparse.Namespace, make_step: Callable[..., Any], depth: int | None
) -> ConfigurationTable:
    """Tune, with a progress bar. Each row is printed above it as soon as it is planned."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("planning", total=None)

        def on_result(x: Any) -> None:
            progress.advance(task)
            if isinstance(x, TableRow):
                progress.console.print(
                    f"{x.config}: {format_bytes(x.peak_bytes)}, {format_seconds(x.seconds)}", highlight=False
                )

        return tune(
            make_step,
            world_size=args.world,
            global_batch=args.batch,
            machine=args.machine,
            memory=args.memory,
            margin=args.margin,
            stages=args.stages,
            micro_batches=args.micro_batches,
            remat=args.remat,
            precision=args.precision,
            offload=args.offload,
            ep=args.ep,
            tp=args.tp,
            pp=args.pp,
            cp=args.cp,
            schedule=args.schedule,
            links=args.links,
            depth=depth,
            chunked_loss=args.chunked_loss,
            gather=args.gather,
            reduce=args.reduce,
            moments=args.moments,
            float8=args.float8,
            compiled=args.compile,
            max_rows=args.rows,
            workers=args.workers,
            cache=not args.no_cache,
            on_result=on_result,
        )


def _estimates(shape: ModelShape, args: argparse.Namespace) -> list[str]:
    """List the estimates of other tools for the model."""
    params = init(shape, shape.depth)
    largest = max([x.numel() for x in tree.tensors(params)])
    devices_per_host = min(int(machine_of(args.machine).ranks), args.world)
    hosts = max(args.world // devices_per_host, 1)
    return [str(x) for x in peer_estimates(tree.numel(params), largest, devices_per_host=devices_per_host, hosts=hosts)]


def _print_exports(args: argparse.Namespace, case: Case, console: Any) -> None:
    """Print the best row as the configurations of other systems, or write their files, and print the differences."""
    from rich.console import Console

    for system, path in args.export:
        with Console(stderr=True).status(f"planning what {system} holds"):
            export = case.table.export(system, make_step=case.make_step)
        console.print(f"\n{export.system}, {path or export.filename}", style="bold")
        for line in export.differences:
            if path or line not in export.text:  # JSON has no comments
                console.print(f"note: {line}", style="yellow", markup=False)
        if export.fits is False:
            console.print(f"warning: {export.differences[0]}", style="red", markup=False)
        if path:
            path.write_text(export.text, encoding="utf-8")
            print(f"wrote {path}", file=sys.stderr)
        else:
            print(export.text, end="")


def _write(args: argparse.Namespace, case: Case) -> None:
    table = case.table
    if args.json:
        args.json.write_text(table.to_json(), encoding="utf-8")
    if args.csv:
        args.csv.write_text(table.to_csv(), encoding="utf-8")
    if args.html:
        args.html.write_text(page([case]), encoding="utf-8")
    if args.plot:
        table.plot(args.plot)
    for path in filter(None, (args.json, args.csv, args.html, args.plot)):
        print(f"wrote {path}", file=sys.stderr)


def _calibrate(args: argparse.Namespace) -> int:
    """Measure this machine, print each constant with its source, and store them. Of several ranks, rank 0 does so."""
    from rich.console import Console
    from rich.table import Table as RichTable

    machine = calibrate(args.seconds)
    if int(os.environ.get("RANK", 0)) == 0:
        grid = RichTable(
            "constant", "value", "source", box=None, pad_edge=False, header_style="bold", title=machine.name
        )
        for constant in machine.constants():
            grid.add_row(*constant)
        console = Console(width=None if sys.stdout.isatty() else 180, highlight=False)
        console.print(grid)
        console.print(f"({machine.source})\nstored in {save(machine)}: fzero plan --machine calibrated")
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    return 0


def _compare(paths: Sequence[pathlib.Path]) -> int:
    from rich.console import Console

    first, second = (ConfigurationTable.from_json(path.read_text(encoding="utf-8")) for path in paths)
    Console(width=None if sys.stdout.isatty() else 180, highlight=False).print(
        render_comparison(first, second, (paths[0].name, paths[1].name))
    )
    return 0
