"""Random numbers by key: a draw depends only on its key and its shape, on every rank and at every stage."""

from typing import TYPE_CHECKING

from fzero._names import missing_names
from fzero.random._draws import apply_mask, bernoulli, dropout, keep_mask_at, normal, randint, uniform
from fzero.random._keys import check_key, fold_in, key, mix_bits, split
from fzero.random._seeded import call_with_key, next_key, seeded
from fzero.random._words import key_words, words_at

__all__ = [
    "bernoulli",
    "dropout",
    "fold_in",
    "key",
    "normal",
    "randint",
    "seeded",
    "split",
    "uniform",
]

# For other packages of fzero only. They may change in any release.
INTERNAL = [
    "apply_mask",
    "call_with_key",
    "check_key",
    "keep_mask_at",
    "key_words",
    "mix_bits",
    "next_key",
    "words_at",
]

if not TYPE_CHECKING:  # a type checker finds a missing name itself
    __getattr__ = missing_names(__name__, __all__)
