"""How experts tune, as rules of a table: which of them its best configuration keeps, where it deviates, and why."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from fzero.graph import size
from fzero.parallel.schedules import schedule
from fzero.tuning._row import Row
from fzero.tuning._space import REMATS, Configuration

__all__ = ["RULES", "ConfigurationRule", "RuleContext", "Verdict", "verdicts"]

ALIKE = 0.01  # what share of a step's seconds such a model cannot tell
CHUNKS = 8  # micro-batches of a pipeline's rank: then it idles for less than a ninth of the time
LAYOUT = ("tp", "pp", "ranks", "schedule", "accumulation")  # what changes where ranks are laid out in another way


class RuleContext(NamedTuple):
    """What a rule looks at.

    Attributes:
        best: the fastest row that fits.
        fitting: all that fit, the fastest first.
        near: devices of a host.
    """

    best: Row
    fitting: Sequence[Row]
    near: int


class ConfigurationRule(NamedTuple):
    """A rule of experts.

    Attributes:
        text: the rule.
        expected: returns the rows among which the rule has its choice, the one that it would take first. None where
            the rule says nothing of the best configuration, as of experts in a model without.
    """

    text: str
    expected: Callable[[RuleContext], list[Row] | None]


class Verdict(NamedTuple):
    """What a table's best configuration is by a rule.

    Attributes:
        rule: the rule.
        kept: whether it is what the rule would take.
        why: the reason, in numbers; "" if it is kept.
    """

    rule: str
    kept: bool
    why: str

    def __str__(self) -> str:
        return f"kept: {self.rule}" if self.kept else f"not kept: {self.rule}: {self.why}"


def verdicts(best: Row, fitting: Sequence[Row], near: int) -> list[Verdict]:
    """Judge the best row of a table by each rule that says something of it.

    Args:
        best: the fastest row that fits.
        fitting: all that fit.
        near: devices of a host.
    """
    asked, found = RuleContext(best, fitting, near), []
    for rule in RULES:
        expected = rule.expected(asked)
        if expected:
            found.append(Verdict(rule.text, expected[0] is best, _why(best, expected[0])))
    return found


# ---------------------------------------------------------------- the rules


def _settings(config: Configuration) -> Configuration:
    """Return what is left of a configuration when the batch is set aside."""
    return replace(config, micro_batch=1, accumulation=1)


def _others(asked: RuleContext, *names: str) -> list[Row]:
    """List the rows that fit and differ from the best in some fields alone, itself among them."""

    def rest(row: Row) -> Configuration:
        return replace(row.config, **dict.fromkeys(names))

    return [r for r in asked.fitting if rest(r) == rest(asked.best)]


def _settings_first(asked: RuleContext) -> list[Row] | None:
    """Take the settings that are the fastest at the smallest micro-batch, and the best row of these."""
    least = min([r.config.micro_batch for r in asked.fitting])
    first = next(r for r in asked.fitting if r.config.micro_batch == least)
    return [r for r in asked.fitting if _settings(r.config) == _settings(first.config)]


def _accumulation(asked: RuleContext) -> list[Row] | None:
    """Reach the global batch by accumulation at the smallest micro-batch."""
    found = _others(asked, "micro_batch", "accumulation")
    return sorted(found, key=lambda r: r.config.micro_batch) if len(found) > 1 else None


def _micro_batch(asked: RuleContext) -> list[Row] | None:
    """Raise the micro-batch as far as it fits."""
    found = _others(asked, "micro_batch", "accumulation")
    return sorted(found, key=lambda r: -r.config.micro_batch) if len(found) > 1 else None


def _stage(asked: RuleContext) -> list[Row] | None:
    """Take the lowest stage that fits."""
    found = _others(asked, "stage")
    return sorted(found, key=lambda r: r.config.stage) if len(found) > 1 else None


def _remat(asked: RuleContext) -> list[Row] | None:
    """Run again no more than must be."""
    found = _others(asked, "remat")
    return sorted(found, key=lambda r: REMATS.index(r.config.remat)) if len(found) > 1 else None


def _offload(asked: RuleContext) -> list[Row] | None:
    """Keep on the device what fits."""
    found = _others(asked, "offload")
    return sorted(found, key=lambda r: r.config.offload) if len(found) > 1 else None


def _experts(asked: RuleContext) -> list[Row] | None:
    """Split experts over the ranks of a machine, and over no more."""
    found = _others(asked, "ep")
    if len(found) < 2:
        return None
    return sorted(found, key=lambda r: (r.config.ep > asked.near, -r.config.ep))


def _model_ranks(asked: RuleContext) -> list[Row] | None:
    """Spread a model over as few ranks as hold it, and be data-parallel with the rest."""
    found = _others(asked, *LAYOUT)
    if len({_spread(r) for r in found}) < 2:
        return None
    return sorted(found, key=lambda r: (_spread(r), *_within(asked, r)))


def _machine_first(asked: RuleContext) -> list[Row] | None:
    """Split matrices over a machine's devices, and lay a pipeline across machines."""
    found = [r for r in _others(asked, *LAYOUT) if _spread(r) == _spread(asked.best)]
    return sorted(found, key=lambda r: _within(asked, r)) if len({r.config.tp for r in found}) > 1 else None


