"""The recorder: writes the inputs and outcomes of decisions as the director makes them.

The recorder gets each decision before and after the scheduler runs (before: attributes may be live
views, and the decision itself adds to them). Whether the request left is a field of the decision,
so its line is written when the next event happens: lines are in the order in which plugins learned
of the events. A failure here is logged and costs a line, never a request.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Protocol

from msgspec.structs import replace as changed

from picker.config.build import Assembly
from picker.decisions.decision import Decision
from picker.decisions.steps import BoundPlugin
from picker.framework.attributes import Attributes, DataKey
from picker.framework.interfaces import Flight
from picker.pool.datastore import EndpointChanges
from picker.recording.candidates import CandidateDeltas
from picker.recording.lines import (
    AnyLine,
    Config,
    DecisionLine,
    End,
    EndpointChange,
    FirstPiece,
    Header,
    Lost,
    encoded,
    refusal_line,
    result_line,
)
from picker.recording.requests import Digests, HeaderPrivacy, RequestLines, bounded, readable
from picker.recording.values import findings_line
from picker.requestcontrol.pipeline import RequestPipeline
from picker.types import Endpoint, ResponseProgress, SchedulingResult, Usage

logger = logging.getLogger(__name__)

LOG_INTERVAL_SECONDS = 5.0
_NUMBER: DataKey[int] = DataKey("Recorded", "recorder")


class LineSink(Protocol):
    """The destination of lines; see `picker.recording.file`."""

    @property
    def is_open(self) -> bool: ...

    @property
    def is_broken(self) -> bool: ...

    def begin_anew(self) -> int:
        """Accept lines again, which must not build upon lost ones; return how many were lost."""

    def write(self, line: bytes, now_seconds: float) -> None: ...

    def lose(self, why: str, now_seconds: float) -> None: ...


class Recorder:
    """Owns the numbering of decisions and configurations, and what was recorded of candidates."""

    def __init__(
        self,
        sink: LineSink,
        clock: Callable[[], float],
        header: Header,
        digests: Digests | None = None,
    ) -> None:
        self._sink, self._clock = sink, clock
        self._log = _Failures(sink, clock)
        digests = self._digests = digests or Digests()
        self._headers = HeaderPrivacy(digests)
        self._requests = RequestLines(self._headers, digests, keeps_prompts=header.has_prompts)
        self._numbers = count(1)
        self._deltas = CandidateDeltas()
        self._pending: tuple[DecisionLine, Decision] | None = None
        self._header = header
        self._config = Config(0, header.started_at, "", "")
        self._in_use: Assembly | None = None

    # Events

    def recorded(self, assembly: Assembly, pipeline: RequestPipeline) -> RequestPipeline:
        """Put `assembly` to use; return its `pipeline` with all decisions recorded."""
        if assembly is not self._in_use:
            self._configured(assembly)
        recorder = _PipelineRecorder(self, self._sink, self._config.number)
        # Replays need first pieces only for the hooks that use them.
        if not pipeline.response_progress:
            return replace(pipeline, recorder=recorder)
        progress = (*pipeline.response_progress, BoundPlugin(recorder))
        return replace(pipeline, recorder=recorder, response_progress=progress)

    def _configured(self, assembly: Assembly) -> None:
        self.flush()
        self._headers.know_names(assembly.profiles)
        is_first, self._in_use = self._in_use is None, assembly
        loaded, old = assembly.loaded, self._config
        name, text = readable(loaded.source.name), loaded.content.decode()
        if is_first:
            self._config = changed(old, name=name, config=text)
            header = changed(self._header, config_name=name, config=text)
            self._header = changed(header, again=True)  # repeated after a loss
            self._write(header)
        else:
            self._config = Config(old.number + 1, self._clock(), name, text)
            self._write(self._config)

    def endpoints_changed(self, changes: EndpointChanges) -> None:
        self.flush()
        self._headers.know_endpoints((*changes.added, *changes.updated), changes.removed)
        for endpoint in changes.removed:
            self._deltas.forget(endpoint.key)
            self._endpoint(endpoint.key, "left")
        for endpoint in changes.added:
            self._endpoint(endpoint.key, "joined", endpoint)
        for endpoint in changes.updated:
            self._endpoint(endpoint.key, "updated", endpoint)

    def endpoint_removed(self, key: str) -> None:
        self.flush()
        self._endpoint(key, "forgotten")

    # Decisions

    def scheduling(self, decision: Decision, config: int) -> None:
        """Take the inputs of a decision with configuration number `config`, before it is made."""
        self.flush()
        # Before the line is made: it must be one that needs no lost line.
        if self._sink.is_broken:
            self._begin_anew()
        request, attributes, seed = decision.request, decision.attributes, decision.seed
        if request is None or attributes is None or seed is None:
            return
        log, number = self._log, next(self._numbers)
        try:
            # Set if this is another attempt to schedule the same request.
            before = attributes.get(_NUMBER)
            findings, left_out = ({}, ()) if before else findings_line(attributes, self._digests)
            # Hooks on responses get the attributes and not the decision.
            attributes[_NUMBER] = number
            changes, order = self._deltas.of(decision.candidates)
            line = DecisionLine(
                number=number,
                config=config,
                at=self._clock(),
                seed=seed,
                request=self._requests.of(request),
                again=before,
                changed=changes,
                order=order,
                findings=findings,
                not_replayable=(*left_out, *self._deltas.not_replayable),
            )
            self._pending = line, decision
        except Exception as error:
            log.exception(error)

    def scheduled(self, decision: Decision, said: SchedulingResult | Exception) -> None:
        pending, log = self._pending, self._log
        if pending is None or pending[1] is not decision:
            return
        self._pending = None  # no line without its outcome
        try:
            if isinstance(said, Exception):
                line = changed(pending[0], refusal=refusal_line(said))
            else:
                line = changed(pending[0], result=result_line(said, decision.candidates))
            self._pending = line, decision
        except Exception as error:
            log.exception(error)

    def first_piece(self, attributes: Attributes, progress: ResponseProgress) -> None:
        number = attributes.get(_NUMBER)
        if number is not None:
            self.flush()  # the decision precedes its response in the file
            at, size = progress.now_seconds, progress.num_bytes
            self._write(FirstPiece(number, at, size, progress.is_last))

    def finished(self, decision: Decision) -> None:
        """Record the end of a request that hooks were called for."""
        attributes, cause = decision.attributes, decision.cause
        number = None if attributes is None else attributes.get(_NUMBER)
        if number is not None and cause is not None:
            self.flush()
            name, at = readable(decision.request_id), decision.ended_at_seconds
            self._write(End(number, name, cause.value, at, _bounded(decision.usage)))

    # Writing

    def _endpoint(self, key: str, change: str, endpoint: Endpoint | None = None) -> None:
        self._write(EndpointChange(key, change, self._clock(), endpoint))

    def flush(self) -> None:
        """Write the pending line: by now it is known whether hooks were called."""
        pending, self._pending = self._pending, None
        if pending is not None:
            # Whether hooks were called is known only after `scheduled`.
            line, decision = pending
            self._write(changed(line, left=True) if decision.is_prepared else line)

    def _write(self, line: AnyLine) -> None:
        log, sink = self._log, self._sink
        if not sink.is_open:
            return
        try:
            # A decision builds upon the lost lines.
            if sink.is_broken and not isinstance(line, DecisionLine):
                self._begin_anew()
            sink.write(encoded(line), self._clock())
        except Exception as error:
            log.exception(error)

    def _begin_anew(self) -> None:
        lost = self._sink.begin_anew()
        self._deltas = CandidateDeltas()  # so the next decision has complete candidates
        now = self._clock()
        for line in (self._header, Lost(lost), self._config):  # the header may be lost too
            self._sink.write(encoded(line), now)


class _Failures:
    """Logs failures to make a line, at most one per `LOG_INTERVAL_SECONDS`; marks each loss."""

    def __init__(self, sink: LineSink, clock: Callable[[], float]) -> None:
        self._sink, self._clock = sink, clock
        self._logged_at: float | None = None

    def exception(self, error: Exception) -> None:
        now = self._clock()
        if self._logged_at is None or now - self._logged_at > LOG_INTERVAL_SECONDS:
            self._logged_at = now
            logger.error("a decision cannot be recorded", exc_info=error)
        self._sink.lose("a line could not be made", now)


class _PipelineRecorder:
    def __init__(self, recorder: Recorder, sink: LineSink, config: int) -> None:
        self._recorder, self._sink, self._config = recorder, sink, config
        self.scheduled, self.finished = recorder.scheduled, recorder.finished

    @property
    def is_recording(self) -> bool:
        return self._sink.is_open

    def scheduling(self, decision: Decision) -> None:
        self._recorder.scheduling(decision, self._config)

    def response_progress(self, flight: Flight, progress: ResponseProgress) -> None:
        if progress.is_first:
            self._recorder.first_piece(flight.attributes, progress)


def _bounded(usage: Usage | None) -> Usage | None:
    if usage is None:
        return None
    # Endpoints may report any numbers.
    cached = usage.cached_tokens
    return Usage(
        bounded(usage.prompt_tokens),
        bounded(usage.completion_tokens),
        bounded(usage.total_tokens),
        None if cached is None else bounded(cached),
    )
