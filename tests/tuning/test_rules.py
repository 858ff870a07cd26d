"""The rules of experts: which of them the best configuration keeps, and why it does not."""

from dataclasses import replace
from typing import Any

import pytest

from fzero.tuning import H100, Configuration, ConfigurationTable, TableRow
from fzero.tuning._verdicts import _RULES, verdicts

USUAL = Configuration(1, 1, 8, ranks=4)
SETTINGS, STAGE, REMAT, OFFLOAD, EXPERTS, SPREAD, WITHIN, CHUNKS, ACCUMULATION, MICRO = [rule.text for rule in _RULES]


def row(seconds: float, moved: float = 1e9, flops: float = 1e12, host_bytes: float = 0.0, **config: Any) -> TableRow:
    return TableRow(replace(USUAL, **config), {"parameters": 1e9}, {"dp": moved}, seconds, host_bytes, flops, True, {})


def judge(*rows: TableRow, devices_per_host: int = 8) -> dict[str, tuple[bool, str]]:
    fitting = sorted(rows, key=lambda r: r.seconds)
    return {v.rule: (v.is_followed, v.why) for v in verdicts(fitting[0], fitting, devices_per_host)}


def test_a_table_of_one_row_is_judged_by_one_rule():
    assert judge(row(1.0)) == {SETTINGS: (True, "")}


@pytest.mark.parametrize(
    "rule,best,other,why",
    [
        (STAGE, {"stage": 2, "moved": 1e9}, {"stage": 1, "moved": 2e9}, "it moves 2.0 GB instead of 1.0 GB"),
        (STAGE, {"stage": 2}, {"stage": 0}, "its collectives overlap less with compute"),
        (REMAT, {"remat": True}, {"remat": "matmuls", "flops": 1.5e12}, "it computes 50% more"),
        (OFFLOAD, {"offload": 1.0}, {"offload": 0.5, "host_bytes": 1e9}, "it waits for the host"),
        (EXPERTS, {"ep": 1}, {"ep": 4, "moved": 3e9}, "it moves 3.0 GB instead of 1.0 GB"),
        (SPREAD, {"pp": 4}, {"pp": 2, "moved": 3e9}, "it moves 3.0 GB instead of 1.0 GB"),
        (SPREAD, {"tp": 4}, {"tp": 1, "pp": 2, "accumulation": 3}, "its pipeline is idle for 25% of the time"),
        (WITHIN, {"pp": 4}, {"tp": 4, "moved": 3e9}, "it moves 3.0 GB instead of 1.0 GB"),
        (
            CHUNKS,
            {"pp": 4, "micro_batch": 8, "accumulation": 1},
            {"pp": 4, "micro_batch": 1, "accumulation": 8},
            "it launches its operations 8 times instead of 1",
        ),
        (MICRO, {}, {"micro_batch": 8, "accumulation": 1, "moved": 3e9}, "it moves 3.0 GB instead of 1.0 GB"),
        (
            ACCUMULATION,
            {"micro_batch": 8, "accumulation": 1},
            {"micro_batch": 1, "accumulation": 8},
            "it launches its operations 8 times instead of 1",
        ),
    ],
)
def test_a_broken_rule_says_by_how_much_and_why(rule, best, other, why):
    """The one that the rule would take is slower; were it the faster, the rule would be kept."""
    result = judge(row(1.0, **best), row(1.5, **other))
    holds, said = result[rule]
    assert not holds and said.startswith(str(replace(USUAL, **{k: v for k, v in other.items() if k in vars(USUAL)})))
    assert said.endswith(f" takes 50% more: {why}")
    assert judge(row(2.0, **best), row(1.5, **other))[rule] == (True, "")


def test_a_rule_within_the_cost_models_resolution_says_so():
    (holds, why) = judge(row(1.0, stage=2), row(1.004, stage=1))[STAGE]
    assert not holds and why.endswith("takes 0.4% more, which is less than the cost model can resolve")


def test_a_rule_requires_the_smallest_micro_batch_before_lean_settings():
    """There stage 3 is the fastest; where the batch is set aside, another stage is."""
    small = [row(4.0, stage=1), row(3.0, stage=3)]
    large = [row(s, stage=stage, micro_batch=8, accumulation=1) for s, stage in ((1.0, 1), (2.0, 3))]
    holds, why = judge(*small, *large)[SETTINGS]
    assert not holds and why.startswith("stage 3, micro-batch 8 x 1, bfloat16 takes 100% more")
    assert judge(*small, replace(large[1], seconds=0.5))[SETTINGS] == (True, "")


