"""Faults in fzero/collectives."""

from tests.mutants.changes import bare, becomes, dropped, never, skipped
from tests.mutants.mutant import AXES, GLOO, STEP, Fault, File, on_processes

MUTANTS = [
    *File("collectives/_sums.py").faults(
        Fault(
            "pmean divides after the sum, which overflows in half precision",
            "pmean.mean",
            becomes("A('psum', B / C, D, E())", "A('psum', B, D, E()) / C"),
        ),
        Fault("a user's vmap shifts the dimension of a collective", "check_dim_options", bare("A - B.ndim")),
        Fault("pmean of integers returns floats", "pmean.mean", becomes("(A // B).to(C.dtype)", "A / B")),
    ),
    *File("collectives/_invariant.py", AXES).faults(
        Fault(
            "the transpose of pvary sums nothing",
            "",
            becomes('A("pvary", B, "psum_invariant", input=C)', 'A("pvary", B, "pvary", input=C)'),
        ),
        Fault(
            "the transpose of psum_invariant sums again",
            "",
            becomes('A("psum_invariant", B, "pvary", output=C)', 'A("psum_invariant", B, "psum_invariant", output=C)'),
        ),
    ),
    *File("collectives/_table.py").faults(
        Fault("a vmap inside a rank program is taken for the axis", "_ApplyLinearMap.vmap", never("A[0] is None")),
        Fault(
            "an input that differs by rank is accepted as invariant",
            "_ApplyLinearMap.vmap",
            never("A.input is not VARYING"),
            AXES,
        ),
        Fault(
            "ranks in lockstep receive the same tensor object", "_apply_in_lockstep.compute", bare("A.clone()"), STEP
        ),
    ),
    *File("collectives/_record.py", AXES).faults(
        Fault("record divides by the wrong axis's size", "add", bare("A // B.C")),
    ),
    *File("collectives/_moves.py").faults(
        Fault("all_to_all returns the rank's own rows", "", bare("A.transpose(0, B.dim)")),
        Fault(
            "a message to half a rank is dropped",
            "_rank_pairs",
            dropped("is_int(r)"),
            ("tests/errors/test_programs.py",),
        ),
        Fault("the transpose of ppermute sends in the same direction", "", becomes("(to, A)", "(A, to)")),
        Fault(
            "a broadcast's gradient goes to all ranks, not to the source only",
            "_keep_for_source",
            becomes("A == B", "A >= 0"),
        ),
    ),
    *File("collectives/_messages.py", ("tests/collectives/test_collectives.py",)).faults(
        Fault(
            "send takes an argument that is not a tensor", "_message_options", skipped("check_dim(A, B, 0, min_ndim=0)")
        ),
    ),
    *File("collectives/gloo.py", GLOO).faults(
        Fault(
            "a rank is sent the entry of another rank",
            "_exchange",
            becomes("target", "source", at="3 of 4"),
            on_processes("core", ranks=4),
        ),
        Fault("internal messages have tags that users may use", "_TAGS", becomes("(1 << 20, 1 << 20)", "(0, 1 << 20)")),
        Fault("reduce_scatter sums whatever reduction is asked for", "reduce_scatter", dropped("A != 'sum'")),
        Fault(
            "wait waits for at most two messages", "wait", becomes("while A.requests: ...", "for _ in range(2): ...")
        ),
        Fault("reduce_scatter returns one rank's part without a sum", "reduce_scatter", becomes("A(B, rank)", "B[0]")),
        Fault(
            "all_gather_into fills the whole leaf from the rank's own part",
            "all_gather_into",
            (becomes("r", "rank", at="1 of 3"), becomes("r * A", "rank * A")),
        ),
        Fault("all_gather_into does not copy the rank's own part", "all_gather_into", skipped("A[B].copy_(C)")),
        Fault("a sum overwrites the tensor that is sent", "_sum_rows", bare("0 if A else 1")),
    ),
]
