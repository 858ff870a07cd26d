"""Run the notebook examples/tour.ipynb, and write its outputs into it, which the tests compare.

python docs/_tour.py
"""

import ast
import contextlib
import io
import json
import pathlib
import re
from typing import Any

PATH = pathlib.Path(__file__).parents[1] / "examples" / "tour.ipynb"


def run(source: str, names: dict[str, Any], number: int) -> tuple[str, Any]:
    """Run a cell; return what it prints, and the value of its last line if that is an expression."""
    body = ast.parse(source)
    last = body.body.pop() if body.body and isinstance(body.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(body, f"cell {number}", "exec"), names)
        value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names) if last else None
    return out.getvalue(), value


def outputs(source: str, names: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """Run a cell, and return what a notebook shows below it."""
    printed, value = run(source, names, number)
    found: list[dict[str, Any]] = []
    if printed:
        found.append({"name": "stdout", "output_type": "stream", "text": printed.splitlines(keepends=True)})
    if value is not None:
        data = {"text/plain": str(value).splitlines(keepends=True)}
        if hasattr(value, "_repr_html_"):
            picture = re.findall(r'base64,([^"]+)"', value._repr_html_())
            data |= {"image/png": picture[0]} if picture else {}
        found.append({"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"})
    return found


def executed(notebook: dict[str, Any]) -> dict[str, Any]:
    """Run all cells of a notebook, in one namespace."""
    names: dict[str, Any] = {"__name__": "__main__"}
    number, cells = 0, []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            number += 1
            shown = outputs("".join(cell["source"]), names, number)
            cell = {**cell, "execution_count": number, "outputs": shown}
        cells.append(cell)
    return {**notebook, "cells": cells}


def main() -> None:
    """Run it, and write it."""
    notebook = executed(json.loads(PATH.read_text()))
    PATH.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
