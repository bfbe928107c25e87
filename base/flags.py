"""Command lines as tables of text, a line or two for each flag, under the headings of `--help`.

    server
    --port PORT[0..65535] = 8000  port to bind; 0 picks a free one
    --retries, -r N[0..]          further attempts (default: none)
    --level debug|info = info     least severe message to log
    --label TEXT …                one or more; a second --label adds to the first
    --[no-]watch = true           follow changes of the file
    --json                        print JSON
    or --csv                      print CSV: not together with the flag before it
    <file> FILE                   an argument; [file] may be left out, and [files …] are any number

A value is read by the reader of its flag, or else by that of the value's name. An interval after
the name bounds a number: `N` and `PORT` are whole, `[` includes a bound and `(` does not. Words
separated by `|` are the choices. A default is written as a user writes it; if the table has none,
the program's applies, e.g. that of the field that the flag sets. A line that begins with spaces
continues the text before it.

A wrong command line ends the program with status 2 and one sentence, with a guess at a misspelling.
"""

import argparse
import dataclasses
import difflib
import ipaddress
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final, NoReturn, TypeAlias, TypeVar
from urllib.parse import urlsplit

# argparse parses; this module only fills it, so that its errors and its help stay those that users
# of Python programs know. typer and click cannot spell both vLLM's switches and Go's.

T = TypeVar("T")
Reader: TypeAlias = Callable[[str], Any]
Readers: TypeAlias = Mapping[str, Reader | Sequence[str]]
"""By flag or by the name of a value: what converts the text, or the words that are allowed."""

