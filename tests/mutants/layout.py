"""Faults in fzero/layout."""

from tests.mutants.mutant import AXES, GRAPH, HALF, WRITES, Mutant

FLAT, RECORDER = ("tests/sharding/test_flat.py",), ("tests/_torch/test_recorder.py",)

MUTANTS = [
    Mutant(
        "a slot is the unit's first leaf",
        "sharding/_boxes.py",
        "self.spec.whole_shapes[self.index]",
        "self.spec.whole_shapes[0]",
        ("tests/sharding/test_answers.py",),
    ),
    Mutant(
        "a moment has its parameter's dtype",
        "sharding/_boxes.py",
        "        return self.parts[0].dtype",
        "        return self.spec.dtype",
        ("tests/sharding/test_answers.py",),
    ),
    Mutant(
        "a part of a leaf is the leaf",
        "sharding/_boxes.py",
        "for shape in self.spec.whole_shapes)",
        "for shape in self.spec.shapes)",
        ("tests/sharding/test_answers.py",),
    ),
    # a unit as one buffer
    Mutant("a pack leaves its padding out", "sharding/_flat.py", "    if padding:", "    if False:", FLAT),
    Mutant(
        "padding is what the memory held", "sharding/_flat.py", "at, padding).zero_()", "at, padding).fill_(7)", FLAT
    ),
    Mutant(
        "a stand-in's parts begin where its memory does",
        "sharding/_flat.py",
        "at, found = buffer.storage_offset(), []",
        "at, found = 0, []",
        FLAT,
    ),
    Mutant(
        "an executor packs as a trace does",
        "graph/run/_compiled.py",
        ", packed: packed_by_copies}",
        "}",
        FLAT,
    ),
    Mutant(
        "every item lies where the first does",
        "graph/_storages.py",
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
    Mutant("drop the padding", "sharding/_spec.py", "-(-self.numel // self.ranks)", "self.numel // self.ranks"),
    Mutant(
        "origin that outlives a change",
        "sharding/_boxes.py",
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
        "sharding/_boxes.py",
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
        "sharding/_segments.py",
        "[psum(square, axes) for axes, square in",
        "[square for axes, square in",
    ),
    Mutant(
        "count the padding in the norm",
        "sharding/_segments.py",
        "position < numel, x",
        "position < numel + 9, x",
    ),
    Mutant("count a tied leaf twice", "sharding/_segments.py", "plain[id(x)] =", "plain[len(plain)] ="),
    Mutant("untie a leaf", "sharding/_units.py", "or tree.identity(leaf) in seen", "or False"),
    Mutant("every part is cut along dimension 0", "sharding/_units.py", "dim=split[i][name]", "dim=0", AXES),
    Mutant("axes in the wrong order", "sharding/_rows.py", "for a in rest[::-1]:", "for a in rest:", AXES),
    Mutant("summed in half precision", "sharding/_flat.py", "else spec.cast[0]", "else spec.dtype", HALF),
    Mutant(
        "shift the rank in the simulation",
        "sharding/_rows.py",
        'return [rearrange(_flat.pack(_spec(options), xs), "... (n k) -> n ... k", n=n)]',
        'return [rearrange(_flat.pack(_spec(options), xs), "... (n k) -> n ... k", n=n).roll(1, 0)]',
    ),
    Mutant(
        "shift the rank in a process",
        "sharding/_rows.py",
        "xs, binding.rank, binding.size)]",
        "xs, (binding.rank + 1) % binding.size, binding.size)]",
        ("tests/distributed",),
    ),
    Mutant(
        "swap the gather order",
        "sharding/_rows.py",
        "rearrange(_narrow(spec, xs[0]), ",
        "rearrange(_narrow(spec, xs[0]).flip(0), ",
    ),
    Mutant("gather is no transpose", "sharding/_rows.py", 'transpose="reduce_scatter"', 'transpose="partition"'),
    Mutant(
        "skip the all_reduce of stage 0",
        "sharding/_rows.py",
        "x.sum(0, dtype=_flat.wire_dtype(spec, x))) for",
        "x[0]) for",
    ),
    Mutant(
        "whole weights on the wire",
        "sharding/_rows.py",
        "return x.to(_flat.gathered_dtype",
        "return x.to(_flat.wire_dtype",
        HALF,
    ),
]
