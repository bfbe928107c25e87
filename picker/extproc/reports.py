"""Reports of Envoy on responses whose bodies it does not show (`--response-bodies usage`).

The reply to a request carries an id as dynamic metadata. A Lua filter in Envoy reads the body as it
passes, and Envoy's access log (a gRPC stream for each of its threads) brings the id with the end of
the body: shortly before the end of the ext_proc stream or, if the body was complete before the
picker's reply to its headers, shortly after. Where the picker asks for it, the filter also calls at
the first piece. A report under an unknown id, because its stream is over or belongs to another
replica, is counted and has no effect.
"""

import logging
from base64 import urlsafe_b64encode
from collections.abc import Callable, Mapping
from os import urandom

from base.series import Counter
from picker.extproc import wire
from picker.rpc.call import Call, Served
from picker.rpc.calls import Abort, Metadata, Receiver, Status
from picker.types import BodyReport

log = logging.getLogger(__name__)

_ID_BYTES = 12  # random, so that an id says nothing of another one; 16 characters


class ResponseReports:
    """Owns the ids of the streams that wait for a report, and the calls that bring reports."""

    def __init__(self, counter: Counter | None = None) -> None:
        """`counter` has the label `result`: taken, unknown or malformed."""
        self._takers: dict[str, Callable[[BodyReport], None]] = {}
        self._logs: set[Call] = set()
        self._counter = counter
        self._is_ending = False

    def open(self, take: Callable[[BodyReport], None]) -> str:
        """Return a new id; reports under it go to `take` until it is closed."""
        report_id = urlsafe_b64encode(urandom(_ID_BYTES)).decode()
        self._takers[report_id] = take
        return report_id

    def close(self, report_id: str) -> None:
        self._takers.pop(report_id, None)
        self._end_if_idle()

    def end_when_idle(self) -> None:
        """End the calls of access logs once no stream is open; they would stay for ever."""
        self._is_ending = True
        self._end_if_idle()

    def methods(self) -> Mapping[str, Served]:
        return {wire.LOG_METHOD: self._serve_log, wire.FIRST_PIECE_METHOD: _FirstPiece.serve(self)}

    def take(self, report_id: str, report: BodyReport) -> None:
        # The first character is the request for reports, not a part of the id.
        taker = self._takers.get(report_id[1:])
        self.count("unknown" if taker is None else "taken")
        if taker is not None:
            taker(report)

    def count(self, result: str) -> None:
        if self._counter is not None:
            self._counter.labels(result).inc()

    def forget(self, call: Call) -> None:
        self._logs.discard(call)

    def _serve_log(self, call: Call, metadata: Metadata) -> Receiver:
        del metadata
        self._logs.add(call)
        return _Log(self, call)

    def _end_if_idle(self) -> None:
        if self._is_ending and not self._takers:
            for call in self._logs:
                call.end()
            self._logs.clear()


class _Log:
    """Implements `Receiver` for one stream of Envoy's access log."""

    def __init__(self, reports: ResponseReports, call: Call) -> None:
        self._reports, self._call = reports, call

    def message(self, data: bytes) -> None:
        try:
            found = wire.decode_log(data)
        except wire.MalformedMessageError as error:
            self._reports.count("malformed")
            log.warning("a proxy sent a malformed access log: %s", error)
            self._end(Status.INVALID_ARGUMENT, "malformed")
            return
        for report_id, report in found:
            self._reports.take(report_id, report)

    def end_of_messages(self) -> None:
        self._end(Status.OK, "")

    def refuses_large_message(self) -> bool:
        self._end(Status.RESOURCE_EXHAUSTED, "there is no room for this message")
        return True

    def abort(self, why: Abort) -> None:
        self._reports.forget(self._call)

    def _end(self, status: Status, text: str) -> None:
        self._reports.forget(self._call)
        self._call.end(status, text)


class _FirstPiece:
    """Implements `Receiver` for a call about the first piece of a response."""

    def __init__(self, reports: ResponseReports, call: Call) -> None:
        self._reports, self._call = reports, call

    @classmethod
    def serve(cls, reports: ResponseReports) -> Served:
        return lambda call, metadata: cls(reports, call)

    def message(self, data: bytes) -> None:
        try:
            report_id, report = wire.decode_first_piece(data)
        except wire.MalformedMessageError as error:
            self._reports.count("malformed")
            self._call.end(Status.INVALID_ARGUMENT, str(error))
            return
        self._reports.take(report_id, report)
        self._call.end()

    def end_of_messages(self) -> None:
        self._call.end(Status.INVALID_ARGUMENT, "a call without a message")

    def refuses_large_message(self) -> bool:
        self._call.end(Status.RESOURCE_EXHAUSTED, "there is no room for this message")
        return True

    def abort(self, why: Abort) -> None:
        """Do nothing: the call owns nothing."""
