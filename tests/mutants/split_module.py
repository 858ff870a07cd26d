"""Faults in fzero.nn's split of a module at its blocks."""

from tests.mutants.changes import bare, becomes, constant, dropped, negated, never, renamed, returns, swapped
from tests.mutants.mutant import Fault, File

SPLIT = ("tests/nn/test_split_module.py",)
NN = ("tests/nn/test_nn.py",)
PIPELINE = ("tests/nn/test_pipeline.py",)

MUTANTS = [
    *File("nn/_split_module.py", SPLIT).faults(
        Fault("each block is given what the first one is", "SplitModule.block", becomes("A[B]", "A[0]", at="3 of 3")),
        Fault("each block runs as the first one", "SplitModule._run_block", becomes("index", "0", at="1 of 3")),
        Fault(
            "the first block's constants are all blocks'",
            "_share_constants.share",
            becomes("A and B and not C.is_meta and D", "A and B and not C.is_meta or D"),
        ),
        Fault("constants of blocks are never shared", "_share_constants.share", negated("is_equal")),
        Fault("a block may return further tensors", "_one_tensor", dropped("has_more")),
        Fault("blocks may write statistics", "_read_only", dropped("mutable=frozenset()")),
        Fault(
            "some blocks may be left out",
            "SplitModule._record",
            becomes("raise ValueError(A(B, C.count))", "return C"),
        ),
        Fault("what blocks are given may depend on parameters", "SplitModule.block_arguments", never("A.B(C)")),
        Fault("the copy has memory of its own", "split_module", (dropped("**A", at="2 of 4"), dropped("**shared"))),
        Fault("join forgets the rest", "SplitModule.join", returns("block_params")),
        Fault("tuples are never tried", "SplitModule._record", becomes("[*A]", "[A.TENSOR]")),
        Fault("blocks with other parameters are stacked", "_check_alike", never("mismatches")),
        Fault("the first of several lists is taken", "blocks_of", constant(1, 9)),
        Fault("blocks of several classes", "_lists", swapped("==", ">=")),
        Fault("a block's parameter may be shared", "check_ownership", never("aliases")),
        Fault("a block's parameter may be frozen", "check_ownership", never("not A.requires_grad")),
        Fault("the loss of routers is lost", "check_ownership", dropped("'output_router_logits'")),
        Fault("masks have the module's dtype", "SplitModule.block_arguments", bare("B or A"), PIPELINE),
    ),
    *File("nn/_shells.py", SPLIT).faults(
        Fault("the module may change what is handed on", "BlockHandler.call", never("A and B is not self.x")),
        Fault("blocks may run in any order", "BlockHandler.call", becomes("A != self.count", "self.count >= 3")),
        Fault("blocks may be given objects", "_check_plain", never("not isinstance(A, B)")),
        Fault("all blocks are of one kind", "_kinds", becomes("A(B, calls)", "B or calls")),
        Fault("constants of functions do not count", "_same", becomes("bool(A == B)", "True")),
        Fault("no blocks are of one kind", "_same", never("A is b")),
        Fault("the rank's block is not chosen", "run_dynamic_block", bare("torch.where(B(list(C), D.position), A, E)")),
        Fault(
            "masks are the first rank's",
            "run_dynamic_block",
            becomes("(A, B([C[D] for D in E], F.position))", "(A, C[E[0]])"),
        ),
        Fault(
            "constants are the first rank's",
            "run_dynamic_block",
            becomes("(A([B[C] for C in D], E.position), F)", "(B[D[0]], F)"),
        ),
        Fault("listening draws the step's numbers", "calls_of", becomes("A(B(0), C)", "C()")),
        Fault(
            "how many values a block has goes unseen",
            "_FirstValueOnly.__len__",
            becomes("raise A('where it asks how many values a block returns,')", "return 1"),
        ),
        Fault("shells copy their blocks", "Shell.__deepcopy__", renamed("copied"), PIPELINE),
    ),
    *File("nn/_functional.py", NN).faults(
        Fault("a rank's copy reads parameters", "Apply._own_module", dropped("shared")),
    ),
    *File("nn/_pipeline.py", PIPELINE).faults(
        Fault("each block of a pipeline is the first", "pipeline.block", becomes("index", "0")),
        Fault("remat is forgotten", "pipeline", becomes("remat", "False")),
        Fault("the rest is the whole tree", "pipeline.first", bare("A['rest']")),
    ),
]
