"""Faults in fzero/collectives."""

from tests.mutants.mutant import AXES, GLOO, STEP, Mutant

MUTANTS = [
    Mutant(
        "half-precision sums", "collectives/_sums.py", 'psum", x / n, axes, Whole())', 'psum", x, axes, Whole()) / n'
    ),
    Mutant("an inner vmap is the axis", "collectives/_table.py", "if in_dims[0] is None:", "if False:"),
    Mutant(
        "a user's vmap shifts a dimension",
        "collectives/_sums.py",
        "Along(dimension(name, x, dim) - x.ndim)",
        "Along(dimension(name, x, dim))",
    ),
    Mutant(
        "integer means become floats",
        "collectives/_sums.py",
        "axes, Whole()) // n).to(leaf.dtype)",
        "axes, Whole()) / n)",
    ),
    Mutant("f adds nothing up", "collectives/_invariant.py", 'transpose="psum_invariant"', 'transpose="pvary"', AXES),
    Mutant("g adds up twice", "collectives/_invariant.py", 'transpose="pvary"', 'transpose="psum_invariant"', AXES),
    Mutant(
        "count the other axis's ranks",
        "collectives/_record.py",
        "full.get(kind, sent) // binding.mapped",
        "full.get(kind, sent)",
        AXES,
    ),
    Mutant("nobody receives from others", "collectives/_exchange.py", "[xs[0].transpose(0, options.dim)]", "[xs[0]]"),
    Mutant(
        "the way back is the way there",
        "collectives/_exchange.py",
        "Pairs(tuple([(to, sender) for",
        "Pairs(tuple([(sender, to) for",
    ),
    Mutant(
        "a broadcast's gradient goes to all", "collectives/_exchange.py", "rank == source, total", "rank >= 0, total"
    ),
    Mutant(
        "what differs is called invariant",
        "collectives/_table.py",
        "if row.invariant and any(",
        "if False and any(",
        AXES,
    ),
    Mutant(
        "ranks share results",
        "collectives/_table.py",
        "(y if row.replicated else y[r]).clone()",
        "(y if row.replicated else y[r])",
        STEP,
    ),
    Mutant(
        "a message is another rank's",
        "collectives/gloo.py",
        "dist.isend(sends[to]",
        "dist.isend(sends[source]",
        ("tests/distributed/test_gloo.py", "-m", "slow or not slow", "-k", "core-4"),
    ),
    Mutant(
        "messages have the tags of a user's",
        "collectives/gloo.py",
        "FIRST_TAG, TAGS = 1 << 20",
        "FIRST_TAG, TAGS = 0",
        GLOO,
    ),
    Mutant("every reduction is a sum", "collectives/gloo.py", 'op != "sum" or not _applies', "not _applies", GLOO),
    Mutant("a wait for two messages", "collectives/gloo.py", "while sent.works:", "for _ in range(2):", GLOO),
    Mutant(
        "parts are not summed",
        "collectives/gloo.py",
        "lambda: _summed(rows, rank)",
        "lambda: rows[0]",
        GLOO,
    ),
    Mutant(
        "all ranks' parts of a leaf are the own one",
        "collectives/gloo.py",
        "at, r * k, r * k + k)",
        "at, rank * k, rank * k + k)",
        GLOO,
    ),
    Mutant("the own part of a leaf stays old", "collectives/gloo.py", "rows[rank].copy_(mine)", "pass", GLOO),
    Mutant(
        "a sum is written over what is sent",
        "collectives/gloo.py",
        "out=rows[0 if rank else 1]",
        "out=rows[rank]",
        GLOO,
    ),
]
