"""One process of `make cuda` that asks torch's caching allocator for drawn storages. It prints facts as JSON.

    python -m tests.cuda.allocations 40

Each line has the storages of one draw, and what torch's allocator took for two passes over them.
"""

import gc
import json
import random
import sys

import torch

from tests.cuda import log

OPERATIONS = 30


def draw(seed: int) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Draw the sizes of storages that are kept, and the first and last operation and the size of others."""
    numbers = random.Random(seed)
    scales = numbers.choices((2_000, 300_000, 2_000_000, 12_000_000, 90_000_000), k=3)

    def size() -> int:
        return numbers.randint(1, numbers.choice(scales))

    ranges = []
    for _ in range(numbers.randint(1, 80)):
        start = numbers.randrange(OPERATIONS)
        ranges.append((start, min(start + numbers.choice((0, 1, 3, 20)), OPERATIONS), size()))
    return [size() for _ in range(numbers.randint(0, 6))], ranges


def take(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def measure(kept: list[int], ranges: list[tuple[int, int, int]]) -> dict[str, int]:
    """Return the peaks of the allocator's blocks and segments; it has no memory before."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.memory_reserved() == 0
    held = [take(size) for size in kept]
    for _ in range(2):
        alive: dict[int, torch.Tensor] = {}
        for position in range(OPERATIONS + 1):
            for i, (start, _, size) in enumerate(ranges):
                if start == position:
                    alive[i] = take(size)
            for i, (_, stop, _) in enumerate(ranges):
                if stop == position:
                    del alive[i]
    del held
    stats = torch.cuda.memory_stats()
    return {"allocated": stats["allocated_bytes.all.peak"], "reserved": stats["reserved_bytes.all.peak"]}


def main() -> None:
    log.leave_out_cudnn()
    for seed in range(int(sys.argv[1])):
        kept, ranges = draw(seed)
        print("FACTS", json.dumps({"kept": kept, "ranges": ranges} | measure(kept, ranges)), flush=True)


if __name__ == "__main__":
    main()
