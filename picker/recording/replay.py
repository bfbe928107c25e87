"""Repeat the decisions of a recording with the picker's own code, and add up the differences.

A configuration is built as the picker builds it. For a decision, its candidates, findings and seed
are restored and the scheduler of the configuration that made it runs; if the request left, hooks
are called, and called again for the response and the end at the recorded times; endpoints that left
are forgotten. So the state of plugins evolves as it did. Another configuration, if given, is built
once for each run and makes all decisions.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec
from msgspec.structs import replace as changed

from picker.config.build import Assembly, BuildOptions, build
from picker.config.catalog import builtin_plugins
from picker.config.instances import Instance
from picker.config.load import load_config
from picker.decisions.decision import Watchers
from picker.decisions.steps import PluginSteps
from picker.errors import ConfigError, RefusedError
from picker.framework.attributes import Attributes
from picker.framework.interfaces import Flight
from picker.framework.services import NoHttp, Services
from picker.metrics.picker_metrics import PickerMetrics
from picker.prefix.match import MATCH_INFO, PrefixCacheMatchInfo
from picker.recording.candidates import CandidateMemory
from picker.recording.lines import (
    Config,
    DecisionLine,
    End,
    EndpointChange,
    FirstPiece,
    Header,
    Lost,
    Number,
    NumberedLine,
    RecordingError,
    RefusalLine,
    ResultLine,
    Stop,
    refusal_line,
    result_line,
)
from picker.recording.requests import request_of
from picker.recording.sources import FindingSources, finding_sources
from picker.recording.values import findings_of
from picker.requestcontrol import admission
from picker.requestcontrol.director import ask_hooks
from picker.requestcontrol.plugin_log import PluginLog
from picker.types import FinishCause, InferenceRequest, ResponseProgress

# Raised by plugins when a recording contains values of unexpected types.
_MISTAKES = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True, slots=True)
class OtherConfig:
    content: bytes
    name: str
    allow_experimental: bool = False


@dataclass(frozen=True, slots=True)
class Redecided:
    """A repeated decision; matched tokens were expected in the recorded or new endpoint's cache."""

    line: int
    recorded: DecisionLine
    outcome: ResultLine | RefusalLine
    left: bool
    prompt_tokens: int
    matched_before: int
    matched_now: int

    @property
    def is_identical(self) -> bool:
        before = self.recorded.result or self.recorded.refusal
        return self.outcome == before and self.left == self.recorded.left


@dataclass(slots=True)
class _Generation:
    text: str
    recorded: Assembly
    used: Assembly
    sources: FindingSources


@dataclass(frozen=True, slots=True)
class _Attempt:
    number: int
    request: InferenceRequest
    recorded: Attributes
    attributes: Attributes
    left: bool


@dataclass(slots=True)
class _Run:
    header: Header
    generations: dict[int, _Generation] = field(default_factory=dict)
    current: int = 0
    candidates: CandidateMemory = field(default_factory=CandidateMemory)
    flights: dict[int, tuple[_Generation, Flight]] = field(default_factory=dict)
    decided: int = 0
    last: _Attempt | None = None
    has_losses: bool = False