LAST_PORT: Final = 65_535
# The text begins after two spaces: a single one separates the parts of a flag.
_ROW: Final = re.compile(
    r"(?P<either>or )?(?:(?P<first>-\w+), )?"
    r"(?:(?P<place>[<\[])(?P<argument>[a-z]+)(?P<any> …)?[>\]]|"
    r"--(?P<no>\[no-\])?(?P<name>[a-z][-a-z0-9]*)(?:, (?P<short>-\w+))?)"
    r"(?: (?P<metavar>[^ =]\S*?)(?P<bounds>[\[(][-.\d]*\.\.[-.\d]*[\])])?(?P<many> …)?)?"
    r"(?: = (?P<default>\S+))?(?:  +(?P<text>.*))?"
)
# argparse passes errors as sentences only, so what was misspelt is taken out of them.
_WORD: Final = r"[\w.-]+"
_CHOICE: Final = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)$")
_UNKNOWN: Final = re.compile(r"unrecognized arguments: .*?(--?[\w-]+)")
_TRUTH: Final = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A flag, or an argument (without spellings). If `metavar` is None, a flag takes no value, and
    an argument is shown by its name. If `default` is None, the table gives none.
    """

    group: str
    name: str
    is_alternative: bool  # excluded by the flag before it
    spellings: tuple[str, ...]  # the name and a short one, in the order of the table
    metavar: str | None
    bounds: str | None
    takes_many: bool
    has_counterpart: bool
    default: str | None
    text: str
    nargs: str | None  # of an argument

    @property
    def dest(self) -> str:
        return self.name.removeprefix("--").replace("-", "_")


def rows(table: str) -> Iterator[Row]:
    group = ""
    for part in re.split(r"\n+(?! )", table.strip()):
        first, *more = part.split("\n")
        found = _ROW.fullmatch(first)
        if found is None:
            if first.startswith(("-", "or -")):  # or a mistyped flag would become a heading
                raise ValueError(f"the table of flags cannot be read at {first!r}")
            group = first
            continue
        argument = found["argument"]
        name = argument or f"--{found['name']}"
        spellings = () if argument else (found["first"], name, found["short"])
        nargs = "*" if found["any"] else "?" if found["place"] == "[" else None
        yield Row(
            group=group,
            name=name,
            is_alternative=found["either"] is not None,
            spellings=tuple(one for one in spellings if one),
            metavar=found["metavar"],
            bounds=found["bounds"],
            takes_many=found["many"] is not None,
            has_counterpart=found["no"] is not None,
            default=found["default"],
            text=" ".join([found["text"] or "", *map(str.strip, more)]).strip(),
            nargs=nargs,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Dialect:
    """A program's way of reading its table.

    `defaults` apply to flags that have none in the table, and `fields` holds the attributes of
    flags whose attribute is named otherwise. Readers raise `errors`, besides `ValueError`, for
    texts that they refuse. With `takes_truth` a flag without a value also accepts `=false`, as in
    Go's programs; with the default `?` it is None until it is given. `settings` are further
    arguments of argparse, by flag.
    """

    readers: Readers = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
    errors: tuple[type[Exception], ...] = ()
    takes_truth: bool = False
    settings: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

    def reader(self, row: Row) -> Reader | Sequence[str]:
        metavar = row.metavar or ""
        if row.bounds is not None:
            return _number(metavar, row.bounds)
        found = self.readers.get(row.name) or self.readers.get(metavar) or READERS.get(metavar)
        return found or (tuple(metavar.split("|")) if "|" in metavar else str)

    def checked(self, read: Reader) -> Reader:
        refusals: tuple[type[Exception], ...] = (ValueError, *self.errors)

        def convert(text: str) -> Any:
            try:
                return read(text)
            except refusals as error:
                raise argparse.ArgumentTypeError(str(error)) from error

        return convert


def add_flags(parser: argparse.ArgumentParser, table: str, dialect: Dialect | None = None) -> None:
    """Add the flags of a table to a parser; those below one heading form a group of `--help`."""
    dialect = dialect or Dialect()
    groups: dict[str | None, argparse._ActionsContainer] = {
        group.title: group for group in parser._action_groups
    }
    either: argparse._ActionsContainer = parser
    table_rows = list(rows(table))
    named = {*dialect.readers, *dialect.fields, *dialect.settings} - {
        row.name for row in table_rows
    }
    if unknown := sorted(name for name in named if name.startswith("--")):
        raise ValueError(f"the table of flags has no {', '.join(unknown)}")
    # The group of alternatives has to exist before the first of them is added to it.
    for row, following in zip_longest(table_rows, table_rows[1:]):
        if row.group and row.group not in groups:
            groups[row.group] = parser.add_argument_group(row.group)
        group = groups[row.group] if row.group else parser
        if row.is_alternative:
            group = either
        elif following is not None and following.is_alternative:
            group = either = group.add_mutually_exclusive_group()
        group.add_argument(*row.spellings, **_settings(row, dialect))


def _settings(row: Row, dialect: Dialect) -> dict[str, Any]:
    dest = dialect.fields.get(row.name, row.dest)
    default = dialect.defaults.get(dest) if row.default is None else row.default
    # argparse converts defaults that are texts as it does values, and leaves all others alone.
    made: dict[str, Any] = {"dest": dest, "default": default, "help": row.text or None}
    if row.metavar is None and row.spellings:
        made["default"] = _TRUTH.get(str(default).lower(), None if default == "?" else False)
        if row.has_counterpart:
            made["action"] = argparse.BooleanOptionalAction
        elif dialect.takes_truth:
            made |= {"type": dialect.checked(truth), "nargs": "?", "const": True, "metavar": "BOOL"}
        else:
            made["action"] = "store_true"
    else:
        read = dialect.reader(row)
        if not row.spellings:
            made["nargs"] = row.nargs
        if not callable(read):
            made["choices"] = tuple(read)
        else:
            made |= {"metavar": row.metavar, "type": dialect.checked(read)}
        if row.takes_many:
            # A list of its own: "extend" adds to the default in place, for the next parser too.
            made |= {"nargs": "+", "action": "extend", "default": list(default or ())}
    return {**made, **dialect.settings.get(row.name, {})}


Refusal: TypeAlias = tuple[str, Iterable[str]]
"""Why a flag is refused, and the values that are accepted because they change nothing."""


def refuse(parser: argparse.ArgumentParser, refused: Mapping[str, Refusal]) -> None:
    """Add another program's flags, which are refused with a reason."""
    for name, (why, harmless) in refused.items():
        # Defaults bind the values of this round; a closure would see the last ones.
        def read(text: str, why: str = why, harmless: Iterable[str] = harmless) -> str:
            if text.lower() not in harmless:
                raise argparse.ArgumentTypeError(why)
            return text

        hidden = argparse.SUPPRESS
        parser.add_argument(name, type=read, nargs="?", const="true", default=hidden, help=hidden)


def defaults_of(*kinds: Any) -> dict[str, Any]:
    """Return the defaults of dataclass fields, by name; the first class that has one counts."""
    fields = [field for kind in reversed(kinds) for field in dataclasses.fields(kind)]
    return {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}


def configured(kind: Callable[..., T], given: argparse.Namespace, **others: Any) -> T:
    """Create a dataclass from `others` and, for all other fields, the flags that set them."""
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    return kind(**{n: getattr(given, n) for n in names if hasattr(given, n)} | others)


