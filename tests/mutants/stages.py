"""Faults in the sharded step, in what makes its trees, and in how ranks compare them."""

from tests.mutants.mutant import Mutant

GIVEN = ("tests/init/test_given.py",)
AGREEMENT = ("tests/ranks/test_agreement.py",)
STEP = "stages/_sharded_step.py"
PARTITION = ("tests/stages/test_partition.py",)
ERRORS = ("tests/test_errors.py",)

SIDE_BY_SIDE = ("tests/init/test_side_by_side.py",)
ATTACKED = ("tests/stages/test_attacked.py",)

MUTANTS = [
    Mutant(
        "a chain's state is taken for parameters",
        "stages/_checks.py",
        "return any(_is_state(x) for x in values)",
        "return False",
        ("tests/test_errors.py", "-k", "swapped"),
    ),
    Mutant(
        "a shape error does not say that it counts ranks",
        "ranks/spmd.py",
        "elif self.mesh.size > 1 and re",
        "elif self.mesh.size < 1 and re",
        ("tests/test_errors.py", "-k", "shape_error"),
    ),
    # leaves side by side
    Mutant("every leaf lies where the unit begins", "init/_side_by_side.py", "spec.offsets[index]", "0", SIDE_BY_SIDE),
    Mutant("tied leaves come apart", "init/_side_by_side.py", "if index not in placed:", "if True:", SIDE_BY_SIDE),
    Mutant(
        "stage 0 lays leaves side by side",
        STEP,
        "if self.layout.shards_within_step:\n            whole",
        "if True:\n            whole",
        SIDE_BY_SIDE,
    ),
    Mutant(
        "all old leaves live on", "init/_side_by_side.py", "one.clear()", "leaves.append([*one.values()])", SIDE_BY_SIDE
    ),
    # checksums
    Mutant("order is not in the checksum", "ranks/agreement.py", ".mul_(2).add_(1)", ".mul_(0).add_(1)", AGREEMENT),
    Mutant("blocks may change places", "ranks/agreement.py", "_FACTOR = 747796405", "_FACTOR = 1", AGREEMENT),
    Mutant("one block counts", "ranks/agreement.py", "alpha=_FACTOR", "alpha=0", AGREEMENT),
    Mutant(
        "a lazy conjugate is read as it lies",
        "ranks/agreement.py",
        " and not (x.is_conj() or x.is_neg())",
        "",
        AGREEMENT,
    ),
    Mutant(
        "a strided tensor is copied whole",
        "layout/elements.py",
        "    if x.is_contiguous():\n",
        "    x = x.contiguous()\n    if x.is_contiguous():\n",
        AGREEMENT,
    ),
    Mutant("the last row is left out", "layout/elements.py", "if last * row < stop", "if False", AGREEMENT),
    # init
    Mutant(
        "a module's weights are drawn anew",
        "init/_source.py",
        "initializer(values) if on_meta(values) else",
        "initializer(values) if True else",
        GIVEN,
    ),
    Mutant("half a module is drawn", "init/_module.py", "if absent and present:", "if False:", GIVEN),
    Mutant(
        "replicated leaves are the caller's",
        "init/_build.py",
        "leaf if may_keep and i == positions[0] else leaf.clone()",
        "leaf",
        GIVEN,
    ),
    Mutant("donated leaves are copied", "init/_build.py", "leaf if may_keep and", "leaf if False and", GIVEN),
    Mutant("donated views are kept", "init/_given.py", "fit and alone)", "fit)", GIVEN),
    Mutant("donated inference tensors are kept", "init/_given.py", " and not x.is_inference()", "", GIVEN),
    Mutant("leaves are held to the end", "init/_given.py", "self.held[i] = None", "pass", GIVEN),
    Mutant("results have a graph", STEP, "(False), torch.no_grad():", "(False):", GIVEN),
    Mutant("results of inference mode", STEP, "with torch.inference_mode(False), ", "with ", GIVEN),
    Mutant("a unit on two devices", "init/_build.py", "if device != devices[0]:", "if False:", GIVEN),
    Mutant(
        "a state without memory",
        "stages/_optimizer.py",
        "    if not any(x.is_meta for x in tree.tensors(params)):\n",
        "    if False:\n",
        GIVEN,
    ),
    # partition
    Mutant("like= is not compared", "init/_like.py", "(tuple(x.shape), x.dtype) != wanted", "False", PARTITION),
    Mutant("tied leaves may differ", "init/_like.py", "if x is not y and tensors", "if False and tensors", PARTITION),
    Mutant("ties are lost", "init/_build.py", "if before not in self.copies:", "if True:", PARTITION),
    Mutant(
        "what differs by rank is shared",
        "init/_given.py",
        "tree.map(torch.clone, x)",
        "tree.map(lambda v: v, x)",
        PARTITION,
    ),
    Mutant(
        "like= of another mesh", "stages/_sharded_step.py", "            check_tree(like, self.mesh)\n", "", PARTITION
    ),
    Mutant("all ranks' bytes", "stages/_state_bytes.py", "tensor.nbytes // n", "tensor.nbytes", PARTITION),
    # errors
    Mutant("stage True", "stages/_shard.py", "-1 if isinstance(stage, bool) else", "", ERRORS),
    Mutant("torch.optim runs", "stages/_optimizer.py", "isinstance(x, torch.optim.Optimizer)", "False", ERRORS),
    Mutant("torch.optim in init", "stages/_optimizer.py", '    check_pair(opt, "init")\n', "", ERRORS),
    Mutant("a module for parameters", "stages/_checks.py", "isinstance(args[i], torch.nn.Module)", "False", ERRORS),
    Mutant(
        "a state shares the parameters' memory",
        "stages/_sharded_step.py",
        "tree.map(copied_from(params), opt_state)",
        "opt_state",
        ATTACKED,
    ),
    Mutant(
        "units are sharded over no axis",
        "layout/units.py",
        "if axes and name not in [",
        "if False and name not in [",
        ATTACKED,
    ),
]
