"""How the commands read their flags: a wrong command line is one sentence and status 2, help has
every default, and what was misspelt is suggested.
"""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Iterable, Sequence
from typing import NoReturn
from urllib.parse import urlsplit

LAST_PORT = 65_535
_WORD = r"[\w.-]+"
_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)$")
_UNKNOWN = re.compile(r"unrecognized arguments: .*?(--?[\w-]+)")


class Parser(argparse.ArgumentParser):
    """A parser without abbreviations. Of another program's parser, `parents=[theirs]` makes it one
    of these; its flags must include `--help`, or `add_help` be true.
    """

    def __init__(
        self,
        prog: str,
        description: str | None = None,
        epilog: str | None = None,
        parents: Sequence[argparse.ArgumentParser] = (),
        add_help: bool = True,
    ) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            parents=list(parents),
            add_help=add_help,
            allow_abbrev=False,
            formatter_class=_Help,
        )

    def error(self, message: str) -> NoReturn:
        """End with status 2 and one line, instead of the usage, which is long."""
        hint = ""
        if unknown := _UNKNOWN.search(message):
            hint = near(unknown[1], self._option_string_actions)
        elif choice := _CHOICE.search(message):
            hint = near(choice[1], re.findall(_WORD, choice[2]))
        self.exit(2, f"{self.prog}: {message}{hint} (see {self.prog.partition(':')[0]} --help)\n")


class _Help(argparse.RawDescriptionHelpFormatter):
    """Adds the default of every flag that has one and does not say it."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        is_plain = action.nargs == 0 or action.default in (None, "", argparse.SUPPRESS)
        if "default" in text or is_plain or action.default in ([], ()) or not action.option_strings:
            return text
        return f"{text} (default %(default)s)"


def near(word: str, known: Iterable[str]) -> str:
    """What `word` may have been meant for, as the end of a sentence; empty without a guess."""
    names = {one.strip("-"): one for one in known}  # dashes would make all flags alike
    found = difflib.get_close_matches(word.strip("-"), names, n=1, cutoff=0.7)
    return f"; did you mean {names[found[0]]}?" if found else ""


def port(text: str) -> int:
    """A TCP port that clients can connect to."""
    return _whole(text, 1, LAST_PORT)


def url(text: str) -> str:
    """Where an HTTP server is, with a scheme; without one it is http."""
    whole = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(whole)
        is_sound = parts.scheme in ("http", "https") and parts.port != 0
        is_sound = is_sound and not {*"?#"} & {*whole}  # paths are put behind it
        host = (parts.hostname or "").encode("idna")
    except ValueError:  # of a port, an address or a name
        is_sound, host = False, b""
    if not is_sound or not host or not (text.isascii() and text.isprintable()):
        text = f"takes an address such as http://127.0.0.1:8080, not {text[:80]!r}"
        raise argparse.ArgumentTypeError(text)
    return whole


def count(text: str) -> int:
    """A whole number of 1 or more."""
    return _whole(text, 1, None)


def seconds(text: str) -> float:
    """A finite number of 0 or more."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"takes seconds, 0 or more, not {text!r}")
    return value


def _whole(text: str, least: int, most: int | None) -> int:
    value = int(text) if re.fullmatch(r"[+-]?[0-9]{1,18}", text) else None
    if value is None or value < least or (most is not None and value > most):
        bounds = f"of {least} or more" if most is None else f"between {least} and {most}"
        raise argparse.ArgumentTypeError(f"takes a whole number {bounds}, not {text!r}")
    return value
