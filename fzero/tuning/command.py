"""fzero plan: the command that lists which settings fit a machine, how fast they are, and the code of the best."""

import argparse
import importlib
import math
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from fzero import tree
from fzero._format import format_bytes, format_seconds
from fzero.tuning._command_options import AUTO, SEARCH_ROWS, parser
from fzero.tuning._local_sgd_estimate import LocalSgdEstimate
from fzero.tuning._page import Case, html_page
from fzero.tuning._peer_estimates import peer_estimates
from fzero.tuning._recipe import recipe
from fzero.tuning._row import TableRow
from fzero.tuning._search_space import min_stages_of
from fzero.tuning._sweep import case_arguments, list_choices, render_cases
from fzero.tuning._table_views import list_warnings, render_comparison, table_width
from fzero.tuning._tune import ConfigurationTable, tune
from fzero.tuning.long_runs import Reliability, goodput
from fzero.tuning.machines import Machine, calibrate, find_machine, save
from fzero.tuning.models import (
    ModelShape,
    init,
    largest_sizes,
    model_shape,
    model_step,
    powers_of_two,
    usable_sizes,
)

__all__ = ["run"]


def run(argv: Sequence[str]) -> int:
    """Run a command.

    Returns:
        The exit code: 0, 1 if nothing fits, 2 for a wrong argument.
    """
    args = parser().parse_args(argv)
    try:
        if args.command == "calibrate":
            return _run_calibrate(args)
        if args.compare:
            return _print_comparison(args.compare)
        cases = case_arguments(args)
        return _run_plan(cases[0]) if len(cases) == 1 else _plan_cases(args, cases)
    except (ValueError, OSError) as error:
        print(f"fzero {args.command}: {error}", file=sys.stderr)
        return 2


def _run_plan(args: argparse.Namespace) -> int:
    """Plan, print the table, the caveats and the lines to paste, and write the files of the options."""
    from rich.console import Console

    _check_required(args)
    what_fails = _read_reliability(args)
    _set_replicas(args)
    options = argparse.Namespace(**vars(args))  # _plan_case sets sizes in `args`
    case, shape = _plan_case(args)
    table, name = case.table, shape.name if shape else args.model
    console = Console(width=None if sys.stdout.isatty() else table_width(table, 180), highlight=False)
    console.print(f"{name}, {args.batch} samples a step, on {args.world} ranks", style="bold")
    console.print(table)
    if table.fitting and what_fails:
        console.print(_goodput_line(args, table, what_fails))
    if table.fitting and args.local_steps and shape:
        console.print(_local_sgd_line(options, table, shape), markup=False)
    estimates = _estimate_lines(shape, args) if shape else []
    for line in estimates:
        console.print(f"other estimators: {line}", style="dim")
    for line in list_warnings(table):
        console.print(f"note: {line}", style="yellow")
    if table.fitting and args.export:
        _print_exports(args, case, console)
    elif table.fitting:
        console.print("\n" + recipe(table.best().config), markup=False)
    _write_files(args, case)
    if table.fitting:
        return 0
    try:
        table.best()
    except ValueError as error:
        print(f"fzero plan: {error}", file=sys.stderr)
    return 1


def _check_required(args: argparse.Namespace) -> None:
    required_names = ["model", "world", "batch"] + ([] if ":" in (args.model or "") else ["length"])
    missing = [f"--{name}" if name != "model" else "MODEL" for name in required_names if getattr(args, name) is None]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} missing: for example, fzero plan llama-3-8b --world 64 --batch 512 --length 8192"
        )


def _plan_case(args: argparse.Namespace) -> tuple[Case, ModelShape | None]:
    """Plan the table of some arguments. The sizes are those of a model by name, else None."""
    make_step, shape = _choose_make_step(args)
    depth = shape.depth if shape and args.depth is None else args.depth
    args.ep = _usual_ep(shape, args.world) if args.ep is None else args.ep
    _set_sizes(args, shape)
    table = _tune_with_progress(args, make_step, depth)
    return Case(list_choices(args), table, make_step), shape


