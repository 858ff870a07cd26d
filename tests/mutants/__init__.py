"""Faults, one line each, that the tests must catch: a table for each folder of fzero."""

from tests.mutants import (
    checkpoint,
    collectives,
    dcp,
    debug,
    graph,
    hf,
    layout,
    moe,
    nn,
    offload,
    optim,
    others,
    profiling,
    random,
    ranks,
    road,
    stages,
    transforms,
    tuning,
    units,
)
from tests.mutants.mutant import Mutant

TABLES = (
    layout,
    collectives,
    transforms,
    offload,
    optim,
    graph,
    random,
    ranks,
    nn,
    stages,
    checkpoint,
    hf,
    dcp,
    debug,
    road,
    moe,
    units,
    tuning,
    profiling,
    others,
)
MUTANTS: list[Mutant] = [mutant for table in TABLES for mutant in table.MUTANTS]
