"""Faults in fzero/parallel/experts."""

from tests.mutants.changes import always, bare, becomes, constant, dropped, in_symbol, never, returns, skipped, swapped
from tests.mutants.mutant import Fault, File

ROUTE = ("tests/parallel/experts/test_route.py",)
POSITIONS = ("tests/parallel/experts/test_positions.py",)
GROUPED = ("tests/parallel/experts/test_grouped.py",)
LAYER = ("tests/parallel/experts/test_layer.py",)
TRAINING = ("tests/parallel/experts/test_training.py",)
TRANSFORMERS = ("tests/parallel/experts/test_transformers.py",)
PLAN = ("tests/graph/test_plan.py", "-k", "axes or another_world_size")
CLIP = ("tests/optim/test_experts.py",)
AXES = ("tests/parallel/experts/test_axes.py",)
BY_HAND = ("tests/parallel/experts/test_by_hand.py",)
INPUT = ("tests/parallel/experts/test_input.py",)

MUTANTS = [
    *File("parallel/experts/_routing.py", ROUTE).faults(
        Fault("the balance bias is added to the gates", "route", becomes("A.gather", "scores.gather")),
        Fault(
            "the bias gets a gradient from the choice",
            "route",
            (becomes("bias.detach()", "bias"), becomes("A.gather(-1, B)", "scores.gather(-1, B) - bias[B]")),
        ),
        Fault("gates are not scaled", "route", bare("A * B")),
        Fault(
            "a group of experts is scored by its best expert only", "_mask_other_groups", constant(2, 1, at="1 of 3")
        ),
        Fault("a token with nan scores takes an expert position", "route", bare("torch.where(B, C.shape[-1], A)")),
        Fault("the router computes in half precision", "route", bare("at_least_float32(A)")),
        Fault("every rank draws the same jitter", "jitter", becomes("A * B.shape[0]", "A * 0")),
        Fault("k may exceed the number of experts", "_check_choices", dropped("maximum=A"), INPUT),
        Fault("gates are divided by zero", "route", bare("A.clamp(min=B)")),
        Fault("every micro-batch draws the same jitter", "jitter", becomes("A.B(C, D())", "A.B(C, 0)"), BY_HAND),
    ),
    *File("parallel/experts/_dispatch.py", POSITIONS).faults(
        Fault(
            "capacity is counted for each rank, not for each sequence",
            "assign_positions",
            (
                becomes("A(B, count)", "A(rearrange(B, 's q -> 1 (s q)'), count).view(B.shape)"),
                becomes("A < c", "A < c * len(queue)"),
                becomes("A * B + C", "A * B + C % B"),
            ),
            TRAINING,
        ),
        Fault(
            "drops depend on the rest of the batch",
            "assign_positions",
            becomes("A(B, count)", "A(rearrange(B, 's q -> 1 (s q)'), count).view(B.shape)"),
            LAYER,
        ),
        Fault(
            "second choices are queued beside first choices, not after them",
            "assign_positions",
            (constant("s t k -> s (k t)", "s t k -> s (t k)"), constant("s (k t) -> s t k", "s (t k) -> s t k")),
        ),
        Fault("an expert takes one token beyond its capacity", "assign_positions", swapped("A < c", "<=")),
        Fault(
            "choices are not queued in the order of the tokens",
            "_queue_positions",
            becomes("A.sort(dim=-1, stable=True)", "A.sort(dim=-1, stable=True, descending=True)"),
        ),
        Fault(
            "the way back has its dimensions swapped",
            "combine",
            (constant(1, 0, at="2 of 4"), constant(0, 1, at="2 of 2")),
        ),
        Fault("combine does not send rows back to their ranks", "combine", becomes("A(B, C(D), ...)", "A(B, (), ...)")),
        Fault("all sequences of a rank share one set of positions", "_number_in_batch", bare("A + B")),
        Fault("combine accepts gates of a wrong shape", "combine", never("A.shape != (B, C, D)"), INPUT),
    ),
    *File("parallel/experts/_sum_rows.py", POSITIONS).faults(
        Fault(
            "an empty position holds the last token, not zeros",
            "_SumRows.forward",
            becomes("A.new_zeros((1, A.shape[1]))", "A[-1:]"),
            LAYER,
        ),
        Fault(
            "the backward pass of a sum of rows reads the first row only",
            "_SumRows.backward",
            becomes("A(B, C, D)", "A(B, C * 0, D)"),
        ),
        Fault("gates get no gradient", "weighted_sum", becomes("A.to", "A.detach().to"), BY_HAND),
        Fault("the tangent of a sum of rows is doubled", "_SumRows.jvp", becomes("tangent", "2 * tangent"), BY_HAND),
    ),
    *File("parallel/experts/_sorted_rows.py", POSITIONS).faults(
        Fault(
            "rows are not sorted in the order of the tokens",
            "_send_order",
            (
                becomes("A.sort(stable=True)", "A.sort(stable=True, descending=True)"),
                in_symbol(
                    "_expert_order",
                    returns("torch.argsort(boundaries.cumsum(1)[:, :-1].flatten(), stable=True, descending=True)"),
                ),
            ),
        ),
        Fault(
            "received rows are not sorted by expert",
            "sort_rows",
            becomes("A(B, max_rows)", "torch.arange(len(recv_rows))"),
        ),
        Fault("counts of rows are not sent to the other ranks", "sort_rows", becomes("A(counts, B)", "counts")),
        Fault("the buffer holds one choice for each token", "sort_rows", becomes("min(A, B // C)", "1")),
        Fault(
            "positions are counted from the choice's expert, not from the first expert of its rank",
            "_send_order",
            becomes("A * (B // C)", "sorted_experts"),
        ),
        Fault("unsort_rows sends rows back unsorted", "unsort_rows", bare("B(A, A.shape[0])")),
    ),
    *File("parallel/experts/_grouped.py", GROUPED).faults(
        Fault(
            "the last expert's rows include the padding",
            "_mm",
            (
                becomes("A.tolist()", "[*A.tolist()[:-1], len(x)]"),
                in_symbol("_outer", becomes("A.tolist()", "[*A.tolist()[:-1], len(x)]")),
            ),
        ),
        Fault("rows behind the last expert's are not masked", "_mm", constant(0, 1, at="2 of 4")),
        Fault("the gradient's matrices are not transposed", "_GroupedProduct.backward", bare("A.mT", at="1 of 2")),
        Fault("a kernel is used for a leaf that is not aligned", "_align_strides", always("A and is_aligned"), LAYER),
        Fault("the flops of a grouped product include the padding", "_count_flops", becomes("2 * A", "2 * x[0]")),
        Fault("a kernel gets a matrix without columns", "_has_kernel", bare("B and A"), BY_HAND),
    ),
    *File("parallel/experts/_load_balance.py", ROUTE).faults(
        Fault("the capacity is rounded down", "expert_capacity", becomes("math.ceil", "math.floor"), POSITIONS),
        Fault("a floating-point error raises the capacity by one", "expert_capacity", bare("round(A, 9)"), POSITIONS),
        Fault("the balance loss uses the rank's own means", "balance_loss", bare("pmean(A, axis)"), TRAINING),
        Fault(
            "the share of tokens is divided by k twice",
            "_choice_shares",
            becomes("max(A, 1)", "max(A * routing.experts.shape[-1], 1)"),
        ),
        Fault("load counts the rank's own tokens only", "expert_load", bare("B(A, C)")),
        Fault(
            "the balance bias favours busy experts",
            "balance_bias",
            (bare("A.mean()"), becomes("A - A", "A - A.mean()")),
        ),
        Fault(
            'the balance loss of "sequence" averages over all sequences first',
            "balance_loss",
            becomes(
                "if A != 'sequence':\n    raise B",
                "if A == 'sequence':\n    share, score = (share.mean(0), score.mean(0))\nelse:\n    raise B",
            ),
            TRAINING,
        ),
        Fault(
            "the balance loss has no gradient",
            "balance_loss",
            becomes("A.probs.mean", "A.probs.detach().mean"),
            BY_HAND,
        ),
        Fault(
            "the entropy is of scores that are not normalised", "stats", bare("A / A.sum(-1, keepdim=True)"), BY_HAND
        ),
    ),
    *File("parallel/experts/_layer.py", INPUT).faults(
        Fault(
            'rows come back over the axis "ep" whatever the argument axis= is',
            "layer",
            dropped("axis", at="7 of 7"),
            BY_HAND,
        ),
        Fault(
            "one matrix is accepted as the weights of all experts",
            "_check_linear",
            (
                becomes("A.shape[:2]", "A.shape[-2]"),
                swapped("A.shape[-2] != (B, C.shape[-1])", "not in"),
                becomes("(A, B.shape[-1])", "(1, B.shape[-1])"),
            ),
        ),
        Fault("a bias is not added", "_batched_linear", always("A is None"), LAYER),
    ),
    *File("parallel/experts/_expert_split.py", INPUT).faults(
        Fault("experts are not split over the ranks", "_ExpertSplit.__call__", returns("None", at="2 of 2"), TRAINING),
        Fault("weights of all experts are accepted as one rank's part", "_check_size", always("A == B // C")),
        Fault("shared experts are split too", "_ExpertSplit.__call__", becomes("A in self.B", "A.endswith(self.B)")),
        Fault(
            "experts are split over another axis than tokens travel along",
            "check_axis",
            never("A and B not in A"),
            AXES,
        ),
        Fault("the axis of the experts need not be a data axis", "check_axis", never("A not in data_axis_names"), AXES),
    ),
    *File("_torch/levels.py", AXES).faults(
        Fault("all ranks along ep have the same experts", "may_differ", constant(False, True)),
    ),
    *File("parallel/experts/transformers.py", TRANSFORMERS).faults(
        Fault(
            "the weights of transformers are not transposed",
            "_run_experts.as_matrix",
            returns("weight.mT if module.is_transposed else weight"),
        ),
        Fault("biases are left out", "_run_experts", never("A.has_bias", at="1 of 2")),
        Fault(
            "the number of experts is read from the rank's part", "_count_experts", bare("getattr(B, 'num_experts', A)")
        ),
        Fault(
            "a module that is no known mixture of experts is split",
            "_registered_axis",
            becomes("A or B.func is not C", "not callable(B)"),
        ),
        Fault("a parameter that all experts share is split", "split_rule", dropped("len(A) == B")),
        Fault(
            "an experts implementation that the user chose is replaced",
            "use_differentiable",
            always("A == 'grouped_mm'"),
        ),
    ),
    *File("graph/planning/_collective_units.py", ("tests/parallel/experts/test_plan.py",)).faults(
        Fault(
            "an exchange in a plan is named by the operation before it",
            "_nearest_unit",
            becomes("[A for B in C for A in B.users if D]", "[]"),
        ),
        Fault("exchanges within a loop have no unit's name in a plan", "infer_units", dropped("body_weights")),
    ),
    *File("sharding/maps/_flat_rows.py", ("tests/parallel/experts/test_plan.py",)).faults(
        Fault("the gather of new parameters has no unit in a plan", "", dropped("unit=A", at="3 of 4")),
    ),
    *File("graph/_one_rank.py", PLAN).faults(
        Fault(
            "a plan for another world keeps this world's split of experts", "_spec_on_mesh", skipped("A[B] = C // D")
        ),
        Fault("experts are planned in unequal parts", "_spec_on_mesh", never("A % B")),
    ),
    *File("optim/clipping/_clip_by_expert.py", CLIP).faults(
        Fault("the norm of an expert is not summed over tp", "_unit_row_sums", never("A.dims[B] != 0")),
        Fault("clip_experts ignores a name that no leaf has", "_expert_layers", never("A and not any(B)")),
        Fault("a unit's long padding has several rows", "_row_ids", becomes("torch.where(A, 0, B)", "B")),
        Fault("the experts of a list are clipped as separate layers", "_layer_path", becomes("A.isdigit()", "False")),
        Fault("the norm of an expert is summed over ep", "_unit_row_sums", always("A.dims[B] != 0")),
        Fault("each leaf of an expert is clipped alone", "_layer_path", returns("path", at="2 of 2")),
        Fault("a rank counts its experts from 0", "_row_ids", becomes("unit_index(...)", "0")),
    ),
    *File("zero/_call_checks.py", TRAINING).faults(
        Fault(
            "a write into experts that are sharded over no axis is refused",
            "check_unwritten",
            dropped("A(B.spec_id).C"),
        ),
    ),
]
