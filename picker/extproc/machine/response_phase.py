"""The response of one stream on its way through the picker: unchanged, or replaced by a tap.

A tap that raises is only asked for the bytes it still holds; then the response continues unchanged.
"""

import logging

import msgspec

from picker.extproc.machine import messages as m
from picker.extproc.machine.messages import Action, BodyMode, body_chunks
from picker.extproc.machine.request_phase import RequestPhase, mode_refusal
from picker.requestcontrol.headers import SYSTEM_OWNED
from picker.types import BodyReport, Metadata, ResponseHead, ResponseTap, RouteDecision

log = logging.getLogger(__name__)

RESPONSE_MARK = ("x-went-into-resp-headers", "true")
_FAILED = "watching a response failed; it continues unchanged"
_CONTENT_LENGTH = "content-length"
_OWNED = frozenset(SYSTEM_OWNED)
_ONE_MESSAGE = (BodyMode.BUFFERED, BodyMode.PARTIAL)
_STREAMED = (BodyMode.DUPLEX, BodyMode.LOCKSTEP, BodyMode.PARTIAL)


class ResponsePhase(msgspec.Struct, eq=False):
    """Owns the tap of one response, until the tap has seen the end or failed."""

    is_marked: bool
    is_reported: bool = False  # the proxy was asked to report on a body that it does not show
    first_is_reported: bool = False  # and on its first piece, when it comes
    _mode: BodyMode = BodyMode.DUPLEX
    _tap: ResponseTap | None = None
    _changes_body: bool = False
    _can_show_body: bool = False
    _has_length: bool = False
    _body_seen: bool = False
    _trailers_seen: bool = False
    _report_ended: bool = False

    @property
    def end_is_unseen(self) -> bool:
        """True if the proxy may close the stream without having shown the response's end."""
        if self._mode is BodyMode.PARTIAL:
            return self._body_seen
        asked_in_vain = self._can_show_body and not self._body_seen
        return self._mode is BodyMode.ABSENT or asked_in_vain

    @property
    def is_hidden(self) -> bool:
        """True if the proxy does not show the body of the response."""
        return self._mode is BodyMode.ABSENT

    @property
    def awaits_report(self) -> bool:
        return self.is_reported and self._mode is BodyMode.ABSENT and not self._report_ended

    @property
    def may_be_left(self) -> bool:
        """True if the stream may end before the response; in full duplex, pieces would be lost."""
        return self._mode is not BodyMode.DUPLEX

    @property
    def waits_for_replies(self) -> bool:
        return self._mode not in (BodyMode.DUPLEX, BodyMode.ABSENT)

    def expect(self, mode: BodyMode) -> None:
        """Set the mode of the response. Raises `RefusedError` for an unusable mode."""
        if mode is BodyMode.UNKNOWN:
            raise mode_refusal()
        self._mode = mode

    def watch(self, decision: RouteDecision, request: RequestPhase) -> None:
        if request.is_tunnel and request.mode is not BodyMode.DUPLEX:
            self._mode = BodyMode.ABSENT  # as the proxy was asked
        self._tap = decision.response
        self._changes_body = decision.response is not None and decision.needs_response_body
        # Envoy ignores overrides of its modes if request bodies are in full duplex (measured).
        self._can_show_body = (
            self._changes_body
            and self._mode is BodyMode.ABSENT
            and request.mode is not BodyMode.DUPLEX
        )

    def pass_on(self, event: m.ResponseHeaders) -> m.SendResponseHeaders:
        """Reply to headers that begin the stream; such a response passes unchanged."""
        self._mode = event.response_body
        return m.SendResponseHeaders(())

    def begin(self, event: m.ResponseHeaders) -> m.SendResponseHeaders:
        headers = event.headers
        self._has_length = _CONTENT_LENGTH in headers
        show_body = self._can_show_body and not event.end_of_stream
        self._can_show_body = show_body
        if show_body:
            self._mode = BodyMode.DUPLEX
        set_headers: tuple[tuple[str, str], ...] = ()
        if self._tap is not None:
            head = ResponseHead(
                event.status,
                event.headers,
                event.served_by,
                event.has_destination_metadata,
                event.reached_no_endpoint,
                shows_body=self.is_reported or self._mode is not BodyMode.ABSENT,
                shows_first_piece=self.first_is_reported or self._mode is not BodyMode.ABSENT,
            )
            try:
                set_headers = self._tap.head(head)
            except Exception:
                log.exception(_FAILED)
                self._tap = None
        if self.is_marked:
            set_headers = (RESPONSE_MARK, *set_headers)
        removed: list[str] = []
        if not _OWNED.isdisjoint(headers):
            set_names = {name for name, _ in set_headers}
            removed = [name for name in headers if name in _OWNED and name not in set_names]
        # The stated length is removed if the body may change after the headers have left.
        changes_later = self._changes_body and self._mode in _STREAMED and not event.end_of_stream
        if changes_later and self._has_length:
            # Envoy leaves it after an override, and makes a longer body a 500 (measured).
            removed.append(_CONTENT_LENGTH)
        if event.end_of_stream:
            self._watch_end()
        return m.SendResponseHeaders(set_headers, tuple(removed), show_body)

    def piece(self, event: m.ResponseBody) -> list[Action]:
        self._body_seen = True
        # A body in one message has no later piece for bytes that are held back.
        is_last = event.end_of_stream or self._mode in _ONE_MESSAGE
        watched = self._tap is not None
        data, metadata = self._watch_body(event.data, is_last)
        if self.waits_for_replies:
            if data == event.data:
                return [m.SendResponseBodyUnchanged(metadata)]
            states_length = self._mode is BodyMode.BUFFERED and self._has_length
            return [m.SendHeldResponseBody(data, len(data) if states_length else None, metadata)]
        if watched and not (data or is_last or metadata):
            return []  # all of it is held back
        return _pieces(data, event.end_of_stream, metadata)

    def trailers(self) -> list[Action]:
        """Reply to trailers, which end the response; a second set gets no reply."""
        if self._trailers_seen:
            return []
        self._trailers_seen = True
        held = self._watch_end()
        if not held:
            return [m.SendResponseTrailers()]
        if not self.waits_for_replies:
            return [*_pieces(held, False, {}), m.SendResponseTrailers()]
        log.warning("the proxy's response mode lost %d bytes held back before trailers", len(held))
        return [m.SendResponseTrailers()]

    def report(self, report: BodyReport) -> None:
        """Pass the report on a body to the tap, unless the body itself is shown."""
        tap = self._tap
        self._report_ended = report.is_last
        if tap is None or self._mode is not BodyMode.ABSENT:
            return
        try:
            tap.report(report)
        except Exception:
            log.exception(_FAILED)
            self._tap = None

    # The tap

    def _watch_body(self, data: bytes, is_last: bool) -> tuple[bytes, Metadata]:
        tap = self._tap
        if tap is None:
            return data, {}
        if is_last:
            self._tap = None
        try:
            return tap.body(data, is_last)
        except Exception:
            log.exception(_FAILED)
            self._tap = None
            return _held(tap) + data, {}

    def _watch_end(self) -> bytes:
        tap, self._tap = self._tap, None
        return b"" if tap is None else _held(tap)


def _pieces(data: bytes, end_of_stream: bool, metadata: Metadata) -> list[Action]:
    pieces = body_chunks(data)
    actions: list[Action] = [m.SendResponseBody(piece, False) for piece in pieces[:-1]]
    actions.append(m.SendResponseBody(pieces[-1], end_of_stream, metadata))
    return actions


def _held(tap: ResponseTap) -> bytes:
    try:
        return tap.end()
    except Exception:
        log.exception("what was held back of a response is lost")
        return b""
