"""Faults in fzero/parallel/tensor, and in what tells copies from one value."""

from tests.mutants.changes import always, bare, becomes, constant, dropped, never, returns, skipped
from tests.mutants.mutant import Fault, File

FUNCTIONS = ("tests/parallel/tensor/test_functions.py",)
TRAINING = ("tests/parallel/tensor/test_training.py",)
LAYERS = ("tests/parallel/tensor/test_layers.py",)
TRANSFORMERS = ("tests/parallel/tensor/test_transformers.py",)
AXES = ("tests/zero/test_axes.py",)
MOE = ("tests/parallel/experts/test_axes.py",)
COPIES = ("tests/collectives/test_copies.py",)

MUTANTS = [
    *File("graph/planning/_collective_units.py", TRAINING).faults(
        Fault("sums of activations count as metrics in a plan", "_moves_values", dropped("A(B)[0].dim() >= 2")),
    ),
    *File("parallel/tensor/_boundaries.py", TRAINING).faults(
        Fault("the backward pass of enter sums nothing", "enter", bare("B('pvary', A, C(D), E())")),
        Fault("the gradient of leave is summed over the ranks", "leave", constant("psum_invariant", "psum")),
        Fault(
            "gradients of a gathered sequence are not summed", "enter", constant("all_gather", "all_gather_invariant")
        ),
        Fault("the gradient of scatter is not one value", "scatter", constant("own_part_invariant", "own_part")),
        Fault(
            "the gradient of all_gather is summed over the ranks",
            "all_gather",
            constant("all_gather_invariant", "all_gather"),
            FUNCTIONS,
        ),
        Fault("a layer's axis may be a data axis", "_checked_axes", never("A in B"), FUNCTIONS),
    ),
    *File("parallel/tensor/_functions.py", FUNCTIONS).faults(
        Fault(
            "a row's bias is added by each rank",
            "row",
            (becomes("None", "b", at="3 of 4"), always("A is None")),
            TRAINING,
        ),
        Fault("the gradient of a bias on part of a sequence is not summed", "row", never("sequence"), TRAINING),
        Fault("every rank looks up the first rows of a table", "own_rows", bare("A - axis_index(...) * B")),
        Fault("a rank looks up tokens of other ranks", "embed", bare("torch.where(B, A, C)")),
        Fault(
            "an unknown token gives zeros, not nan",
            "own_rows",
            becomes("math.nan", "0.0"),
        ),
        Fault("a full weight is accepted as a part", "check_part", never("A > 1")),
    ),
    *File("parallel/tensor/_cross_entropy.py", FUNCTIONS).faults(
        Fault("an unknown target gives a finite loss", "combine_sums", becomes("math.nan", "nll")),
        Fault("each rank subtracts its own maximum", "_row_sums", bare("B('all_gather', A, C, -1)")),
        Fault(
            "the mean of logits divides by the rank's part of the vocabulary",
            "cross_entropy",
            becomes("A * B(C(D))", "A"),
        ),
        Fault("ignored targets count in the mean", "combine_sums", becomes("(~A).sum", "A.numel")),
        Fault("cross_entropy computes in half precision", "cross_entropy", bare("at_least_float32(A)")),
    ),
    *File("axes/_rules.py", AXES).faults(
        Fault("two rules may split over one axis", "_JoinedRules.__call__", never("A in B")),
        Fault("rules within joined rules are not found", "rules_in", becomes("A.B", "()", at="1 of 2"), MOE),
    ),
    *File("parallel/tensor/_split_rule.py", FUNCTIONS).faults(
        Fault(
            "the shortest suffix of a name is matched first",
            "match_suffix",
            becomes("range(len(A))", "reversed(range(len(A)))"),
        ),
    ),
    *File("parallel/tensor/_layers.py", FUNCTIONS).faults(
        Fault("a tied parameter does not get its tie's style", "layers", skipped("A(B, styles)"), LAYERS),
        Fault("a split may divide an attention head", "Layers.split", never("A.heads % B"), TRANSFORMERS),
    ),
    *File("parallel/tensor/_shared_inputs.py", TRANSFORMERS).faults(
        Fault("a value enters a module once for each layer", "SharedInputModule.enter_once", never("A is B")),
        Fault(
            "a module keeps entered values after the call",
            "SharedInputModule.__call__",
            skipped("self._entered.clear()"),
            LAYERS + TRANSFORMERS,
        ),
    ),
    *File("parallel/tensor/_forwards.py", TRANSFORMERS).faults(
        Fault("every rank takes the first shared heads", "Layer._own_heads", bare("axis_index(...) * B + A")),
        Fault("the gradient of a latent is one rank's", "Layer._latent_forward", becomes("enter(A, self.axis)", "A")),
        Fault(
            "a latent multiplies in its own precision",
            "Layer._latent_forward",
            becomes("self.linear(A, B, C)", "self.run(A)"),
        ),
        Fault("shared heads do not enter their layer", "Layer._own_heads", bare("B(A, self.axis)")),
        Fault(
            "replicated parameters of a split layer do not enter it",
            "Layer._run_on_parts",
            bare("B(A, self.axis)", at="1 of 3"),
            LAYERS + TRANSFORMERS,
        ),
        Fault(
            "every rank has a padding row in its part of an embedding",
            "Layer._embedding_forward",
            becomes("{'padding_idx': None}", "{}"),
            LAYERS,
        ),
        Fault("the padding row gets a gradient", "Layer._embedding_forward", bare("A.detach()"), LAYERS),
        Fault(
            "a layer accepts parameters that are not split", "Layer._check_split", never("A.shape[B.C] != D"), LAYERS
        ),
    ),
    *File("parallel/tensor/_styles.py", LAYERS).faults(
        Fault("a packed matrix is split without unpacking", "ParamSplit.unpacked_dim", returns("self.dim")),
    ),
    *File("parallel/tensor/_tensor_plan.py", TRANSFORMERS).faults(
        Fault(
            "the parameters of an activation have the gradient of one rank's columns",
            "_style_activations",
            becomes("dict.fromkeys(A, B())", "{}"),
        ),
    ),
    *File("parallel/tensor/_style_splits.py", LAYERS).faults(
        Fault(
            "the number of groups of heads is not divided",
            "Heads.attributes",
            becomes("group_size", "self.groups", at="3 of 3"),
            TRANSFORMERS,
        ),
        Fault("the number of heads is not divided", "Heads.attributes", bare("local_counts[A]")),
    ),
    *File("parallel/tensor/_shared_inputs.py", LAYERS).faults(
        Fault("an error of fzero gets a hint of heads", "SharedInputModule.__call__", always("not is_message(A, B)")),
    ),
    *File("parallel/tensor/_install.py", LAYERS).faults(
        Fault("the first block does not split the sequence", "install", never("not i")),
        Fault("a norm on part of a sequence does not enter", "install", never("A == 'norm'")),
    ),
    *File("parallel/tensor/_sequence.py", LAYERS).faults(
        Fault("a module that needs all tokens gets part of them", "_boundary_kind", always("is_norm")),
    ),
    *File("collectives/_check_copies.py", COPIES).faults(
        Fault("calls on copies are not recorded", "note_call", skipped("A.has_calls |= bool(B)")),
        Fault(
            "copies of equal values are refused",
            "_differs",
            (constant(False, True), becomes("(True, blocks)", "(True, [])")),
        ),
        Fault(
            "the search for copies goes on behind an operation that makes one value",
            "_walk",
            always("A is None or A.B is not INVARIANT"),
        ),
        Fault("split leaves count as equal on all ranks", "_differs", never("A is not None and id(A) in B")),
        Fault(
            "the search for copies goes on behind a remat block", "_walk", dropped("not hasattr(A, 'deferred_checks')")
        ),
        Fault(
            "sums outside a remat block are not checked",
            "_check_calls_over",
            becomes("A(B, C, D, E).F[G] = (H.name, I)", "A(B, C, D, E).F.get(G)"),
        ),
        Fault(
            "values before a remat block are not checked",
            "DeferredCheck.check",
            skipped("A(B, self.axis, self.invariant_loss, self.C)"),
        ),
    ),
    *File("transforms/_remat_runs.py", COPIES).faults(
        Fault("blocks that run again are not checked", "RematFunction.backward", becomes("A.deferred_checks", "None")),
    ),
    *File("transforms/_value_and_grad.py", COPIES).faults(
        Fault("the losses of an ensemble's models count as one value", "_invariant_axes", dropped("not all(A)")),
        Fault(
            "the axes of the mean count as axes of one value",
            "_invariant_axes",
            dropped("A.name not in [B.name for B in C]"),
        ),
    ),
    *File("axes/lockstep.py", COPIES).faults(
        Fault(
            "the guard of one rank sees the operations of a rendezvous",
            "_compute_for_all",
            becomes("with torch.no_grad(), A(): ...", "with torch.no_grad(): ..."),
        ),
    ),
    *File("nn/_apply.py", LAYERS).faults(
        Fault("ranks of tp may get different examples", "Apply._call", never("self.tp is not None")),
    ),
    *File("nn/_module_pipeline.py", LAYERS).faults(
        Fault("ranks of tp in a pipeline may get different examples", "pipeline.first", skipped("A.B(C)")),
    ),
]
