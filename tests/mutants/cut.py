"""Faults in fzero.nn's cut of a module at its blocks."""

from tests.mutants.mutant import Mutant

CUT = ("tests/nn/test_cut.py",)
NN = ("tests/nn/test_nn.py",)
PIPELINE = ("tests/nn/test_pipeline.py",)

MUTANTS = [
    Mutant("each block is given what the first one is", "nn/_cut.py", "x, given[index])", "x, given[0])", CUT),
    Mutant("each block runs as the first one", "nn/_cut.py", "self.blocks[index]", "self.blocks[0]", CUT),
    Mutant(
        "the first block's constants are all blocks'",
        "nn/_cut.py",
        "x.is_meta and torch.equal",
        "x.is_meta or torch.equal",
        CUT,
    ),
    Mutant(
        "constants of blocks are never shared",
        "nn/_cut.py",
        "return other if alike and",
        "return other if not alike and",
        CUT,
    ),
    Mutant(
        "a block may return further tensors",
        "nn/_cut.py",
        "isinstance(values[0], torch.Tensor) or others",
        "isinstance(values[0], torch.Tensor)",
        CUT,
    ),
    Mutant("blocks may write statistics", "nn/_cut.py", "mutable=frozenset(), tp=None)", "tp=None)", CUT),
    Mutant(
        "some blocks may be left out",
        "nn/_cut.py",
        'raise ValueError(f"the module ran',
        'return records  # (f"the module ran',
        CUT,
    ),
    Mutant("what blocks are given may depend on parameters", "nn/_cut.py", "if reach.holds(x):", "if False:", CUT),
    Mutant("the copy has memory of its own", "nn/_cut.py", "{**shells, **shared}", "{**shells}", CUT),
    Mutant("join forgets the rest", "nn/_cut.py", 'return {**found, **params["rest"]}', "return found", CUT),
    Mutant(
        "the module may change what is handed on", "nn/_shells.py", "if index and x is not self.x:", "if False:", CUT
    ),
    Mutant("blocks may run in any order", "nn/_shells.py", "if index != self.count:", "if self.count >= 3:", CUT),
    Mutant(
        "blocks may be given objects", "nn/_shells.py", "elif not isinstance(value, CONSTANTS):", "elif False:", CUT
    ),
    Mutant("tuples are never tried", "nn/_cut.py", "else [*Form]:", "else [Form.TENSOR]:", CUT),
    Mutant("blocks with other parameters are stacked", "nn/_cut.py", "if differing:", "if False:", CUT),
    Mutant("the first of several lists is cut", "nn/_cut.py", "len(lists) > 1", "len(lists) > 9", CUT),
    Mutant("blocks of several classes", "nn/_cut.py", "for child in m}) == 1", "for child in m}) >= 1", CUT),
    Mutant("a block's parameter may be shared", "nn/_cut.py", "            if others:", "            if False:", CUT),
    Mutant("a block's parameter may be frozen", "nn/_cut.py", "if not p.requires_grad:", "if False:", CUT),
    Mutant("the loss of routers is lost", "nn/_cut.py", '"output_router_logits", ', "", CUT),
    Mutant(
        "all blocks are of one kind",
        "nn/_shells.py",
        "if same_calls(other, calls)), None)",
        "if other or calls), None)",
        CUT,
    ),
    Mutant("constants of functions do not count", "nn/_shells.py", "return bool(a == b)", "return True", CUT),
    Mutant("no blocks are of one kind", "nn/_shells.py", "        return a is b", "        return False", CUT),
    Mutant(
        "the rank's block is not chosen",
        "nn/_shells.py",
        "out = torch.where(select(list(is_mine), index.which), y, out)",
        "out = y",
        CUT,
    ),
    Mutant(
        "masks are the first rank's",
        "nn/_shells.py",
        "_selected([given[i] for i in own], index.which)",
        "given[own[0]]",
        CUT,
    ),
    Mutant(
        "constants are the first rank's",
        "nn/_shells.py",
        "_selected([constants[i] for i in own], index.which)",
        "constants[own[0]]",
        CUT,
    ),
    Mutant("listening draws the step's numbers", "nn/_shells.py", "draw_from(key(0), listened)", "listened()", CUT),
    Mutant(
        "a rank's copy reads parameters",
        "nn/_functional.py",
        "copy_module(self.module, shared)",
        "copy_module(self.module)",
        NN,
    ),
    Mutant(
        "how many values a block has goes unseen",
        "nn/_shells.py",
        'raise Changed("where it asks how many values a block returns,")',
        "return 1",
        CUT,
    ),
    Mutant("shells copy their blocks", "nn/_shells.py", "def __deepcopy__", "def copied", PIPELINE),
    Mutant(
        "each block of a pipeline is the first",
        "nn/_pipeline.py",
        "x.dtype), index)",
        "x.dtype), 0)",
        PIPELINE,
    ),
    Mutant("remat is forgotten", "nn/_pipeline.py", "remat=remat", "remat=False", PIPELINE),
    Mutant(
        "the rest is the whole tree",
        "nn/_pipeline.py",
        'return made.first(params["rest"], inputs_of(batch))',
        "return made.first(params, inputs_of(batch))",
        PIPELINE,
    ),
    Mutant("masks have the module's dtype", "nn/_cut.py", "dtype or own, batch)", "own, batch)", PIPELINE),
]