def _in_turn(asked: RuleContext) -> list[Row] | None:
    """Cut the batch so small that a pipeline is full most of the time, and no smaller."""
    found = _others(asked, "micro_batch", "accumulation")
    if asked.best.config.pp == 1 or len(found) < 2:
        return None
    enough = CHUNKS * asked.best.config.pp

    def cut(row: Row) -> tuple[bool, int]:
        n = row.config.accumulation
        return n < enough, n if n >= enough else -n

    return sorted(found, key=cut)


def _spread(row: Row) -> int:
    return row.config.tp * row.config.pp


def _within(asked: RuleContext, row: Row) -> tuple[bool, int]:
    """Order rows by tp: the most ranks that a machine has first, then what would leave it."""
    return row.config.tp > asked.near, -row.config.tp


# in the order in which experts go
RULES = (
    ConfigurationRule("choose all else at the smallest micro-batch that was asked for", _settings_first),
    ConfigurationRule("the lowest stage that fits", _stage),
    ConfigurationRule("no more remat than memory asks for", _remat),
    ConfigurationRule("no more offload than memory asks for", _offload),
    ConfigurationRule("experts split over a machine's devices, not over more", _experts),
    ConfigurationRule("a model over as few ranks, tp times pp, as hold it", _model_ranks),
    ConfigurationRule("tensor parallelism within a machine, a pipeline across machines", _machine_first),
    ConfigurationRule(f"{CHUNKS} micro-batches for each rank of a pipeline", _in_turn),
    ConfigurationRule("then accumulation up to the global batch", _accumulation),
    ConfigurationRule("then the largest micro-batch that fits", _micro_batch),
)


# ---------------------------------------------------------------- reasons


def _why(best: Row, other: Row) -> str:
    """Say what the rule's row takes beside the best, and what makes the difference."""
    if other is best:
        return ""
    more = other.seconds / best.seconds - 1
    if more < ALIKE:
        return f"{other.config} takes {more:.1%} more, which is less than such a model can tell"
    reasons = [f"it moves {_moved(other)} where {_moved(best)} are enough"] if _sum(other) > 1.05 * _sum(best) else []
    if other.flops > 1.02 * best.flops:
        reasons.append(f"it computes {other.flops / best.flops - 1:.0%} more")
    if other.config.accumulation > best.config.accumulation:
        reasons.append(f"it starts its operations {other.config.accumulation} times and not {best.config.accumulation}")
    if (idle := _idle(other)) > _idle(best) + ALIKE:
        reasons.append(f"its pipeline is idle for {idle:.0%} of the time")
    if other.host_bytes > best.host_bytes:
        reasons.append("it waits for the host")
    said = " and ".join(reasons) or "its collectives are less hidden"
    return f"{other.config} takes {more:.0%} more: {said}"


def _idle(row: Row) -> float:
    """Return the share of the time for which the ranks of a pipeline wait, were its stages alike."""
    c = row.config
    return 1 - schedule(c.schedule, c.pp, c.accumulation, c.pipeline_stages).timing().efficiency if c.pp > 1 else 0.0


def _sum(row: Row) -> float:
    return sum(row.moved.values())


def _moved(row: Row) -> str:
    """Say how many bytes a row moves; along which axes, if there are several."""
    parts = [f"{size(n)} along {axis}" for axis, n in row.moved.items()]
    return f"{size(_sum(row))} ({', '.join(parts)})" if len(parts) > 1 else size(_sum(row))