def _plan_cases(args: argparse.Namespace, cases_args: Sequence[argparse.Namespace]) -> int:
    """Plan several models or sizes, print a row of each, and write a page to choose from."""
    from rich.console import Console

    for option in ("json", "csv", "plot", "export", "mtbf", "local_steps"):
        if getattr(args, option):
            raise ValueError(
                f"--{option.replace('_', '-')} is for one model and size, and these are {len(cases_args)}; --html has "
                "all"
            )
    for case_args in cases_args:
        _check_required(case_args)
        find_machine(case_args.machine)  # an unknown one is an error before the first case is planned
    _read_reliability(args)  # its options are wrong without --mtbf
    cases, errors = list[Case](), dict[str, ValueError]()
    for case_args in cases_args:
        try:
            cases.append(_plan_case(case_args)[0])
        except ValueError as error:  # such as a batch that some ranks do not divide; the other cases go on
            errors[", ".join([f"{name} {value}" for name, value in list_choices(case_args).items()])] = error
    if not cases:
        raise next(iter(errors.values()))
    console = Console(width=None if sys.stdout.isatty() else 180, highlight=False)
    console.print(render_cases(cases))
    for name, error in errors.items():
        console.print(f"not planned: {name}: {error}", style="yellow", markup=False)
    if args.html:
        args.html.write_text(html_page(cases), encoding="utf-8")
        print(f"wrote {args.html}", file=sys.stderr)
    return 0 if any(case.table.fitting for case in cases) else 1


def _read_reliability(args: argparse.Namespace) -> Reliability | None:
    """Return the failures of a long run, checked before anything is planned; None without --mtbf."""
    times = {"save": args.save_time, "restart": args.restart_time, "repair": args.repair_time}
    known_times = {name: value for name, value in times.items() if value is not None}
    options = [*[f"--{name}-time" for name in known_times], *(["--days"] if args.days is not None else [])]
    if args.mtbf is None and options:
        raise ValueError(f"{options[0]} needs --mtbf, the time between failures of one device: --mtbf 45000h")
    if args.days is not None and not 0 < args.days < math.inf:
        raise ValueError(f"--days {args.days:g}: expected a number above 0")
    seconds = {f"{name}_seconds": value for name, value in known_times.items()}
    return None if args.mtbf is None else Reliability(args.mtbf, **seconds)


def _goodput_line(args: argparse.Namespace, table: ConfigurationTable, what_fails: Reliability) -> str:
    """Simulate a long run with the best row, and return its goodput as a line."""
    row = table.best().row
    devices_per_replica = row.config.cp * row.config.tp * row.config.pp  # devices of one replica of the model
    what_fails = replace(what_fails, devices_lost=max(int(table.machine.ranks), devices_per_replica))
    result = goodput(row.seconds, args.world, what_fails, days=args.days or 30.0)
    if not result.mean:
        return f"{result}. No step lasts: is {args.mtbf:g} s the time between failures of one device?"
    average = format_seconds(row.seconds / result.mean)
    return f"{result}. So a step takes {average} on average, where {format_seconds(row.seconds)} is planned"


