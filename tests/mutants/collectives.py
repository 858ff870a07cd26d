"""Faults in fzero/collectives."""

from tests.mutants.changes import bare, becomes, constant, dropped, never, skipped
from tests.mutants.mutant import AXES, GLOO, STEP, Fault, File

MUTANTS = [
    *File("collectives/_sums.py").faults(
        Fault("f adds nothing up", "", constant("psum_invariant", "pvary", at="3 of 4"), AXES),
        Fault("g adds up twice", "", constant("pvary", "psum_invariant", at="2 of 4"), AXES),
        Fault("half-precision sums", "pmean.mean", becomes("A('psum', B / C, D, E())", "A('psum', B, D, E()) / C")),
        Fault("a user's vmap shifts a dimension", "dim_options", bare("A - B.ndim")),
        Fault("integer means become floats", "pmean.mean", becomes("(A // B).to(C.dtype)", "A / B")),
    ),
    *File("collectives/_table.py").faults(
        Fault("an inner vmap is the axis", "_LinearMap.vmap", never("A[0] is None")),
        Fault("what differs is called invariant", "_LinearMap.vmap", never("A.input is not VARYING"), AXES),
        Fault("ranks share results", "_rendezvous.compute", bare("A.clone()"), STEP),
    ),
    *File("collectives/_record.py", AXES).faults(
        Fault("count the other axis's ranks", "add", bare("A // B.C")),
    ),
    *File("collectives/_moves.py").faults(
        Fault("nobody receives from others", "", bare("A.transpose(0, B.dim)")),
        Fault("ppermute's transpose is not inverted", "", becomes("(to, A)", "(A, to)")),
        Fault("a broadcast's gradient goes to all", "_only", becomes("A == B", "A >= 0")),
    ),
    *File("collectives/gloo.py", GLOO).faults(
        Fault(
            "a rank is sent the entry of another rank",
            "_exchange",
            becomes("to", "source", at="3 of 4"),
            ("tests/distributed/test_gloo.py", "-m", "slow or not slow", "-k", "core-4"),
        ),
        Fault("internal messages have tags that users may use", "TAGS", becomes("(1 << 20, 1 << 20)", "(0, 1 << 20)")),
        Fault("every reduction is a sum", "reduce_scatter", dropped("A != 'sum'")),
        Fault("a wait for two messages", "wait", becomes("while A.works: ...", "for _ in range(2): ...")),
        Fault("parts are not summed", "reduce_scatter", becomes("A(B, rank)", "B[0]")),
        Fault(
            "all ranks' parts of a leaf are the own one",
            "all_gather_into",
            (becomes("r", "rank", at="1 of 3"), becomes("r * A", "rank * A")),
        ),
        Fault("the own part of a leaf stays old", "all_gather_into", skipped("A[B].copy_(C)")),
        Fault("a sum is written over what is sent", "_sum_rows", bare("0 if A else 1")),
    ),
]
