"""The passes in their order, and the knobs of `fzero.jit` that set them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, NamedTuple

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fzero.graph._ir import FUSED, copied, is_input, nbytes, values
from fzero.graph._storages import moves
from fzero.graph.loop._scan import loop_of, with_body
from fzero.graph.passes._bucket import bucket
from fzero.graph.passes._carry import carry
from fzero.graph.passes._donate import donate
from fzero.graph.passes._drop_lone_collectives import drop_lone_collectives
from fzero.graph.passes._early_move import early_move
from fzero.graph.passes._gather_into import gather_into
from fzero.graph.passes._hoist import hoist
from fzero.graph.passes._in_place import in_place
from fzero.graph.passes._keep_on_host import keep_on_host
from fzero.graph.passes._mark_fused import mark_fused
from fzero.graph.passes._recast import recast
from fzero.graph.passes._recompute import recompute
from fzero.graph.passes._regather import regather
from fzero.graph.passes._schedule import Orders, schedule
from fzero.graph.passes._slice_of_gather import slice_of_gather
from fzero.graph.planning._cost import Device
from fzero.graph.planning._liveness import live_in, most_in_a_turn
from fzero.graph.planning._plan import Settings

__all__ = ["AUTO", "FITTING", "PASSES", "Choice", "Knobs", "Pass", "PassContext", "PassManager", "Passed"]

# The passes in their order: the list that makes a schedule of a traced graph.
#
# Each row of `PASSES` says which arguments its pass takes from a `Choice`, the settings of one schedule, and from a
# `PassContext`, which all schedules of a step share. A new optimization is a new row: write the pass into a file of
# `fzero/graph/passes/`, and put it where it belongs. A setting of it is a field of `Choice`, whose values
# `fzero.graph._candidates` enumerates.


FITTING = "fitting"  # of prefetch: one ahead, where there is room


class Choice(NamedTuple):
    """The settings of one schedule.

    Attributes:
        recompute: whether cheap values are computed again for their late uses.
        max_reuse_bytes: how many bytes of other units may be used while a gathered unit stays.
        bucket_bytes: up to what size collectives are joined.
        prefetch: how many gathers start ahead, or `FITTING`.
        in_flight: how many reductions may be on their way while work goes on.
        across_turns: whether the last reductions of a loop's turn are on their way until the next one starts its own.
        room: the memory budget of `prefetch=FITTING`, in bytes. It follows from other schedules, and no plan shows it.
        recast: whether wide copies are made again for uses that wait for a collective.
    """

    recompute: bool
    max_reuse_bytes: float
    bucket_bytes: int
    prefetch: int | str = 0
    in_flight: int = 0
    across_turns: bool = False
    room: float = math.inf
    recast: bool = False

    def settings(self) -> Settings:
        """Return what a plan tells of the choice, by name; of loops and casts only where there is something to tell."""
        quiet = {"room", *[name for name in ("across_turns", "recast") if not getattr(self, name)]}
        return {k: v for k, v in self._asdict().items() if k not in quiet}


class PassContext(NamedTuple):
    """What all schedules of a step have in common.

    Attributes:
        pairs: the positions `(result, argument)` of results that are written into donated arguments.
        donated: the positions of all donated arguments.
        functional: whether no collective may overwrite what it is given, as Inductor asks of a whole graph.
        places: this rank's place in each process group, by the group's name.
        moves: whether values are copied from one memory to the other.
        device: that the cost model takes, if it is not the one that the values lie on.
        lone_groups: the process groups of one rank.
        fuses: whether Inductor compiles segments, and so stores no value that it computes within a loop.
    """

    pairs: tuple[tuple[int, int], ...] = ()
    donated: tuple[int, ...] = ()
    functional: bool = False
    places: tuple[tuple[str, int], ...] = ()
    moves: bool = False
    device: Device | None = None
    lone_groups: tuple[str, ...] = ()
    fuses: bool = False


class Pass(NamedTuple):
    """A row of the list.

    Attributes:
        name: of the pass.
        apply: a pure function of a graph and arguments to a graph with the same results, or to the graph itself.
        arguments: returns those arguments, all that the pass depends on beside the graph; None leaves the pass out.
        reads: returns what the pass finds in a graph whatever those are, its last argument, which choices share.
        loops: whether it runs on loops whose bodies have passed all rows, and not on each graph.
    """

    name: str
    apply: Callable[..., Graph]
    arguments: Callable[[Choice, PassContext], tuple[Any, ...] | None]
    reads: Callable[[Graph], Any] | None = None
    loops: bool = False


def _ahead(choice: Choice, given: PassContext) -> tuple[int | str, int, float]:
    """Return how many gathers start ahead, how many reductions may be on their way, and up to how many bytes."""
    if choice.prefetch == FITTING:
        return 1, choice.in_flight, choice.room
    return choice.prefetch, choice.in_flight, math.inf


PASSES = (
    Pass(
        "drop_lone_collectives",
        drop_lone_collectives,
        lambda choice, given: (given.lone_groups,) if given.lone_groups else None,
    ),
    Pass("keep_on_host", keep_on_host, lambda choice, given: () if given.moves else None),
    Pass("hoist", hoist, lambda choice, given: (choice.max_reuse_bytes,)),
    Pass("recompute", recompute, lambda choice, given: () if choice.recompute else None),
    Pass("regather", regather, lambda choice, given: (choice.max_reuse_bytes,)),
    Pass("bucket", bucket, lambda choice, given: (choice.bucket_bytes,)),
    Pass("recast", recast, lambda choice, given: () if choice.recast else None),
    Pass("early_move", early_move, lambda choice, given: () if given.moves else None),
    Pass("donate", donate, lambda choice, given: (given.pairs, given.donated)),
    Pass("in_place", in_place, lambda choice, given: None if given.functional else ()),
    Pass("gather_into", gather_into, lambda choice, given: None if given.functional else ()),
    Pass("slice_of_gather", slice_of_gather, lambda choice, given: None if given.functional else (given.places,)),
    Pass("mark_fused", mark_fused, lambda choice, given: () if given.fuses else None),
    Pass("schedule", schedule, _ahead, Orders),
    Pass("carry", carry, lambda choice, given: (choice.in_flight,) if choice.across_turns else None, loops=True),
)


class Passed(NamedTuple):
    """A graph after a pass.

    Attributes:
        row: the pass.
        arguments: what the pass was given; None if it was left out.
        graph: what it made, or the graph before it if it was left out.
    """

    row: Pass
    arguments: tuple[Any, ...] | None
    graph: Graph


@dataclass(frozen=True)
class PassManager:
    """The passes over one traced graph. Choices that begin alike share what the first passes make.

    Attributes:
        traced: the graph.
        given: what all choices have in common.
    """

    traced: Graph
    given: PassContext
    # by the graph before a pass, which is one object for choices that made it alike, the pass and its arguments
    _made: dict[tuple[Any, ...], Graph] = field(default_factory=dict, repr=False)
    _read: dict[tuple[str, Graph], Any] = field(default_factory=dict, repr=False)
    # those of loops, by the node's function
    _bodies: dict[Any, "PassManager"] = field(default_factory=dict, repr=False)

    def run(self, choice: Choice, last: str = PASSES[-1].name) -> list[Passed]:
        """Return the graph after each pass, in order, up to and with the `last`.

        The bodies of loops are scheduled behind the last pass over each graph, so that passes over loops find them.
        """
        graph, found = self.traced, []
        for row, following in zip(PASSES, [*PASSES[1:], None], strict=True):
            arguments = row.arguments(choice, self.given)
            if row.loops:
                arguments = arguments if _has_loops(graph) else None
                graph = graph if arguments is None else row.apply(graph, *arguments)
            elif arguments is not None:
                graph = self._after(row, graph, arguments)
            if following is not None and following.loops and not row.loops:
                graph = self._with_bodies(graph, choice)
            found.append(Passed(row, arguments, graph))
            if row.name == last:
                break
        return found

    def _after(self, row: Pass, graph: Graph, arguments: tuple[Any, ...]) -> Graph:
        """Return what a pass makes of a graph."""
        key = (graph, row.name, arguments)
        if key not in self._made:
            shared = []
            if row.reads is not None:
                if (row.name, graph) not in self._read:
                    self._read[row.name, graph] = row.reads(graph)
                shared = [self._read[row.name, graph]]
            made = row.apply(graph, *arguments, *shared)
            self._made[key] = graph if made is graph or _same(graph, made) else made
        return self._made[key]

    def scheduled(self, choice: Choice) -> Graph:
        """Return the graph after all passes."""
        return self.run(choice)[-1].graph

    def _with_bodies(self, graph: Graph, choice: Choice) -> Graph:
        """Return a graph whose loops have scheduled bodies."""
        if not _has_loops(graph):
            return graph
        graph = copied(graph)
        for node in [n for n in graph.nodes if loop_of(n)]:
            inside = choice if choice.room == math.inf else choice._replace(room=_room_in(graph, node, choice.room))
            with_body(node, self.body(node).scheduled(inside))
            for item in reversed(list(node.users)):  # at once, since the tuple holds all
                node.append(item)
        return graph

    def changed_by(self, choice: Choice, name: str) -> bool:
        """Return whether a pass adds or removes operations, in the graph or in the body of a loop."""
        before, after = [x.graph for x in [Passed(PASSES[0], None, self.traced), *self.run(choice, name)][-2:]]
        if len(before.nodes) != len(after.nodes):
            return True
        return any(self.body(n).changed_by(choice, name) for n in after.nodes if loop_of(n))

    def body(self, node: Node) -> "PassManager":
        """Return the passes over the body of a loop, of the loop's node in any graph."""
        if node.target not in self._bodies:
            loop = loop_of(node)
            assert loop is not None
            inside = self.given._replace(places=(), device=None, moves=moves(loop.body))
            given = inside._replace(pairs=loop.pairs, donated=tuple(loop.places_of_sums))
            self._bodies[node.target] = PassManager(loop.body, given)
        return self._bodies[node.target]


