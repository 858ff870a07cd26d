"""Run the code of a page on the GPU, statement by statement, and print where it stops and why.

python -m tests.cuda.devices tests/cuda/pages.py docs/jit.md

A kernel of `make cuda` computes nothing, so assertions, comparisons and printed numbers are left out. What is left is
where values lie: a page's code runs unchanged on a GPU if none of its statements meets a value on the CPU.
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

from tests.docs.pages import blocks

COMPARISONS = ("assert_close", "assert_trees_close", "assert_equivalent", "assert_optimizer")


def is_comparison(node: ast.stmt) -> bool:
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return isinstance(node, ast.Assert)
    return ast.unparse(node.value.func).endswith(COMPARISONS)


class WithoutComparisons(ast.NodeTransformer):
    def generic_visit(self, node: ast.AST) -> ast.AST:
        node = super().generic_visit(node)
        if isinstance(getattr(node, "body", None), list):
            node.body = [x for x in node.body if not is_comparison(x)] or [ast.Pass()]  # pyright: ignore
        return node


def run(page: pathlib.Path) -> dict[str, str]:
    """Run a page; return the line where it stops and its error, or nothing."""
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page):
        if not block.runs or ".receive(" in block.body:  # a message tells its shape, and here it tells nothing
            continue
        body = block.body.replace("fzero.jit(step)", 'fzero.jit(step, backend="fx")')
        tree = WithoutComparisons().visit(ast.parse("\n" * block.line + body))
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