class Replay:
    """Repeats the decisions of one recording. Owns the plugins and their state."""

    def __init__(self, path: str, other: OtherConfig | None = None) -> None:
        self._path = path
        self._other = other
        self._run: _Run | None = None
        self._notes: Counter[str] = Counter()
        self._log = PluginLog(Watchers(), _no_time)
        self._line = 0
        self.runs = 0

    @property
    def notes(self) -> Mapping[str, int]:
        """Return the limits of this replay as sentences, each with its number of occurrences."""
        return dict(self._notes)

    def decisions(self, lines: Iterable[NumberedLine]) -> Iterator[Redecided]:
        """Process the lines in their order; yield every decision. Raises `RecordingError` for an
        inconsistent line and for a recorded configuration that cannot be used; `ConfigError` for
        the other configuration.
        """
        for numbered in lines:
            self._line = numbered.number
            try:
                decided = self._take(numbered)
            except _MISTAKES as error:
                raise self._wrong(f"cannot be replayed: {error!r}") from error
            if decided is not None:
                yield decided

    def _take(self, numbered: NumberedLine) -> Redecided | None:
        line, run = numbered.line, self._run
        if line is None:
            self._notes[f"line {numbered.number} is half-written"] += 1
            return None
        if isinstance(line, Header):
            self._begin(line)
            return None
        if run is None:
            raise ValueError("nothing before the header")
        match line:
            case DecisionLine():
                return self._decide(run, line)
            case Config():
                self._configured(run, line)
            case EndpointChange():
                self._endpoint(run, line)
            case FirstPiece():
                self._first_piece(run, line)
            case End():
                self._ended(run, line)
            case Lost():
                run.has_losses = True
                text = "lines were lost while recording; later decisions may differ"
                self._notes[text] += line.lines
            case Stop(reason="size"):
                self._notes["the recording ends where its file reached its size"] += 1
        return None

    # Configurations

    def _begin(self, header: Header) -> None:
        known = None if self._run is None else changed(self._run.header, again=header.again)
        if header.again and known == header:
            return  # repeated after a loss: the run continues
        self.runs += 1
        self._run = run = _Run(header)
        if not header.has_prompts:
            self._notes["the prompts were left out of the recording"] += 1
        self._add(run, 0, header.config, header.config_name)

    def _configured(self, run: _Run, line: Config) -> None:
        known = run.generations.get(line.number)
        if known is not None and known.text == line.config:
            run.current = line.number
            return  # repeated after a loss
        if line.number <= run.current and not run.has_losses:
            raise ValueError(f"configuration {line.number} comes after {run.current}")
        if self._other is not None:
            self._notes["a recorded change of the configuration is ignored"] += 1
        self._add(run, line.number, line.config, line.name)

    def _add(self, run: _Run, number: int, text: str, name: str) -> None:
        before, header, other = run.generations.get(run.current), run.header, self._other
        allow = header.allow_experimental_plugins
        instances = {} if before is None else before.recorded.instances
        try:
            recorded = _built(text.encode(), name, header, allow=allow, before=instances)
        except ConfigError as error:
            raise self._wrong(f"this version cannot use its configuration: {error}") from error
        if other is None:
            used = recorded
        elif before is not None:
            used = before.used  # built once, so that its plugins have one state for the whole run
        else:
            allow |= other.allow_experimental
            used = _built(other.content, other.name, header, allow=allow, before={})
        sources = finding_sources(recorded, used, has_prompts=header.has_prompts, log=self._log)
        for note in sources.notes:
            self._notes[note] += 1
        run.generations[number] = _Generation(text, recorded, used, sources)
        run.current = number

    # Events

    def _decide(self, run: _Run, line: DecisionLine) -> Redecided | None:
        generation = run.generations.get(line.config)
        if generation is None and not run.has_losses:
            raise ValueError(f"there is no configuration {line.config}")
        run.decided += 1
        for name in line.not_replayable:
            self._notes[f"{name} is of a type that no recording can hold"] += 1
        # Also of a decision that is not repeated: later lines build upon its candidates.
        candidates = run.candidates.after(line.changed, line.order)
        if generation is None:
            self._notes["decided by a configuration that was lost, and not repeated"] += 1
            return None
        shown = generation.sources.candidates(candidates)
        recorded = findings_of(line.findings)
        last = run.last
        if last is not None and last.number == line.again:
            if last.left:  # now, so it needs no other attempt
                return None
            # As in the picker, the next attempt continues with what the last one left.
            request, recorded, attributes = last.request, last.recorded, last.attributes
        else:
            request = request_of(line.request)
            attributes, request = generation.sources.fill(recorded, request, shown)
        outcome, left = self._outcome(run, line, generation, (request, shown, attributes))
        run.last = _Attempt(line.number, request, recorded, attributes, left)
        return Redecided(
            line=self._line,
            recorded=line,
            outcome=outcome,
            left=left,
            prompt_tokens=request.num_tokens,
            matched_before=_matched(recorded, line.result, request),
            matched_now=_matched(attributes, outcome, request),
        )

    def _outcome(
        self,
        run: _Run,
        line: DecisionLine,
        generation: _Generation,
        shown: tuple[InferenceRequest, Any, Attributes],
    ) -> tuple[ResultLine | RefusalLine, bool]:
        """Decide; return the outcome, and whether the request leaves."""
        used, log, (request, candidates, attributes) = generation.used, self._log, shown
        try:
            rng = Random(line.seed)
            result = used.pipeline.scheduler.plugin.schedule(
                request, candidates, attributes, rng, PluginSteps()
            )
        except RefusedError as refusal:
            return refusal_line(refusal), False
        except Exception as error:
            log.exception(used.pipeline.scheduler.name, error, "the decision failed")
            return refusal_line(error), False
        outcome = result_line(result, candidates)
        flight = Flight(request, result, attributes)
        try:
            if not result.endpoints:
                return outcome, False
            admission.refuse_if_not_cached(request, result, attributes)
        except RefusedError:
            return outcome, False
        with suppress(RefusedError):  # as in the picker: the end of the request follows
            ask_hooks(used.pipeline.hooks, flight, PluginSteps(), log)
        if line.left:  # otherwise no line reports its end
            run.flights[line.number] = (generation, flight)
        return outcome, True

    def _endpoint(self, run: _Run, line: EndpointChange) -> None:
        if line.change == "left":
            run.candidates.forget(line.key)
        elif line.change == "forgotten":
            # Those in use at that time, as in the picker.
            for observer in run.generations[run.current].used.observers:
                observer.endpoint_removed(line.key)

    def _first_piece(self, run: _Run, line: FirstPiece) -> None:
        known = run.flights.get(line.number)
        if known is None:
            self._unknown(run, line.number)
            return
        (generation, flight), log = known, self._log
        progress = ResponseProgress(line.at, line.num_bytes, None, True, line.is_last)
        for hook in generation.used.pipeline.response_progress:
            try:
                hook.plugin.response_progress(flight, progress)
            except Exception as error:
                log.exception(hook.name, error, "the replay continues without it")

    def _ended(self, run: _Run, line: End) -> None:
        cause, log = FinishCause(line.cause), self._log
        known = run.flights.pop(line.number, None)
        if known is None:
            self._unknown(run, line.number)
            return
        generation, flight = known
        for hook in generation.used.pipeline.request_ends:
            try:
                hook.plugin.request_ended(flight, cause, line.usage, line.at)
            except Exception as error:
                log.exception(hook.name, error, "what it holds for the request may not be released")

    def _unknown(self, run: _Run, number: int) -> None:
        if number > run.decided and not run.has_losses:
            raise ValueError(f"there is no decision {number}")

    def _wrong(self, text: str) -> RecordingError:
        return RecordingError(f"{self._path}:{self._line}: {text}")


