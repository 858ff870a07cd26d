"""The command `python -m fzero.checkpoint`: list, verify, compare and export checkpoints."""

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from fzero.checkpoint._differences import differences
from fzero.checkpoint._error import CheckpointError
from fzero.checkpoint._export_file import export
from fzero.checkpoint._files import Files, files_at
from fzero.checkpoint._folder import read_complete, step_name, step_numbers
from fzero.checkpoint._inspect import verify
from fzero.checkpoint.layout import MANIFEST, Manifest

__all__ = ["main"]

_DTYPES = {str(x).removeprefix("torch."): x for x in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, by default the process's, and return its exit code."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except (CheckpointError, OSError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments, with a subparser for each of its four commands."""
    parser = argparse.ArgumentParser(prog="python -m fzero.checkpoint", description="List, verify, compare and export.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[Any], int], text: str, *paths: str) -> argparse.ArgumentParser:
        subparser = commands.add_parser(name, help=text, description=text)
        for path in paths:
            subparser.add_argument(path, metavar=path.upper())
        subparser.set_defaults(run=run)
        return subparser

    ls = command("ls", _run_ls, "List the checkpoints of a run's folder, or the leaves of one checkpoint.", "path")
    ls.add_argument("--limit", type=_parse_count, metavar="N", help="list the first N leaves")
    command("verify", _run_verify, "Read a checkpoint, or all checkpoints of a run, and compare each checksum.", "path")
    command("diff", _run_diff, "List the leaves and values that differ between two checkpoints.", "a", "b")
    text = "Write the full leaves to a safetensors file, to model.safetensors in a folder, or as torch.save does."
    out = command("export", _run_export, text, "path", "out")
    out.add_argument("--prefix", default="", help="write the leaves below this path, such as params, without the path")
    out.add_argument("--dtype", choices=_DTYPES, help="cast floating point leaves")
    out.add_argument("--torch", action="store_true", help="write a file for torch.load; needs memory for all leaves")
    return parser


def _parse_count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of leaves: give 0 or more")
    return int(text)


def _print_table(table: Table) -> None:
    """Print a table as wide as the terminal, or in its full width to a file."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=10_000)
    console.print(table)


def _new_table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name, justify="right" if name in ("step", "size", "ranks", "leaves", "bytes") else "left")
    return table


@contextlib.contextmanager
def _progress_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on a terminal, and yield the function that updates it with the bytes done and in total."""
    console = Console(stderr=True)
    columns = [TextColumn(label, markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn()]
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(label, total=None)
        yield lambda nbytes, total: bar.update(task, completed=nbytes, total=total)


def _format_mesh(manifest: Manifest) -> str:
    return ", ".join([f"{name}={size}" for name, size in manifest.layout.mesh])


def _format_date(manifest: Manifest) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.timestamp))


def _list_steps(path: str) -> list[int]:
    """List the steps of a run's folder; none if the folder is one checkpoint.

    Raises:
        CheckpointError: if the folder is neither.
    """
    files = files_at(path)
    if files.size(MANIFEST) is not None:
        return []
    steps = step_numbers(files)
    if not steps:
        raise CheckpointError(f"{files.path!r} is neither a checkpoint nor a run: it has no {MANIFEST} and no step-*")
    return steps


def _check_one_checkpoint(path: str) -> str:
    """Return the path if it is one checkpoint.

    Raises:
        CheckpointError: if it is the folder of a run.
    """
    steps = _list_steps(path)
    if steps:
        raise CheckpointError(f"{path!r} is the folder of a run: give one checkpoint, such as {step_name(steps[-1])}")
    return path


def _run_ls(args: Any) -> int:
    """Print the checkpoints of a folder, one a row, or the leaves of one checkpoint."""
    files, steps = files_at(args.path), _list_steps(args.path)
    if not steps:
        _ls_one(files, args.limit)
        return 0
    table = _new_table("step", "date", "size", "ranks", "mesh", "leaves", "state")
    for step in steps:
        try:
            manifest = read_complete(files.subfolder(step_name(step)))
        except CheckpointError as error:
            table.add_row(str(step), "", "", "", "", "", Text(str(error)))
            continue
        layout = manifest.layout
        row = decimal(manifest.nbytes), str(layout.ranks), _format_mesh(manifest), str(len(layout.leaf_index)), "whole"
        table.add_row(str(step), _format_date(manifest), *row)
    _print_table(table)
    return 0


def _ls_one(files: Files, limit: int | None) -> None:
    """Print the leaves and values of a checkpoint, at most `limit` of them, and its size, date and mesh."""
    manifest = read_complete(files)
    layout = manifest.layout
    table = _new_table("path", "dtype", "shape", "bytes", "")
    rows = []
    for path, i in layout.leaf_index.items():
        leaf = layout.leaves[i]
        note = "differs by rank" if leaf.per_rank else ""
        if path in layout.ties:
            note = f"is {layout.ties[path]}"
        rows.append((path, str(leaf.dtype).removeprefix("torch."), str(list(leaf.shape)), f"{leaf.nbytes:,}", note))
    rows += [(path, "value", "", "", repr(value)[:80]) for path, value in layout.values.items()]
    rows.sort()
    for row in rows[:limit]:
        table.add_row(*[Text(x) for x in row])
    ranks = f"{layout.ranks} ranks ({_format_mesh(manifest)})" if layout.mesh else "1 process"
    counts = f"{len(layout.leaf_index)} leaves and {len(layout.values)} values"
    print(f"{_format_date(manifest)}, {decimal(manifest.nbytes)} of {ranks}, {counts}, whole")
    _print_table(table)
    if limit is not None and limit < len(rows):
        print(f"and {len(rows) - limit} more")


def _run_verify(args: Any) -> int:
    """Read each checkpoint at a path, print whether it is whole, and return 1 if one is not."""
    files, steps = files_at(args.path), _list_steps(args.path)
    failures = 0
    for step in steps or [None]:
        folder = files if step is None else files.subfolder(step_name(step))
        try:
            with _progress_bar(folder.path) as progress:
                nbytes = verify(folder.path, progress)
            print(f"{folder.path}: whole, {nbytes:,} bytes")
        except CheckpointError as error:
            if step is not None and step not in step_numbers(files):
                print(f"{folder.path}: removed meanwhile")
                continue
            failures += 1
            print(" ".join(str(error).split()), file=sys.stderr)
    return 1 if failures else 0


def _run_diff(args: Any) -> int:
    """Print the leaves that differ between two checkpoints, and return 1 if there are any."""
    checkpoint_a, checkpoint_b = _check_one_checkpoint(args.a), _check_one_checkpoint(args.b)
    table = _new_table("path", "a", "b", "elements that differ", "largest difference")
    with _progress_bar("diff") as progress:
        for d in differences(checkpoint_a, checkpoint_b, progress):
            count = "" if d.count is None else f"{d.count:,}"
            largest = "" if d.largest is None else f"{d.largest:.6g}"
            table.add_row(*[Text(x) for x in (d.path, d.one or "missing", d.other or "missing", count, largest)])
    if not table.row_count:
        print("the same leaves and values, bit for bit")
        return 0
    _print_table(table)
    return 1


def _run_export(args: Any) -> int:
    dtype, path = _DTYPES[args.dtype] if args.dtype else None, _check_one_checkpoint(args.path)
    with _progress_bar("export") as progress:
        file, names = export(path, args.out, prefix=args.prefix, dtype=dtype, as_torch=args.torch, progress=progress)
    print(f"{file}: {len(names)} leaves")
    return 0


if __name__ == "__main__":
    sys.exit(main())
