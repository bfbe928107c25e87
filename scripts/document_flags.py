"""Keep the worker's flags in docs/configuration.md what the parser says: checks, or with `--write`
writes, what stands between the two marks.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from worker.flags import build_parser  # noqa: E402 (the repository's own, wherever we are started)

DOCUMENT = ROOT / "docs" / "configuration.md"
BEGIN = "<!-- flags of the worker: written by scripts/document_flags.py -->"
END = "<!-- end of the worker's flags -->"


def tables() -> str:
    """One table for each group of flags."""
    parts = []
    for group in build_parser()._action_groups:
        actions = [a for a in group._group_actions if "--help" not in a.option_strings]
        if actions:
            rows = "".join(_row(action) for action in actions)
            head = "| flag | default | meaning |\n|---|---|---|\n"
            parts.append(f"#### {(group.title or '').capitalize()}\n\n{head}{rows}")
    return "\n".join(parts)


def _row(action: argparse.Action) -> str:
    return f"| {_names(action)} | {_default(action)} | {_meaning(action)} |\n"


def _names(action: argparse.Action) -> str:
    flag = action.option_strings[0]
    if isinstance(action, argparse.BooleanOptionalAction):
        return f"`{flag}`, `--no-{flag.removeprefix('--')}`"
    if action.nargs == 0:
        return f"`{flag}`"
    if action.choices is not None:
        return f"`{flag}` " + r" \| ".join(f"`{choice}`" for choice in action.choices)
    value = action.metavar if isinstance(action.metavar, str) else _kind(action)
    return f"`{flag} {value}{' …' if action.nargs == '+' else ''}`"


def _kind(action: argparse.Action) -> str:
    kinds = {
        "integer": "N",
        "number": "NUMBER",
        "int": "N",
        "power_of_two": "N",
        "byte_count": "BYTES",
        "positive": "NUMBER",
        "not_negative": "NUMBER",
        "fraction": "NUMBER",
    }
    name = getattr(action.type, "__name__", type(action.type).__name__)
    return kinds.get(name, "TEXT")


def _default(action: argparse.Action) -> str:
    if isinstance(action.default, bool):
        return "on" if action.default else "off"
    if action.default is None or action.default in ([], ""):
        return ""
    return f"`{action.default}`"


def _meaning(action: argparse.Action) -> str:
    text = action.help or ""
    for said_already in (" (default %(default)s)", " (default: %(default)s)"):
        text = text.replace(said_already, "")
    return text.replace("%%", "%").replace("|", r"\|")


def main() -> int:
    """Compare, or write; 1 when the document is not what it should be."""
    document = DOCUMENT.read_text(encoding="utf-8")
    before, rest = document.split(BEGIN)
    _, after = rest.split(END)
    wanted = f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"
    if wanted == document:
        return 0
    if sys.argv[1:] == ["--write"]:
        DOCUMENT.write_text(wanted, encoding="utf-8")
        return 0
    print("docs/configuration.md lags behind the flags; run scripts/document_flags.py --write")
    return 1


if __name__ == "__main__":
    sys.exit(main())
