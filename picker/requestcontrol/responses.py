"""Watches the response of one routed request and gives it back the client's model name.

Theory of operation: the stream tells of the beginning of the response, then of each piece of its
body, where the proxy shows bodies. Every piece is measured, read for its usage (by a reader of the
request's parser), shown to the hooks, and handed on, unchanged or with the model renamed. A reader
or a hook that fails is reported and not asked again; the response never suffers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeGuard

import msgspec

from picker.framework.interfaces import (
    Flight,
    Parser,
    ReadsResponses,
    ResponseHeadHook,
    ResponseProgressHook,
    ResponseReader,
)
from picker.requestcontrol.observer import RequestObserver, ResponseTimes
from picker.requestcontrol.plugin_log import PluginLog
from picker.requestcontrol.renaming import ModelRenamer
from picker.types import Metadata, ResponseHead, ResponseProgress, Usage

NO_METADATA: Metadata = MappingProxyType({})
EVENT_STREAM = "text/event-stream"
CONSEQUENCE = "the response goes on without it"


class ResponseWatch(msgspec.Struct, frozen=True):
    """What watching a response takes.

    `renamed_from` is the name that the endpoint was asked with, where the client asked with another
    one; `started_seconds` is when the request began, on `clock`. `responded` is told when the
    response begins.
    """

    flight: Flight
    parser: Parser
    heads: tuple[ResponseHeadHook, ...]
    progress: tuple[ResponseProgressHook, ...]
    observer: RequestObserver
    log: PluginLog
    clock: Callable[[], float]
    started_seconds: float
    renamed_from: str | None = None
    responded: Callable[[ResponseHead], None] | None = None


class Response:
    """A `ResponseTap`. Owns what is known about the response of one request."""

    __slots__ = (
        "_content_type",
        "_ended",
        "_first_at",
        "_is_readable",
        "_is_streaming",
        "_last_at",
        "_num_bytes",
        "_processing",
        "_progress",
        "_reader",
        "_renamer",
        "_seen_body",
        "_watch",
    )

    def __init__(self, watch: ResponseWatch) -> None:
        self._watch = watch
        self._progress = list(watch.progress)
        self._content_type = ""
        self._is_readable = True
        self._is_streaming = watch.flight.request.body.stream
        self._reader: ResponseReader | None = None
        self._renamer: ModelRenamer | None = None
        self._seen_body = False
        self._num_bytes = 0
        self._first_at: float | None = None
        self._last_at = 0.0
        self._processing = 0.0
        self._ended = False

    @property
    def usage(self) -> Usage | None:
        """What the response has said so far."""
        return None if self._reader is None else self._usage(self._reader)

    @property
    def times(self) -> ResponseTimes | None:
        """How it went; None when no body was shown."""
        if not self._seen_body:
            return None
        first, started = self._first_at, self._watch.started_seconds
        return ResponseTimes(
            is_streaming=self._is_streaming,
            num_bytes=self._num_bytes,
            ttft_seconds=None if first is None else first - started,
            processing_seconds=self._processing,
        )

    def head(self, head: ResponseHead) -> tuple[tuple[str, str], ...]:
        """The response begins; the headers that the hooks want on it, a later hook's last."""
        if self._watch.responded is not None:
            self._watch.responded(head)
        self._content_type = head.headers.get("content-type", "").lower()
        self._is_readable = _is_plain(head.headers)
        if EVENT_STREAM in self._content_type:
            self._is_streaming = True
        headers: dict[str, str] = {}
        for hook in self._watch.heads:
            try:
                wanted = hook.response_head(self._watch.flight, head)
            except Exception as error:
                self._watch.log.exception(hook, error, CONSEQUENCE)
            else:
                if wanted:
                    headers.update(wanted)
        return tuple(headers.items())

    def body(self, data: bytes, is_last: bool) -> tuple[bytes, Metadata]:
        """A piece of the body; what goes on instead. Pieces after the last one pass unseen."""
        if self._ended:
            return data, NO_METADATA
        began = self._watch.clock()
        if not self._seen_body:
            self._begin_body()
        is_first = self._measure(data, began)
        if self._reader is not None:
            self._read(self._reader, data, is_last)
        metadata = NO_METADATA
        if self._progress and (data or is_last):
            metadata = self._tell_hooks(began, is_first, is_last)
        if self._renamer is not None:
            data = self._renamer.feed(data, is_last)
        self._ended = is_last
        self._processing += self._watch.clock() - began
        return data, metadata

    def end(self) -> bytes:
        """The response ended with trailers; what was held back. Nothing where no body was shown."""
        if self._ended or not self._seen_body:
            return b""
        return self.body(b"", is_last=True)[0]

    def _begin_body(self) -> None:
        self._seen_body = True
        watch = self._watch
        if not self._is_readable:
            return
        if watch.renamed_from is not None and _is_json(self._content_type):
            request = watch.flight.request
            self._renamer = ModelRenamer(watch.renamed_from, request.incoming_model)
        if _reads_responses(watch.parser):
            try:
                body = watch.flight.request.body
                self._reader = watch.parser.response_reader(body, self._content_type)
            except Exception as error:
                watch.log.exception(watch.parser, error, CONSEQUENCE)

    def _measure(self, data: bytes, now: float) -> bool:
        """Count the piece; whether it is the first one with content."""
        if not data:
            return False
        self._num_bytes += len(data)
        if self._first_at is None:
            self._first_at = self._last_at = now
            return True
        if self._is_streaming:
            self._watch.observer.streamed(self._watch.flight.request, now - self._last_at)
        self._last_at = now
        return False

    def _read(self, reader: ResponseReader, data: bytes, is_last: bool) -> None:
        try:
            reader.feed(data, is_last)
        except Exception as error:
            self._reader = None
            self._watch.log.exception(reader, error, CONSEQUENCE)

    def _usage(self, reader: ResponseReader) -> Usage | None:
        try:
            return reader.usage
        except Exception as error:
            self._reader = None
            self._watch.log.exception(reader, error, CONSEQUENCE)
            return None

    def _tell_hooks(self, now: float, is_first: bool, is_last: bool) -> Metadata:
        """Show the hooks how far it has come; their metadata with the last piece."""
        progress = ResponseProgress(now, self._num_bytes, self.usage, is_first, is_last)
        merged: dict[str, dict[str, str | float | Mapping[str, float]]] = {}
        for hook in tuple(self._progress):
            try:
                metadata = hook.response_progress(self._watch.flight, progress)
            except Exception as error:
                self._progress.remove(hook)
                self._watch.log.exception(hook, error, CONSEQUENCE)
                continue
            if is_last and metadata:
                for namespace, values in metadata.items():
                    merged.setdefault(namespace, {}).update(values)
        return merged


def _reads_responses(parser: object) -> TypeGuard[ReadsResponses]:
    """Whether it understands responses; an `isinstance` of a protocol costs ten times as much."""
    return hasattr(parser, "response_reader")


def _is_plain(headers: Mapping[str, str]) -> bool:
    """Whether the body can be read as it stands."""
    return headers.get("content-encoding", "").strip().lower() in ("", "identity")


def _is_json(content_type: str) -> bool:
    return "json" in content_type or EVENT_STREAM in content_type
