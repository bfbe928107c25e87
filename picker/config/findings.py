"""Errors and warnings about a document, with their positions in it."""

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import yaml

from picker.errors import ConfigError

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """A document with its name for messages (a file, a flag); its nodes know their positions."""

    name: str
    root: yaml.Node = field(repr=False)

    def position(self, path: Path) -> tuple[int, int]:
        """Return line and column, from one, of the deepest existing step of `path`."""
        mark, _ = self._follow(path)
        return mark.line + 1, mark.column + 1

    def line_of(self, path: Path) -> int | None:
        """Return the line, from one, of `path`; None if it does not exist completely."""
        mark, is_all = self._follow(path)
        return mark.line + 1 if is_all else None

    def _follow(self, path: Path) -> tuple[yaml.Mark, bool]:
        node, mark = self.root, self.root.start_mark
        for step in path:
            if isinstance(node, yaml.MappingNode):
                # The last one counts: earlier ones were merged and overridden.
                pair = next((pair for pair in reversed(node.value) if pair[0].value == step), None)
                if pair is None:
                    return mark, False
                mark, node = pair[0].start_mark, pair[1]
            elif isinstance(node, yaml.SequenceNode) and isinstance(step, int):
                if step >= len(node.value):
                    return mark, False
                node = node.value[step]
                mark = node.start_mark
            else:
                return mark, False
        return mark, True


def dotted(path: Path) -> str:
    """Format a path as in `plugins[2].parameters.blockSize`."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return "".join(steps).lstrip(".")


# More do not help, and locating each delays the decisions of requests.
MAX_FINDINGS = 200


class Severity(Enum):
    """An error keeps the picker from starting; a warning does not."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Finding:
    """`line` and `column` count from one, and are None if nothing is there. `key` is the dotted
    path. `allowed` are the valid values, if they can be listed; `nearest` was probably meant.
    """

    severity: Severity
    message: str
    file: str
    line: int | None = None
    column: int | None = None
    key: str = ""
    allowed: tuple[str, ...] = ()
    nearest: str | None = None

    @property
    def where(self) -> str:
        if self.line is None:
            return self.file
        return f"{self.file}:{self.line}:{self.column}"

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"

    @property
    def text(self) -> str:
        """Return `key: message; did you mean …? allowed: …`, in one printable line."""
        head = f"{self.key}: " if self.key else ""
        hints = []
        if self.nearest is not None:
            hints.append(f"did you mean '{self.nearest}'?")
        elif self.allowed:
            hints.append(f"allowed: {', '.join(self.allowed)}")
        text = f"{head}{'; '.join((self.message, *hints))}"
        # Keys and values come from the file, and may contain control characters.
        return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)

    def as_dict(self) -> dict[str, str | int | list[str] | None]:
        return {
            "severity": self.severity.value,
            "file": self.file,
            "line": self.line,
            "column": self.column,
            "key": self.key,
            "message": self.message,
            "allowed": list(self.allowed),
            "nearest": self.nearest,
        }


class InvalidConfigError(ConfigError):
    """A configuration with errors. `findings` includes warnings; the text has only errors."""

    def __init__(self, findings: Iterable[Finding]) -> None:
        self.findings = tuple(findings)
        errors = (one for one in self.findings if one.severity is Severity.ERROR)
        super().__init__("\n".join(map(str, errors)))


class Findings:
    """Owns the findings of one configuration; iterates in the order of the file. If there are more
    than `limit`, the last one says so. Without a `source` findings have no file and no line.
    """

    def __init__(self, source: Source | None, limit: int = MAX_FINDINGS) -> None:
        self._source, self._limit = source, limit
        self._found: dict[Finding, None] = {}  # an ordered set
        self._has_errors = False
        self._written: dict[Path, Path] = {}  # by the path that was meant
        self._left_out, self._gravest = 0, Severity.WARNING

    def __iter__(self) -> Iterator[Finding]:
        # Plugins are built in an order of their own, but authors read from top to bottom.
        yield from sorted(self._found, key=lambda one: (one.line or 0, one.column or 0))
        if self._left_out:
            text = "there are further findings, which are not listed"
            yield Finding(self._gravest, text, "" if self._source is None else self._source.name)

    def __len__(self) -> int:
        return len(self._found) + self._left_out

    @property
    def has_errors(self) -> bool:
        return self._has_errors

    def error(
        self, path: Path, text: str, allowed: Sequence[str] = (), nearest: str | None = None
    ) -> None:
        self._add(Severity.ERROR, path, text, allowed, nearest)

    def warn(self, path: Path, text: str) -> None:
        self._add(Severity.WARNING, path, text)

    def unknown(self, path: Path, text: str, given: object, known: Iterable[str]) -> None:
        """Add an error about the name `given`, with the `known` names and the nearest of them."""
        # Before the search, which is slow among many names.
        if not self._is_left_out(Severity.ERROR):
            names = sorted(known)
            self.error(path, text, names, nearest_name(given, names))

    def take_as(self, written: Path, meant: Path) -> None:
        """Report findings about the key `meant` at `written`, its misspelt form in the file."""
        self._written[meant] = written

    def _as_written(self, path: Path) -> Path:
        found: Path = ()
        for step in path:
            found = self._written.get((*found, step), (*found, step))
        return found

    def add(self, finding: Finding) -> None:
        if not self._is_left_out(finding.severity):
            self._found[finding] = None
            self._has_errors |= finding.severity is Severity.ERROR

    def refuse_errors(self) -> None:
        """Raise `InvalidConfigError` with all findings, if any is an error."""
        if self.has_errors:
            raise InvalidConfigError(self)

    def _is_left_out(self, severity: Severity) -> bool:
        """Return whether there is no room for another finding; if so, count it as left out."""
        if len(self._found) < self._limit:
            return False
        self._left_out += 1
        if severity is Severity.ERROR:
            self._has_errors, self._gravest = True, severity
        return True

    def _add(
        self,
        severity: Severity,
        path: Path,
        text: str,
        allowed: Sequence[str] = (),
        nearest: str | None = None,
    ) -> None:
        if self._is_left_out(severity):
            return
        path = self._as_written(path)
        finding = Finding(severity, text, "", None, None, dotted(path), tuple(allowed), nearest)
        if self._source is not None:
            line, column = self._source.position(path)
            finding = replace(finding, file=self._source.name, line=line, column=column)
        self.add(finding)


def nearest_name(given: object, known: Sequence[str]) -> str | None:
    """Return the name in `known` with the spelling closest to `given`; None if none is close."""
    near = difflib.get_close_matches(str(given), known, n=1)
    return near[0] if near else None
