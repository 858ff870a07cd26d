"""Faults in fzero/units, in fzero/layout/subtrees.py, and in the cap of the default rule."""

from tests.mutants.mutant import Mutant

UNITS = ("tests/units",)

MUTANTS = [
    Mutant(
        "small neighbours are joined without an end",
        "layout/subtrees.py",
        "is_open and _numel",
        "is_open or _numel",
        UNITS,
    ),
    Mutant(
        "neighbours are joined past the upper size",
        "layout/subtrees.py",
        "if is_small and is_open and _numel(found[-1]) + numel <= most:",
        "if is_small and is_open:",
        UNITS,
    ),
    Mutant(
        "a rest is joined past the upper size",
        "layout/subtrees.py",
        "< least and last + _numel(piece) <= most:",
        "< least:",
        UNITS,
    ),
    Mutant(
        "a rest stays alone", "layout/subtrees.py", "return _without_rests(found, least, most)", "return found", UNITS
    ),
    Mutant("a large subtree stays whole", "layout/subtrees.py", "if sum(sizes) <= most and", "if", UNITS),
    Mutant(
        "large children are one piece", "layout/subtrees.py", "and max(sizes, default=0) < least:", "and True:", UNITS
    ),
    Mutant(
        "a piece is named by its first subtree",
        "layout/subtrees.py",
        'first if first == last else f"{first} to {last}"',
        "first",
        UNITS,
    ),
    Mutant("sizes are those of all kinds", "units/_size.py", "_kind(path, x, rules), {}", "(), {}", UNITS),
    Mutant("axes do not part units", "units/_size.py", "None if axes is None else tuple(axes)", "None", UNITS),
    Mutant(
        "splits do not part units",
        "units/_size.py",
        "tuple(sorted((rules.split and rules.split(path, leaf)) or ()))",
        "()",
        UNITS,
    ),
    Mutant("a cap splits a tie", "units/_rule.py", "if tree.identity(x) in first:", "if False:", UNITS),
    Mutant("lists count", "units/_granularity.py", "(not is_list)\n", "1\n", UNITS),
    Mutant("a node does not count itself", "units/_granularity.py", "(not is_list)\n", "(not children)\n", UNITS),
    Mutant("a fine subtree may be large", "units/_granularity.py", " and node.numel <= most}", "}", UNITS),
    Mutant(
        "a node's own leaves may be large",
        "units/_granularity.py",
        "if home and nodes[home].own <= most",
        "if home",
        UNITS,
    ),
    Mutant("the default rule has no cap", "layout/units.py", "if sum(parts.values()) <= MOST or", "if True or", UNITS),
    Mutant(
        "the cap counts leaves before they are split",
        "layout/units.py",
        "leaves[i].numel() // math.prod([lookup(name).size for name in split[i]])",
        "leaves[i].numel()",
        UNITS,
    ),
]
