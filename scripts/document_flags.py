"""Keep the flags in docs/configuration.md what the parsers say: checks, or with `--write` writes,
the text between the marks of each program.
"""

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import fleet.command_lines  # noqa: E402 (the repository's own, wherever we are started)
import picker.cli.flags  # noqa: E402
import worker.cli.flags  # noqa: E402
from scripts.wrap_prose import wrapped  # noqa: E402

DOCUMENT = ROOT / "docs" / "configuration.md"
PARSERS = {
    "fleet": lambda: fleet.command_lines.parser_of("up"),
    "picker": picker.cli.flags.build_parser,
    "worker": worker.cli.flags.build_parser,
}
LONGEST_CHOICES = 90  # columns beside the flag
# The end of the text of a flag whose parser does not know the default.
DEFAULT = re.compile(r" \(default:? (?P<default>.*)\)$")


def marks(program: str) -> tuple[str, str]:
    """The lines before and after the flags of a program."""
    begin = f"<!-- flags of the {program}: written by scripts/document_flags.py -->"
    return begin, f"<!-- end of the {program}'s flags -->"


def lists(parser: argparse.ArgumentParser) -> str:
    """One list for each group of flags."""
    parts = []
    for group in parser._action_groups:
        actions = [a for a in group._group_actions if "--help" not in a.option_strings]
        actions = [a for a in actions if a.help != argparse.SUPPRESS]
        if actions:
            heading = _heading(group.title or "")
            if heading.startswith("Simulator"):  # its page has the meanings
                items = ", ".join(f"{_names(one)}{_shown_default(one)}" for one in actions) + "\n"
            else:
                items = "".join(_item(action) for action in actions)
            parts.append(f"#### {heading}\n\n{items}")
    return wrapped("\n".join(parts))


def _heading(title: str) -> str:
    return title[:1].upper() + title[1:]


def _item(action: argparse.Action) -> str:
    return f"- {_names(action)}{_shown_default(action)}: {DEFAULT.sub('', _text(action))}\n"


def _text(action: argparse.Action) -> str:
    return (action.help or "").replace("%%", "%")


def _shown_default(action: argparse.Action) -> str:
    found = DEFAULT.search(_text(action))
    default = _default(action) or (found["default"] if found else "")
    is_said = "%(default)s" in default or default in ("off", "none")
    return "" if is_said or not default else f" ({default})"


def _names(action: argparse.Action) -> str:
    flag = action.option_strings[0]
    if isinstance(action, argparse.BooleanOptionalAction):
        return f"`--[no-]{flag.removeprefix('--')}`"
    if action.nargs in ("?", 0):
        return f"`{flag}`"
    if action.choices is not None:
        choices = "|".join(map(str, action.choices))
        return f"`{flag} {choices}`" if len(choices) <= LONGEST_CHOICES else f"`{flag}`"
    value = action.metavar if isinstance(action.metavar, str) else _kind(action)
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
    value = action.default
    return f"`{json.dumps(value) if isinstance(value, tuple) else value}`"


def main() -> int:
    """Compare, or write; 1 when the document is not what it should be."""
    document = wanted = DOCUMENT.read_text(encoding="utf-8")
    for program, build_parser in PARSERS.items():
        begin, end = marks(program)
        before, rest = wanted.split(begin)
        _, after = rest.split(end)
        wanted = f"{before}{begin}\n\n{lists(build_parser())}\n{end}{after}"
    if wanted == document:
        return 0
    if sys.argv[1:] == ["--write"]:
        DOCUMENT.write_text(wanted, encoding="utf-8")
        return 0
    print("docs/configuration.md lags behind the flags; run scripts/document_flags.py --write")
    return 1


if __name__ == "__main__":
    sys.exit(main())