class Parser(argparse.ArgumentParser):
    def __init__(
        self,
        prog: str,
        description: str | None = None,
        epilog: str | None = None,
        add_help: bool = True,
    ) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            add_help=add_help,
            allow_abbrev=False,
            formatter_class=_Help,
        )

    def error(self, message: str) -> NoReturn:
        """End with status 2 and one line instead of the usage, which is long."""
        line = f"{self.prog}: {self.hinted(message)} (see {self.prog.partition(':')[0]} --help)\n"
        self.exit(2, line)

    def hinted(self, message: str) -> str:
        """Return an error with a suggestion behind it, where a known word is near."""
        if unknown := _UNKNOWN.search(message):
            return message + near(unknown[1], self._option_string_actions)
        if choice := _CHOICE.search(message):
            return message + near(choice[1], re.findall(_WORD, choice[2]))
        return message


class _Help(argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        is_plain = action.nargs == 0 or action.default in (None, "", argparse.SUPPRESS)
        if "default" in text or is_plain or action.default in ([], ()) or not action.option_strings:
            return text
        return f"{text} (default %(default)s)"


def near(word: str, known: Iterable[str]) -> str:
    """Return a suggestion for a misspelt word as the end of a sentence; empty without a guess."""
    names = {one.strip("-"): one for one in known}  # dashes would make all flags alike
    found = difflib.get_close_matches(word.strip("-"), names, n=1, cutoff=0.7)
    return f"; did you mean {names[found[0]]}?" if found else ""


# Readers. Each raises `ValueError` with the end of a sentence that begins with the flag.


def whole_number(least: int | None = None, most: int | None = None) -> Reader:
    def read(text: str) -> int:
        # `int` alone takes blanks, underscores and digits of other scripts.
        value = int(text) if re.fullmatch(r"[+-]?[0-9]{1,18}", text) else None
        too_small = value is None or (least is not None and value < least)
        if value is None or too_small or (most is not None and value > most):
            raise ValueError(f"takes a whole number{_range(least, most)}, not {text!r}")
        return value

    return read


def _range(least: int | None, most: int | None) -> str:
    if most is not None:
        return f" from {least} to {most}"
    return "" if least is None else f" of {least} or more"


def _number(metavar: str, bounds: str) -> Reader:
    """Return the reader of an interval such as `[1..]` or `(0..1]`; `N` is a whole number."""
    low, high = bounds[1:-1].split("..")
    if metavar in ("N", "PORT"):
        return whole_number(int(low) if low else None, int(high) if high else None)
    least, is_open = float(low), bounds[0] == "("
    wanted = f"above {low}" if is_open else f"of {low} or more"
    wanted = f"from {low} to {high}" if high else wanted

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        in_bounds = least <= value <= float(high) if high else least <= value < math.inf
        if not in_bounds or (is_open and value == least):
            raise ValueError(f"takes a number {wanted}, not {text!r}")
        return value

    return read


def truth(text: str) -> bool:
    if text.lower() not in _TRUTH:
        raise ValueError(f"'{text}' is neither true nor false")
    return _TRUTH[text.lower()]


def url(text: str) -> str:
    """Read the address of an HTTP server; the default scheme is http."""
    whole = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(whole)
        is_sound = parts.scheme in ("http", "https") and parts.port != 0
        is_sound = is_sound and not {*"?#"} & {*whole}  # paths are put behind it
        host = (parts.hostname or "").encode("idna")
    except ValueError:  # of a port, an address or a name
        is_sound, host = False, b""
    if not is_sound or not host or not (text.isascii() and text.isprintable()):
        raise ValueError(f"takes an address such as http://127.0.0.1:8080, not {text[:80]!r}")
    return whole


def networks(text: str) -> tuple[str, ...]:
    """Read networks in CIDR notation: 10.8.0.0/16,fd00::/8."""
    return tuple(str(ipaddress.ip_network(one.strip())) for one in text.split(","))


def strings(text: str) -> tuple[str, ...]:
    """Read a JSON list of strings, as vLLM's flags take it."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f'must be a list such as ["*"]: {error}') from error
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise ValueError('must be a list such as ["*"]')
    return tuple(found)


def byte_count(text: str) -> int:
    """Read a number of bytes, plain or followed by K, M, G or T (powers of 1024)."""
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    factor = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}.get(unit)
    if factor is None or not number.replace(".", "", 1).isdigit():
        raise ValueError(f"must be a number of bytes such as 4G, got {text}")
    value = int(float(number) * factor)
    if value < 1:
        raise ValueError(f"must be at least 1, got {text}")
    return value


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"takes a number, not {text!r}") from None


READERS: Final[Readers] = {
    "N": whole_number(),
    "NUMBER": number,
    "PORT": whole_number(1, LAST_PORT),
    "URL": url,
    "CIDR": networks,
    "STRINGS": strings,
    "BYTES": byte_count,
}
