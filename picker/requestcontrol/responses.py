"""Responses: the picker watches each one, and restores the model name that the client asked for.

Every piece is measured, read for its usage, shown to the hooks, and passed on. A reader or a hook
that fails is logged and not called again; the response is not affected.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import msgspec
from msgspec.structs import replace

from picker.decisions.decision import Decision, ResponseTimes
from picker.decisions.steps import BoundPlugin
from picker.framework.interfaces import (
    Flight,
    Parser,
    ResponseHeadHook,
    ResponseProgressHook,
    ResponseReader,
)
from picker.outliers.breaker import Answer
from picker.outliers.detector import Attempt
from picker.requestcontrol.headers import DESTINATION_NAMESPACE, DESTINATION_SCORES, REQUEST_ID
from picker.requestcontrol.pipeline import BodylessResponseHook, RequestContext
from picker.requestcontrol.plugin_log import PluginLog
from picker.types import (
    BodyReport,
    Metadata,
    ResponseHead,
    ResponseProgress,
    SchedulingResult,
    Usage,
)

_KEY = b'"model"'
_SEPARATORS = (b":", b": ", b" :", b" : ")


class ModelRenamer:
    """Replaces one model name with another in one response. Owns the bytes held back."""

    __slots__ = ("_held", "_longest", "_openings", "_replacement")

    def __init__(self, served: str, asked: str) -> None:
        """`served` is the name that the endpoint uses, `asked` the one in the client's request."""
        texts = [json.dumps(served), json.dumps(served, ensure_ascii=False)]
        # Some servers escape slashes, and some write letters beyond ASCII as they are.
        texts += [text.replace("/", "\\/") for text in texts]
        # No regular expression: the name may come from a client, and compiling takes far longer
        # than searching. A spelling ends with its quotation mark, so none begins another one.
        self._openings = tuple(
            (_KEY + separator, _KEY + separator + name)
            for name in sorted({text.encode(errors="surrogatepass") for text in texts})
            for separator in _SEPARATORS
        )
        self._longest = max(len(whole) for _, whole in self._openings)
        self._replacement = json.dumps(asked).encode()
        self._held = b""

    def feed(self, data: bytes, is_last: bool) -> bytes:
        """Take a piece; return the bytes for the client: with the last piece, all that are left."""
        if self._held:
            data = self._held + data
            self._held = b""
        pieces: list[bytes] = []
        start, at = 0, data.find(_KEY)
        while at >= 0:
            for before, whole in self._openings:
                if data.startswith(whole, at):
                    pieces += (data[start:at], before, self._replacement)
                    start = at + len(whole)
                    break
            at = data.find(_KEY, max(start, at + 1))
        end = len(data) if is_last else self._settled(data, start)
        self._held = data[end:]
        if not pieces and end == len(data):
            return data
        pieces.append(data[start:end])
        return b"".join(pieces)

    def _settled(self, data: bytes, start: int) -> int:
        at = data.find(b'"', max(start, len(data) - self._longest + 1))
        while at >= 0:
            if _KEY.startswith(data[at : at + len(_KEY)]):
                rest = data[at:]
                if any(whole.startswith(rest) for _, whole in self._openings):
                    return at
            at = data.find(b'"', at + 1)
        return len(data)


NO_METADATA: Metadata = MappingProxyType({})
EVENT_STREAM = "text/event-stream"
CONSEQUENCE = "the response continues without it"
SERVED_ENDPOINT = "x-pointsman-endpoint"
# The `grpc-status` of a response that consists of headers alone, as a status of HTTP: unknown,
# deadline exceeded, internal and unavailable.
_OF_GRPC = {"2": 500, "4": 504, "13": 500, "14": 503}


