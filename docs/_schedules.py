"""Draw the picture of docs/schedules.md: `python docs/_schedules.py` writes docs/schedules.png."""

import pathlib

from fzero.parallel.schedules import schedule
from fzero.parallel.schedules._named_schedules import NAMES

RANKS, MICRO_BATCHES = 4, 8

if __name__ == "__main__":
    first, *others = [schedule(name, RANKS, MICRO_BATCHES, row.min_stages) for name, row in NAMES.items()]
    first.plot(pathlib.Path(__file__).parent / "schedules.png", beside=others)
