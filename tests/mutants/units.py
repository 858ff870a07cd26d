"""Faults in fzero/units, in fzero/sharding/_units.py, and in the cap of the default rule."""

from tests.mutants.mutant import Mutant

UNITS = ("tests/sharding",)

MUTANTS = [
    Mutant(
        "small neighbours are joined without an end",
        "sharding/_units.py",
        "is_open and _numel",
        "is_open or _numel",
        UNITS,
    ),
    Mutant(
        "neighbours are joined past the upper size",
        "sharding/_units.py",
        "if is_small and is_open and _numel(found[-1]) + numel <= most:",
        "if is_small and is_open:",
        UNITS,
    ),
    Mutant(
        "a rest is joined past the upper size",
        "sharding/_units.py",
        "< least and last + _numel(piece) <= most:",
        "< least:",
        UNITS,
    ),
    Mutant(
        "a rest stays alone", "sharding/_units.py", "return _without_rests(found, least, most)", "return found", UNITS
    ),
    Mutant("a large subtree stays whole", "sharding/_units.py", "if sum(sizes) <= most and", "if", UNITS),
    Mutant(
        "large children are one piece", "sharding/_units.py", "and max(sizes, default=0) < least:", "and True:", UNITS
    ),
    Mutant(
        "a piece is named by its first subtree",
        "sharding/_units.py",
        'first if first == last else f"{first} to {last}"',
        "first",
        UNITS,
    ),
    Mutant("sizes are those of all kinds", "sharding/_unit_policies.py", "_kind(path, x, rules), {}", "(), {}", UNITS),
    Mutant(
        "axes do not part units", "sharding/_unit_policies.py", "None if axes is None else tuple(axes)", "None", UNITS
    ),
    Mutant(
        "splits do not part units",
        "sharding/_unit_policies.py",
        "tuple(sorted((rules.split and rules.split(path, leaf)) or ()))",
        "()",
        UNITS,
    ),
    Mutant("a cap splits a tie", "sharding/_unit_policies.py", "if tree.identity(x) in first:", "if False:", UNITS),
    Mutant("lists count", "sharding/_unit_policies.py", "(not is_list)\n", "1\n", UNITS),
    Mutant("a node does not count itself", "sharding/_unit_policies.py", "(not is_list)\n", "(not children)\n", UNITS),
    Mutant("a fine subtree may be large", "sharding/_unit_policies.py", " and node.numel <= most}", "}", UNITS),
    Mutant(
        "a node's own leaves may be large",
        "sharding/_unit_policies.py",
        "if home and nodes[home].own <= most",
        "if home",
        UNITS,
    ),
    Mutant(
        "the default rule has no cap", "sharding/_units.py", "if sum(parts.values()) <= MOST or", "if True or", UNITS
    ),
    Mutant(
        "the cap counts leaves before they are split",
        "sharding/_units.py",
        "leaves[i].numel() // math.prod([lookup(name).size for name in split[i]])",
        "leaves[i].numel()",
        UNITS,
    ),
]
