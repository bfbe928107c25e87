"""The recorder: writes down what decisions are made of, as the director makes them.

Theory of operation. The director shows the recorder each attempt to schedule before and after it
asks (before: attributes may be live views, and the decision itself adds to them). Whether the
request then left, the decision says; so a line is written when the next thing happens. All lines
are in the order in which plugins learned of things.

What goes wrong here is logged and costs a line, never a request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Protocol

from msgspec.structs import replace as changed

from picker.decisions.decision import Decision
from picker.decisions.steps import BoundPlugin
from picker.framework.attributes import Attributes, DataKey
from picker.framework.interfaces import Flight
from picker.pool.datastore import EndpointChanges
from picker.recording.candidates import CandidateDeltas
from picker.recording.findings import findings_line
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
)
from picker.recording.privacy import Digests, HeaderPrivacy, bounded, readable
from picker.recording.requests import RequestLines
from picker.recording.results import refusal_line, result_line
from picker.requestcontrol.pipeline import RequestPipeline
from picker.types import Endpoint, ResponseProgress, SchedulingResult, Usage

logger = logging.getLogger(__name__)

LOG_INTERVAL_SECONDS = 5.0
_NUMBER: DataKey[int] = DataKey("Recorded", "recorder")


class LineSink(Protocol):
    """Where lines go; see `picker.recording.file`."""

    @property
    def is_open(self) -> bool:
        """Whether the recording goes on."""
        ...

    @property
    def is_broken(self) -> bool:
        """Whether lines were lost; none are taken until `begin_anew`."""
        ...

    def begin_anew(self) -> int:
        """Take lines again, which need none before them; how many were lost."""
        ...

    def write(self, line: bytes, now_seconds: float) -> None:
        """Take a line."""
        ...

    def lose(self, why: str, now_seconds: float) -> None:
        """A line could not be made."""
        ...


@dataclass(frozen=True, slots=True)
class ConfigText:
    """A configuration as it was loaded, and the names that it gives to profiles."""

    name: str
    text: str
    profiles: tuple[str, ...] = ()


class Recorder:
    """Owns the numbers of requests and configurations, and what was told of candidates.

    An `EndpointObserver`.
    """

    def __init__(
        self, sink: LineSink, clock: Callable[[], float], digests: Digests | None = None
    ) -> None:
        """`clock` is that of the requests."""
        self._sink, self._clock = sink, clock
        self._log = _Failures(sink, clock)
        self._digests = digests or Digests()
        self._headers = HeaderPrivacy(self._digests)
        self._requests = RequestLines(self._headers, self._digests, keeps_prompts=True)
        self._numbers = count(1)
        self._deltas = CandidateDeltas()
        self._pending: tuple[DecisionLine, Decision] | None = None
        self._header: Header | None = None  # as it is told after a loss
        self._config = Config(0, 0.0, "", "")

    # What is recorded

    def begin(self, header: Header, profiles: Sequence[str]) -> None:
        """The picker starts, with these scheduling profiles."""
        self._requests = RequestLines(
            self._headers, self._digests, keeps_prompts=header.has_prompts
        )
        self._headers.know_names(profiles)
        self._config = Config(0, header.started_at, header.config_name, header.config)
        self._header = changed(header, again=True)
        self._write(header)

    def configured(self, config: ConfigText) -> None:
        """Another configuration is in use."""
        self._settle()
        self._headers.know_names(config.profiles)
        number = self._config.number + 1
        self._config = Config(number, self._clock(), config.name, config.text)
        self._write(self._config)

    def recorded(self, pipeline: RequestPipeline) -> RequestPipeline:
        """`pipeline`, of the configuration in use, with everything it decides written down."""
        recorder = _PipelineRecorder(self, self._config.number)
        if not pipeline.response_progress:
            return replace(pipeline, recorder=recorder)
        progress = (*pipeline.response_progress, BoundPlugin(recorder))
        return replace(pipeline, recorder=recorder, response_progress=progress)

    def endpoints_changed(self, changes: EndpointChanges) -> None:
        """The pool has changed."""
        self._settle()
        self._headers.know_endpoints((*changes.added, *changes.updated), changes.removed)
        for endpoint in changes.removed:
            self._deltas.forget(endpoint.key)
            self._endpoint(endpoint.key, "left")
        for endpoint in changes.added:
            self._endpoint(endpoint.key, "joined", endpoint)
        for endpoint in changes.updated:
            self._endpoint(endpoint.key, "updated", endpoint)

    def endpoint_removed(self, key: str) -> None:
        """Plugins forget the endpoint."""
        self._settle()
        self._endpoint(key, "forgotten")

    def settle(self) -> None:
        """Write what may still be held back."""
        self._settle()

    # Decisions

    @property
    def is_recording(self) -> bool:
        """Whether it is worth to look."""
        return self._sink.is_open

    def scheduling(self, decision: Decision, config: int) -> None:
        """The scheduler of configuration `config` is about to be asked."""
        self._settle()
        if self._sink.is_broken:
            self._begin_anew()
        request, attributes, seed = decision.request, decision.attributes, decision.seed
        if request is None or attributes is None or seed is None:
            return
        log, number = self._log, next(self._numbers)
        try:
            before = attributes.get(_NUMBER)
            findings, left_out = ({}, ()) if before else findings_line(attributes, self._digests)
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
        """The scheduler has answered, or failed."""
        pending, log = self._pending, self._log
        if pending is None or pending[1] is not decision:
            return
        self._pending = None  # a line without its outcome is none
        try:
            if isinstance(said, Exception):
                line = changed(pending[0], refusal=refusal_line(said))
            else:
                line = changed(pending[0], result=result_line(said, decision.candidates))
            self._pending = line, decision
        except Exception as error:
            log.exception(error)

    def first_piece(self, attributes: Attributes, progress: ResponseProgress) -> None:
        """The response of a recorded request begins."""
        number = attributes.get(_NUMBER)
        if number is not None:
            self._settle()
            at, size = progress.now_seconds, progress.num_bytes
            self._write(FirstPiece(number, at, size, progress.is_last))

    def finished(self, decision: Decision) -> None:
        """A request that hooks were told of is over."""
        attributes, cause = decision.attributes, decision.cause
        number = None if attributes is None else attributes.get(_NUMBER)
        if number is not None and cause is not None:
            self._settle()
            name, at = readable(decision.request_id), decision.ended_at_seconds
            self._write(End(number, name, cause.value, at, _bounded(decision.usage)))

    # Writing

    def _endpoint(self, key: str, change: str, endpoint: Endpoint | None = None) -> None:
        self._write(EndpointChange(key, change, self._clock(), endpoint))

    def _settle(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            line, decision = pending
            self._write(changed(line, left=True) if decision.is_prepared else line)

    def _write(self, line: AnyLine) -> None:
        log, sink = self._log, self._sink
        if not sink.is_open:
            return
        try:
            if sink.is_broken and not isinstance(
                line, DecisionLine
            ):  # that builds upon what is lost
                self._begin_anew()
            sink.write(encoded(line), self._clock())
        except Exception as error:
            log.exception(error)

    def _begin_anew(self) -> None:
        lost = self._sink.begin_anew()
        self._deltas = CandidateDeltas()
        now = self._clock()
        if self._header is not None:  # it may be what was lost
            self._sink.write(encoded(self._header), now)
        self._sink.write(encoded(Lost(lost)), now)
        self._sink.write(encoded(self._config), now)


class _Failures:
    """Tells of lines that could not be made, with moderation, and breaks the recording off."""

    def __init__(self, sink: LineSink, clock: Callable[[], float]) -> None:
        self._sink, self._clock = sink, clock
        self._told_at: float | None = None

    def exception(self, error: Exception) -> None:
        """A line is lost for this reason."""
        now = self._clock()
        if self._told_at is None or now - self._told_at > LOG_INTERVAL_SECONDS:
            self._told_at = now
            logger.error("a decision cannot be recorded", exc_info=error)
        self._sink.lose("a line could not be made", now)


class _PipelineRecorder:
    """The recorder as the pipeline of one configuration has it; a `ResponseProgressHook` too."""

    def __init__(self, recorder: Recorder, config: int) -> None:
        self._recorder = recorder
        self._config = config
        self.scheduled, self.finished = recorder.scheduled, recorder.finished

    @property
    def is_recording(self) -> bool:
        """Whether the recording goes on."""
        return self._recorder.is_recording

    def scheduling(self, decision: Decision) -> None:
        """The scheduler is about to be asked."""
        self._recorder.scheduling(decision, self._config)

    def response_progress(self, flight: Flight, progress: ResponseProgress) -> None:
        """A piece of the response has come; the first one is of interest."""
        if progress.is_first:
            self._recorder.first_piece(flight.attributes, progress)


def _bounded(usage: Usage | None) -> Usage | None:
    if usage is None:
        return None
    cached: Any = usage.cached_tokens
    return Usage(
        bounded(usage.prompt_tokens),
        bounded(usage.completion_tokens),
        bounded(usage.total_tokens),
        None if cached is None else bounded(cached),
    )
