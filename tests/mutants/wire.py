"""Faults in what codecs send: fzero/codecs, fzero/sharding/maps, and the passes that order their collectives."""

from tests.mutants.changes import always, becomes, constant, dropped, never
from tests.mutants.mutant import Fault, File
from tests.mutants.rows import keys_of

HALF = "CodeKind(4, 3.5, torch.int8)"
CODECS = ("tests/codecs/test_codecs.py",)
CODED = ("tests/sharding/maps/test_coded.py",)

MUTANTS = [
    *File("codecs/_quantize.py", CODECS).faults(
        *[
            Fault(f"{name} has other numbers", "KINDS", becomes(f'"{name}": A', f'"{name}": {HALF}'))
            for name in keys_of("codecs/_quantize.py", "KINDS")
        ],
        Fault(
            "a block has the scale of the next one",
            "quantize",
            becomes("scales.unsqueeze(-1)", "scales.roll(1, -1).unsqueeze(-1)"),
        ),
        Fault("the sign of four bits is lost", "unpack", becomes("A - 8", "A")),
        Fault("codes are rounded down", "quantize", becomes("torch.round(x)", "torch.floor(x)")),
        Fault(
            "rounding at random forgets the place",
            "_draw_fractions",
            becomes("mix_bits(A, B << 32)", "mix_bits(A, B * 0)"),
        ),
        Fault(
            "a nan is no large magnitude",
            "largest_magnitudes",
            becomes("A(B, nan=C, posinf=C)", "A(B, nan=0.0, posinf=C)"),
        ),
        Fault("the second half of a byte is the first", "pack", becomes("A << 4", "low << 4")),
        Fault("a scale is half as large", "block_scales", becomes("A / B.largest", "A / (2 * B.largest)")),
    ),
    *File("codecs/_codec.py", CODECS).faults(
        Fault(
            "the bound of an integer codec leaves float32's rounding out",
            "Codec.error_bound",
            becomes("1 + (A.largest + 1) * 2**-22", "1"),
        ),
        Fault("codes of another codec are decoded", "Codec._check_encoded", never("A != B or C")),
        Fault("integers are encoded as numbers", "_check_floating_point", dropped("not A.is_floating_point()")),
        Fault("the gradient is rounded, too", "_Round.backward", becomes("A[0]", "A[0].bfloat16().float()")),
        Fault("a vmap rounds all its values as one tensor", "_Round.vmap", becomes("leading + 1", "leading")),
    ),
    *File("sharding/elements/_block_ranges.py", CODED).faults(
        Fault("blocks begin where a shard begins", "block_range", becomes("begin % block", "0")),
        Fault("a range has the scales of the unit's first blocks", "UnitRange.own", becomes("self.first", "0")),
    ),
    *File("sharding/maps/_coded_rows.py", CODED).faults(
        Fault("each rank has scales of its own", "", becomes("A.amax(0)", "A[0]")),
        Fault("the sums of codes have too few bytes", "_bytes_per_sum", becomes("A * ranks", "A")),
        Fault("sums of bytes are never negative", "decode_sums", becomes("A - (1 << B)", "A")),
        Fault("a rank adds its own codes alone", "sum_payloads", becomes("A.sum(0)", "A[0]")),
        Fault("over a further axis a rank takes its own sum alone", "add_sums", becomes("A.sum(0)", "A[0]")),
        Fault("a sum of sums has the bytes of one rank's codes", "_part_bytes", becomes("options.ranks", "1")),
    ),
    *File("sharding/maps/_coded.py", CODED).faults(
        Fault(
            "a rank's index along several axes is that along the last",
            "_apply_row_to_part",
            becomes("index * a.size + a.rank", "a.rank"),
        ),
        Fault("scales are shared along one axis alone", "_largest_magnitudes", becomes("reversed(axes)", "axes[:1]")),
    ),
    *File("sharding/maps/_unit_maps.py", CODED).faults(
        Fault("one rank rounds a sum that it does not send", "_is_single", constant(1, 0)),
        Fault(
            "at stage 0 the gradients of experts are summed without codes",
            "apply_over_unit_axes",
            never("A == 'all_reduce_shard' and B"),
        ),
        Fault("leaves that exist already are not rounded", "_gather_from_origin", never("key is not None")),
        Fault(
            "a gradient of a gradient is rounded",
            "_WithRowDerivatives.backward",
            becomes("_apply_rows(A, B, C, D)", "apply_over_unit_axes(A, B, C, [x.bfloat16().float() for x in D])"),
        ),
    ),
    *File("transforms/_gradient_groups.py", CODED).faults(
        Fault("an unsharded program does not round", "_tensor_groups", dropped("rounding=A")),
        Fault("full leaves of stages 0 and 1 are not rounded", "_round_leaves", always("key is None")),
    ),
    *File("optim/_precision.py", CODED).faults(
        Fault("leaves in full precision are sent by a codec", "Precision.gradients", always("dtype == self.param")),
    ),
    *File("graph/ir/_nodes.py", CODED).faults(
        Fault("a decoded unit is never freed", "views_and_users", dropped("(decoded and decodes(user))")),
    ),
    *File("graph/ir/_collective_nodes.py", CODED).faults(
        Fault("codes are sent in the order of work", "sends_codes", never("A and B")),
    ),
    *File("graph/passes/_bucket.py", CODED).faults(
        Fault("maxima of gradients wait for each other", "bucket", dropped("n in from_inputs")),
    ),
]
