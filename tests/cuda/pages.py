"""Run the code of a page on the GPU, statement by statement, and print where it stops and why.

python -m tests.cuda.devices tests/cuda/pages.py docs/jit.md

A kernel of `make cuda` computes nothing, so no numbers are compared. What is left is where values lie: a page runs
unchanged on a GPU if none of its statements, comparisons among them, meets a value on the CPU.
"""

import ast
import contextlib
import io
import json
import os
import pathlib
import sys
import tempfile
import traceback

import fzero
from tests.docs.pages import blocks

LAWS = ("assert_equivalent", "assert_optimizer")  # which compare numbers of their own
COMPARISONS = ("torch.allclose", "torch.equal", "torch.testing.assert_close", "assert_trees_close")


class ComparisonsOfPlaces(ast.NodeTransformer):
    """Comparisons of tensors become those of where they lie; laws and other assertions are left out."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if ast.unparse(node.func) in COMPARISONS:
            node.func = ast.Name("compare_places", ast.Load())
        return super().generic_visit(node)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        node = super().generic_visit(node)
        if isinstance(getattr(node, "body", None), list):
            node.body = [x for x in node.body if not is_left_out(x)] or [ast.Pass()]  # pyright: ignore
        return node


def is_left_out(node: ast.stmt) -> bool:
    """Return whether a statement is a law, or an assertion without a comparison of tensors."""
    if isinstance(node, ast.Assert):
        return "compare_places" not in ast.unparse(node)
    return (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and ast.unparse(node.value.func).endswith(LAWS)
    )


def compare_places(actual: object, expected: object, *_: object, **__: object) -> bool:
    """Compare where two trees of tensors lie, in place of their numbers.

    Raises:
        RuntimeError: if two tensors lie on different devices, with torch's words.
    """
    for x, y in zip(fzero.tree.tensors(actual), fzero.tree.tensors(expected), strict=False):
        if x.device.type != y.device.type:
            raise RuntimeError(f"Expected all tensors to be on the same device, but found {x.device} and {y.device}")
    return True


def run(page: pathlib.Path) -> dict[str, str]:
    """Run a page; return the line where it stops and its error, or nothing."""
    names: dict[str, object] = {"__name__": "__main__", "compare_places": compare_places}
    for block in blocks(page):
        if not block.runs or ".receive(" in block.body:  # a message tells its shape, and here it tells nothing
            continue
        body = block.body.replace("fzero.jit(step)", 'fzero.jit(step, backend="fx")')
        tree = ComparisonsOfPlaces().visit(ast.parse("\n" * block.line + body))
        for statement in ast.fix_missing_locations(tree).body:
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    exec(compile(ast.Module([statement], []), str(page), "exec"), names)
            except Exception as error:
                place = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(page)]
                return {"line": str(place[-1] if place else block.line), "error": f"{type(error).__name__}: {error}"}
        if block.file:
            pathlib.Path(block.file).write_text(block.body)
    return {}


if __name__ == "__main__":
    page = pathlib.Path(sys.argv[1]).resolve()
    os.chdir(tempfile.mkdtemp())
    print("\nFACTS", json.dumps(run(page)))
