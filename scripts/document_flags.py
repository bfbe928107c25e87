"""Keep the flags in docs/configuration.md what the parsers say: checks, or with `--write` writes,
the text between the marks of each program.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import fleet.command_lines  # noqa: E402 (the repository's own, wherever we are started)
import picker.cli.flags  # noqa: E402
import worker.cli.flags  # noqa: E402

DOCUMENT = ROOT / "docs" / "configuration.md"
PARSERS = {
    "fleet": lambda: fleet.command_lines.parser_of("up"),
    "picker": picker.cli.flags.build_parser,
    "worker": worker.cli.flags.build_parser,
}


def marks(program: str) -> tuple[str, str]:
    """The lines before and after the flags of a program."""
    begin = f"<!-- flags of the {program}: written by scripts/document_flags.py -->"
    return begin, f"<!-- end of the {program}'s flags -->"


def tables(parser: argparse.ArgumentParser) -> str:
    """One table for each group of flags."""
    parts = []
    for group in parser._action_groups:
        actions = [a for a in group._group_actions if "--help" not in a.option_strings]
        actions = [a for a in actions if a.help != argparse.SUPPRESS]
        if actions:
            rows = "".join(_row(action) for action in actions)
            head = "| flag | default | meaning |\n|---|---|---|\n"
            parts.append(f"#### {_heading(group.title or '')}\n\n{head}{rows}")
    return "\n".join(parts)


def _heading(title: str) -> str:
    return title[:1].upper() + title[1:]


def _row(action: argparse.Action) -> str:
    return f"| {_names(action)} | {_default(action)} | {_meaning(action)} |\n"


def _names(action: argparse.Action) -> str:
    flag = action.option_strings[0]
    if action.nargs == "?":
        return f"`{flag}`"
    if isinstance(action, argparse.BooleanOptionalAction):
        return f"`{flag}`, `--no-{flag.removeprefix('--')}`"
    if action.nargs == 0:
        return f"`{flag}`"
    if action.choices is not None:
        return f"`{flag}` " + r" \| ".join(f"`{choice}`" for choice in action.choices)
    value = action.metavar if isinstance(action.metavar, str) else _kind(action)
    value = value.replace("|", r"\|")
    return f"`{flag} {value}{' …' if action.nargs == '+' else ''}`"


def _kind(action: argparse.Action) -> str:
    kinds = {
        "integer": "N",
        "number": "NUMBER",
        "int": "N",
        "port": "N",
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
    if action.default is None or action.default in ([], (), ""):
        return ""
    return f"`{action.default}`"


def _meaning(action: argparse.Action) -> str:
    text = action.help or ""
    for said_already in (" (default %(default)s)", " (default: %(default)s)"):
        text = text.replace(said_already, "")
    return text.replace("%%", "%").replace("|", r"\|")


def main() -> int:
    """Compare, or write; 1 when the document is not what it should be."""
    document = wanted = DOCUMENT.read_text(encoding="utf-8")
    for program, build_parser in PARSERS.items():
        begin, end = marks(program)
        before, rest = wanted.split(begin)
        _, after = rest.split(end)
        wanted = f"{before}{begin}\n\n{tables(build_parser())}\n{end}{after}"
    if wanted == document:
        return 0
    if sys.argv[1:] == ["--write"]:
        DOCUMENT.write_text(wanted, encoding="utf-8")
        return 0
    print("docs/configuration.md lags behind the flags; run scripts/document_flags.py --write")
    return 1


if __name__ == "__main__":
    sys.exit(main())
