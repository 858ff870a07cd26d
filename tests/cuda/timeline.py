"""A step's timeline: order, streams and waits are the log's, and seconds are those of fzero's cost model."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fzero._report import new_figure
from fzero._torch import flop_formulas, with_query_heads
from fzero.graph import Hardware
from fzero.graph.planning._collective_seconds import _find_route, _latency_seconds, _transfer_seconds
from tests.cuda import log
from tests.cuda.log import Event
from tests.cuda.streams import COMPUTE, WORK

LAUNCHES = (*WORK, "copy", "fill")


class Span(NamedTuple):
    """The work of a stream from one second to another."""

    row: str  # "compute" or "collectives"
    name: str
    start: float
    end: float


class Timeline(NamedTuple):
    """A step's spans, and the seconds in which the compute stream waited for collectives."""

    spans: list[Span]
    exposed: float

    @staticmethod
    def of(fields: Sequence[Any]) -> "Timeline":
        """Make a timeline from what `json` made of one."""
        return Timeline([Span(*span) for span in fields[0]], fields[1])

    @property
    def seconds(self) -> float:
        return max(span.end for span in self.spans)

    @property
    def communication(self) -> float:
        return sum(span.end - span.start for span in self.spans if span.row == "collectives")

    @property
    def hidden(self) -> float:
        """The share of the collectives' seconds in which the compute stream did not wait for them."""
        return 1 - self.exposed / self.communication


class NoteWork(TorchDispatchMode):
    """Note in the log, behind the launches of each operation, how long it takes by the cost model."""

    def __init__(self, hardware: Hardware) -> None:
        super().__init__()
        self._hardware = hardware

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = f(*args, **(kwargs or {}))
        tensors = {id(x): x for x in _tensors([args, kwargs, out])}.values()
        if any(x.is_cuda for x in tensors):
            seconds = _operation_seconds(f, args, kwargs or {}, out, sum(x.nbytes for x in tensors), self._hardware)
            log.note("work", int(1e9 * seconds), f.overloadpacket.__name__)
        return out


def _tensors(values: Any) -> list[torch.Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(values) if isinstance(x, torch.Tensor)]


def _operation_seconds(f: Any, args: Any, kwargs: Any, out: Any, size: int, hardware: Hardware) -> float:
    """Return the seconds of `fzero.graph.planning._cost.estimate_work`; causal attention computes half of all pairs."""
    packet, flops = f.overloadpacket, 0.0
    if packet in flop_formulas():
        flops = flop_formulas()[packet](*with_query_heads(packet, args), **kwargs, out_val=out)
        flops *= 0.5 if "attention" in packet.__name__ and any(x is True for x in args) else 1.0
    slow = hardware.float32_slowdown if any(x.element_size() > 2 for x in _tensors(args)[:1]) else 1.0
    return max(flops * slow / hardware.flops, size / hardware.memory_bandwidth, hardware.launch_seconds)


def timeline(events: Sequence[Event], hardware: Hardware, ranks: int) -> Timeline:
    """Give each work and each collective of a log its seconds. All collectives share one wire.

    Args:
        events: a step's log, noted within `NoteWork`.
        hardware: the hardware of the cost model.
        ranks: of each collective; consecutive ranks share a machine.
    """
    clocks: dict[str, float] = {}
    recorded: dict[int, float] = {}
    spans: list[Span] = []
    exposed = wire = 0.0
    launched = False
    for e in events:
        now = clocks.get(e.stream, 0.0)
        if e.kind == "work" and launched:
            clocks[COMPUTE] = clocks.get(COMPUTE, 0.0) + e.bytes / 1e9
            spans.append(Span("compute", e.name, clocks[COMPUTE] - e.bytes / 1e9, clocks[COMPUTE]))
            launched = False
        elif e.kind in LAUNCHES and e.stream == COMPUTE:
            launched = True
        elif e.kind == "collective":
            start, launched = max(now, wire), False
            clocks[e.stream] = wire = start + _collective_seconds(e, hardware, ranks)
            spans.append(Span("collectives", e.name, start, wire))
        elif e.kind == "record event":
            recorded[e.bytes] = now
        elif e.kind == "wait event":
            clocks[e.stream] = max(now, recorded.get(e.bytes, 0.0))
            exposed += clocks[e.stream] - now if e.stream == COMPUTE else 0.0
    return Timeline(spans, exposed)


def _collective_seconds(e: Event, hardware: Hardware, ranks: int) -> float:
    kind = e.name.removesuffix(" in place")
    total = e.bytes * (1 if kind == "all_reduce" else ranks)
    route = _find_route(("dp",), (("dp", ranks),), hardware.ranks_per_machine)
    return (
        hardware.latency_seconds
        + _latency_seconds(kind, route, hardware)
        + _transfer_seconds(kind, total, route, hardware, 0.0)
    )


def draw(actual: Timeline, title: str, path: Any) -> None:
    """Draw the whole step, and below it a twentieth from its forward and from its backward pass."""
    figure = new_figure(11, 5.5)
    whole, forward, backward = figure.subplots(3, 1)
    for axes, around in ((whole, None), (forward, 0.15), (backward, 0.6)):
        _draw_rows(axes, actual)
        if around is not None:
            axes.set_xlim(1e3 * actual.seconds * around, 1e3 * actual.seconds * (around + 0.05))
    whole.set_title(title, fontsize=10)
    backward.set_xlabel("milliseconds")
    figure.savefig(path, dpi=110)


COLORS = {"all_gather": "#1f77b4", "reduce_scatter": "#d62728", "all_reduce": "#9467bd"}


def _draw_rows(axes: Any, actual: Timeline) -> None:
    for y, row in enumerate(("collectives", "compute")):
        spans = [span for span in actual.spans if span.row == row]
        colors = [COLORS.get(span.name.removesuffix(" in place"), _color_of_work(span.name)) for span in spans]
        axes.broken_barh([(1e3 * s.start, 1e3 * (s.end - s.start)) for s in spans], (y - 0.4, 0.8), facecolors=colors)
    axes.set_yticks([0, 1], ["collectives", "compute"])


def _color_of_work(name: str) -> str:
    """Products and attention are dark, all other operations light."""
    return "#2b2b2b" if "mm" in name or "attention" in name else "#b5b5b5"
