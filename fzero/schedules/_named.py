"""The schedules that have names."""

import difflib
from collections.abc import Callable
from typing import Any

from fzero.schedules._greedy import Cap, greedy
from fzero.schedules._schedule import Schedule

__all__ = ["schedule"]


def schedule(
    name: str, ranks: int, micro_batches: int, stages: int = 1, *, cap: Cap = None, **durations: Any
) -> Schedule:
    """Make a known schedule.

    | name | order | in flight on rank r |
    | --- | --- | --- |
    | "gpipe" | all forward passes, then all backward passes | all micro-batches |
    | "1f1b" | a forward pass, a backward pass, in turn | ranks - r |

    Args:
        name: one of the table.
        ranks: how many ranks the pipeline has.
        micro_batches: how many go through it.
        stages: how many pipeline stages a rank holds.
        cap: another cap on what is in flight, as in `greedy`.
        **durations: `forward`, `backward`, `weight`, `hop` and `cost`, as in `greedy`, which may change the order.

    Raises:
        ValueError: if there is no schedule of this name, or it cannot be made for these counts.

    Example:
        >>> schedule("1f1b", ranks=4, micro_batches=8)
        Schedule('1f1b': 4 ranks, 4 stages, 8 micro-batches)

    References:
        Huang et al., GPipe, 2019. Narayanan et al., PipeDream-Flush in Memory-Efficient Pipeline-Parallel DNN
        Training, 2021.
    """
    if name not in NAMES:
        near = difflib.get_close_matches(str(name).lower(), NAMES, 1, 0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"schedule {name!r}: expected one of {', '.join(map(repr, NAMES))}{hint}")
    return NAMES[name](ranks, micro_batches, stages, cap, durations)


def _gpipe(ranks: int, micro_batches: int, stages: int, cap: Cap, durations: dict[str, Any]) -> Schedule:
    if cap is not None:
        raise ValueError(f"schedule 'gpipe' has no cap, and got cap={cap!r}: with one it is '1f1b'")
    return greedy(ranks, micro_batches, stages, name="gpipe", **durations)


def _1f1b(ranks: int, micro_batches: int, stages: int, cap: Cap, durations: dict[str, Any]) -> Schedule:
    if stages != 1:
        raise ValueError(f"schedule '1f1b' has one stage on each rank, and got stages={stages}: use 'interleaved'")
    return greedy(ranks, micro_batches, 1, cap=cap or (lambda rank: ranks - rank), name="1f1b", **durations)


NAMES: dict[str, Callable[..., Schedule]] = {"gpipe": _gpipe, "1f1b": _1f1b}
