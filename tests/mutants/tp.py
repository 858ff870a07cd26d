"""Faults in fzero/tp, and in what tells copies from one value."""

from tests.mutants.mutant import Mutant

FUNCTIONS = ("tests/tp/test_functions.py",)
TRAINING = ("tests/tp/test_training.py",)
LAYERS = ("tests/tp/test_layers.py",)
TRANSFORMERS = ("tests/tp/test_transformers.py",)
AXES, MOE = ("tests/stages/test_axes.py",), ("tests/moe/test_axes.py",)
COPIES = ("tests/transforms/test_copies.py",)

MUTANTS = [
    Mutant("sums of activations are metrics", "graph/plan/_layers.py", "or values(node)[0].dim() >= 2", "", TRAINING),
    # the ends of layers
    Mutant(
        "a layer is entered by itself",
        "tp/_boundaries.py",
        'return apply_along("pvary", x, _bound(axis), Whole())',
        "return x",
        TRAINING,
    ),
    Mutant("partial results are summed as copies", "tp/_boundaries.py", '"psum_invariant", x', '"psum", x', TRAINING),
    Mutant(
        "parts of the sequence are gathered as one value",
        "tp/_boundaries.py",
        '"all_gather", x',
        '"all_gather_invariant", x',
        TRAINING,
    ),
    Mutant("a part is cut as by a joint map", "tp/_boundaries.py", '"own_part_invariant"', '"own_part"', TRAINING),
    Mutant(
        "parts are joined as copies",
        "tp/_boundaries.py",
        '"all_gather_invariant", x, axis',
        '"all_gather", x, axis',
        FUNCTIONS,
    ),
    Mutant(
        "a row's bias is added by each rank",
        "tp/_linear.py",
        "w.ndim - 1, None)",
        "w.ndim - 1, b)",
        TRAINING,
        (("    if b is None:\n        return y\n    return y", "    return y\n    return y"),),
    ),
    Mutant(
        "a bias on a part of the sequence does not enter",
        "tp/_linear.py",
        "(enter(b, axis) if sequence else b)",
        "b",
        TRAINING,
    ),
    Mutant(
        "a step may average over the axis", "tp/_boundaries.py", "if axis in averaged and", "if False and", FUNCTIONS
    ),
    Mutant("two rules may cut over one axis", "axes/rules.py", "if axis in found:", "if False:", AXES),
    Mutant(
        "one of several rules is not looked into",
        "axes/rules.py",
        "for rule in split.rules for found",
        "for rule in () for found",
        MOE,
    ),
    # vocabulary
    Mutant(
        "all ranks look the first rows up",
        "tp/_linear.py",
        "tokens - axis_index(axis).to(tokens.device) * v",
        "tokens",
        FUNCTIONS,
    ),
    Mutant(
        "tokens of others are looked up",
        "tp/_linear.py",
        "torch.where(mine, F.embedding(local, table), fill)",
        "F.embedding(local, table)",
        FUNCTIONS,
    ),
    Mutant("unknown tokens are zeros", "tp/_linear.py", ", math.nan)", ", 0.0)", FUNCTIONS),
    Mutant("unknown targets are trained on", "tp/_cross_entropy.py", "nll, math.nan)", "nll, nll)", FUNCTIONS),
    Mutant(
        "each rank has its own maximum",
        "tp/_cross_entropy.py",
        'along("all_gather", x.detach().amax(-1, keepdim=True), axis, -1)',
        "x.detach().amax(-1, keepdim=True)",
        FUNCTIONS,
    ),
    Mutant("the mean of logits is a rank's", "tp/_cross_entropy.py", "mean / v", "mean / x.shape[-1]", FUNCTIONS),
    Mutant("ignored targets count", "tp/_cross_entropy.py", "(~ignored).sum()", "ignored.numel()", FUNCTIONS),
    Mutant("half precision stays so", "tp/_cross_entropy.py", "else logits.float()", "else logits", FUNCTIONS),
    # names
    Mutant(
        "the shortest name counts",
        "tp/_split.py",
        "for i in range(len(parts))",
        "for i in reversed(range(len(parts)))",
        FUNCTIONS,
    ),
    Mutant(
        "a whole weight is taken for a part",
        "tp/_linear.py",
        "if n > 1 and not may_differ",
        "if False and not may_differ",
        FUNCTIONS,
    ),
    # layers of modules
    Mutant("what layers are given is handed to each", "tp/_regions.py", "if given is x", "if False", TRANSFORMERS),
    Mutant("a region forgets nothing", "tp/_regions.py", "self._entered.clear()", "pass", LAYERS + TRANSFORMERS),
    Mutant("shared heads are the first ones", "tp/_forwards.py", "axis_index(self.axis) * count + ", "", TRANSFORMERS),
    Mutant(
        "shared heads are used alike",
        "tp/_forwards.py",
        "own = enter(w, self.axis).unflatten",
        "own = w.unflatten",
        TRANSFORMERS,
    ),
    Mutant(
        "groups of heads stay as they are",
        "tp/_regions.py",
        '{"num_key_value_groups": each}',
        '{"num_key_value_groups": self.groups}',
        TRANSFORMERS,
    ),
    Mutant("counts of heads are not divided", "tp/_regions.py", "own[values[count]] for", "values[count] for", LAYERS),
    Mutant(
        "norms of heads do not enter",
        "tp/_forwards.py",
        "own = {name: enter(getattr(self.module, name), self.axis) for name in whole}",
        "own = {name: getattr(self.module, name) for name in whole}",
        LAYERS + TRANSFORMERS,
    ),
    Mutant("a packed matrix is cut as one", "tp/_styles.py", "self.dim + (self.packed > 1)", "self.dim", LAYERS),
    Mutant("padding is a row of each rank", "tp/_forwards.py", '{"padding_idx": None}', "{}", LAYERS),
    Mutant("the padding's row is trained", "tp/_forwards.py", "y.detach(), y)", "y, y)", LAYERS),
    Mutant("ties do not follow", "tp/_layers.py", "    _let_ties_follow(module, styles)\n", "", LAYERS),
    Mutant(
        "parameters that are not cut are used",
        "tp/_forwards.py",
        "if x.shape[known.along] != wanted",
        "if False",
        LAYERS,
    ),
    Mutant("heads are cut", "tp/_layers.py", "if known.heads % n:", "if False:", TRANSFORMERS),
    # the residual stream
    Mutant("the first block does not cut", "tp/_install.py", "layers.axis, not i,", "layers.axis, False,", LAYERS),
    Mutant("norms on parts do not enter", "tp/_install.py", 'if kind == "norm":', "if False:", LAYERS),
    Mutant(
        "what needs all tokens has a part",
        "tp/_sequence.py",
        'return "norm" if is_norm else "whole"',
        'return "norm"',
        LAYERS,
    ),
    # copies and one value
    Mutant("copies are not looked at", "collectives/_copies.py", "here.hidden |= bool(own)", "pass", COPIES),
    Mutant(
        "copies of what is equal are refused",
        "collectives/_copies.py",
        "return False, blocks",
        "return True, []",
        COPIES,
    ),
    Mutant(
        "what makes one value is looked through",
        "collectives/_copies.py",
        "(row is None or not row.one)",
        "True",
        COPIES,
    ),
    Mutant(
        "split leaves do not differ",
        "collectives/_copies.py",
        "(leaf is not None and id(leaf) in leaves)",
        "False",
        COPIES,
    ),
    Mutant("blocks are looked through", "collectives/_copies.py", 'if not hasattr(node, "exposed") and', "if", COPIES),
    Mutant(
        "blocks that run again are not checked",
        "transforms/_remat/_remat.py",
        "given, ctx.exposed)",
        "given, None)",
        COPIES,
    ),
    Mutant(
        "sums outside a block are not checked",
        "collectives/_copies.py",
        ".summed[own] = (row.name, node)",
        ".summed.get(own)",
        COPIES,
    ),
    Mutant(
        "nothing before a block is checked",
        "collectives/_copies.py",
        "_check(behind, self.axis, self.one_loss, self.leaves)",
        "",
        COPIES,
    ),
    Mutant(
        "an ensemble is one model",
        "transforms/gradients/_value_and_grad.py",
        "if not all(isinstance(p, OwnPrimal) and a in p.varies for p in primals)",
        "",
        COPIES,
    ),
    Mutant(
        "the axes of the mean are checked too",
        "transforms/gradients/_value_and_grad.py",
        "if a.size > 1 and a.name not in [own.name for own in axes]",
        "if a.size > 1",
        COPIES,
    ),
    Mutant(
        "a meeting of ranks is seen by the guard of one",
        "axes/lockstep.py",
        "with torch.no_grad(), without_function_modes():",
        "with torch.no_grad():",
        COPIES,
    ),
    Mutant(
        "ranks of tp may have examples of their own",
        "nn/_functional.py",
        "if self.tp is not None:",
        "if False:",
        LAYERS,
    ),
    Mutant(
        "ranks of tp in a pipeline may have examples of their own",
        "nn/_pipeline.py",
        "tp.check_shared(batch)",
        "pass",
        LAYERS,
    ),
]