def test_a_rule_keeps_experts_within_a_machine():
    rows = row(1.0, ep=4), row(2.0, ep=8), row(3.0, ep=16)
    assert judge(*rows, devices_per_host=4)[EXPERTS] == (True, "")
    assert judge(*rows, devices_per_host=8)[EXPERTS][1].startswith(
        "stage 1, micro-batch 1 x 8, bfloat16, ep 8 takes 100% more"
    )


def test_a_rule_keeps_tensor_parallelism_within_a_machine_and_pipelines_across():
    """Of layouts over equally many ranks the one with most of a machine's devices to a matrix, and no more."""
    rows = row(1.0, tp=4, pp=4), row(2.0, tp=8, pp=2), row(3.0, tp=16), row(4.0, tp=2, pp=8)
    assert judge(*rows, devices_per_host=4)[WITHIN] == (True, "")
    for devices_per_host, first in ((8, "tp 8, pp 2 by 1f1b"), (16, "tp 16"), (2, "tp 2, pp 8 by 1f1b")):
        holds, why = judge(*rows, devices_per_host=devices_per_host)[WITHIN]
        assert not holds and why.startswith(f"stage 1, micro-batch 1 x 8, bfloat16, {first} takes ")
    assert SPREAD not in judge(*rows)
    holds, why = judge(*rows, row(5.0, tp=2, pp=2), row(6.0, tp=4))[SPREAD]
    assert not holds and why.startswith("stage 1, micro-batch 1 x 8, bfloat16, tp 4 takes 500% more")
    assert WITHIN not in judge(row(1.0, pp=4), row(2.0, pp=2)) and WITHIN not in judge(row(1.0), row(2.0))


def test_rules_compare_layouts_that_differ_in_derived_settings():
    """Fewer data-parallel ranks have more micro-batches each."""
    one, two = row(1.0, ranks=4, accumulation=8), row(2.0, ranks=2, accumulation=16, pp=2, schedule="gpipe")
    assert judge(one, two)[SPREAD] == (True, "")
    assert judge(replace(one, seconds=3.0), two)[SPREAD][0] is False


def test_a_rule_bounds_the_micro_batches_of_a_pipeline():
    rows = [row(s, pp=2, micro_batch=m, accumulation=64 // m) for s, m in ((1.0, 4), (2.0, 2), (3.0, 8), (4.0, 1))]
    assert judge(*rows)[CHUNKS] == (True, "")  # 16 for two ranks
    holds, why = judge(*rows[1:])[CHUNKS]
    assert holds and not why  # 32, since 8 are too few
    assert judge(rows[2], row(4.0, pp=2, micro_batch=16, accumulation=4))[CHUNKS] == (True, "")
    assert judge(rows[0], rows[2])[CHUNKS][0] and not judge(replace(rows[2], seconds=0.1), rows[0])[CHUNKS][0]
    assert CHUNKS not in judge(row(1.0), row(2.0, micro_batch=8, accumulation=1))


def test_a_broken_rule_lists_bytes_by_axis():
    two = replace(row(1.5, stage=1), traffic_bytes={"dp": 1e9, "tp": 2e9})
    why = judge(row(1.0, stage=2), two)[STAGE][1]
    assert why.endswith("it moves 3.0 GB (1.0 GB along dp, 2.0 GB along tp) instead of 1.0 GB")


def test_rules_compare_fitting_rows_that_differ_in_one_setting():
    assert STAGE not in judge(row(1.0, stage=2), row(2.0, stage=1, remat=True))
    table = ConfigurationTable((row(1.0, stage=2), row(2.0, stage=1)), (), H100, None, budget_bytes=2e9)
    assert {v.rule for v in table.rules()} == {SETTINGS, STAGE}
    assert f"rule not kept: {STAGE}: stage 1" in str(table).replace("\n", " ") and f"rule kept: {SETTINGS}" in str(
        table
    )
    assert replace(table, budget_bytes=1.0).rules() == []
