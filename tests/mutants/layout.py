"""Faults in fzero/layout."""

from tests.mutants.mutant import AXES, HALF, Mutant

MUTANTS = [
    Mutant("drop the padding", "layout/spec.py", "-(-self.numel // self.ranks)", "self.numel // self.ranks"),
    Mutant(
        "origin that outlives a change",
        "layout/boxes.py",
        "Shard(children[0], uid)",
        "Shard(children[0], uid, _LAST.get(uid))",
        more=(  # a memory that no flattening clears
            ("self.origin = origin\n", "self.origin = _LAST.setdefault(uid, origin)\n"),
            ("class Shard(", "_LAST: dict = {}\n\n\nclass Shard("),
        ),
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
        "position < numel, box.data",
        "position < numel + 9, box.data",
    ),
    Mutant("count a tied leaf twice", "layout/segments.py", "plain[id(x)] =", "plain[len(plain)] ="),
    Mutant("untie a leaf", "layout/units.py", "or tree.identity(leaf) in seen", "or False"),
    Mutant("every part is cut along dimension 0", "layout/units.py", "dim=split[i][name]", "dim=0", AXES),
    Mutant("axes in the wrong order", "layout/units.py", "for a in rest[::-1]:", "for a in rest:", AXES),
    Mutant("summed in half precision", "layout/flat.py", "else spec.cast[0]", "else spec.dtype", HALF),
]