def _built(
    content: bytes, name: str, header: Header, *, allow: bool, before: Mapping[str, Instance]
) -> Assembly:
    options = BuildOptions(
        services=Services(NoHttp(), hash_seed=header.hash_seed),
        allow_experimental=allow,
        strict_data_scope=header.strict_data_scope,
        before=before,
    )
    loaded = load_config(content, name)
    return build(loaded, builtin_plugins(), PickerMetrics(), _no_time, options)


def _no_time() -> float:
    return 0.0


def _matched(
    attributes: Attributes, outcome: ResultLine | RefusalLine | None, request: InferenceRequest
) -> int:
    if not isinstance(outcome, ResultLine) or not outcome.endpoints:
        return 0
    key = outcome.endpoints[0][0]
    found = [
        one.match_blocks.get(key, 0) * one.block_size_tokens
        for one in attributes.of_type(MATCH_INFO)
        if isinstance(one, PrefixCacheMatchInfo)
    ]
    return min(max(found, default=0), request.num_tokens)


REFUSED = "(refused)"
_MAX_TOTALS_SHOWN = 3  # of one decision


class Move(msgspec.Struct, frozen=True):
    before: str
    now: str
    requests: int


class Share(msgspec.Struct, frozen=True):
    endpoint: str
    before: int
    now: int


class Difference(msgspec.Struct, frozen=True):
    """The differences of one decision; `line` is its number in the file."""

    line: int
    request_id: str
    texts: tuple[str, ...]


class Scores(msgspec.Struct, frozen=True):
    """The mean total of the chosen endpoints; None without any."""

    before: float | None
    now: float | None


class Comparison(msgspec.Struct, frozen=True):
    """`moved` decisions have another destination, `rescored` ones other totals, whatever their
    destination. `matched` tokens of prompts were expected in the cache of the destination.
    """

    decisions: int
    identical: int
    moved: int
    rescored: int
    refused_before: int
    refused_now: int
    prompt_tokens: int
    matched_tokens_before: int
    matched_tokens_now: int
    scores: Scores
    recorded_seconds: float
    moves: tuple[Move, ...]
    shares: tuple[Share, ...]
    differences: tuple[Difference, ...]


_SUMS = Comparison.__struct_fields__[:9]


