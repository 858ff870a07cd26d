"""Random numbers by key: a draw is a function of its key and its shape, on every rank and at every stage."""

from fzero.random._draws import bernoulli, dropout, normal, randint, uniform
from fzero.random._keys import fold_in, key, split
from fzero.random._seeded import seeded

__all__ = ["bernoulli", "dropout", "fold_in", "key", "normal", "randint", "seeded", "split", "uniform"]