class Response(msgspec.Struct, eq=False):
    """A `ResponseTap` that measures a response; `attempt` is set when the request leaves."""

    _decision: Decision
    _flight: Flight
    _parser: Parser
    _context: RequestContext
    _log: PluginLog
    _heads: Sequence[BoundPlugin[ResponseHeadHook]]
    _progress: list[BoundPlugin[ResponseProgressHook]]
    _renamed_from: str | None
    _is_streaming: bool
    attempt: Attempt | None = None
    has_body: bool = False
    _legs: tuple[str, ...] = ()
    _content_type: str = ""
    _is_readable: bool = True
    _reader: ResponseReader | None = None
    _renamer: ModelRenamer | None = None
    _num_bytes: int = 0
    _head_at: float = 0.0
    _served_by: str | None = None
    _first_at: float | None = None
    _last_at: float = 0.0
    _processing: float = 0.0
    _ended: bool = False

    def acquire_legs(self, legs: Iterable[str]) -> None:
        self._legs = tuple(legs)
        self._context.inflight.acquire_legs(self._legs)

    def release_legs(self) -> None:
        """Release the earlier stages, because the answer has begun or the request is over."""
        if self._legs:
            legs, self._legs = self._legs, ()
            self._context.inflight.release_legs(legs)

    @property
    def usage(self) -> Usage | None:
        reader, log = self._reader, self._log
        if reader is None:
            return None
        try:
            return reader.usage
        except Exception as error:
            self._reader = None
            log.exception(type(reader).__name__, error, CONSEQUENCE)
            return None

    @property
    def times(self) -> ResponseTimes:
        first, started = self._first_at, self._decision.received_at_seconds
        return ResponseTimes(
            is_streaming=self._is_streaming,
            num_bytes=self._num_bytes,
            ttft_seconds=None if first is None else first - started,
            processing_seconds=self._processing,
        )

    def head(self, head: ResponseHead) -> tuple[tuple[str, str], ...]:
        clock, coding = self._context.clock, head.headers.get("content-encoding", "")
        self._content_type = head.headers.get("content-type", "").lower()
        self._is_readable = coding.strip().lower() in ("", "identity")
        if EVENT_STREAM in self._content_type:
            self._is_streaming = True
        self._head_at, self._served_by = clock(), head.served_by
        if self.attempt is not None:
            self.attempt.responded(answer_of(head), self._head_at)
        headers: dict[str, str] = {}
        if self._heads:
            head = replace(head, came_at_seconds=self._head_at)
        for bound in self._heads:
            steps, log, hook = self._decision.steps, self._log, bound.plugin.response_head
            try:
                wanted = steps.call(bound, hook, self._flight, head)
                headers.update(wanted or {})
            except Exception as error:
                log.exception(bound.name, error, CONSEQUENCE)
        return tuple(headers.items())

    def body(self, data: bytes, is_last: bool) -> tuple[bytes, Metadata]:
        if self._ended:
            return data, NO_METADATA
        began = self._context.clock()
        if not self.has_body:
            self._begin_body()
        metadata = self._take(data, is_last, self._measure(data, began), began)
        if self._renamer is not None:
            data = self._renamer.feed(data, is_last)
        self._ended = is_last
        self._processing += self._context.clock() - began
        return data, metadata

    def end(self) -> bytes:
        """End the response with trailers; return the bytes held back, if a body was shown."""
        if self._ended or not self.has_body:
            return b""
        return self.body(b"", is_last=True)[0]

    def report(self, report: BodyReport) -> None:
        """Measure and read a body that passed elsewhere; nothing of it can be changed here."""
        if self._ended:
            return
        now = came = self._context.clock()
        if not self.has_body:
            self._begin_body()
        is_first = self._first_at is None and report.num_bytes > 0
        if report.first_after_seconds is not None:
            came = min(now, self._head_at + report.first_after_seconds)
        # A report of the end without the time of the first piece leaves that unknown.
        is_first = is_first and (not report.is_last or report.first_after_seconds is not None)
        if is_first:
            self._first_at = came
        self._num_bytes = max(self._num_bytes, report.num_bytes)
        self._ended = report.is_last
        if report.is_last and self._is_streaming and report.first_after_seconds is not None:
            address = self._served_by or self._decision.destination
            self._context.prompt_heads.learn(address, report.first_after_seconds)
        self._take(report.data, report.is_last, is_first, came if is_first else now)
        self._processing += self._context.clock() - now

    def _take(self, data: bytes, is_last: bool, is_first: bool, now: float) -> Metadata:
        if is_first:
            self.release_legs()
        if self._reader is not None:
            reader, log = self._reader, self._log
            try:
                reader.feed(data, is_last)
            except Exception as error:
                self._reader = None
                log.exception(type(reader).__name__, error, CONSEQUENCE)
        if self._progress and (data or is_last or is_first):
            return self._ask_hooks(now, is_first, is_last)
        return NO_METADATA

    def _begin_body(self) -> None:
        self.has_body = True
        if not self._is_readable:
            return
        request, parser, log = self._flight.request, self._parser, self._log
        is_json = "json" in self._content_type or EVENT_STREAM in self._content_type
        if self._renamed_from is not None and is_json:
            self._renamer = ModelRenamer(self._renamed_from, request.incoming_model)
        if hasattr(parser, "response_reader"):  # an `isinstance` of a protocol costs ten times more
            try:
                self._reader = parser.response_reader(request.body, self._content_type)
            except Exception as error:
                log.exception(type(parser).__name__, error, CONSEQUENCE)

    def _measure(self, data: bytes, now: float) -> bool:
        """Count the piece; return whether it is the first one with content."""
        if not data:
            return False
        self._num_bytes += len(data)
        if self._first_at is None:
            self._first_at = self._last_at = now
            return True
        if self._is_streaming:
            for watch in self._context.watchers.streamed:
                watch(self._decision, now - self._last_at)
        self._last_at = now
        return False

    def _ask_hooks(self, now: float, is_first: bool, is_last: bool) -> Metadata:
        progress = ResponseProgress(now, self._num_bytes, self.usage, is_first, is_last)
        merged: dict[str, dict[str, str | float | Mapping[str, float]]] = {}
        clock, log = self._context.clock, self._log
        for bound in tuple(self._progress):
            metadata: Metadata | None = None
            hook = bound.plugin.response_progress
            try:  # measured at once, without a step: a response may have thousands of pieces
                metadata = bound.measured(clock, hook, self._flight, progress)
            except Exception as error:
                self._progress.remove(bound)
                log.exception(bound.name, error, CONSEQUENCE)
            if is_last and metadata:
                for namespace, values in metadata.items():
                    merged.setdefault(namespace, {}).update(values)
        return merged


