"""Faults in fzero's other folders and files."""

from tests.mutants.changes import always, bare, becomes, before, dropped, never, returns, skipped
from tests.mutants.mutant import DONATION, GATHER_TEXTS, HALF, JIT, OWN, WRITES, Fault, File

JIT_DONATION = ("tests/graph/test_jit_donation.py",)

BOXES = ("tests/errors/test_boxes.py",)
ERRORS = ("tests/test_errors.py",)

MUTANTS = [
    *File("__init__.py", ("tests/test_import.py",)).faults(
        Fault("`import fzero` imports fzero.tuning as well", "", before("import importlib", "import fzero.tuning")),
    ),
    *File("_torch/on_import.py", ("tests/test_import.py",)).faults(
        Fault("Dynamo is imported with fzero", "", before("import importlib.abc", "import torch._dynamo")),
        Fault("Dynamo is not configured when it is imported", "_Loader.exec_module", skipped("A(module)", at="2 of 2")),
        Fault("boxes are not registered with optree", "register_optree_node", skipped("A('optree', B)")),
    ),
    *File("_tracebacks.py", ("tests/parallel/tensor/test_layers.py",)).faults(
        Fault("a message without its frames passes for the user's error", "is_message", dropped("hasattr(A, B)")),
    ),
    *File("_tracebacks.py", ("tests/test_tracebacks.py",)).faults(
        Fault(
            "an error of a policy's constructor has frames of fzero",
            "api_boundary_of_class",
            bare("api_boundary(A, documented=B)"),
        ),
    ),
    *File("_call_hints.py", ("tests/errors/test_calls.py", "tests/test_tracebacks.py")).faults(
        Fault("another library's argument is answered with the nearest", "_nearest", bare("A or B", at="1 of 2")),
        Fault("an error within a function gets the hints of a wrong call", "_failed_at_call", never("A is code")),
        Fault(
            "a misspelled name gets no suggestion",
            "_nearest",
            becomes("difflib.get_close_matches(A, B, 1)", "difflib.get_close_matches(A, B, 0 + 1, 1.0)"),
        ),
    ),
    *File("_call_hints.py", ("tests/test_call_hints.py",)).faults(
        Fault("an error of the user's function is taken for a wrong type", "_is_meant", never("is_user_code(A)")),
        Fault("a message of fzero is replaced", "_is_meant", becomes("A == _RAISE", "False")),
        Fault("a right type is named as wrong", "find_type_error", always("not isinstance(A, B)")),
        Fault("an int is no number", "find_type_error", becomes("A if B else classes", "classes")),
    ),
    *File("_arguments.py", ("tests/test_arguments.py",)).faults(
        Fault("a bool passes as an int", "is_int", bare("A and B")),
        Fault("an int below the least passes", "check_int", dropped("A <= B", at="1 of 2")),
        Fault("a tree passes as a function", "check_callable", never("not callable(A)")),
        Fault("a value with a long text is printed", "show_value", always("len(A) <= B")),
        Fault("a number passes as a value of remat", "check_remat", never("not (A or B or C)")),
        Fault("a single choice is told as one of two", "check_choice", becomes("A if rest else last", "A")),
        Fault("the int 1 passes as True", "check_choice", dropped("isinstance(A, B)")),
        Fault("a name in other letters is not near", "did_you_mean", bare("A.lower()", at="2 of 2")),
    ),
    *File("zero/_call_checks.py", ("tests/errors/test_places.py",)).faults(
        Fault("nested keys are not told from flat ones", "_key_hint", never("A in paths")),
        Fault("a key that is there passes for a near one", "_key_hint", never("A in values")),
        Fault("a dict of the user passes for an argument", "_key_notes", never("A in values and A not in owner")),
    ),
    *File("optim/_adam.py", ("tests/errors/test_places.py",)).faults(
        Fault("adamw's mask is first checked in an update", "adamw.init", skipped("check_mask_fits(A, B)")),
    ),
    *File("nn/_module_checks.py", ("tests/errors/test_places.py",)).faults(
        Fault("swapped parameters and buffers are called missing", "check_order", never("A and B")),
    ),
    *File("_names.py", ("tests/test_names.py",)).faults(
        Fault("another library's name is answered with the nearest", "missing_attribute", never("A and name in A")),
        Fault("a hidden name is the nearest", "missing_attribute", always("not x.startswith(A)")),
    ),
    *File("_arguments.py", ("tests/errors/test_paths.py",)).faults(
        Fault("an empty path passes", "check_path", dropped("not A")),
        Fault("a tree passes as a path", "check_path", never("not isinstance(A, B)")),
    ),
    *File("examples.py", ("tests/examples/test_copies.py",)).faults(
        Fault("a copied program replaces the user's file", "main", never("A(B).exists()")),
    ),
    *File("tree.py", ERRORS).faults(
        Fault(
            "trees in other layouts raise no LayoutError", "structure_error", becomes("LayoutError(A)", "ValueError(A)")
        ),
    ),
    *File("tree.py", ("tests/test_remedies.py",)).faults(
        Fault("a wrong argument is printed with all its numbers", "show", always("len(A) <= B")),
        Fault("a generator is told to be registered", "not_a_tensor", never("A.isgenerator(B)")),
    ),
    *File("tree.py").faults(
        Fault("tree.map makes two results of a tied leaf", "map", always("A not in B")),
    ),
    *File("axes/_bound_axes.py", ("tests/zero/test_axis_order.py",)).faults(
        Fault("hosts are gathered with the ranks within a host", "join_axes", never("run and A[B] < C[D]")),
        Fault(
            "units are always sharded in the mesh's order", "resolve_shard_axes", becomes("A if B else axis", "axis")
        ),
        Fault(
            "the index of an example follows the order of axis=", "loss_axes", becomes("in_mesh_order(A)", "tuple(A)")
        ),
        Fault("an axis that is named twice divides a unit twice", "check_distinct", never("len(A) < len(B)")),
    ),
    *File("zero/_evaluate.py", ("tests/zero/test_axis_order.py",)).faults(
        Fault("outputs follow the order of axis=, and not that of the batch", "_example_axes", returns("axes")),
    ),
    *File("sharding/maps/_flat_rows.py", ("tests/zero/test_axis_order.py",)).faults(
        Fault("shards pass between hosts in their own dtype", "_cast_all_to_gather", returns("xs")),
        Fault(
            "gradients are added over the hosts in the dtype of the update",
            "_local_reduce_scatter_shards",
            becomes("A.to(B)", "A"),
        ),
    ),
    *File("axes/_scope.py").faults(
        Fault("an axis stays bound after the rank program", "call_in_scope", skipped("A.stack.pop()")),
    ),
    *File("axes/_replicated.py", BOXES).faults(
        Fault("a simulation does not check that plain results are equal", "_ReplicatedIdentity.vmap", always("not A")),
        Fault(
            "a process does not notice that an input differs by rank",
            "check_inputs_replicated",
            never("A.name in B"),
            OWN,
        ),
    ),
    *File("_torch/levels.py", WRITES).faults(
        Fault("vmap hides a write", "version_key", skipped("A = B(A)")),
    ),
    *File("_torch/running_transforms.py", WRITES).faults(
        Fault(
            "the priority of a gradient's reduction is not raised",
            "raise_priority",
            never("not A()"),
            ("tests/transforms/test_memory.py",),
        ),
    ),
    *File("zero/_call_checks.py", ("tests/test_remedies.py",)).faults(
        Fault("a plain state is not named as the argument", "explain_error", never("is_opt_state(A)")),
        Fault(
            "a metric that differs by rank is taken for a parameter", "explain_error", always("A.split('.')[0] in B")
        ),
    ),
    *File("_donated.py", ("tests/test_remedies.py",)).faults(
        Fault("a tensor that init took names a step's results", "donated_message", never("A.startswith(B)")),
    ),
    *File("zero/_call_checks.py", ("tests/zero/test_parameters_with_grad.py",)).faults(
        Fault(
            "parameters with requires_grad are not detached, so each step's graph is kept",
            "as_value",
            never("is_grad_leaf"),
        ),
        Fault("a tensor with a graph is detached", "as_value", dropped("A.is_leaf")),
        Fault("jit lets a step write into its shards", "check_unwritten", always("not A()"), WRITES),
    ),
    *File("zero/_sharded_step.py", HALF).faults(
        Fault(
            "master weights start from rounded parameters",
            "ShardedStep.init",
            becomes("A.B('params', C, D)", "A.B('params', optimizer.precision.cast(C() if callable(C) else C), D)"),
        ),
        Fault(
            "any argument counts as state, the batch too",
            "ShardedStep.state_argnums",
            always("A in self.B or A < len(C) and D(E, C[A])"),
            JIT_DONATION,
        ),
    ),
    *File("optim/_precision.py", HALF).faults(
        Fault(
            "parameters that stay in full precision get the narrow dtype",
            "Precision.leaf_dtype",
            becomes("self.master", "self.param"),
        ),
    ),
    *File("_torch/tracing.py", JIT).faults(
        Fault(
            "random draws become constants of a trace",
            "trace",
            becomes("with A, B(), C, D(E), F(), G(): ...", "with A, B(), C, F(), G(): ..."),
        ),
    ),
    *File("_donated.py", DONATION).faults(
        Fault("a donated tensor keeps its memory", "donate_memory", skipped("A.data = B(A.dtype, A.device)")),
    ),
    *File("ranks/_agreement.py", GATHER_TEXTS).faults(
        Fault("texts of a later round may be read in an earlier one", "gather_texts", becomes("A[B] += 1", "A[B] = 1")),
        Fault(
            "texts of two topics share keys", "gather_texts", becomes("f'fzero/{A}/{B[A]}/{C}'", "f'fzero/{B[A]}/{C}'")
        ),
    ),
]
