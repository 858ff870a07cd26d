"""Expert rules of tuning: which of them a table's best configuration follows, and why it deviates from the rest."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from fzero._format import format_bytes
from fzero.parallel.schedules import schedule
from fzero.tuning._row import TableRow
from fzero.tuning._search_space import REMATS, Configuration

__all__ = ["Verdict", "verdicts"]

_TIME_RESOLUTION = 0.01  # the cost model cannot resolve smaller differences, as a share of a step's seconds
_MICRO_BATCHES_PER_RANK = 8  # of a pipeline, which then idles for less than a ninth of the time
_PARALLEL_FIELDS = ("tp", "pp", "ranks", "schedule", "accumulation")  # the fields that change with the layout of ranks


class _RuleContext(NamedTuple):
    """The input of a rule.

    Attributes:
        best: the fastest row that fits.
        fitting: all rows that fit, the fastest first.
        devices_per_host: the number of devices of a host.
    """

    best: TableRow
    fitting: Sequence[TableRow]
    devices_per_host: int


class _ConfigurationRule(NamedTuple):
    """An expert rule.

    Attributes:
        text: the rule, as text.
        expected: a function that returns the rows from which the rule chooses, its choice first. It returns None where
            the rule does not apply to the best configuration, such as a rule about experts to a dense model.
    """

    text: str
    expected: Callable[[_RuleContext], list[TableRow] | None]


class Verdict(NamedTuple):
    """The verdict on a table's best configuration by one rule.

    Attributes:
        rule: the rule, as text.
        is_followed: whether the best configuration is the rule's choice.
        why: the reason for the deviation, in numbers; "" if the rule is followed.
    """

    rule: str
    is_followed: bool
    why: str

    def __str__(self) -> str:
        return f"kept: {self.rule}" if self.is_followed else f"not kept: {self.rule}: {self.why}"


def verdicts(best: TableRow, fitting: Sequence[TableRow], devices_per_host: int) -> list[Verdict]:
    """Judge the best row of a table by each rule that applies to it.

    Args:
        best: the fastest row that fits.
        fitting: all rows that fit, the fastest first.
        devices_per_host: the number of devices of a host.
    """
    context = _RuleContext(best, fitting, devices_per_host)
    results = []
    for rule in _RULES:
        expected = rule.expected(context)
        if expected:
            results.append(Verdict(rule.text, expected[0] is best, _explain_choice(best, expected[0])))
    return results


def _with_unit_batch(config: Configuration) -> Configuration:
    """Return a configuration with its batch fields set to 1, for comparison of the rest."""
    return replace(config, micro_batch=1, accumulation=1)


def _comparable_rows(context: _RuleContext, *names: str) -> list[TableRow]:
    """List the rows that fit and differ from the best in these fields alone. The best row is among them."""

    def clear_fields(row: TableRow) -> Configuration:
        return replace(row.config, **dict.fromkeys(names))

    return [r for r in context.fitting if clear_fields(r) == clear_fields(context.best)]


def _prefer_fast_settings(context: _RuleContext) -> list[TableRow] | None:
    """Take the fastest settings at the smallest micro-batch, and then the fastest row with these settings."""
    smallest = min([r.config.micro_batch for r in context.fitting])
    first = next(r for r in context.fitting if r.config.micro_batch == smallest)
    return [r for r in context.fitting if _with_unit_batch(r.config) == _with_unit_batch(first.config)]


def _prefer_accumulation(context: _RuleContext) -> list[TableRow] | None:
    """Reach the global batch by accumulation at the smallest micro-batch."""
    rows = _comparable_rows(context, "micro_batch", "accumulation")
    return sorted(rows, key=lambda r: r.config.micro_batch) if len(rows) > 1 else None


def _prefer_large_micro_batches(context: _RuleContext) -> list[TableRow] | None:
    """Raise the micro-batch as far as it fits."""
    rows = _comparable_rows(context, "micro_batch", "accumulation")
    return sorted(rows, key=lambda r: -r.config.micro_batch) if len(rows) > 1 else None


def _prefer_low_stages(context: _RuleContext) -> list[TableRow] | None:
    """Take the lowest stage that fits."""
    rows = _comparable_rows(context, "stage")
    return sorted(rows, key=lambda r: r.config.stage) if len(rows) > 1 else None


def _prefer_less_remat(context: _RuleContext) -> list[TableRow] | None:
    """Recompute no more than memory requires."""
    rows = _comparable_rows(context, "remat")
    return sorted(rows, key=lambda r: REMATS.index(r.config.remat)) if len(rows) > 1 else None


def _prefer_less_offload(context: _RuleContext) -> list[TableRow] | None:
    """Keep as much state on the device as fits."""
    rows = _comparable_rows(context, "offload")
    return sorted(rows, key=lambda r: r.config.offload) if len(rows) > 1 else None


def _prefer_experts_within_host(context: _RuleContext) -> list[TableRow] | None:
    """Split experts over the ranks of a machine, and not over more."""
    rows = _comparable_rows(context, "ep")
    if len(rows) < 2:
        return None
    return sorted(rows, key=lambda r: (r.config.ep > context.devices_per_host, -r.config.ep))


def _prefer_few_model_ranks(context: _RuleContext) -> list[TableRow] | None:
    """Spread a model over as few ranks as can hold it, and use the rest for data parallelism."""
    rows = _comparable_rows(context, *_PARALLEL_FIELDS)
    if len({_ranks_per_model(r) for r in rows}) < 2:
        return None
    return sorted(rows, key=lambda r: (_ranks_per_model(r), *_tp_sort_key(context, r)))


def _machine_first(context: _RuleContext) -> list[TableRow] | None:
    """Split matrices over a machine's devices, and lay a pipeline across machines."""
    rows = [
        r for r in _comparable_rows(context, *_PARALLEL_FIELDS) if _ranks_per_model(r) == _ranks_per_model(context.best)
    ]
    return sorted(rows, key=lambda r: _tp_sort_key(context, r)) if len({r.config.tp for r in rows}) > 1 else None


