"""Faults in fzero/parallel/experts."""

from tests.mutants.changes import always, bare, becomes, constant, dropped, elsewhere, never, returns, skipped, swapped
from tests.mutants.mutant import Fault, File

ROUTE = ("tests/parallel/experts/test_route.py",)
POSITIONS = ("tests/parallel/experts/test_positions.py",)
GROUPED = ("tests/parallel/experts/test_grouped.py",)
LAYER = ("tests/parallel/experts/test_layer.py",)
TRAINING = ("tests/parallel/experts/test_training.py",)
TRANSFORMERS = ("tests/parallel/experts/test_transformers.py",)
PLAN = ("tests/graph/test_plan.py", "-k", "axes or another_size")
CLIP = ("tests/optim/test_experts.py",)
AXES = ("tests/parallel/experts/test_axes.py",)
BY_HAND = ("tests/parallel/experts/test_by_hand.py",)
INPUT = ("tests/parallel/experts/test_input.py",)

MUTANTS = [
    *File("parallel/experts/_routing.py", ROUTE).faults(
        Fault("the bias is in the gates", "route", becomes("A.gather", "scores.gather")),
        Fault(
            "gates are not detached from the choice",
            "route",
            (becomes("bias.detach()", "bias"), becomes("A.gather(-1, B)", "scores.gather(-1, B) - bias[B]")),
        ),
        Fault("gates are not scaled", "route", bare("A * B")),
        Fault("a group is as good as its best", "_in_best_groups", constant(2, 1, at="1 of 3")),
        Fault("a nan takes a position", "route", bare("torch.where(B, C.shape[-1], A)")),
        Fault("routing in half precision", "route", becomes("torch.float32", "logits.dtype")),
        Fault("all ranks jitter alike", "jitter", becomes("A * B.shape[0]", "A * 0")),
        Fault("k is not checked", "_check_choices", becomes("1 <= k <= A", "1 <= k"), INPUT),
        Fault("gates are divided by zero", "route", bare("A.clamp(min=B)")),
        Fault("micro-batches jitter alike", "jitter", becomes("A.B(C, D())", "A.B(C, 0)"), BY_HAND),
    ),
    *File("parallel/experts/_dispatch.py", POSITIONS).faults(
        Fault(
            "capacity is counted per rank",
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
            "second choices are positions with the first",
            "assign_positions",
            (constant("s t k -> s (k t)", "s t k -> s (t k)"), constant("s (k t) -> s t k", "s (t k) -> s t k")),
        ),
        Fault("one position too many", "assign_positions", swapped("A < c", "<=")),
        Fault(
            "choices queue in any order",
            "_queue_positions",
            (
                becomes("A.sort(dim=-1, stable=True)", "A.sort(dim=-1, stable=True, descending=True)"),
                elsewhere("_send_order", becomes("A.sort(stable=True)", "A.sort(stable=True, descending=True)")),
                elsewhere(
                    "_expert_order",
                    returns("torch.argsort(boundaries.cumsum(1)[:, :-1].flatten(), stable=True, descending=True)"),
                ),
            ),
        ),
        Fault(
            "the way back has its dimensions swapped",
            "combine",
            (constant(1, 0, at="2 of 4"), constant(0, 1, at="2 of 2")),
        ),
        Fault("the way back goes nowhere", "combine", becomes("A(B, C(D), ...)", "A(B, (), ...)")),
        Fault(
            "an empty position holds the last token",
            "_SumRows.forward",
            becomes("A.new_zeros((1, A.shape[1]))", "A[-1:]"),
            LAYER,
        ),
        Fault("rows are not copied back", "_SumRows.backward", becomes("A(B, C, D)", "A(B, C * 0, D)")),
        Fault("sequences share their positions", "_flat", bare("A + B")),
        Fault("one gate passes for all", "combine", never("A.shape != (B, C, D)"), INPUT),
        Fault(
            "rows arrive in the senders' order", "sort_rows", becomes("A(B, max_rows)", "torch.arange(len(recv_rows))")
        ),
        Fault("counts stay at home", "sort_rows", becomes("A(counts, B)", "counts")),
        Fault("there is room for one choice", "sort_rows", becomes("min(A, B // C)", "1")),
        Fault(
            "positions count from the own expert and not the rank's first",
            "_send_order",
            becomes("A * (B // C)", "ordered"),
        ),
        Fault("sorted rows go back as they lie", "unsort_rows", bare("B(A, A.shape[0])")),
        Fault("gates do not learn", "weighted_sum", becomes("A.to", "A.detach().to"), BY_HAND),
        Fault("rows' tangents double", "_SumRows.jvp", becomes("tangent", "2 * tangent"), BY_HAND),
    ),
    *File("parallel/experts/_grouped.py", GROUPED).faults(
        Fault(
            "ends count the padding",
            "_mm",
            (
                becomes("A.tolist()", "[*A.tolist()[:-1], len(x)]"),
                elsewhere("_outer", becomes("A.tolist()", "[*A.tolist()[:-1], len(x)]")),
            ),
        ),
        Fault("rows behind the last are not masked", "_mm", constant(0, 1, at="2 of 4")),
        Fault("the gradient's matrices are not transposed", "_GroupedProduct.backward", bare("A.mT", at="1 of 2")),
        Fault("a leaf may begin anywhere", "_aligned", always("A and is_aligned"), LAYER),
        Fault("a plan counts the padding", "_flops", becomes("2 * A", "2 * x[0]")),
        Fault("no columns go to the kernel", "_has_kernel", bare("B and A"), BY_HAND),
    ),
    *File("parallel/experts/_routing.py", ROUTE).faults(
        Fault("positions are rounded down", "expert_capacity", becomes("math.ceil", "math.floor"), POSITIONS),
        Fault("positions are counted in binary", "expert_capacity", bare("round(A, 9)"), POSITIONS),
        Fault("the loss is of the rank's own means", "balance_loss", bare("B(A, C)"), TRAINING),
        Fault(
            "the share is divided by k twice", "_shares", becomes("max(A, 1)", "max(A * routing.experts.shape[-1], 1)")
        ),
        Fault("the load is the rank's own", "load", bare("B(A, C)")),
        Fault("the bias favours the busy", "balance_bias", (bare("A.mean()"), becomes("A - A", "A - A.mean()"))),
        Fault(
            "sequences are balanced together",
            "balance_loss",
            becomes(
                "if A != 'sequence':\n    raise B",
                "if A == 'sequence':\n    share, score = (share.mean(0), score.mean(0))\nelse:\n    raise B",
            ),
            TRAINING,
        ),
        Fault("nobody learns to balance", "balance_loss", becomes("A.probs.mean", "A.probs.detach().mean"), BY_HAND),
        Fault("the entropy is of what sums to no one", "stats", bare("A / A.sum(-1, keepdim=True)"), BY_HAND),
    ),
    *File("parallel/experts/_layer.py", INPUT).faults(
        Fault("rows come back along ep, whatever the axis", "layer", dropped("axis", at="7 of 7"), BY_HAND),
        Fault(
            "one matrix passes for all experts",
            "_check_linear",
            (
                becomes("A.shape[:2]", "A.shape[-2]"),
                swapped("A.shape[-2] != (B, C.shape[-1])", "not in"),
                becomes("(A, B.shape[-1])", "(1, B.shape[-1])"),
            ),
        ),
        Fault("a bias is not added", "batched_linear", always("A is None"), LAYER),
        Fault("every rank has all experts", "ExpertSplit.__call__", returns("None", at="2 of 2"), TRAINING),
        Fault("experts that are not split pass", "_check_size", always("A == B // C")),
        Fault("shared experts are split too", "ExpertSplit.__call__", becomes("A in self.B", "A.endswith(self.B)")),
        Fault(
            "experts are split over another axis than tokens travel along",
            "check_axis",
            never("A and B not in A"),
            AXES,
        ),
        Fault("the axis of the experts is none of the data's", "check_axis", never("A not in data_axis_names"), AXES),
    ),
    *File("_torch/levels.py", AXES).faults(
        Fault("all ranks along ep have the same experts", "may_differ", constant(False, True)),
    ),
    *File("parallel/experts/transformers.py", TRANSFORMERS).faults(
        Fault(
            "weights are taken as they are stored",
            "_experts.as_matrix",
            returns("weight.mT if module.is_transposed else weight"),
        ),
        Fault("biases are left out", "_experts", never("A.has_bias", at="1 of 2")),
        Fault("a part of the experts passes for all", "_count", bare("getattr(B, 'num_experts', A)")),
        Fault(
            "experts of any implementation are split", "_axis_of", becomes("A or B.func is not C", "not callable(B)")
        ),
        Fault("what experts share is split", "split", dropped("len(A) == B")),
        Fault("experts that were chosen are replaced", "use_differentiable", always("A == 'grouped_mm'")),
    ),
    *File("graph/planning/_plan.py", ("tests/parallel/experts/test_plan.py",)).faults(
        Fault(
            "an exchange is called by what comes before it",
            "_nearest",
            becomes("[A for B in C for A in B.users if D]", "[]"),
        ),
        Fault("in a loop nobody knows the layers", "layers", dropped("body_weights")),
    ),
    *File("sharding/_flat.py", ("tests/parallel/experts/test_plan.py",)).faults(
        Fault("what gathers new experts has no name", "", dropped("unit=A", at="2 of 3")),
    ),
    *File("graph/_one_rank.py", PLAN).faults(
        Fault("a plan keeps the parts of experts", "_spec_on_mesh", skipped("A[B] = C // D")),
        Fault("experts are planned in unequal parts", "_spec_on_mesh", never("A % B")),
    ),
    *File("optim/_norms.py", CLIP).faults(
        Fault("an expert is not summed over tp", "_row_sums_of_unit", never("A.dims[B] != 0")),
        Fault("a wrong name clips nothing", "_clip_experts", never("A and not any(B)")),
        Fault("a list of experts is clipped row by row", "_layer", becomes("A.isdigit()", "False")),
        Fault("experts are summed over ep", "_row_sums_of_unit", always("A.dims[B] != 0")),
        Fault("each leaf of an expert is clipped alone", "_layer", returns("path", at="2 of 2")),
        Fault("a rank's rows begin at 0", "_row_ids", becomes("A(B.unit.spec_id).to(C)", "0")),
    ),
    *File("zero/_checks.py", TRAINING).faults(
        Fault("experts over no axis were cut", "check_unwritten", dropped("A(B.spec_id).C")),
    ),
]
