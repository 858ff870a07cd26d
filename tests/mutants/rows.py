"""The rows of a table of fzero, by syntax: faults are planted in a process that imports no fzero."""

import ast
import pathlib

from tests.mutants.places import tree_of

FZERO = pathlib.Path(__file__).parents[2] / "fzero"


def keys_of(file: str, table: str) -> list[str]:
    """List the keys of a dictionary that a file assigns at its top level."""
    assigned = [node for node in tree_of((FZERO / file).read_text()).body if isinstance(node, ast.Assign)]
    (rows,) = [node.value for node in assigned if ast.unparse(node.targets[0]) == table]
    assert isinstance(rows, ast.Dict)
    return [ast.literal_eval(key) for key in rows.keys if key is not None]
