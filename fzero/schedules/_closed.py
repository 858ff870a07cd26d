"""Orders that are known in closed form, for any number of micro-batches."""

from collections.abc import Sequence

from fzero.schedules._actions import Action, Kind
from fzero.schedules._greedy import placed
from fzero.schedules._schedule import Schedule
from fzero.schedules._timing import Durations

__all__ = ["one_f_one_b", "shortest", "there_and_back"]


def groups(ranks: int, micro_batches: int) -> list[int]:
    """Cut micro-batches into groups that go round the ranks together: as many as can have one for each rank.

    Megatron's groups have one micro-batch for each rank, and it refuses a last one that is smaller, as torch does. Of
    sizes that differ by one at most, and are never below the number of ranks, every count has its whole efficiency.
    """
    n = max(1, micro_batches // ranks)
    return [micro_batches // n + (i < micro_batches % n) for i in range(n)]


def one_f_one_b(
    ranks: int, micro_batches: int, stages: int, name: str, hops: int = 1, split: bool = False, wait: bool = False
) -> Schedule:
    """Make 1F1B of one stage a rank or more: some forward passes, then one and a backward pass in turn, then the rest.

    A rank begins `hops` forward passes sooner than the next one. One is enough where messages take no time; two hide
    a message there and one back behind other work, and keep more in flight. With `wait` all forward passes come
    first, which is GPipe.

    With `split`, rank r does a weight half r backward passes after its input half. So gradients run back to rank 0
    without waiting for weights, and all ranks have as much in flight.

    References:
        Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, 2021, section 2.2. Zhuang et
        al., On Optimizing the Communication of Model Parallelism, 2023 (eager 1F1B). Qi et al., Zero Bubble Pipeline
        Parallelism, 2024, section 3.1 (ZB-H1).
    """
    sizes = groups(ranks, micro_batches)
    members = [range(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]
    turns = [(chunk, m) for group in members for chunk in range(stages) for m in group]
    back = [(stages - 1 - chunk, m) for chunk, m in turns]
    rows = []
    for rank in range(ranks):
        ahead = (stages - 1) * sizes[0] + hops * (ranks - 1 - rank)
        ahead = len(turns) if wait else min(len(turns), ahead)

        def action(kind: Kind, turn: tuple[int, int], rank: int = rank) -> Action:
            return Action(kind, turn[0] * ranks + rank, turn[1])

        row = [action("F", turn) for turn in turns[:ahead]]
        for i, turn in enumerate(back):
            row += [action("F", turn) for turn in turns[ahead + i : ahead + i + 1]]
            row += [action("I" if split else "B", turn)]
            row += [action("W", back[i - rank])] if split and i >= rank else []
        row += [action("W", turn) for turn in back[max(0, len(back) - rank) :]] if split else []
        rows.append(tuple(row))
    return Schedule(tuple(rows), placed(ranks, ranks * stages), name)


def shortest(home: Sequence[int], micro_batches: int, split: bool, durations: Durations) -> float:
    """Return a time below which no order of these actions ends.

    A rank cannot begin before the first output has come to it. Where backward passes are whole, its last one is that
    of its first stage, and the stages before have theirs to do after it.
    """
    forward = [durations[Action("F", s, 0)] for s in range(len(home))]
    backward = [durations[Action("B", s, 0)] for s in range(len(home))]
    hops = [durations.hop * (home[s] != home[s - 1]) for s in range(1, len(home))]
    found = []
    for rank in set(home):
        own = [s for s, r in enumerate(home) if r == rank]
        way = sum(hops[: own[0]])
        head, work = sum(forward[: own[0]]) + way, micro_batches * sum(forward[s] + backward[s] for s in own)
        found.append(head + work + (0 if split else sum(backward[: own[0]]) + way))
    return max(found)


def there_and_back(ranks: int, micro_batches: int, stages: int, name: str) -> Schedule:
    """Make ZB-V: two stages a rank, placed there and back, so that the loss and the first gradient are on rank 0.

    References:
        Qi et al., Zero Bubble Pipeline Parallelism, 2024, section 6, in the order of torch's ScheduleZBVZeroBubble.
    """
    rows = [tuple(_v_row(ranks, micro_batches, rank)) for rank in range(ranks)]
    return Schedule(tuple(rows), placed(ranks, stages * ranks, "v"), name)


def _v_row(ranks: int, micro_batches: int, rank: int) -> list[Action]:
    count = max(2 * ranks - 1, micro_batches)  # the order is known from so many on: of fewer, those are left out
    down, up = rank, 2 * ranks - 1 - rank
    row: list[Action] = []
    done = {(kind, stage): 0 for kind in "FIW" for stage in (down, up)}

    def do(stage: int, *kinds: Kind) -> None:
        for kind in kinds:
            row.append(Action(kind, stage, done[kind, stage]))
            done[kind, stage] += 1

    for _ in range(2 * (ranks - rank) - 1):
        do(down, "F")
    for _ in range(rank):
        do(up, "F")
        do(down, "F")
    for _ in range(ranks - rank):
        do(up, "F", "I", "W")
    while done["F", up] < count:
        if done["F", down] < count:
            do(down, "F")
        do(down, "I", "W")
        do(up, "F", "I", "W")
    for _ in range(rank):  # input halves only: the ranks before wait for them
        do(down, "I")
        do(up, "I")
    for _ in range(ranks - rank):
        do(down, "I", "W")
    for stage in (up, down):
        while done["W", stage] < count:
            do(stage, "W")
    return [action for action in row if action.micro_batch < micro_batches]