class Tally:
    def __init__(self, num_differences: int) -> None:
        self._num_differences = num_differences
        self._sums: Counter[str] = Counter()  # by field of `Comparison`
        self._moves: Counter[tuple[str, str]] = Counter()
        self._before: Counter[str] = Counter()
        self._now: Counter[str] = Counter()
        self._scores_before, self._scores_now = _Mean(), _Mean()
        self._differences: list[Difference] = []
        self._first_at, self._last_at = math.inf, -math.inf

    def add(self, one: Redecided) -> None:
        before, now = one.recorded.result, one.outcome
        was, is_now = _destination(before), _destination(now)
        self._first_at = min(self._first_at, one.recorded.at)
        self._last_at = max(self._last_at, one.recorded.at)
        self._sums.update(
            decisions=1,
            identical=one.is_identical,
            moved=was != is_now,
            rescored=not one.is_identical and _totals(before) != _totals(now),
            refused_before=was == REFUSED,
            refused_now=is_now == REFUSED,
            prompt_tokens=one.prompt_tokens,
            matched_tokens_before=one.matched_before,
            matched_tokens_now=one.matched_now,
        )
        self._before[was] += 1
        self._now[is_now] += 1
        self._scores_before.add(_score(before))
        self._scores_now.add(_score(now))
        if one.is_identical:
            return
        if was != is_now:
            self._moves[was, is_now] += 1
        if len(self._differences) < self._num_differences:
            request = one.recorded.request.id
            self._differences.append(Difference(one.line, request, _differences(one)))

    def result(self) -> Comparison:
        endpoints = sorted(self._before.keys() | self._now.keys())
        return Comparison(
            **{name: self._sums[name] for name in _SUMS},
            scores=Scores(self._scores_before.value, self._scores_now.value),
            recorded_seconds=max(0.0, self._last_at - self._first_at),
            moves=tuple(Move(*pair, count) for pair, count in self._moves.most_common()),
            shares=tuple(Share(key, self._before[key], self._now[key]) for key in endpoints),
            differences=tuple(self._differences),
        )


class _Mean:
    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def add(self, value: float | None) -> None:
        if value is not None and math.isfinite(value):
            self._sum, self._count = self._sum + value, self._count + 1

    @property
    def value(self) -> float | None:
        return self._sum / self._count if self._count else None


def _destination(outcome: ResultLine | RefusalLine | None) -> str:
    if isinstance(outcome, ResultLine) and outcome.endpoints:
        return outcome.endpoints[0][0]
    return REFUSED


def _score(outcome: ResultLine | RefusalLine | None) -> float | None:
    """Return the total of the first endpoint that the primary profile picked."""
    if not isinstance(outcome, ResultLine):
        return None
    profile = outcome.profiles.get(outcome.primary_profile)
    return float(profile.picked[0][1]) if profile is not None and profile.picked else None


def _totals(outcome: ResultLine | RefusalLine | None) -> object:
    if not isinstance(outcome, ResultLine):
        return None
    return {name: (one.scored, one.totals) for name, one in outcome.profiles.items()}


def _differences(one: Redecided) -> tuple[str, ...]:
    before, now = one.recorded.result or one.recorded.refusal, one.outcome
    texts = []
    if _text(before) != _text(now):
        texts.append(f"{_text(before)} → {_text(now)}")
    if isinstance(before, ResultLine) and isinstance(now, ResultLine):
        if before.set_headers != now.set_headers:
            texts.append(f"headers {before.set_headers} → {now.set_headers}")
        for name in sorted(before.profiles.keys() | now.profiles.keys()):
            texts += _of_profile(name, before, now)
    if one.left != one.recorded.left:
        left = "left" if one.left else "did not leave"
        texts.append(f"now it {left}")
    return tuple(texts)


def _of_profile(name: str, before: ResultLine, now: ResultLine) -> list[str]:
    was, is_now = before.profiles.get(name), now.profiles.get(name)
    if was is None or is_now is None:
        return [f"profile '{name}' {'ran now' if was is None else 'did not run now'}"]
    if was.scored != is_now.scored or len(was.totals) != len(is_now.totals):
        return [f"profile '{name}' scored other endpoints"]
    changes = [
        f"total {_number(old)} → {_number(new)} of candidate {index + 1} in profile '{name}'"
        for index, (old, new) in enumerate(zip(was.totals, is_now.totals, strict=True))
        if old != new
    ]
    shown = changes[:_MAX_TOTALS_SHOWN]
    if len(changes) > len(shown):
        shown.append(f"and {len(changes) - len(shown)} other totals")
    return shown


def _number(value: Number) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"


def _text(outcome: ResultLine | RefusalLine | None) -> str:
    if isinstance(outcome, ResultLine):
        return ", ".join(f"{key} ({address})" for key, address in outcome.endpoints)
    if outcome is None:
        return "nothing"
    return f"refused: {outcome.code}, {outcome.message}"