class BodylessResponse(msgspec.Struct, eq=False):
    """The `ResponseTap` of a request without a body: sets headers and passes bodies. Stateless."""

    _heads: Sequence[BodylessResponseHook]
    _log: PluginLog

    def head(self, head: ResponseHead) -> tuple[tuple[str, str], ...]:
        headers: dict[str, str] = {}
        log = self._log
        for hook in self._heads:
            try:
                headers |= hook.bodyless_response_head(head) or {}
            except Exception as error:
                log.exception(type(hook).__name__, error, CONSEQUENCE)
        return tuple(headers.items())

    def body(self, data: bytes, is_last: bool) -> tuple[bytes, Metadata]:
        del is_last
        return data, NO_METADATA

    def end(self) -> bytes:
        return b""

    def report(self, report: BodyReport) -> None:
        """Ignore a report, because only requests with a body are reported on."""


class DecisionHeader:
    """A `ResponseHeadHook` that names the endpoint that served the request. Stateless."""

    name = "decision-header"

    def response_head(self, flight: Flight, head: ResponseHead) -> Mapping[str, str]:
        return {
            REQUEST_ID: flight.request.request_id,
            SERVED_ENDPOINT: _served(flight, head.served_by),
        }


def _served(flight: Flight, served_by: str | None) -> str:
    """Return the name of the endpoint that the proxy reports, else of the chosen endpoint."""
    chosen = flight.result.endpoints
    if served_by is None or served_by == chosen[0].host_port:
        return chosen[0].name
    for profile in flight.result.profiles.values():
        for one in profile.scored:
            if one.candidate.endpoint.host_port == served_by:
                return one.candidate.endpoint.name
    others = (one.name for one in chosen if one.host_port == served_by)
    return next(others, served_by)


def endpoint_scores(result: SchedulingResult) -> Metadata:
    primary = result.profiles.get(result.primary_profile)
    if primary is None or not primary.scored:
        return NO_METADATA
    scores = {one.candidate.endpoint.host_port: one.score for one in primary.scored}
    return {DESTINATION_NAMESPACE: {DESTINATION_SCORES: scores}}


def answer_of(head: ResponseHead) -> Answer:
    """Reduce the beginning of a response to what concerns the endpoint's health."""
    grpc_status = head.headers.get("grpc-status")
    status = head.status if grpc_status is None else _OF_GRPC.get(grpc_status, head.status)
    return Answer(status, head.served_by, head.reached_no_endpoint)