def _pipeline_fill(context: _RuleContext) -> list[TableRow] | None:
    """Split the batch into enough micro-batches to fill the pipeline most of the time, and not into more."""
    rows = _comparable_rows(context, "micro_batch", "accumulation")
    if context.best.config.pp == 1 or len(rows) < 2:
        return None
    enough = _MICRO_BATCHES_PER_RANK * context.best.config.pp

    def order(row: TableRow) -> tuple[bool, int]:
        n = row.config.accumulation
        return n < enough, n if n >= enough else -n

    return sorted(rows, key=order)


def _ranks_per_model(row: TableRow) -> int:
    return row.config.tp * row.config.pp


def _tp_sort_key(context: _RuleContext, row: TableRow) -> tuple[bool, int]:
    """Return a key that sorts rows by tp: the largest within a machine first, those that cross machines last."""
    return row.config.tp > context.devices_per_host, -row.config.tp


# in the order in which experts apply them
_RULES = (
    _ConfigurationRule("choose all else at the smallest micro-batch of the search", _prefer_fast_settings),
    _ConfigurationRule("the lowest stage that fits", _prefer_low_stages),
    _ConfigurationRule("no more remat than memory requires", _prefer_less_remat),
    _ConfigurationRule("no more offload than memory requires", _prefer_less_offload),
    _ConfigurationRule("experts split over the devices of one machine at most", _prefer_experts_within_host),
    _ConfigurationRule("a model over as few ranks, tp times pp, as can hold it", _prefer_few_model_ranks),
    _ConfigurationRule("tensor parallelism within a machine, pipelines across machines", _machine_first),
    _ConfigurationRule(f"{_MICRO_BATCHES_PER_RANK} micro-batches for each rank of a pipeline", _pipeline_fill),
    _ConfigurationRule("then accumulation up to the global batch", _prefer_accumulation),
    _ConfigurationRule("then the largest micro-batch that fits", _prefer_large_micro_batches),
)


def _explain_choice(best: TableRow, choice: TableRow) -> str:
    """Compare the rule's choice with the best row, and explain the difference; "" if they are the same."""
    if choice is best:
        return ""
    extra_share = choice.seconds / best.seconds - 1
    if extra_share < _TIME_RESOLUTION:
        return f"{choice.config} takes {extra_share:.1%} more, which is less than the cost model can resolve"
    reasons = (
        [f"it moves {_moved_text(choice)} instead of {_moved_text(best)}"]
        if _moved_bytes(choice) > 1.05 * _moved_bytes(best)
        else []
    )
    if choice.flops > 1.02 * best.flops:
        reasons.append(f"it computes {choice.flops / best.flops - 1:.0%} more")
    if choice.config.accumulation > best.config.accumulation:
        reasons.append(
            f"it launches its operations {choice.config.accumulation} times instead of {best.config.accumulation}"
        )
    if (idle := _idle_share(choice)) > _idle_share(best) + _TIME_RESOLUTION:
        reasons.append(f"its pipeline is idle for {idle:.0%} of the time")
    if choice.host_bytes > best.host_bytes:
        reasons.append("it waits for the host")
    text = " and ".join(reasons) or "its collectives overlap less with compute"
    return f"{choice.config} takes {extra_share:.0%} more: {text}"


def _idle_share(row: TableRow) -> float:
    """Return the share of the time that the ranks of a pipeline idle, if all stages took equally long."""
    c = row.config
    return 1 - schedule(c.schedule, c.pp, c.accumulation, c.pipeline_stages).timing().efficiency if c.pp > 1 else 0.0


def _moved_bytes(row: TableRow) -> float:
    return sum(row.traffic_bytes.values())


def _moved_text(row: TableRow) -> str:
    """Format the bytes that a row moves, by axis if there are several."""
    parts = [f"{format_bytes(n)} along {axis}" for axis, n in row.traffic_bytes.items()]
    return (
        f"{format_bytes(_moved_bytes(row))} ({', '.join(parts)})" if len(parts) > 1 else format_bytes(_moved_bytes(row))
    )
