"""Faults in fzero/nn."""

from tests.mutants.changes import always, bare, becomes, constant, dropped, never, returns, skipped
from tests.mutants.mutant import STEP, Fault, File

WRITTEN = ("tests/nn/test_writes.py",)
LEFT = ("tests/nn/test_leftovers.py",)
CLOSURES = ("tests/nn/test_closures.py",)
CHUNKS = ("tests/nn/test_linear_cross_entropy.py",)
FLOAT8 = ("tests/nn/test_float8.py",)

MUTANTS = [
    *File("parallel/tensor/_cross_entropy.py", CHUNKS).faults(
        Fault(
            "a label beside a chunk counts as the chunk's last class", "take_target_logits", becomes("A < B", "True")
        ),
        Fault("ignored labels add to the z loss", "combine_sums", skipped("A = torch.where(B, 0.0, A)")),
    ),
    *File("codecs/_quantize.py", FLOAT8).faults(
        Fault("scales of float8 are no powers of two", "block_scales", never("A.is_float")),
        Fault(
            "scales are rounded down, so that large numbers saturate", "_power_of_two", becomes("A + B & ~B", "A & ~B")
        ),
    ),
    *File("codecs/_quantize.py", FLOAT8).faults(
        Fault("a nan counts as a zero", "largest_magnitudes", dropped("nan=A")),
    ),
    *File("nn/_float8.py", FLOAT8).faults(
        Fault(
            "a row's scale is that of a column",
            "_encode_matrix",
            becomes("largest_magnitudes(x)", "largest_magnitudes(x.mT)"),
        ),
        Fault(
            "weights take the scale of inputs",
            "_scaled_product",
            becomes("*b_operand", "b_operand.codes, a_operand.scale"),
        ),
        Fault(
            "tensorwise gradients are rounded to e4m3", "float8_linear", becomes("torch.float8_e5m2", "_VALUE_DTYPE")
        ),
        Fault(
            "rowwise gradients are rounded to e5m2",
            "float8_linear",
            becomes("A if B else _VALUE_DTYPE", "torch.float8_e5m2"),
        ),
        Fault(
            "in the backward pass values are in e5m2 and gradients in e4m3",
            "_Recipe.of_gradient",
            becomes(
                "A(a=B, b=_VALUE_DTYPE, gradient=B, is_rowwise=D, adds_fast=E)",
                "A(a=_VALUE_DTYPE, b=B, gradient=B, is_rowwise=D, adds_fast=E)",
            ),
        ),
        Fault("gradients add in few bits", "_Recipe.of_gradient", constant(False, True)),
        Fault("rowwise codes of one direction serve both", "_Product.backward", never("A.is_rowwise")),
        Fault(
            "a layer keeps its input for the backward pass", "_Product.setup_context", becomes("not A and B", "False")
        ),
        Fault("an odd number of tokens is not padded", "_pad_codes", becomes("-A % SIZE_MULTIPLE", "0")),
        Fault(
            "all samples of a vmap share the first one's scales",
            "_Product.vmap",
            becomes("A.select(B, i)", "A.select(B, 0)"),
        ),
    ),
    *File("nn/_matmul_precision.py", ("tests/nn/test_matmul_precision.py",)).faults(
        Fault(
            "routers multiply in float8",
            "_default_layers",
            becomes("A if block_layers else B", "block_layers if block_layers else B"),
        ),
        Fault("heads and input layers multiply in float8", "_default_layers", becomes("A.startswith(B)", "True")),
        Fault("the last layer without blocks multiplies in float8", "_default_layers", becomes("A[1:-1]", "A[1:]")),
        Fault("layers of other sizes are chosen", "_default_layers", dropped("_has_multiple_sizes(A)")),
        Fault("transposed weights are not transposed back", "_forward_linear", becomes("A if B else C", "C")),
        Fault("products forget their scales", "MatmulPrecision.linear", dropped("scaling=A")),
        Fault("a weight that attention only reads is listed", "_linear_layers", skipped("A.discard(B)")),
    ),
    *File("parallel/tensor/_install.py", ("tests/nn/test_matmul_precision.py",)).faults(
        Fault("split layers multiply exactly", "install", becomes("A.get(B, C)", "C")),
    ),
    *File("nn/_tiled.py", ("tests/nn/test_tiled.py",)).faults(
        Fault("the activations of all tiles are kept", "tiled", bare("remat(A)")),
        Fault("tiles come back in another order", "tiled", becomes("torch.cat(ys, dim)", "torch.cat(ys[::-1], dim)")),
        Fault("a tile's result may have any number of tokens", "_check_tile", never("A or B or C")),
    ),
    *File("nn/_linear_cross_entropy.py", CHUNKS).faults(
        Fault("logits are kept for the backward pass", "_chunked_sums", bare("remat(A)")),
        Fault(
            "the gradient of hidden states is summed in half precision",
            "_WideGradient.forward",
            becomes("A.new_zeros((), dtype=torch.float32).expand(A.shape)", "torch.zeros_like(A)"),
        ),
        Fault("a chunk's labels are those of the first chunk", "_chunk_sums", bare("A - B * C")),
        Fault("the sums of half precision are taken in half precision", "_chunk_sums", bare("at_least_float32(A)")),
        Fault("logits are not capped again", "_cap_logits", becomes("A * torch.tanh(B)", "torch.tanh(B)")),
        Fault("ranks add their sums without the maximum", "_combine_ranks", becomes("A[0].log() + B", "A[0].log()")),
        Fault("smoothing divides by a rank's classes", "head_cross_entropy", becomes("len(A) * B(C)", "len(A)")),
    ),
    *File("nn/_lazy_logits.py", ("tests/nn/test_chunked_loss.py",)).faults(
        Fault("a head's scale is forgotten", "_LazyLogits._with_change", becomes("(*A, change)", "A")),
        Fault("a slice of tokens is forgotten", "_LazyLogits.__getitem__", becomes("self.hidden[A]", "self.hidden")),
        Fault(
            "ignored labels of the model count",
            "_cross_entropy",
            becomes("LossOptions(ignore_index, ...)", "LossOptions(-1, reduction, label_smoothing)"),
        ),
        Fault("a head split over an axis counts as whole", "install_lazy_logits", becomes("A if B else C", "None")),
        Fault("logits that exist pass for those that do not", "_with_check", never("not any(A)")),
    ),
    *File("nn/_functional.py", STEP).faults(
        Fault(
            "functional returns the module's own buffers, not copies",
            "functional",
            becomes("x.clone()", "x"),
            ("tests/nn/test_functional.py",),
        ),
    ),
    *File("nn/_functional.py", ("tests/nn/test_longrope.py",)).faults(
        Fault("longrope's frequencies are constants", "scratch_buffers", returns("frozenset()")),
        Fault("the short frequencies of longrope are scratch", "scratch_buffers", always("not A.endswith(B)")),
        Fault("the cache of longrope is a notice", "functional", becomes("(*A, *B)", "(*A,)")),
    ),
    *File("nn/_apply.py", ("tests/nn/test_longrope.py",)).faults(
        Fault(
            "a call returns the frequencies that it wrote", "Apply._call", bare("A | self.scratch_names", at="2 of 2")
        ),
    ),
    *File("parallel/context/_models.py", ("tests/nn/test_longrope.py",)).faults(
        Fault("a rank of split sequences knows its own positions alone", "_use_longest_position", always("A is None")),
        Fault("the longest position has an angle of its own", "_use_longest_position", bare("A[..., :-1, :]")),
    ),
    *File("nn/_apply.py", STEP).faults(
        Fault("ranks share a module's cached copy", "Apply._own_module", bare("B(A, C)")),
        Fault("ranks in lockstep run one module", "Apply._own_module", always("not A()")),
        Fault(
            "only a module's first call is checked for leftovers",
            "Apply._run_and_check_writes",
            becomes("A not in self.B.C", "not self.B.C"),
            WRITTEN,
        ),
        Fault(
            "a trace after other calls is not checked for leftovers",
            "Apply._run_and_check_writes",
            bare("B or A"),
            WRITTEN,
        ),
        Fault(
            "a call that is differentiated after others is not checked for leftovers",
            "Apply._run_and_check_writes",
            becomes("any(map(A, B.values()))", "False"),
            WRITTEN,
        ),
        Fault(
            "stand-ins that a trace leaves in a module are not removed",
            "Apply._run_and_check_writes",
            becomes("A(B, traced=C)", "A(B, traced=False)"),
            LEFT,
        ),
    ),
    *File("nn/_module_checks.py", STEP).faults(
        Fault("a parameter's hook is dropped without an error", "_check_hooks", becomes("A(x)", "[]"), WRITTEN),
    ),
    *File("nn/_copy.py", CLOSURES).faults(
        Fault("a function in an attribute reads the original module", "copy_module", skipped("A.__dict__[B] = C")),
        Fault("a hook reads the original module", "copy_module", becomes("A(hook, B)", "hook")),
        Fault(
            "a function's default argument reads the original module", "_follow_function", becomes("A[1]", "parts[1]")
        ),
        Fault(
            "a function's globals are not searched for the module", "_global_names", never("A.opname == 'LOAD_GLOBAL'")
        ),
    ),
    *File("nn/_remat_blocks.py", ("tests/nn/test_remat_blocks.py",)).faults(
        Fault("remat updates statistics twice", "_Forward.body", bare("A.clone()")),
    ),
    *File("nn/_module_writes.py", WRITTEN).faults(
        Fault(
            "a tensor that a call leaves in an attribute is not reported",
            "check_leftovers",
            never("A and not B.is_ignored(C)"),
        ),
        Fault(
            "an auxiliary loss in an attribute is named only in a notice",
            "_report_tensors",
            never("any(map(A, B))"),
        ),
        Fault("a program on a module may not leave tensors in it", "_report_tensors", never("A.has_program")),
        Fault("a counter is kept at its number at the trace", "_report_value", never("A.is_traced")),
        Fault(
            "an attribute that is filled in once is taken for a counter", "check_leftovers", dropped("A is not None")
        ),
        Fault("a value in an object in an attribute is not seen", "_copy_plain_values", never("isinstance(x, A) or B")),
        Fault("attributes that the user declares constant are refused", "LeftoverCheck.is_ignored", returns("False")),
        Fault("tensors in a list in an attribute are not found", "tensors_in", never("isinstance(A, B)", at="2 of 3")),
        Fault("a parameter that a call replaces is not reported", "check_writes", never("A[B] is not C")),
        Fault("a module is not restored after a call", "restore_modules", becomes("states_before", "()"), LEFT),
    ),
]
