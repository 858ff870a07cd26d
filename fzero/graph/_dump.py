"""dump: the graph after each pass as a text file, and the peaks in a table."""

import inspect
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from torch.fx import Graph, Node

from fzero._torch import line_of
from fzero.graph._ir import is_collective, shown
from fzero.graph._ops import title_of
from fzero.graph._pass_manager import Choice, Passed, PassManager
from fzero.graph.loop._scan import loop_of
from fzero.graph.planning._liveness import live_bytes, live_ranges
from fzero.ranks import Mesh

__all__ = ["checked_folder", "dump", "folder_of"]

SUMMARY, LEFT_OUT = "peaks.txt", "left out"


class DumpedGraph(NamedTuple):
    """A graph at one place of the list of passes: what its file is called, what the pass was given, and the graph."""

    title: str
    how: str
    graph: Graph


def checked_folder(folder: str | os.PathLike[str]) -> str:
    """Make a folder for dumps, or find that it is there.

    Returns:
        Its path.

    Raises:
        TypeError: if `folder` is no path.
        ValueError: if it cannot be made or written into. The message names it.
    """
    try:
        path = Path(folder)
    except TypeError as error:
        raise TypeError(f"dump={folder!r}: expected the path of a folder") from error
    if not os.fspath(folder) or "\0" in str(path):
        raise ValueError(f'dump={folder!r}: expected the path of a folder; "." is the one at hand')
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ValueError(f"dump={str(folder)!r}: {error.filename} is a file; expected the path of a folder") from error
    except OSError as error:
        raise ValueError(f"dump={str(folder)!r}: the folder cannot be made: {error.strerror}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ValueError(f"dump={str(folder)!r}: no permission to write into the folder")
    return str(path.absolute())  # whatever the working directory is when the step is traced


def folder_of(folder: str, mesh: Mesh | None, traces: int) -> Path:
    """Return where a trace is dumped: the folder itself, or one in it for each rank, and for each trace but the first.

    Args:
        folder: as the user named it.
        mesh: of the step, if it has one.
        traces: how often the step was traced before.
    """
    rank = [f"rank_{mesh.rank}"] if mesh is not None and mesh.distributed else []
    return Path(folder, *rank, *([f"trace_{traces + 1}"] if traces else []))


def dump(folder: Path, passes: PassManager, choice: Choice, name: str, body: Graph | None = None) -> None:
    """Write the graph as traced, and after each pass, into numbered files of a folder, and a table of their peaks.

    Args:
        folder: is made if it is not there; what an earlier dump left in it goes. A loop has a folder in it.
        passes: the passes over the traced graph.
        choice: the settings of the schedule to show.
        name: of the step.
        body: what became of a loop's body in the end, where the passes are those over one.

    Raises:
        OSError: if the folder cannot be written into. Names the file.

    Example:
        >>> import fzero, tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = fzero.jit(lambda x: (x + 1).sum(), dump=folder).plan(torch.ones(2))
        ...     print(*sorted(os.listdir(folder))[:3])
        ...     print(Path(folder, "00_traced.txt").read_text().splitlines()[5].split("  #")[0])
        00_traced.txt 03_hoist.txt 05_regather.txt
             1               16  float32[2]                   add = aten.add.Tensor(arg0_1, 1)
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("[0-9][0-9]_*.txt"):  # of other settings, which ran other passes
        old.unlink()
    states = [DumpedGraph("00_traced", "", passes.traced)]
    for number, passed in enumerate(passes.run(choice), 1):
        states.append(DumpedGraph(f"{number:02}_{passed.row.name}", _asked(passed), passed.graph))
    if body is not None and choice.across_turns:  # passes over the loop have changed its body, too
        states[-1] = states[-1]._replace(how="of the loop", graph=body)
    last = states[-1].graph
    rows = []
    for state in states:
        live = live_bytes(live_ranges(state.graph), len(state.graph.nodes))
        rows.append(_row(state, live))
        if state.how != LEFT_OUT:
            Path(folder, f"{state.title}.txt").write_text(_text(name, state, live), encoding="utf-8")
    for node in last.nodes:
        if loop := loop_of(node):
            dump(Path(folder, node.name), passes.body(node), choice, f"{name}, {node.name}", loop.body)
    head = f"{'graph':<24} {'operations':>10} {'collectives':>11} {'peak bytes':>16} {'at':>7}  arguments"
    Path(folder, SUMMARY).write_text("\n".join([f"{name}: {choice.settings()}", "", head, *rows, ""]), encoding="utf-8")


def _asked(passed: Passed) -> str:
    """Say in one line what a pass was given, by the names of its arguments."""
    if passed.arguments is None:
        return LEFT_OUT
    names = list(inspect.signature(passed.row.apply).parameters)[1:]
    given = [f"{name}={x}" for name, x in zip(names, passed.arguments, strict=False)]
    return textwrap.shorten(", ".join(given), 80, placeholder=" ...")


def _row(state: DumpedGraph, live: Sequence[int]) -> str:
    """Count a graph's operations and collectives, and say how much is alive at its peak, and where."""
    nodes = list(state.graph.nodes)
    operations, collectives = sum(n.op == "call_function" for n in nodes), sum(map(is_collective, nodes))
    peak = max(live)
    counts = f"{operations:>10,} {collectives:>11} {peak:>16,} {live.index(peak):>7}"
    return f"{state.title:<24} {counts}  {state.how}".rstrip()


def _text(name: str, state: DumpedGraph, live: Sequence[int]) -> str:
    """Describe a graph: a line for each node, with the bytes that are alive while it runs."""
    peak = max(live)
    lines = [
        f"{name}, {state.title}({state.how})",
        f"peak {peak:,} bytes at {live.index(peak)}; arguments of the step are alive throughout",
        "",
    ]
    lines.append(f"{'at':>6} {'live bytes':>16}  {'value':<28} operation")
    lines += [
        f"{at:>6} {held:>16,}  {_line(node)}"
        for at, (node, held) in enumerate(zip(state.graph.nodes, live, strict=True))
    ]
    return "\n".join([*lines, ""])


def _line(node: Node) -> str:
    """Describe a node: what it computes, its operation on which values, whose it is, and its source line."""
    given = [*map(str, node.args), *[f"{key}={x}" for key, x in node.kwargs.items()]]
    target = title_of(node)
    if loop := loop_of(node):
        target = f"a loop of {loop.turns} turns, in the folder {node.name}/, of"
    operation = f"{node.name} = {target}({', '.join(given)})"
    if node.op == "placeholder":
        operation = f"{node.name}: {node.meta.get('label', 'an argument')}"
    if node.op == "output":
        operation = f"return {given[0]}"
    notes = [x for x in (node.meta.get("unit", ""), line_of(node)) if x]
    return f"{shown(node):<28} {operation}" + (f"  # {', '.join(notes)}" if notes else "")
