"""Endpoints from a watched file.

It is read again when it changes, in place, by renaming or by turning a link on its way; what it
says then applies as a whole. A bad entry is skipped and reported, the good ones apply. The file
must be readable when the picker starts; afterwards an unreadable file leaves the pool as it is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

from picker.datalayer.datastore import Datastore
from picker.datalayer.endpoints_file import MAX_FILE_BYTES, EndpointList, parse_endpoints
from picker.errors import ConfigError
from picker.file_changes import moments_to_look
from picker.metrics import PickerMetrics

log = logging.getLogger(__name__)


class FileDiscovery:
    """Keeps the datastore's endpoints equal to those of a file."""

    def __init__(
        self,
        path: Path,
        datastore: Datastore,
        metrics: PickerMetrics,
        read: Callable[[bytes], EndpointList] = parse_endpoints,
    ) -> None:
        """`read` makes endpoints of the file; it raises `ConfigError` when it is no such file."""
        self._path, self._decode = path, read
        self._datastore = datastore
        self._errors = metrics.discovery_errors_total
        self._content: bytes | None = None
        self._complaint = ""

    def load(self) -> None:
        """Read the file now. Raises `ConfigError` when it cannot be read or is not a list of
        endpoints.
        """
        content = self._read()
        if content != self._content:
            self._content = content
            self._apply(self._parse(content))

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
            log.error("%s; keeping the endpoints of before", text)

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

    def _parse(self, content: bytes) -> EndpointList:
        try:
            return self._decode(content)
        except ConfigError as error:
            raise ConfigError(f"{self._path}: {error}") from error

    def _apply(self, found: EndpointList) -> None:
        for problem in found.problems:
            self._errors.inc()
            log.warning("%s: skipped %s", self._path, problem)
        changes = self._datastore.set_endpoints(found.endpoints)
        log.info(
            "%s: %d endpoints (%d added, %d removed)",
            self._path,
            len(found.endpoints),
            len(changes.added),
            len(changes.removed),
        )
