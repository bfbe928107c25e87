"""The mistakes and doubts about a configuration, as values with positions, and their collection."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from picker.config.source import Path, Source, dotted
from picker.errors import ConfigError

# More do not help, and locating each takes time in which no request is decided.
MAX_FINDINGS = 200


class Severity(Enum):
    """An error keeps the picker from starting; a warning does not."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Finding:
    """One error or warning about a configuration.

    `line` and `column` count from one and are None where nothing was written; `key` is the dotted
    path of what it is about. `allowed` are the values that would do, where they can be listed;
    `nearest` the one that was probably meant.
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
        """`file:line:column`, as far as it is known."""
        if self.line is None:
            return self.file
        return f"{self.file}:{self.line}:{self.column}"

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"

    @property
    def text(self) -> str:
        """`key: message; did you mean …? allowed: …`, in one printable line."""
        head = f"{self.key}: " if self.key else ""
        hints = []
        if self.nearest is not None:
            hints.append(f"did you mean '{self.nearest}'?")
        elif self.allowed:
            hints.append(f"allowed: {', '.join(self.allowed)}")
        text = f"{head}{'; '.join((self.message, *hints))}"
        return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)

    def as_dict(self) -> dict[str, str | int | list[str] | None]:
        """For JSON."""
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
    """A configuration with errors. `findings` has its warnings too; its text is the errors."""

    def __init__(self, findings: Iterable[Finding]) -> None:
        self.findings = tuple(findings)
        errors = (one for one in self.findings if one.severity is Severity.ERROR)
        super().__init__("\n".join(map(str, errors)))


class Findings:
    """Owns what was found while one configuration is read and built; iterates in file order.

    Beyond `limit` findings, the last one says that there are more. Without a `source` findings
    have no file and no line.
    """

    def __init__(self, source: Source | None, limit: int = MAX_FINDINGS) -> None:
        self._source, self._limit = source, limit
        self._found: dict[Finding, None] = {}  # a set that keeps its order
        self._has_errors = False
        self._written: dict[Path, Path] = {}  # by the path that was meant
        self._left_out, self._gravest = 0, Severity.WARNING

    def __iter__(self) -> Iterator[Finding]:
        yield from sorted(self._found, key=lambda one: (one.line or 0, one.column or 0))
        if self._left_out:
            text = "there are further findings, which are not listed"
            yield Finding(self._gravest, text, "" if self._source is None else self._source.name)

    def __len__(self) -> int:
        return len(self._found) + self._left_out

    @property
    def has_errors(self) -> bool:
        """Whether the configuration cannot be used."""
        return self._has_errors

    def error(
        self, path: Path, text: str, allowed: Sequence[str] = (), nearest: str | None = None
    ) -> None:
        """Something at `path` that makes the configuration unusable."""
        self._add(Severity.ERROR, path, text, allowed, nearest)

    def warn(self, path: Path, text: str) -> None:
        """Something at `path` that the author should know."""
        self._add(Severity.WARNING, path, text)

    def unknown(self, path: Path, text: str, given: object, known: Iterable[str]) -> None:
        """An error about the name `given`, with the names that are `known` and the nearest."""
        if not self._is_left_out(Severity.ERROR):
            names = sorted(known)
            self.error(path, text, names, nearest_name(given, names))

    def take_as(self, written: Path, meant: Path) -> None:
        """Report what is found at `meant` where it is written, under a misspelt key."""
        self._written[meant] = written

    def _as_written(self, path: Path) -> Path:
        found: Path = ()
        for step in path:
            found = self._written.get((*found, step), (*found, step))
        return found

    def add(self, finding: Finding) -> None:
        """Note a finding; a duplicate is dropped."""
        if not self._is_left_out(finding.severity):
            self._found[finding] = None
            self._has_errors |= finding.severity is Severity.ERROR

    def refuse_errors(self) -> None:
        """Raise `InvalidConfigError` with everything that was found, if there is an error."""
        if self.has_errors:
            raise InvalidConfigError(self)

    def _is_left_out(self, severity: Severity) -> bool:
        """Whether there are enough already; then one more is counted."""
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
    """The one of `known` that is spelt most like `given`, if any is like it at all."""
    near = difflib.get_close_matches(str(given), known, n=1)
    return near[0] if near else None
