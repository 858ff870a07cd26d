"""Faults in fzero/_torch, where the graph uses it."""

from tests.mutants.changes import always, bare, becomes, dropped, never, skipped, swapped
from tests.mutants.mutant import DONATION, IN_PLACE, JIT, LENGTHS, Fault, File

RECORDER = ("tests/_torch/test_recorder.py",)
GRAPHS = ("tests/_torch/test_graphs.py",)
BUFFERS = ("tests/_torch/test_memory.py",)
COMPILE = ("tests/graph/test_compile.py",)
PLAN = ("tests/graph/test_plan.py",)
DECISIONS = ("tests/_torch/test_decisions.py",)
BORDERS = ("tests/graph/run/test_borders.py",)

MUTANTS = [
    *File("_torch/accelerator.py", ("tests/graph/test_autocast.py",)).faults(
        Fault("a graph casts again where it runs", "without_autocast", never("torch.is_autocast_enabled(A)")),
        Fault(
            "gradients of a weight used twice are summed in half precision",
            "without_autocast_cache",
            skipped("torch.set_autocast_cache_enabled(False)"),
        ),
        Fault(
            "autocast's cache stays off",
            "without_autocast_cache",
            skipped("torch.set_autocast_cache_enabled(was_enabled)"),
        ),
    ),
    *File("_torch/tracing.py", DONATION).faults(
        Fault(
            "`.data =` with other memory is not refused", "_Assignments.__torch_function__", never("A == B"), IN_PLACE
        ),
        Fault("anomaly mode stays on during a trace", "trace", becomes("False", "torch.is_anomaly_enabled()"), JIT),
    ),
    *File("_torch/graphs.py", GRAPHS).faults(
        Fault("a copied graph may use a name twice", "copy_nodes", skipped("A._used_names.update(B)")),
    ),
    *File("_torch/memory.py", DONATION).faults(
        Fault("a reference from C++ to a tensor is not counted", "_count_references", bare("A + B._use_count() - 1")),
        Fault("a view's base that Python holds is not seen", "_keeps_base", dropped("sys.getrefcount(A) <= B()")),
        Fault("a view's base that autograd holds is not seen", "_keeps_base", dropped("A <= B + 1")),
    ),
    *File("_torch/stand_ins.py", ("tests/_torch/test_stand_ins.py",)).faults(
        Fault(
            "1 and True share a cache entry of stand-ins",
            "_argument_key",
            becomes("return A, B", "return B", at="2 of 2"),
        ),
        Fault("stand-ins with different strides share a cache entry", "_argument_key", dropped("A.stride()")),
        Fault("stand-ins with different dtypes share a cache entry", "_argument_key", dropped("A.dtype")),
        Fault(
            "whether operands share memory is not in the key of the cache of stand-ins",
            "StandInCache.call",
            becomes("(A, B, C, D(E))", "(A, B, C, ())"),
        ),
        Fault(
            "a cached stand-in of a view has memory of its own",
            "_tensor_metadata",
            becomes("A.get(storage_id(B))", "None"),
        ),
        Fault(
            "an alias of a stand-in is on the meta device",
            "make_alias",
            becomes("A.fake_device", "torch.device('meta')"),
        ),
        Fault(
            "a function runs anew for stand-ins of known metadata",
            "StandInCache.call",
            becomes("isinstance(A, B) and C", "not isinstance(A, B) or C"),
        ),
        Fault(
            "metadata of stand-ins is shared by default dtypes",
            "StandInCache.call",
            becomes("_SHARED[A]", "_SHARED[torch.float32]"),
        ),
        Fault(
            "a cached stand-in lets its data be read",
            "_make_stand_in",
            becomes("A._allow_unsafe_data_ptr_access", "True"),
        ),
    ),
    *File("_torch/recorder.py", RECORDER).faults(
        Fault(
            "the efficient zeros of forward mode are recorded",
            "REPLACEMENTS",
            dropped("A: torch.ops.aten.zeros.default"),
            IN_PLACE,
        ),
        Fault("a stand-in is not copied when it is recorded", "_track", bare("B(A)")),
        Fault(
            "only the first of several results is recorded", "_record_node", becomes("enumerate(A)", "enumerate(A[:1])")
        ),
        Fault(
            "the user's annotations of nodes are lost",
            "_record_node",
            dropped("**get_current_meta().get('custom', {})"),
        ),
        Fault("a compound operation counts as a plain one", "_is_plain", dropped("A.has_kernel_for_dispatch_key(B)")),
        Fault(
            "an operation whose shape depends on values is recorded as a plain one",
            "_is_plain",
            dropped("A & set(B.tags)"),
        ),
        Fault("an operation meant as one node is recorded as its parts", "OneNode.__call__", never("mode is not None")),
        Fault(
            "a node of the backward pass has the line being run, not its forward line",
            "_call_source",
            (swapped("==", "!="), becomes("-1", "-2")),
            PLAN,
        ),
    ),
    *File("_torch/memory.py", BUFFERS).faults(
        Fault("leaves with a gap between them count as a buffer", "_find_buffer", never("A[B].storage_offset() != C")),
        Fault("leaves that do not fill their storage count as a buffer", "_find_buffer", always("fills")),
        Fault("transposed leaves count as a buffer", "_find_buffer", dropped("A[B].is_contiguous()")),
    ),
    *File("_torch/compiler.py", COMPILE).faults(
        Fault("Inductor's cache is not used", "_stand_in_mode", dropped("shape_env=ShapeEnv()")),
        Fault(
            "a GPU's code waits for the CPU's vector instructions",
            "_compile",
            always("all(A.device.type == 'cpu' for A in B if C)"),
        ),
        Fault("a worker's cache key differs from the step's", "", becomes("copyreg.pickle", "str")),
        Fault(
            "the workaround for GCC 11 and 12 is off",
            "_gcc_workaround",
            becomes("return A", "return {}", at="2 of 2"),
            ("tests/_torch/test_torch.py",),
        ),
        Fault(
            "code that is not valid C++ is compiled again with the same settings",
            "_compile",
            becomes("{**A, 'cpp.max_horizontal_fusion_size': 1}", "A"),
            ("tests/_torch/test_torch.py",),
        ),
        Fault(
            "the result of a segment does not have the traced strides",
            "_match_strides",
            always("A or B(C, D)"),
            BORDERS,
        ),
        Fault(
            "a view is taken of a tensor with other strides",
            "_ReshapeInterpreter.call_function",
            never("A in B"),
            BORDERS,
        ),
        Fault(
            "padding by a length fixes that length in the code",
            "_AtLength.call_function",
            never("A is B.default"),
            LENGTHS,
        ),
    ),
    *File("_torch/compiler_process.py", COMPILE).faults(
        Fault(
            "Inductor is imported on a thread before Dynamo's import has ended",
            "_start_thread",
            skipped("A.import_module(B)"),
            ("tests/test_import.py",),
        ),
    ),
    *File("_torch/decisions.py", DECISIONS).faults(
        Fault(
            "a rounded size is fitted by a polynomial",
            "_Operations._check_sizes",
            (swapped("or", "and"), bare("not A")),
        ),
        Fault(
            "a comparison that fixes the length is ignored",
            "_Operations.check_not_fixed",
            never("self.symbol in self.env.replacements"),
        ),
        Fault("a length of 1 uses the code of other lengths", "decisions.holds", dropped("A >= 2")),
        Fault("a fractional size counts as a whole number", "_Operations._check_sizes", bare("torch.SymFloat | A")),
        Fault("every division of sizes counts as exact", "_simplify", bare("B.C and A")),
        Fault(
            "a number that a substitute ignores may follow the length",
            "_Substitutes.__torch_function__",
            never("any(A for B in tree_leaves((C, D)))"),
        ),
        Fault(
            "the number of comparisons has no limit",
            "_make_environment.LimitedShapeEnv.evaluate_expr",
            never("len(self.guards) > A"),
        ),
    ),
]