def _has_loops(graph: Graph) -> bool:
    return any(loop_of(n) for n in graph.nodes)


def _same(one: Graph, other: Graph) -> bool:
    """Return whether two graphs are alike, node by node, so that what follows makes the same of them."""
    if len(one.nodes) != len(other.nodes):
        return False
    return all(_described(a) == _described(b) for a, b in zip(one.nodes, other.nodes, strict=True))


def _described(node: Node) -> tuple[Any, ...]:
    args, kwargs = (map_arg(x, lambda a: a.name) for x in (node.args, node.kwargs))
    return node.name, node.target, args, kwargs, node.meta.get("unit"), FUSED in node.meta


def _room_in(graph: Graph, node: Node, room: float) -> float:
    """Return up to how many bytes may be alive in a loop's body, its arguments included."""
    loop = loop_of(node)
    assert loop is not None
    at = list(graph.nodes).index(node)
    around = live_in(list(graph.nodes))[at] - most_in_a_turn(loop)
    return room - around + nbytes(*[x for n in loop.body.nodes if is_input(n) for x in values(n)])


# The knobs of `fzero.jit`: what may be asked of a schedule, and what each knob takes.


AUTO = "auto"  # the cost model chooses


class Knobs(NamedTuple):
    """What the user asks of the schedule; "auto" leaves it to the cost model."""

    prefetch: int | str = AUTO
    in_flight: int | str = AUTO
    bucket_bytes: int | str = AUTO
    max_reuse_bytes: float | str = AUTO
    memory_budget: float | None = None
    recompute: bool | str = AUTO
    recast: bool | str = AUTO
    across_turns: bool | str = AUTO  # no argument of fzero.jit: asked for where a known schedule is made again

    @staticmethod
    def of(settings: Mapping[str, Any]) -> "Knobs":
        """Return what asks for a schedule that is known by its settings, which tell some only where they are True."""
        told = {"recast": False, "across_turns": False, **settings}
        return Knobs(**{name: value for name, value in told.items() if name in Knobs._fields}).checked()

    def checked(self) -> "Knobs":
        """Return the knobs as plain numbers of Python.

        Raises:
            ValueError: if one is set to none of its values. Says which those are.
        """
        return Knobs(**{name: TAKES[name].checked(name, value) for name, value in self._asdict().items()})


