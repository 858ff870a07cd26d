"""The options of `fzero plan` as tables of docs/planner.md."""

import argparse
import re
from typing import Any

from fzero.tuning import _command_options
from tests.docs.pages import DOCS

PAGE, BEGIN, END = DOCS / "planner.md", "<!-- options -->\n", "<!-- /options -->"
_NAMES_OF_REMAT = {value: name for name, value in _command_options._REMAT.items()}


def _plan_parser() -> Any:
    (commands,) = _command_options.parser()._subparsers._group_actions  # pyright: ignore
    return commands.choices["plan"]


def tables() -> str:
    """Write a table of each group of options: option, default, meaning."""
    lines = []
    for group in _plan_parser()._action_groups[2:]:  # the first two are argparse's own
        lines += [f"### {group.title.capitalize()}", "", "| option | default | meaning |", "| --- | --- | --- |"]
        lines += [f"| `{_usage(action)}` | {_default(action)} | {action.help} |" for action in group._group_actions]
        lines.append("")
    return "\n".join(lines)


def _usage(action: argparse.Action) -> str:
    if not action.option_strings:
        return action.dest
    value = action.metavar or ("" if action.nargs == 0 else action.dest.upper())
    value = ",".join(action.choices) if action.choices else str(value)
    return " ".join(
        [action.option_strings[0], *[value] * (action.nargs if isinstance(action.nargs, int) else 1)]
    ).strip()


def _default(action: argparse.Action) -> str:
    if action.dest == "workers":
        return "all processors"
    if action.default in (None, False, []):
        return ""
    values = action.default if isinstance(action.default, tuple) else (action.default,)
    shown = [
        _NAMES_OF_REMAT[x] if action.dest == "remat" else f"{x:g}" if isinstance(x, float) else str(x) for x in values
    ]
    return f"`{','.join(shown)}`"


def page() -> str:
    """Return the text of the page, with the tables as the options are now."""
    return re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}{tables()}\n{END}", PAGE.read_text(), flags=re.DOTALL)
