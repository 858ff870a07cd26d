"""Faults in fzero/layout."""

from tests.mutants.mutant import AXES, GRAPH, HALF, WRITES, Mutant

FLAT, RECORDER = ("tests/layout/test_flat.py",), ("tests/_torch/test_recorder.py",)

MUTANTS = [
    Mutant(
        "a slot is the unit's first leaf",
        "layout/boxes.py",
        "self.spec.whole_shapes[self.index]",
        "self.spec.whole_shapes[0]",
        ("tests/layout/test_answers.py",),
    ),
    Mutant(
        "a moment has its parameter's dtype",
        "layout/boxes.py",
        "        return self.parts[0].dtype",
        "        return self.spec.dtype",
        ("tests/layout/test_answers.py",),
    ),
    Mutant(
        "a part of a leaf is the leaf",
        "layout/boxes.py",
        "for shape in self.spec.whole_shapes)",
        "for shape in self.spec.shapes)",
        ("tests/layout/test_answers.py",),
    ),
    # a unit as one buffer
    Mutant("a pack leaves its padding out", "layout/flat.py", "    if padding:", "    if False:", FLAT),
    Mutant("padding is what the memory held", "layout/flat.py", "at, padding).zero_()", "at, padding).fill_(7)", FLAT),
    Mutant(
        "a stand-in's parts begin where its memory does",
        "layout/flat.py",
        "at, found = buffer.storage_offset(), []",
        "at, found = 0, []",
        FLAT,
    ),
    Mutant(
        "an executor packs as a trace does",
        "graph/run/_pieces.py",
        ", packed: packed_by_copies}",
        "}",
        FLAT,
    ),
    Mutant(
        "every item lies where the first does",
        "graph/storages.py",
        "(found.of[source][index],)",
        "(found.of[source][0],)",
        GRAPH,
    ),
    Mutant(
        "constants are recorded as data",
        "_torch/recorder.py",
        "if found is None or found.constant is not None:",
        "if found is None:",
        RECORDER,
    ),
    Mutant(
        "a constant keeps its value when data is written into it",
        "_torch/recorder.py",
        "if known.constant is not None and storage_id(known.constant) in written:",
        "if False:",
        RECORDER,
    ),
    Mutant(
        "items are counted without those that are none",
        "_torch/recorder.py",
        "for i, x in enumerate(out):",
        "for i, x in enumerate([y for y in out if y is not None]):",
        RECORDER,
    ),
    Mutant(
        "other traces record one node, too",
        "_torch/recorder.py",
        "if mode is not None and recorder is not None:",
        "if mode is not None:",
        RECORDER,
    ),
    Mutant("drop the padding", "layout/spec.py", "-(-self.numel // self.ranks)", "self.numel // self.ranks"),
    Mutant(
        "origin that outlives a change",
        "layout/boxes.py",
        "return Shard(parts[0] if len(parts) == 1 else tuple(parts), uid)",
        "return Shard(parts[0] if len(parts) == 1 else tuple(parts), uid, _LAST.get(uid))",
        more=(  # a memory that no flattening clears
            (
                "if origin is None else _Origin(origin,",
                "if _LAST.setdefault(uid, origin) is None else _Origin(_LAST[uid],",
            ),
            ("class Shard(", "_LAST: dict = {}\n\n\nclass Shard("),
        ),
    ),
    Mutant(
        "a written shard is what it was",
        "layout/boxes.py",
        "self._origin.written != _written(self.data)",
        "False",
        WRITES,
    ),
    Mutant(
        "memory is known by its address",
        "_torch/levels.py",
        "StorageWeakRef(x.untyped_storage()))",
        "x.untyped_storage()._cdata)",
        ("tests/_torch/test_torch.py",),
    ),
    Mutant(
        "skip the psum in the norm",
        "layout/segments.py",
        "[psum(square, axes) for axes, square in",
        "[square for axes, square in",
    ),
    Mutant(
        "count the padding in the norm",
        "layout/segments.py",
        "position < numel, x",
        "position < numel + 9, x",
    ),
    Mutant("count a tied leaf twice", "layout/segments.py", "plain[id(x)] =", "plain[len(plain)] ="),
    Mutant("untie a leaf", "layout/units.py", "or tree.identity(leaf) in seen", "or False"),
    Mutant("every part is cut along dimension 0", "layout/units.py", "dim=split[i][name]", "dim=0", AXES),
    Mutant("axes in the wrong order", "layout/rows.py", "for a in rest[::-1]:", "for a in rest:", AXES),
    Mutant("summed in half precision", "layout/flat.py", "else spec.cast[0]", "else spec.dtype", HALF),
    Mutant(
        "shift the rank in the simulation",
        "layout/rows.py",
        'return [rearrange(flat.pack(_spec(options), xs), "... (n k) -> n ... k", n=n)]',
        'return [rearrange(flat.pack(_spec(options), xs), "... (n k) -> n ... k", n=n).roll(1, 0)]',
    ),
    Mutant(
        "shift the rank in a process",
        "layout/rows.py",
        "xs, binding.rank, binding.size)]",
        "xs, (binding.rank + 1) % binding.size, binding.size)]",
        ("tests/distributed",),
    ),
    Mutant(
        "swap the gather order",
        "layout/rows.py",
        "rearrange(_narrow(spec, xs[0]), ",
        "rearrange(_narrow(spec, xs[0]).flip(0), ",
    ),
    Mutant("gather is no transpose", "layout/rows.py", 'transpose="reduce_scatter"', 'transpose="partition"'),
    Mutant(
        "skip the all_reduce of stage 0", "layout/rows.py", "x.sum(0, dtype=flat.wire_dtype(spec, x))) for", "x[0]) for"
    ),
    Mutant(
        "whole weights on the wire",
        "layout/rows.py",
        "return x.to(flat.gathered_dtype",
        "return x.to(flat.wire_dtype",
        HALF,
    ),
]
