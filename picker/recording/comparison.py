"""The differences between recorded and repeated decisions, added up."""

import math
from collections import Counter

import msgspec

from picker.recording.lines import Number, RefusalLine, ResultLine
from picker.recording.replay import Redecided

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
