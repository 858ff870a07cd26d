"""Draw the picture of docs/schedules.md: `python docs/_schedules.py` writes docs/schedules.png."""

import pathlib

from fzero.parallel.schedules import schedule

RANKS, MICRO_BATCHES = 4, 8
NAMES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb": 1, "zbv": 2}  # with their stages on a rank

if __name__ == "__main__":
    first, *others = [schedule(name, RANKS, MICRO_BATCHES, stages) for name, stages in NAMES.items()]
    first.plot(pathlib.Path(__file__).parent / "schedules.png", beside=others)
