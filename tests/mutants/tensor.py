"""Faults in fzero/parallel/tensor, and in what tells copies from one value."""

from tests.mutants.changes import always, bare, becomes, constant, dropped, elsewhere, never, returns, skipped
from tests.mutants.mutant import Fault, File

FUNCTIONS = ("tests/parallel/tensor/test_functions.py",)
TRAINING = ("tests/parallel/tensor/test_training.py",)
LAYERS = ("tests/parallel/tensor/test_layers.py",)
TRANSFORMERS = ("tests/parallel/tensor/test_transformers.py",)
AXES = ("tests/zero/test_axes.py",)
MOE = ("tests/parallel/experts/test_axes.py",)
COPIES = ("tests/collectives/test_copies.py",)

MUTANTS = [
    *File("graph/planning/_plan.py", TRAINING).faults(
        Fault("sums of activations are metrics", "_moves_values", dropped("A(B)[0].dim() >= 2")),
    ),
    *File("parallel/tensor/_functions.py", TRAINING).faults(
        Fault("a layer is entered by itself", "enter", bare("B('pvary', A, C(D), E())")),
        Fault("partial results are summed as copies", "leave", constant("psum_invariant", "psum")),
        Fault(
            "parts of the sequence are gathered as one value", "enter", constant("all_gather", "all_gather_invariant")
        ),
        Fault("a part is cut as by a joint map", "scatter", constant("own_part_invariant", "own_part")),
        Fault("parts are joined as copies", "gather", constant("all_gather_invariant", "all_gather"), FUNCTIONS),
        Fault("a step may average over the axis", "_bound", never("A in B"), FUNCTIONS),
    ),
    *File("parallel/tensor/_functions.py", FUNCTIONS).faults(
        Fault(
            "a row's bias is added by each rank",
            "row",
            (becomes("None", "b", at="3 of 4"), always("A is None")),
            TRAINING,
        ),
        Fault("a bias on a part of the sequence does not enter", "row", never("sequence"), TRAINING),
        Fault("all ranks look the first rows up", "own_rows", bare("A - B(C).to(A.device) * D")),
        Fault("tokens of others are looked up", "embed", bare("torch.where(B, A, C)")),
        Fault(
            "unknown tokens are zeros",
            "own_rows",
            (becomes("math.nan", "0.0"), elsewhere("cross_entropy", becomes("math.nan", "0.0"))),
        ),
        Fault("unknown targets are trained on", "cross_entropy", becomes("math.nan", "nll")),
        Fault("each rank has its own maximum", "_sums", bare("B('all_gather', A, C, -1)")),
        Fault("the mean of logits is a rank's", "cross_entropy", becomes("A / v", "A / x.shape[-1]")),
        Fault("ignored targets count", "cross_entropy", becomes("(~A).sum", "A.numel")),
        Fault("half precision stays so", "cross_entropy", bare("A.float()")),
        Fault("a whole weight is taken for a part", "check_part", never("A > 1")),
    ),
    *File("axes/_rules.py", AXES).faults(
        Fault("two rules may cut over one axis", "JoinedRules.__call__", never("A in B")),
        Fault("one of several rules is not looked into", "rules_in", becomes("A.B", "()", at="1 of 2"), MOE),
    ),
    *File("parallel/tensor/_layers.py", FUNCTIONS).faults(
        Fault("the shortest name counts", "match_suffix", becomes("range(len(A))", "reversed(range(len(A)))")),
        Fault("ties do not follow", "layers", skipped("A(B, styles)"), LAYERS),
        Fault("heads are cut", "Layers.split", never("A.heads % B"), TRANSFORMERS),
    ),
    *File("parallel/tensor/_forwards.py", TRANSFORMERS).faults(
        Fault("what layers are given is handed to each", "Region.enter_once", never("A is B")),
        Fault("a region forgets nothing", "Region.__call__", skipped("self._entered.clear()"), LAYERS + TRANSFORMERS),
        Fault("shared heads are the first ones", "Layer._own_heads", bare("B(self.axis).to(D) * C + A")),
        Fault("shared heads are used alike", "Layer._own_heads", bare("B(A, self.axis)")),
        Fault(
            "norms of heads do not enter",
            "Layer._on_parts",
            bare("B(A, self.axis)", at="1 of 3"),
            LAYERS + TRANSFORMERS,
        ),
        Fault("padding is a row of each rank", "Layer._embedding", becomes("{'padding_idx': None}", "{}"), LAYERS),
        Fault("the padding's row is trained", "Layer._embedding", bare("A.detach()"), LAYERS),
        Fault("parameters that are not cut are used", "Layer._check_split", never("A.shape[B.C] != D"), LAYERS),
    ),
    *File("parallel/tensor/_styles.py", LAYERS).faults(
        Fault(
            "groups of heads stay as they are",
            "Heads.attributes",
            becomes("group_size", "self.groups", at="3 of 3"),
            TRANSFORMERS,
        ),
        Fault("counts of heads are not divided", "Heads.attributes", bare("local_counts[A]")),
        Fault("a packed matrix is cut as one", "ParamSplit.unpacked_dim", returns("self.dim")),
    ),
    *File("parallel/tensor/_forwards.py", LAYERS).faults(
        Fault("the first block does not cut", "install", never("not i")),
        Fault("norms on parts do not enter", "install", never("A == 'norm'")),
        Fault("what needs all tokens has a part", "_kind", always("is_norm")),
    ),
    *File("collectives/_copies.py", COPIES).faults(
        Fault("copies are not looked at", "note_call", skipped("A.has_calls |= bool(B)")),
        Fault(
            "copies of what is equal are refused",
            "_differs",
            (constant(False, True), becomes("(True, blocks)", "(True, [])")),
        ),
        Fault("what makes one value is looked through", "_walk", always("A is None or A.B is not INVARIANT")),
        Fault("split leaves do not differ", "_differs", never("A is not None and id(A) in B")),
        Fault("blocks are looked through", "_walk", dropped("not hasattr(A, 'deferred_checks')")),
        Fault(
            "sums outside a block are not checked",
            "_check",
            becomes("A(B, C, D, E).F[G] = (H.name, I)", "A(B, C, D, E).F.get(G)"),
        ),
        Fault(
            "nothing before a block is checked",
            "DeferredCheck.check",
            skipped("A(B, self.axis, self.invariant_loss, self.C)"),
        ),
    ),
    *File("transforms/_remat.py", COPIES).faults(
        Fault("blocks that run again are not checked", "_Remat.backward", becomes("A.deferred_checks", "None")),
    ),
    *File("transforms/_value_and_grad.py", COPIES).faults(
        Fault("an ensemble is one model", "_invariant_axes", dropped("not all(A)")),
        Fault("the axes of the mean are checked too", "_invariant_axes", dropped("A.name not in [B.name for B in C]")),
    ),
    *File("axes/lockstep.py", COPIES).faults(
        Fault(
            "a meeting of ranks is seen by the guard of one",
            "_compute_for_all",
            becomes("with torch.no_grad(), A(): ...", "with torch.no_grad(): ..."),
        ),
    ),
    *File("nn/_functional.py", LAYERS).faults(
        Fault("ranks of tp may have examples of their own", "Apply.__call__", never("self.tp is not None")),
    ),
    *File("nn/_pipeline.py", LAYERS).faults(
        Fault("ranks of tp in a pipeline may have examples of their own", "pipeline.first", skipped("A.B(C)")),
    ),
]
