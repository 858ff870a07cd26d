"""Faults in the policies that choose units, and in the cap of the default rule."""

from tests.mutants.changes import always, bare, becomes, dropped, never
from tests.mutants.mutant import Fault, File

UNITS = ("tests/sharding",)

MUTANTS = [
    *File("sharding/units/_units.py", UNITS).faults(
        Fault("a default unit may have any size", "_divide_large", always("sum(A.values()) <= B")),
        Fault("the cap counts leaves before they are split", "_divide_large", bare("A // math.prod(B)")),
    ),
    *File("sharding/units/_subtrees.py", UNITS).faults(
        Fault(
            "small units are joined beyond the upper size",
            "_divide_subtree",
            becomes("A and B and C(D[-1]) + E <= F", "A and B or C(D[-1]) + E <= F"),
        ),
        Fault("neighbours are joined past the upper size", "_divide_subtree", dropped("A(B[-1]) + C <= D")),
        Fault("a small rest is joined past the upper size", "_join_small", dropped("A + B(C) <= D")),
        Fault("a small rest is a unit of its own", "_divide_subtree", bare("B(A, C, D)")),
        Fault("a large subtree stays whole", "_divide_subtree", dropped("sum(A) <= B")),
        Fault("large children are one piece", "_divide_subtree", always("max(A, default=0) < B")),
        Fault("a piece is named by its first subtree", "_name_subtree", always("A == last")),
    ),
    *File("sharding/units/_units_by_size.py", UNITS).faults(
        Fault("sizes are those of all kinds", "by_size", becomes("A(B, x, C)", "()")),
        Fault("leaves over different axes share a unit", "_unit_key", always("A is None")),
        Fault("leaves with different splits share a unit", "_unit_key", bare("tuple(sorted(B or A))")),
        Fault("a list counts as a level", "_tree_nodes", becomes("not A", "1", at="1 of 2")),
        Fault("a node does not count in its depth", "_tree_nodes", becomes("is_list", "children", at="2 of 3")),
        Fault("by_granularity may make units beyond its cap", "by_granularity", dropped("A.numel <= B")),
        Fault("a node's own leaves may exceed the cap", "_unit_name", dropped("A[B].C <= D")),
    ),
    *File("sharding/units/_unit_policy.py", UNITS).faults(
        Fault("a rule of sizes takes tied leaves for separate leaves", "find_unit_leaves", never("A.B(C) in D")),
    ),
]
