"""dump: the graph after each pass as a text file, and a table of the peaks."""

import inspect
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from torch.fx import Graph, Node

from fzero._arguments import check_path
from fzero._torch import node_line
from fzero.graph._pass_manager import PASSES, PassManager, PassResult, PassSettings
from fzero.graph.ir import display_name, dtypes_and_shapes, is_collective
from fzero.graph.loop import node_loop
from fzero.graph.planning import live_bytes, live_ranges
from fzero.ranks import Mesh

__all__ = ["dump", "dump_folder", "make_folder"]

_TRACED, _SUMMARY, _LEFT_OUT = "traced", "peaks.txt", "left out"


class _DumpedGraph(NamedTuple):
    """A graph after a pass: the pass, which names its file, its arguments as text, and the graph."""

    name: str
    detail: str
    graph: Graph


def make_folder(folder: str | os.PathLike[str]) -> str:
    """Make a folder for dumps if it does not exist.

    Returns:
        The folder's absolute path.

    Raises:
        TypeError: if `folder` is not a path.
        ValueError: if the folder cannot be made or written into. The message names the folder.
    """
    path = Path(check_path("dump", folder, 'the path of a folder, such as "."'))
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ValueError(f"dump={str(folder)!r}: {error.filename} is a file; expected the path of a folder") from error
    except OSError as error:
        raise ValueError(f"dump={str(folder)!r}: the folder cannot be made: {error.strerror}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ValueError(f"dump={str(folder)!r}: no permission to write into the folder")
    return str(path.absolute())  # absolute: the working directory may change before the step is traced


def dump_folder(folder: str, mesh: Mesh | None, traces: int) -> Path:
    """Return the folder of one trace's dump: `folder`, then a folder for the rank, then one for a repeated trace.

    Args:
        folder: the user's folder.
        mesh: the step's mesh, if it has one. Only ranks of a distributed mesh have a folder each.
        traces: how often the step was traced before. The first trace has no folder of its own.
    """
    rank = [f"rank_{mesh.rank}"] if mesh is not None and mesh.distributed else []
    return Path(folder, *rank, *([f"trace_{traces + 1}"] if traces else []))


def dump(folder: Path, passes: PassManager, settings: PassSettings, name: str, body: Graph | None = None) -> None:
    """Write the traced graph, and the graph after each pass, into files, and a table of their peaks in their order.

    Args:
        folder: the folder to write into. It is made if it does not exist; files of an earlier dump are deleted. Each
            loop has a folder in it.
        passes: the passes over the traced graph.
        settings: the settings of the schedule to show.
        name: the step's name.
        body: for the dump of a loop, the loop's body after all passes.

    Raises:
        OSError: if the folder cannot be written into. The message names the file.

    Example:
        >>> import fzero, tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = fzero.jit(lambda x: (x + 1).sum(), dump=folder).plan(torch.ones(2))
        ...     print(Path(folder, "peaks.txt").read_text().splitlines()[3].split()[:2])
        ...     print(Path(folder, "traced.txt").read_text().splitlines()[5].split("  #")[0])
        ['0', 'traced']
             1               16  float32[2]                   add = aten.add.Tensor(arg0_1, 1)
    """
    folder.mkdir(parents=True, exist_ok=True)
    for graph_name in [_TRACED, *[row.name for row in PASSES]]:  # an earlier dump may have run other passes
        Path(folder, f"{graph_name}.txt").unlink(missing_ok=True)
    states = [_DumpedGraph(_TRACED, "", passes.traced)]
    states += [_DumpedGraph(ran.row.name, _arguments_text(ran), ran.graph) for ran in passes.run(settings)]
    if body is not None and settings.across_iterations:  # passes over the loop change its body, too
        states[-1] = states[-1]._replace(detail="of the loop", graph=body)
    last_graph = states[-1].graph
    rows = []
    for order, state in enumerate(states):
        live = live_bytes(live_ranges(state.graph), len(state.graph.nodes))
        rows.append(_dump_row(order, state, live))
        if state.detail != _LEFT_OUT:
            Path(folder, f"{state.name}.txt").write_text(_graph_text(name, state, live), encoding="utf-8")
    for node in last_graph.nodes:
        if loop := node_loop(node):
            dump(Path(folder, node.name), passes.body(node), settings, f"{name}, {node.name}", loop.body)
    head = f"{'':>2}  {'graph':<21} {'operations':>10} {'collectives':>11} {'peak bytes':>16} {'at':>7}  arguments"
    Path(folder, _SUMMARY).write_text(
        "\n".join([f"{name}: {settings.shown_in_plan()}", "", head, *rows, ""]), encoding="utf-8"
    )


def _arguments_text(result: PassResult) -> str:
    """Show the arguments of a pass, by name, in one line."""
    if result.arguments is None:
        return _LEFT_OUT
    names = list(inspect.signature(result.row.apply).parameters)[1:]
    texts = [f"{name}={x}" for name, x in zip(names, result.arguments, strict=False)]
    return textwrap.shorten(", ".join(texts), 80, placeholder=" ...")


def _dump_row(order: int, state: _DumpedGraph, live: Sequence[int]) -> str:
    """Show a graph's place in the order, its operations and collectives, its peak, and the peak's position."""
    nodes = list(state.graph.nodes)
    operations, collectives = sum(n.op == "call_function" for n in nodes), sum(map(is_collective, nodes))
    peak = max(live)
    counts = f"{operations:>10,} {collectives:>11} {peak:>16,} {live.index(peak):>7}"
    return f"{order:>2}  {state.name:<21} {counts}  {state.detail}".rstrip()


def _graph_text(name: str, state: _DumpedGraph, live: Sequence[int]) -> str:
    """Describe a graph: a line for each node, with the bytes that are live while the node runs."""
    peak = max(live)
    lines = [
        f"{name}, {state.name}({state.detail})",
        f"peak {peak:,} bytes at {live.index(peak)}; the step's arguments are live throughout",
        "",
    ]
    lines.append(f"{'at':>6} {'live bytes':>16}  {'value':<28} operation")
    lines += [
        f"{position:>6} {size:>16,}  {_node_line(node)}"
        for position, (node, size) in enumerate(zip(state.graph.nodes, live, strict=True))
    ]
    return "\n".join([*lines, ""])


def _node_line(node: Node) -> str:
    """Describe a node: its dtypes and shapes, its operation and operands, its unit, and its source line."""
    operands = [*map(str, node.args), *[f"{key}={x}" for key, x in node.kwargs.items()]]
    target = display_name(node)
    if loop := node_loop(node):
        target = f"a loop of {loop.iterations} iterations, in the folder {node.name}/, of"
    operation = f"{node.name} = {target}({', '.join(operands)})"
    if node.op == "placeholder":
        operation = f"{node.name}: {node.meta.get('label', 'an argument')}"
    if node.op == "output":
        operation = f"return {operands[0]}"
    notes = [x for x in (node.meta.get("unit", ""), node_line(node)) if x]
    return f"{dtypes_and_shapes(node):<28} {operation}" + (f"  # {', '.join(notes)}" if notes else "")