def _set_replicas(args: argparse.Namespace) -> None:
    """Set the number of replicas of local SGD, before anything is planned.

    Raises:
        ValueError: if they do not divide ranks and batch, or the model is a function of the user's.
    """
    if args.replicas is not None and args.local_steps is None:
        raise ValueError("--replicas needs --local-steps, the steps between two averages: --local-steps 100")
    if args.local_steps is None:
        return
    if _choose_make_step(args)[1] is None:
        raise ValueError("--local-steps counts the parameters of models by name; plan the step of one replica instead")
    ranks = int(find_machine(args.machine).ranks)
    args.replicas = args.replicas or max(args.world // ranks, 1)
    if args.replicas < 2 or args.world % args.replicas or args.batch % args.replicas:
        raise ValueError(
            f"--local-steps {args.local_steps} on {args.replicas} replicas: expected at least 2, which divide --world "
            f"{args.world} and --batch {args.batch}: give --replicas 2"
        )


def _local_sgd_line(args: argparse.Namespace, table: ConfigurationTable, shape: ModelShape) -> str:
    """Plan the step of one replica in the memory that the state of local SGD leaves, and compare it in a line."""
    ranks = args.world // args.replicas
    elements = sum([x.numel() for x in tree.tensors(init(shape, args.depth or shape.depth))])
    replica_options = {"world": ranks, "batch": args.batch // args.replicas, "host": (1,)}
    rows = _plan_case(argparse.Namespace(**{**vars(args), **replica_options}))[0].table.fitting
    speed = {name: n for name, n in (args.axis_bandwidths or {}).items() if name == "replica"}
    machine = replace(_choose_machine(args), axis_bandwidths=tuple(speed.items()))
    estimates = [
        LocalSgdEstimate(row=row, elements=elements, replicas=args.replicas, every=args.local_steps, machine=machine)
        for row in rows
    ]
    fitting = [x for x in estimates if x.peak_bytes <= table.budget_bytes]
    if not fitting:
        return f"local SGD: no step of a replica of {ranks} ranks fits beside the anchor and the outer momentum"
    best, seconds = min(fitting, key=lambda x: x.seconds), format_seconds(table.best().row.seconds)
    return f"{best}. The best row above takes {seconds}; the losses of the two differ: docs/local_sgd.md"


def _choose_make_step(args: argparse.Namespace) -> tuple[Callable[..., Any], ModelShape | None]:
    """Return `make_step`, and the sizes of a model by name; None for a function of the user's."""
    if ":" not in args.model or pathlib.Path(args.model).exists():
        return model_step(args.model, length=args.length, explicit=args.explicit_attention), model_shape(args.model)
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
    args.host = _host_sizes(args) if args.host == AUTO else args.host
    options = {name: getattr(args, name) for name in ("cp", "tp", "pp")}
    auto_names = [name for name, values in options.items() if values == AUTO]
    if not auto_names:
        return
    if shape is None:
        raise ValueError(f"--{auto_names[0]} auto: only models by name say what divides them: give sizes, such as 1,8")
    depth = (args.depth or shape.depth) // min(map(min_stages_of, args.schedule))
    largest = largest_sizes(shape, args.length, int(find_machine(args.machine).ranks), depth)
    if args.explicit_attention:
        largest["cp"] = 1
    sizes = {name: powers_of_two(largest[name]) if name in auto_names else options[name] for name in options}
    for name, values in usable_sizes(sizes, args.world, args.batch).items():
        setattr(args, name, values)
    args.rows = SEARCH_ROWS if args.rows is None else args.rows


def _choose_machine(args: argparse.Namespace) -> Machine:
    """Return the machine, with the bandwidth between hosts that was given."""
    machine = find_machine(args.machine)
    return machine if args.network_bandwidth is None else replace(machine, network_bandwidth=args.network_bandwidth)


def _bandwidths_within_a_replica(args: argparse.Namespace) -> dict[str, float] | None:
    """Return the bandwidths along the axes of a planned step. With local SGD, "replica" is the axis of its average."""
    axis_bandwidths = args.axis_bandwidths or {}
    return {name: n for name, n in axis_bandwidths.items() if name != "replica" or not args.local_steps} or None


def _host_sizes(args: argparse.Namespace) -> tuple[int, ...]:
    """Return the sizes of the axis of hosts for "auto": 1, and the hosts that the ranks fill.

    Raises:
        ValueError: if the ranks fill no number of hosts.
    """
    ranks = int(find_machine(args.machine).ranks)
    hosts, remainder = divmod(args.world, ranks)
    if remainder and hosts:
        raise ValueError(f"--host auto: --world {args.world} fills no number of hosts of {ranks} ranks: give sizes")
    return (1, hosts) if hosts > 1 else (1,)


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

        return _tune_by_options(args, make_step, depth, on_result)


def _tune_by_options(
    args: argparse.Namespace, make_step: Callable[..., Any], depth: int | None, on_result: Callable[[Any], None]
) -> ConfigurationTable:
    """Tune with the command's options as the arguments of `tune`."""
    return tune(
        make_step,
        world_size=args.world,
        global_batch=args.batch,
        machine=_choose_machine(args),
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
        host=args.host,
        schedule=args.schedule,
        axis_bandwidths=_bandwidths_within_a_replica(args),
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


def _estimate_lines(shape: ModelShape, args: argparse.Namespace) -> list[str]:
    """List the estimates of other tools for the model."""
    params = init(shape, shape.depth)
    largest = max([x.numel() for x in tree.tensors(params)])
    devices_per_host = min(int(find_machine(args.machine).ranks), args.world)
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


def _write_files(args: argparse.Namespace, case: Case) -> None:
    table = case.table
    if args.json:
        args.json.write_text(table.to_json(), encoding="utf-8")
    if args.csv:
        args.csv.write_text(table.to_csv(), encoding="utf-8")
    if args.html:
        args.html.write_text(html_page([case]), encoding="utf-8")
    if args.plot:
        table.plot(args.plot)
    for path in filter(None, (args.json, args.csv, args.html, args.plot)):
        print(f"wrote {path}", file=sys.stderr)


def _run_calibrate(args: argparse.Namespace) -> int:
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


def _print_comparison(paths: Sequence[pathlib.Path]) -> int:
    from rich.console import Console

    first, second = (ConfigurationTable.from_json(path.read_text(encoding="utf-8")) for path in paths)
    Console(width=None if sys.stdout.isatty() else 180, highlight=False).print(
        render_comparison(first, second, (paths[0].name, paths[1].name))
    )
    return 0
