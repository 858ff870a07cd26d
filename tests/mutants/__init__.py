"""Faults, one line each, that the tests must catch: a table for each folder of fzero."""

from tests.mutants import collectives, graph, layout, nn, optim, others, random, ranks, transforms
from tests.mutants.mutant import Mutant

TABLES = (layout, collectives, transforms, optim, graph, random, nn, ranks, others)
MUTANTS: list[Mutant] = [mutant for table in TABLES for mutant in table.MUTANTS]
