"""Endpoints, objectives and rewrites from a watched file.

It is read again when it changes, in place, by renaming or by turning a link on its way; what it
says then applies as a whole. A bad entry is skipped and reported, the good ones apply. The file
must be readable when the picker starts; afterwards an unreadable file leaves all as it is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from picker.errors import ConfigError
from picker.file_changes import moments_to_look
from picker.metrics.picker_metrics import PickerMetrics
from picker.pool.datastore import Datastore
from picker.pool.policies import NO_RULES, RequestRules, RuleSet
from picker.types import Endpoint

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class PoolContents:
    """What an endpoints file says.

    `skipped` names what does not count and why, one line each, `remarks` what its author
    should know; both are cut when there is too much. `num_skipped` is complete.
    """

    endpoints: tuple[Endpoint, ...]
    rules: RuleSet = NO_RULES
    skipped: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    num_skipped: int = 0


class FileDiscovery:
    """Keeps the datastore's endpoints, and the rules of requests, equal to those of a file."""

    def __init__(
        self,
        path: Path,
        datastore: Datastore,
        rules: RequestRules,
        metrics: PickerMetrics,
        read: Callable[[bytes, str], PoolContents],
    ) -> None:
        """`read` takes the file's bytes and its name; it raises `ConfigError`, which names it, when
        that is no such file.
        """
        self._path, self._decode = path, read
        self._datastore, self._rules = datastore, rules
        self._errors = metrics.discovery_errors_total
        self._content: bytes | None = None
        self._complaint = ""

    def load(self) -> None:
        """Read the file now. Raises `ConfigError` when it cannot be read or is no
        endpoints file.
        """
        content = self._read()
        if content != self._content:
            self._content = content
            self._apply(self._parse(content))

    def is_absent(self) -> bool:
        """A file that is not there cannot be started with."""
        return False

    def problem(self) -> str | None:
        """Why the file could not be read lately; None: it could."""
        return self._complaint or None

    async def run(self) -> None:
        """Follow the file until cancelled."""
        folder, name = self._path.parent.absolute(), self._path.name
        async with aclosing(moments_to_look(folder, name)) as moments:
            async for _ in moments:
                await self._reload()

    async def _reload(self) -> None:
        """Apply what has changed; a large file is decoded beside the decisions, not before them."""
        try:
            content = self._read()
            if content == self._content:
                return
            self._content = content
            self._apply(await asyncio.to_thread(self._parse, content))
        except ConfigError as error:
            self._complain(str(error))
        else:
            self._complaint = ""

    def _complain(self, text: str) -> None:
        """Once per complaint, not once per look at the file."""
        if text != self._complaint:
            self._complaint = text
            self._errors.inc()
            log.error("%s; keeping what the file said before", text)

    def _read(self) -> bytes:
        try:
            if not self._path.is_file():
                self._path.stat()
                raise ConfigError(f"{self._path}: the endpoints file is not a file")
            with self._path.open("rb") as file:
                return file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(f"{self._path}: cannot read the endpoints file: {reason}") from error

    def _parse(self, content: bytes) -> PoolContents:
        return self._decode(content, str(self._path))

    def _apply(self, found: PoolContents) -> None:
        """All of it before the next request is looked at."""
        self._errors.inc(found.num_skipped)
        for line in found.skipped:
            log.warning("skipped %s", line)
        for line in found.remarks:
            log.warning("%s", line)
        if self._rules.use(found.rules):
            rules = found.rules
            log.info(
                "%s: %d objectives, %d rules of rewrites",
                self._path,
                len(rules.objectives),
                len(rules.rewrites),
            )
        changes = self._datastore.set_endpoints(found.endpoints)
        log.info(
            "%s: %d endpoints (%d added, %d removed)",
            self._path,
            len(found.endpoints),
            len(changes.added),
            len(changes.removed),
        )
