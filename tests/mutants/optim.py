"""Faults in fzero/optim."""

import ast
import pathlib

from tests.mutants.changes import always, bare, becomes, constant, dropped, never, returns, skipped, swapped
from tests.mutants.mutant import FULL_LEAVES, HALF, OPTIM_LAWS, SHARD_MASTERS, WRAPPERS, Fault, File, Mutant
from tests.mutants.places import tree_of

FZERO = pathlib.Path(__file__).parents[2] / "fzero"

EIGHT_BIT, ROUNDING = ("tests/optim/moments/test_eight_bit.py",), ("tests/optim/wrappers/test_stochastic_rounding.py",)
SIXTEEN_BIT = ("tests/optim/moments/test_sixteen_bit.py",)
REMEDIES = ("tests/test_remedies.py",)

LOSS_SCALING = ("tests/optim/wrappers/test_loss_scaling.py",)

MUTANTS = [
    *File("optim/wrappers/_groups.py", ("tests/optim/wrappers/test_groups.py",)).faults(
        Fault(
            "a group writes its moments over those of other groups",
            "_merge_states",
            becomes("where(m, b, a)", "b"),
        ),
        Fault("a leaf may be in several groups", "_check_groups", swapped("sum(A) != 1", "<")),
        Fault("groups share a state whose elements belong to no leaf", "_check_group_state", never("not A and any(B)")),
    ),
    *File("optim/_base.py", REMEDIES).faults(
        Fault("a chain takes the state of another chain", "chain.update", never("len(A) != len(B)")),
        Fault(
            "a chain takes the fields of a state for its links' states",
            "chain.update",
            becomes("hasattr(A, B) or C", "C"),
        ),
    ),
    *File("optim/_adam.py", ("tests/optim/test_optim.py",)).faults(
        Fault(
            "Adam's bias correction uses the next step's count",
            "_update_moments",
            becomes("A.count + 1", "A.count + 2"),
        ),
        Fault("adamw decays leaves that the mask excludes", "adamw.update", bare("A * is_decayed")),
    ),
    *File("optim/moments/_eight_bit.py", EIGHT_BIT).faults(
        Fault("a byte is that of the value below", "_last_below", becomes("0 if signed else 1", "1")),
        Fault("the code has no negative values", "_dynamic_values", becomes("-x if A else x", "x")),
        Fault("compiled code has no negative values", "_compute_values", becomes("torch.where(A, -B, B)", "B")),
        Fault("compiled code begins a decade too early", "_compute_bytes", becomes("torch.where(is_first, A, B)", "B")),
        Fault("a byte is that of the least number of its look-up", "encode", becomes("A + (B > C)", "A")),
        Fault("a scale of zero divides", "encode", becomes("torch.where(A == 0, B, C)", "C")),
    ),
    *File("optim/moments/_moments.py", EIGHT_BIT).faults(
        Fault("small leaves are in 8 bits", "_is_small", returns("False")),
        Fault("an optimizer takes moments of another kind", "check_moment", never("actual != expected")),
        Fault("the sign of a block of one element is lost", "_update_leaf", becomes("A if is_single else B", "B")),
    ),
    *File("optim/wrappers/_stochastic_rounding.py", ROUNDING).faults(
        Fault("all updates have the same draws", "stochastic_rounding.update", becomes("fold_in(A, 0)", "A")),
    ),
    *File("optim/moments/_rounding.py", ROUNDING).faults(
        Fault("stochastic rounding always rounds down", "round_at_random", becomes("A + (B & 65535)", "A")),
        Fault("a value rounds to infinity", "round_at_random", becomes("A.clamp(B, C)", "A")),
    ),
    *File("optim/moments/_rounding.py", SIXTEEN_BIT).faults(
        Fault("moments always round down", "round_at_random", becomes("A + (B & 65535)", "A")),
    ),
    *File("optim/moments/_sixteen_bit.py", SIXTEEN_BIT).faults(
        Fault("each update of a moment has the same draws", "map_sixteen_bit", becomes("fold_in(A, 0)", "A")),
        Fault("both moments have the same draws", "_round_moments", becomes("A >> 16 * i", "A")),
        Fault("full leaves of a shard are rounded", "_update_full_leaves", becomes("put_subset(u, A, B, C)", "u")),
    ),
    *File("sharding/elements/_leaf_subset.py", SIXTEEN_BIT).faults(
        Fault("a rank writes another rank's numbers", "scatter_subset", becomes("(A >= 0) & (A < k)", "A < k")),
        Fault("a rank reads the first rank's elements", "subset_places", bare("A - B * C")),
    ),
    *File("sharding/elements/_by_leaf.py", SIXTEEN_BIT).faults(
        Fault("all ranks have the same draws", "unit_positions", bare("A + B"), ROUNDING),
        Fault(
            "compiled draws are those of the leaf before",
            "spread_leaf_values",
            becomes("positions >= end", "positions > end"),
        ),
    ),
    *File("random/_words.py", ("tests/random/test_random.py",)).faults(
        Fault("streams have one set of words in other orders", "words_at", bare("A ^ second")),
        Fault("the sign of a word is shifted in", "_shift_right", bare("A & B")),
    ),
    *File("sharding/elements/_leaf_positions.py", ROUNDING).faults(
        Fault("all leaves have the same draws", "_path_key", becomes("binascii.crc32(A)", "0")),
        Fault(
            "parts of split leaves have the draws of the first part",
            "_position_in_full_leaf",
            becomes("A * B + C * D", "A * B"),
        ),
    ),
    *File("optim/_convert_moments.py", EIGHT_BIT).faults(
        Fault("a second moment is converted by the signed code", "_MOMENTS", constant(False, True)),
        Fault("rounded moments are rounded again", "_convert_moment", never("A == B and C == D")),
    ),
    *File("sharding/elements/_leaf_blocks.py", EIGHT_BIT).faults(
        Fault(
            "elements take the scale of the next block",
            "BlockMap.gather",
            becomes("A.index_select(1, B)", "A.index_select(1, B).roll(-1, 1)"),
        ),
        Fault("a block's maximum is of the rank's part only", "BlockMap.maxima", always("A is None")),
        Fault("all ranks with a part of a block send its scale", "BlockMap.scatter", bare("A & (B < C)")),
        Fault("parts that cut blocks are taken", "_part_shape", never("A if has_rows else B")),
    ),
    *File("optim/checks/_shapes.py", ("tests/optim/checks/test_shapes.py",)).faults(
        Fault(
            "an update of another shape is broadcast onto its parameter",
            "check_updates",
            never("A is not None"),
            ("tests/optim/test_optim.py",),
        ),
        Fault(
            "a gradient of another shape is broadcast onto its parameter",
            "checks_gradients.checked",
            never("A is not None"),
        ),
        Fault(
            "an optimizer takes the state of another, which has the fields that it reads",
            "checks_gradients.checked",
            never("type(A) is not type(B)"),
            REMEDIES,
        ),
        Fault(
            "an attribute error of an optimizer's own code is blamed on its state",
            "checks_gradients.checked",
            never("A.obj is not B"),
            REMEDIES,
        ),
        Fault("shapes are not compared", "_have_same_shapes", becomes("A.shape == B.shape", "True")),
        Fault("pieces of a shard count as another shape", "_full_shape", becomes("A if rest else B", "first")),
    ),
    *File("optim/_adam.py", ("tests/optim/checks/test_shapes.py",)).faults(
        Fault("Adam broadcasts a gradient onto its moments", "_update_moments", skipped("check_moment(A, B, C)")),
    ),
    *File("optim/matrices/_adafactor.py", ("tests/optim/checks/test_shapes.py",)).faults(
        Fault("Adafactor broadcasts means of another shape", "_check_means", never("A != B")),
    ),
    *File("optim/_norms.py", WRAPPERS).faults(
        Fault("padding counts in leaf norms", "_sums_of_squares", becomes("A.sum(1)[:-1]", "A.sum(1)[1:]")),
        Fault("leaf norms are of the rank's part only", "_leaf_norms", bare("B(A, axes)")),
    ),
    *File("sharding/_owners.py", FULL_LEAVES).faults(
        Fault("an owner receives another matrix's parts", "_parts_to_matrices", becomes("parts[A]", "parts[0]")),
        Fault("pieces go back to the wrong place", "_matrices_to_parts", becomes("A[B.matrix]", "0", at="2 of 3")),
        Fault(
            "rank 0 owns all matrices",
            "OwnerAssignment.owner_stacks",
            (swapped("(A + B // C) % self.D", "*"), becomes("(A + B // C) * self.D", "(A + B // C) * 0")),
        ),
        Fault("the padding of a shard is sent to owners", "_parts_to_shards", never("A > B")),
    ),
    *File("optim/wrappers/_wrappers.py", FULL_LEAVES).faults(
        Fault("a mask selects whole units, not elements", "where", bare("torch.where(B != 0, A, C)"), WRAPPERS),
        Fault("a mask takes memory for a state of no leaf", "masked.init", never("not any(A)"), WRAPPERS),
        Fault("masked leaves count in norms", "masked.update", bare("B(A, C)", at="3 of 3"), OPTIM_LAWS),
    ),
    *File("optim/wrappers/_on_full_leaves.py", FULL_LEAVES).faults(
        Fault("on_full_leaves keeps its state full on every rank", "_shard_states", never("A.ndim")),
    ),
    *File("optim/matrices/_muon.py", FULL_LEAVES).faults(
        Fault("Muon decays no parameter", "_subtract_decay", bare("A - rate * B * p")),
        Fault("Muon's rate is not scaled", "_SCALES", becomes("math.sqrt(max(1, A / B))", "1.0", at="all")),
    ),
    *File("optim/matrices/_matrix_shards.py", FULL_LEAVES).faults(
        Fault("Muon takes one part of a split matrix for the matrix", "_map_owner_stack", becomes("reversed(A)", "()")),
    ),
    *File("sharding/elements/_leaf_ids.py", OPTIM_LAWS).faults(
        Fault(
            "per_leaf gives a number to the first name of a tied leaf only",
            "_number_leaves",
            skipped("A[B] = A[C]"),
        ),
    ),
    *File("optim/_one_moment.py", OPTIM_LAWS).faults(
        Fault("nesterov looks ahead by the whole buffer", "sgd.update", becomes("momentum * b", "b", at="2 of 2")),
        Fault("Adagrad's sums forget earlier squares", "adagrad.update", becomes("s + g * g", "g * g")),
        Fault("Lion decays no parameter", "lion", dropped("add_decayed_weights(A, B)")),
    ),
    *File("optim/_adam.py", OPTIM_LAWS).faults(
        Fault("Adam decays", "adam", becomes("0.0", "0.1")),
    ),
    *File("optim/_lamb.py", OPTIM_LAWS).faults(
        Fault("LAMB has no trust ratio", "lamb", dropped("scale_by_trust_ratio()")),
    ),
    *File("optim/matrices/_adafactor.py", OPTIM_LAWS).faults(
        Fault("Adafactor clips no step", "adafactor.update", becomes("(A / B).clamp(min=1)", "1")),
    ),
    *File("optim/_lamb.py", WRAPPERS).faults(
        Fault("a trust ratio of zero", "_scale_to_norm", bare("(B == 0) | A")),
    ),
    *File("optim/_averages.py", WRAPPERS).faults(
        Fault("params_ema averages the gradients, not the new parameters", "params_ema.update", bare("B(A, grads)")),
        Fault("the average starts in the parameters' memory", "params_ema.init", constant(True, False), OPTIM_LAWS),
    ),
    *File("optim/wrappers/_inject_hyperparams.py", WRAPPERS).faults(
        Fault("hyperparameters in float32", "_scalar_tensor", becomes("torch.float64", "torch.float32")),
        Fault("the number of muon's iterations becomes a tensor", "_is_count", returns("False")),
    ),
    *File("optim/matrices/_adafactor.py", ("tests/test_default_device.py",)).faults(
        Fault("Adafactor's sharded means lie on the default device", "_zero_means", becomes("A.data.device", "None")),
    ),
    *File("optim/matrices/_factored_sums.py", WRAPPERS).faults(
        Fault(
            "Adafactor adds each rank's part of a split leaf at the first part's rows",
            "_full_indices",
            becomes("A[B] * C + axis_index(...)", "A[B]"),
            ("tests/parallel/tensor/test_training.py", "-k", "adafactor and 2"),
        ),
        Fault("Adafactor mixes the columns of stacked matrices", "_sum_indices", bare("A + B // C * D")),
        Fault(
            "padding counts as a row",
            "_leaf_ranges",
            becomes(
                "A(offset=0, width=1, area=1, rows=B, columns=B)", "A(offset=0, width=1, area=1, rows=0, columns=B)"
            ),
            OPTIM_LAWS,
        ),
    ),
    *File("optim/_precision.py", SHARD_MASTERS).faults(
        Fault("a shard of full leaves counts as a master", "Precision._shard_dtype", dropped("x.origin is None")),
        Fault("a shard over no axis counts as a master", "Precision._shard_dtype", dropped("spec.axes")),
        Fault("programs run on master weights", "Precision.to_param", never("is_master")),
        Fault("init rounds the shards that are masters", "Precision._shard_dtype", never("is_master and A and B")),
    ),
    *File("optim/wrappers/_master_weights.py", SHARD_MASTERS).faults(
        Fault("a state without masters trains half-precision shards", "_check_masters", never("A and B and C")),
        Fault(
            "converted states keep old masters",
            "convert_masters",
            becomes("_distinct_masters(masters, new_masters)", "masters"),
        ),
    ),
    *File("optim/wrappers/_master_weights.py", HALF).faults(
        Fault(
            "the master copy is dropped",
            "master_weights.update",
            becomes("A(B, state)", "tree.map(lambda p: p.to(master), B)"),
        ),
        Fault(
            "gradients of the wrong dtype are accepted",
            "check_dtypes",
            becomes("expected", "torch.float32", at="2 of 3"),
        ),
    ),
    *File("optim/wrappers/_loss_scaling.py", LOSS_SCALING).faults(
        Fault("a rank decides alone whether to skip a step", "all_finite", bare("B(A, axes)")),
        Fault("a skipped step changes the state", "_select_if_good", becomes("old_values", "new_values")),
        Fault(
            "the updates of a skipped step are 0.0, not -0.0",
            "dynamic_loss_scale.update",
            becomes("torch.full_like(A, -0.0)", "torch.zeros_like(A)"),
        ),
        Fault(
            "the loss scale's count is not reset after growth",
            "dynamic_loss_scale.update",
            becomes("grows", "grows & False", at="3 of 3"),
        ),
    ),
]


def of_other_optimizers(planted: list[Mutant]) -> list[Mutant]:
    """Plant a fault in each optimizer that has none: its rate is zero. They are found by syntax, without an import."""
    with_fault = {mutant.symbol.split(".")[0] for mutant in planted}
    mutants = []
    for path in sorted((FZERO / "optim").rglob("*.py")):
        functions = [node for node in tree_of(path.read_text()).body if isinstance(node, ast.FunctionDef)]
        for name in [f.name for f in functions if f.args.args and f.args.args[0].arg == "learning_rate"]:
            if name not in with_fault and not name.startswith(("_", "scale_by_", "check_")):
                change = becomes("check_rate(learning_rate)", "learning_rate = 0.0")
                fault = Fault(f"{name} takes steps of no size", name, change)
                mutants += File(str(path.relative_to(FZERO)), OPTIM_LAWS).faults(fault)
    return mutants


MUTANTS += of_other_optimizers(MUTANTS)