class _Takes(NamedTuple):
    """What a knob takes: a few values of its own, and numbers from 0 on.

    Attributes:
        values: its own values.
        number: what to call the numbers that it takes: `COUNT`, `AMOUNT`, or "" for none.
    """

    values: tuple[Any, ...]
    number: str

    def checked(self, name: str, value: Any) -> Any:
        """Return the value, if the knob takes it."""
        if any(value is own or (isinstance(value, str) and value == own) for own in self.values):
            return value
        if self.number == COUNT and isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0:
            return int(value)
        if self.number == AMOUNT and isinstance(value, Real) and not isinstance(value, bool) and float(value) >= 0:
            return int(value) if isinstance(value, Integral) else float(value)
        raise ValueError(f"{name}={value!r}: expected {self}")

    def __str__(self) -> str:
        said = [self.number] if self.number else []
        said += [f'"{own}"' if isinstance(own, str) else str(own) for own in self.values]
        return " or ".join([", ".join(said[:-1]), said[-1]])


COUNT = "an int from 0 on"
AMOUNT = "a number from 0 on"

TAKES = {
    "prefetch": _Takes((FITTING, AUTO), COUNT),
    "in_flight": _Takes((AUTO,), COUNT),
    "bucket_bytes": _Takes((AUTO,), COUNT),
    "max_reuse_bytes": _Takes((math.inf, AUTO), AMOUNT),
    "memory_budget": _Takes((None,), AMOUNT),
    "recompute": _Takes((True, False, AUTO), ""),
    "recast": _Takes((True, False, AUTO), ""),
    "across_turns": _Takes((True, False, AUTO), ""),
}
