"""Faults in the sharded step, in what makes its trees, and in how ranks compare them."""

from tests.mutants.mutant import Mutant

GIVEN = ("tests/zero/test_given.py",)
AGREEMENT = ("tests/ranks/test_agreement.py",)
STEP = "zero/_sharded_step.py"
PARTITION = ("tests/zero/test_partition.py",)
ERRORS = ("tests/test_errors.py",)

SIDE_BY_SIDE = ("tests/zero/test_side_by_side.py",)
ATTACKED = ("tests/zero/test_attacked.py",)

MUTANTS = [
    Mutant(
        "a chain's state is taken for parameters",
        "zero/_checks.py",
        "return any(_is_state(x) for x in values)",
        "return False",
        ("tests/test_errors.py", "-k", "swapped"),
    ),
    Mutant(
        "a shape error does not say that it counts ranks",
        "ranks/_spmd.py",
        "elif self.mesh.size > 1 and re",
        "elif self.mesh.size < 1 and re",
        ("tests/test_errors.py", "-k", "shape_error"),
    ),
    # leaves side by side
    Mutant("every leaf lies where the unit begins", "zero/_build.py", "spec.offsets[index]", "0", SIDE_BY_SIDE),
    Mutant("tied leaves come apart", "zero/_build.py", "if index not in placed:", "if True:", SIDE_BY_SIDE),
    Mutant(
        "stage 0 lays leaves side by side",
        STEP,
        "if self.layout.shards_within_step:\n            whole",
        "if True:\n            whole",
        SIDE_BY_SIDE,
    ),
    Mutant("all old leaves live on", "zero/_build.py", "one.clear()", "leaves.append([*one.values()])", SIDE_BY_SIDE),
    # checksums
    Mutant("order is not in the checksum", "ranks/_agreement.py", ".mul_(2).add_(1)", ".mul_(0).add_(1)", AGREEMENT),
    Mutant("blocks may change places", "ranks/_agreement.py", "_FACTOR = 747796405", "_FACTOR = 1", AGREEMENT),
    Mutant("one block counts", "ranks/_agreement.py", "alpha=_FACTOR", "alpha=0", AGREEMENT),
    Mutant(
        "a lazy conjugate is read as it lies",
        "ranks/_agreement.py",
        " and not (x.is_conj() or x.is_neg())",
        "",
        AGREEMENT,
    ),
    Mutant(
        "a strided tensor is copied whole",
        "sharding/_flat.py",
        "    if x.is_contiguous():\n",
        "    x = x.contiguous()\n    if x.is_contiguous():\n",
        AGREEMENT,
    ),
    Mutant("the last row is left out", "sharding/_flat.py", "if last * row < stop", "if False", AGREEMENT),
    # init
    Mutant(
        "a module's weights are drawn anew",
        "zero/_source.py",
        "initializer(values) if on_meta(values) else",
        "initializer(values) if True else",
        GIVEN,
    ),
    Mutant("half a module is drawn", "zero/_module.py", "if absent and present:", "if False:", GIVEN),
    Mutant(
        "replicated leaves are the caller's",
        "zero/_build.py",
        "leaf if may_keep and i == positions[0] else leaf.clone()",
        "leaf",
        GIVEN,
    ),
    Mutant("donated leaves are copied", "zero/_build.py", "leaf if may_keep and", "leaf if False and", GIVEN),
    Mutant("donated views are kept", "zero/_source.py", "fit and alone)", "fit)", GIVEN),
    Mutant("donated inference tensors are kept", "zero/_source.py", " and not x.is_inference()", "", GIVEN),
    Mutant("leaves are held to the end", "zero/_source.py", "self.held[i] = None", "pass", GIVEN),
    Mutant("results have a graph", STEP, "(False), torch.no_grad():", "(False):", GIVEN),
    Mutant("results of inference mode", STEP, "with torch.inference_mode(False), ", "with ", GIVEN),
    Mutant("a unit on two devices", "zero/_build.py", "if device != devices[0]:", "if False:", GIVEN),
    Mutant(
        "a state without memory",
        "zero/_checks.py",
        "    if not any(x.is_meta for x in tree.tensors(params)):\n",
        "    if False:\n",
        GIVEN,
    ),
    # partition
    Mutant("like= is not compared", "zero/_build.py", "(tuple(x.shape), x.dtype) != wanted", "False", PARTITION),
    Mutant("tied leaves may differ", "zero/_build.py", "if x is not y and tensors", "if False and tensors", PARTITION),
    Mutant("ties are lost", "zero/_build.py", "if before not in self.copies:", "if True:", PARTITION),
    Mutant(
        "what differs by rank is shared",
        "zero/_source.py",
        "tree.map(torch.clone, x)",
        "tree.map(lambda v: v, x)",
        PARTITION,
    ),
    Mutant(
        "like= of another mesh", "zero/_sharded_step.py", "            check_tree(like, self.mesh)\n", "", PARTITION
    ),
    Mutant("all ranks' bytes", "zero/_bytes.py", "tensor.nbytes // n", "tensor.nbytes", PARTITION),
    # errors
    Mutant("stage True", "zero/_shard.py", "-1 if isinstance(stage, bool) else", "", ERRORS),
    Mutant("torch.optim runs", "zero/_checks.py", "isinstance(x, torch.optim.Optimizer)", "False", ERRORS),
    Mutant("torch.optim in init", "zero/_checks.py", '    check_pair(opt, "init")\n', "", ERRORS),
    Mutant("a module for parameters", "zero/_checks.py", "isinstance(args[i], torch.nn.Module)", "False", ERRORS),
    Mutant(
        "a state shares the parameters' memory",
        "zero/_sharded_step.py",
        "tree.map(copied_from(params), opt_state)",
        "opt_state",
        ATTACKED,
    ),
    Mutant(
        "units are sharded over no axis",
        "sharding/_units.py",
        "if axes and name not in [",
        "if False and name not in [",
        ATTACKED,
    ),
]
