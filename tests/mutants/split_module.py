"""Faults in fzero.nn's split of a module at its blocks."""

from tests.mutants.changes import bare, becomes, constant, dropped, negated, never, renamed, returns, swapped
from tests.mutants.mutant import Fault, File

SPLIT = ("tests/nn/split/test_split_module.py",)
NN = ("tests/nn/test_functional.py",)
PIPELINE = ("tests/nn/test_module_pipeline.py",)

MUTANTS = [
    *File("nn/split/_split_module.py", SPLIT).faults(
        Fault(
            "every block gets the first block's arguments", "_SplitModule.block", becomes("A[B]", "A[0]", at="3 of 3")
        ),
        Fault("every block runs the first block's code", "_SplitModule._run_block", becomes("index", "0", at="1 of 3")),
        Fault(
            "every block uses the first block's constants",
            "_share_constants.share",
            becomes("A and B and not C.is_meta and D", "A and B and not C.is_meta or D"),
        ),
        Fault(
            "unequal constants of blocks are shared, and equal ones are not",
            "_share_constants.share",
            negated("is_equal"),
        ),
        Fault("a block may return further tensors", "_one_tensor", dropped("has_more")),
        Fault("a block may write its buffers", "_read_only", dropped("mutable_names=frozenset()")),
        Fault(
            "some blocks may be left out",
            "_SplitModule._record_blocks",
            becomes("raise ValueError(A(B, C.count))", "return C"),
        ),
        Fault("a block's arguments may depend on parameters", "_SplitModule.block_arguments", never("A.B(C)")),
        Fault(
            "a split module does not share its parameters' memory",
            "split_module",
            (dropped("**A", at="2 of 4"), dropped("**tied_tensors")),
        ),
        Fault("join returns the blocks' parameters only", "_SplitModule.join", returns("block_params")),
        Fault(
            "blocks that return tuples are not supported", "_SplitModule._record_blocks", becomes("[*A]", "[A.TENSOR]")
        ),
        Fault(
            "a block's arguments are recorded in the module's dtype, not in dtype=",
            "_SplitModule.block_arguments",
            bare("B or A"),
            PIPELINE,
        ),
    ),
    *File("nn/split/_find_blocks.py", SPLIT).faults(
        Fault("blocks with other parameters are stacked", "_check_alike", never("mismatches")),
        Fault("a module with several lists of blocks is not refused", "find_blocks", constant(1, 9)),
        Fault("a list of blocks of several classes counts as blocks", "_module_lists", swapped("==", ">=")),
        Fault("a block's parameter may be shared", "check_ownership", never("aliases")),
        Fault("a block's parameter may be frozen", "check_ownership", never("not A.requires_grad")),
        Fault("a router's loss is dropped without an error", "check_ownership", dropped("'output_router_logits'")),
    ),
    *File("nn/split/_shells.py", SPLIT).faults(
        Fault("the module may change a tensor between blocks", "BlockHandler.call", never("A and B is not self.x")),
        Fault("blocks may run in any order", "BlockHandler.call", becomes("A != self.count", "self.count >= 3")),
        Fault("a block may get arguments that are not plain", "_check_plain", never("not isinstance(A, B)")),
        Fault(
            "a module that asks for the number of a block's values is not refused",
            "_FirstValueOnly.__len__",
            becomes("raise A('where it asks how many values a block returns,')", "return 1"),
        ),
        Fault("a shell is copied with its block", "Shell.__deepcopy__", renamed("copied"), PIPELINE),
    ),
    *File("nn/split/_dynamic_block.py", SPLIT).faults(
        Fault(
            "blocks with different constants run as one kind", "_group_by_kind", becomes("A(B, calls)", "B or calls")
        ),
        Fault("constants of functions are not compared", "_are_same", becomes("bool(A == B)", "True")),
        Fault("blocks that share a constant tensor count as different kinds", "_are_same", never("A is b")),
        Fault(
            "the code of all kinds of blocks is not selected by rank",
            "run_dynamic_block",
            bare("torch.where(B(list(C), D.position), A, E)"),
        ),
        Fault(
            "every rank uses the first rank's masks",
            "run_dynamic_block",
            becomes("(A, B([C[D] for D in E], F.position))", "(A, C[E[0]])"),
        ),
        Fault(
            "every rank uses the first rank's constants",
            "run_dynamic_block",
            becomes("(A([B[C] for C in D], E.position), F)", "(B[D[0]], F)"),
        ),
        Fault(
            "recording a module's calls advances the random generator", "_record_calls", becomes("A(B(0), C)", "C()")
        ),
    ),
    *File("nn/_apply.py", NN).faults(
        Fault(
            "a rank's copy of a module copies its parameters",
            "Apply._own_module",
            dropped("shared_tensors(self.module)"),
        ),
    ),
    *File("nn/_module_pipeline.py", PIPELINE).faults(
        Fault("every block of a pipeline is the first one", "pipeline.block", becomes("index", "0")),
        Fault("remat= is ignored", "pipeline", becomes("remat", "False")),
        Fault("the first layers of a pipeline get the whole tree, not the rest", "pipeline.first", bare("A['rest']")),
    ),
]
