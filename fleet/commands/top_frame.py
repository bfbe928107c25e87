"""One picture of a picker for a terminal: a pure function of the picker's state, the size of the
terminal, and the wishes of its user. Every line has exactly the available width, so nothing wraps.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from rich.text import Text

from fleet.commands.top_text import (
    OUTCOME_STYLES,
    STATES,
    Glyphs,
    bar,
    cell,
    clean,
    count,
    percent,
    rate,
    seconds,
    size,
    sparkline,
    styled,
    words,
)
from fleet.picker_views import Seen
from picker.admin.history import NO_SERIES
from picker.admin.views import NOT_USABLE, EndpointView
from picker.decisions.views import RecordSummary
from picker.flowcontrol.views import BandView

MIN_REQUESTS = 2
REQUESTS_WITHOUT_LIMIT = 10
MAX_BANDS = 5
_BAR = 7
_COLUMNS = 61  # cells of an endpoint's line without its name and its curve
_TROUBLED_FIRST = {"ejected": 0, "unknown": 0, "on-trial": 1, "suspect": 2}


def _known(value: float | None) -> float:
    return -1 if value is None else value  # below every known value


# Orders of endpoints by the name of the key; the highest first.
SORTS: dict[str, Callable[[EndpointView], float]] = {
    "trouble": lambda one: -_TROUBLED_FIRST.get(one.health.state, 3),
    "running": lambda one: _known(one.metrics.running_requests if one.metrics else None),
    "waiting": lambda one: _known(one.metrics.waiting_requests if one.metrics else None),
    "KV": lambda one: _known(one.metrics.kv_cache_usage if one.metrics else None),
    "requests": lambda one: one.requests_per_second or 0,
    "TTFT": lambda one: 0 if one.ttft is None else one.ttft.p95,
}
KEYS = "s sort  / filter  f failed only  p pause  arrows, Enter explain  q quit"
_HEAD = "bold underline"
_ID_WIDTH = 36
_WIDTH_FOR_IDS = 120
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Room:
    width: int
    height: int | None
    glyphs: Glyphs


@dataclass(frozen=True, slots=True)
class Title:
    url: str
    lost: str | None = None


@dataclass(frozen=True, slots=True)
class Wishes:
    """The user's choices: `text` filters both lists by name; with `is_typing`, keys extend it."""

    sort: str = "trouble"
    text: str = ""
    is_typing: bool = False
    only_failed: bool = False
    is_paused: bool = False
    chosen: RecordSummary | None = None

    def endpoints(self, seen: Seen) -> list[EndpointView]:
        found = [one for one in seen.pool.endpoints if self.text in f"{one.key} {one.address}"]
        return sorted(found, key=SORTS[self.sort], reverse=True)

    def requests(self, seen: Seen) -> list[RecordSummary]:
        return [
            one
            for one in seen.decisions
            if (not self.only_failed or _has_failed(one))
            and self.text
            in " ".join((one.request_id, one.model, one.fairness_id, one.endpoint or ""))
        ]

    def pressed(self, key: str, seen: Seen | None) -> Wishes:
        """Apply a key: a character, "up", "down", "enter", "escape" or "backspace"."""
        if self.is_typing:
            return self._typed(key)
        if key in ("up", "down", "k", "j"):
            by = 1 if key in ("down", "j") else -1
            return self if seen is None else self._moved(by, self.requests(seen))
        names = list(SORTS)
        after = names[(names.index(self.sort) + 1) % len(names)]
        changes: dict[str, dict[str, Any]] = {
            "s": {"sort": after},
            "/": {"is_typing": True, "text": ""},
            "f": {"only_failed": not self.only_failed},
            "p": {"is_paused": not self.is_paused},
            "escape": {"text": "", "chosen": None},
        }
        return replace(self, **changes.get(key, {}))

    def _typed(self, key: str) -> Wishes:
        if key in ("enter", "escape"):
            return replace(self, is_typing=False, text=self.text if key == "enter" else "")
        if key == "backspace":
            return replace(self, text=self.text[:-1])
        return replace(self, text=self.text + key) if len(key) == 1 else self

    def _moved(self, by: int, requests: list[RecordSummary]) -> Wishes:
        at = next((at for at, one in enumerate(requests) if _same(one, self.chosen)), None)
        place = 0 if at is None else max(0, min(at + by, len(requests) - 1))
        return replace(self, chosen=requests[place] if requests else None)

    def words(self) -> str:
        parts = [f"by {self.sort}"]
        if self.text or self.is_typing:
            parts.append(f"with '{self.text}{'_' if self.is_typing else ''}'")
        parts += ["failed only"] * self.only_failed + ["PAUSED"] * self.is_paused
        return ", ".join(parts)


def _has_failed(one: RecordSummary) -> bool:
    return one.outcome not in OUTCOME_STYLES or (one.status or 200) >= 400


def _same(one: RecordSummary, other: RecordSummary | None) -> bool:
    """Check if two records are of the same request, also if only one of them has ended."""
    return other is not None and (one.request_id, one.received_unix_seconds) == (
        other.request_id,
        other.received_unix_seconds,
    )


def frame(seen: Seen | None, title: Title, room: Room, wishes: Wishes | None = None) -> list[Text]:
    lines = [_title(seen, title, room)]
    if seen is not None:
        lines += [_rates(seen, room), _flow_control(seen, room)]
        keys = Text() if wishes is None else _keys(wishes, room)
        wishes = wishes or Wishes()
        num_bands = min(len(seen.queues.bands), MAX_BANDS) if seen.queues.is_on else 0
        endpoints, requests = wishes.endpoints(seen), wishes.requests(seen)
        space = _share_out(len(endpoints), num_bands, len(requests), room.height)
        lines += [keys, *_endpoints(seen, endpoints, space.endpoints, room)]
        if num_bands:
            lines += [Text(), *_queues(seen, num_bands, room)]
        lines += [Text(), *_requests(seen, requests, space.requests, room, wishes.chosen)]
    return lines if room.height is None else lines[: room.height]


@dataclass(frozen=True, slots=True)
class _Space:
    endpoints: int
    requests: int


def _share_out(endpoints: int, bands: int, requests: int, height: int | None) -> _Space:
    """Return the numbers of rows for endpoints and requests, with lines that count the rest."""
    if height is None:
        return _Space(endpoints, REQUESTS_WITHOUT_LIMIT)
    around = 3 + 2 + (2 if bands else 0) + 3  # fixed and blank lines
    left = height - around - bands
    few = min(requests, MIN_REQUESTS)
    for_endpoints = max(1, min(endpoints, left - few))
    return _Space(for_endpoints, max(0, left - for_endpoints))


def _title(seen: Seen | None, title: Title, room: Room) -> Text:
    glyphs = room.glyphs
    if title.lost is not None:
        words, style = f"{glyphs.bad} {title.lost}", "bold red"
    elif seen is None:
        words, style = "asking ...", "dim"
    else:
        endpoints = seen.pool.endpoints
        usable = sum(one.health.state not in NOT_USABLE for one in endpoints)
        speed = f"  {rate(seen.pool.pool.requests_per_second)} req/s"
        words, style = f"{usable} of {len(endpoints)} endpoints usable{speed}", ""
    text = f"pointsman {title.url}  "
    first = cell(text, min(len(text), room.width), glyphs)
    second = cell(words, room.width - len(first), glyphs)
    return styled([(first, "bold"), (second, style)])


def _keys(wishes: Wishes, room: Room) -> Text:
    words = f"{wishes.words()}   "
    left = room.width - len(words)
    style = "bold yellow" if wishes.is_paused else "bold"
    return _fitting(
        [(cell(words, len(words), room.glyphs), style), (KEYS[: max(0, left)], "dim")], room
    )


def _rates(seen: Seen, room: Room) -> Text:
    pool, ttft = seen.pool.pool, seen.pool.pool.ttft
    p50, p95 = (None, None) if ttft is None else (ttft.p50, ttft.p95)
    first = f"TTFT with queue p50 {seconds(p50)} p95 {seconds(p95)}"
    parts = [(f"{first}  {rate(pool.tokens_per_second)} tok/s", "")]
    for value, word in (
        (pool.refusals_per_second, "refused"),
        (pool.failures_per_second, "failed"),
    ):
        parts.append((f"  {rate(value)}/s {word}", "bold red" if value else ""))
    return _fitting(parts, room)


def _flow_control(seen: Seen, room: Room) -> Text:
    queues, glyphs = seen.queues, room.glyphs
    if not queues.is_on:
        return styled([(cell("flow control off", room.width, glyphs), "dim")])
    most = "" if queues.max_requests is None else f"/{queues.max_requests}"
    stale = f"  {queues.stale_endpoints} stale" if queues.stale_endpoints else ""
    text = (
        f"saturation {bar(queues.saturation, 10, glyphs)} {percent(queues.saturation)}  "
        f"queued {queues.queued_requests}{most} ({size(queues.queued_bytes)})  "
        f"in flight {queues.under_way}  {rate(queues.dispatched_per_second)}/s{stale}"
    )
    return styled([(cell(text, room.width, glyphs), "")])


# Endpoints


def _endpoints(seen: Seen, endpoints: list[EndpointView], rows: int, room: Room) -> list[Text]:
    longest = max((len(one.name) for one in endpoints), default=0)
    name_width = max(10, min(longest, 14 + max(0, room.width - 80) // 2))
    spark_width = max(0, min(room.width - name_width - _COLUMNS, 60))
    head = (
        cell("ENDPOINT", name_width, room.glyphs)
        + " STATE       RUN WAIT KV           PREFIX INFL  REQ/S   TTFT "
        + cell("RUNNING", spark_width, room.glyphs)
    )
    shown, more = _cut(endpoints, rows)
    series = {} if seen.pool.history is None else seen.pool.history.endpoints
    # One scale for all, so that curves can be compared.
    highest = max((value or 0 for one in series.values() for value in one.running), default=0)
    lines = [styled([(cell(head, room.width, room.glyphs), _HEAD)])]
    for one in shown:
        running = series.get(one.key, NO_SERIES).running
        spark = sparkline(running, max(1, highest), spark_width, room.glyphs)
        lines.append(_endpoint(one, name_width, spark, room))
    return lines + _more(more, "endpoints", room)


def _endpoint(one: EndpointView, name_width: int, spark: str, room: Room) -> Text:
    glyphs, load = room.glyphs, one.metrics
    sign, word, style = STATES.get(one.health.state, ("doubtful", one.health.state, "yellow"))
    usage = None if load is None else load.kv_cache_usage
    cache = f"{bar(usage or 0, _BAR, glyphs)} {percent(usage):>4}"
    columns = [
        cell(count(None if load is None else load.running_requests), 4, glyphs, right=True),
        cell(count(None if load is None else load.waiting_requests), 4, glyphs, right=True),
        cell(cache, _BAR + 5, glyphs),
        cell(percent(one.prefix_hit_share), 6, glyphs, right=True),
        cell(count(one.inflight_requests), 4, glyphs, right=True),
        cell(rate(one.requests_per_second), 6, glyphs, right=True),
        cell(seconds(None if one.ttft is None else one.ttft.p95), 6, glyphs, right=True),
    ]
    parts = [
        (cell(one.name, name_width, glyphs) + " ", ""),
        (cell(f"{getattr(glyphs, sign)} {word}", 10, glyphs), style),
        (" " + " ".join(columns) + " ", ""),
        (spark, "cyan"),
    ]
    return _fitting(parts, room)


# Queues


def _queues(seen: Seen, rows: int, room: Room) -> list[Text]:
    head = "PRIORITY   QUEUED/MAX     SIZE  OLDEST  FLOWS, BY THEIR SHARE OF THE BAND"
    bands, more = _cut(list(seen.queues.bands), rows)
    lines = [styled([(cell(head, room.width, room.glyphs), _HEAD)])]
    lines += [_band(one, room) for one in bands]
    return lines + _more(more, "bands", room)


def _band(one: BandView, room: Room) -> Text:
    glyphs = room.glyphs
    waiting = sorted(
        (flow for flow in one.flows if flow.queued_requests), key=lambda flow: -flow.queued_requests
    )
    oldest = max((flow.oldest_wait_seconds for flow in waiting), default=None)
    flows = ", ".join(
        f"{flow.fairness_id} {percent(flow.queued_requests / max(1, one.queued_requests))}"
        for flow in waiting
    )
    columns = [
        cell(str(one.priority), 8, glyphs),
        cell(f"{one.queued_requests}/{one.max_requests}", 12, glyphs, right=True),
        cell(size(one.queued_bytes), 8, glyphs, right=True),
        cell(seconds(oldest), 7, glyphs, right=True),
    ]
    text = " ".join(columns) + "  "
    return _fitting([(text, ""), (cell(flows, room.width - len(text), glyphs), "")], room)


# Requests


def _requests(
    seen: Seen, requests: list[RecordSummary], rows: int, room: Room, chosen: RecordSummary | None
) -> list[Text]:
    counts = Counter(one.outcome for one in seen.decisions)
    listed = ", ".join(
        f"{clean(words(name), room.glyphs)} {many}" for name, many in counts.most_common()
    )
    of = f"of the last {len(seen.decisions)} requests: {listed}" if listed else "no request yet"
    lines = [styled([(cell(of, room.width, room.glyphs), "dim")])]
    head = "AT       OUTCOME                ENDPOINT        QUEUE   TTFT  TOTAL FLOW"
    if room.width >= _WIDTH_FOR_IDS:
        head = cell(head, room.width - _ID_WIDTH - 1, room.glyphs) + " ID"
    lines.append(styled([(cell(head, room.width, room.glyphs), _HEAD)]))
    # The marked one stays visible.
    at = next((at for at, one in enumerate(requests) if _same(one, chosen)), 0)
    first = max(0, at - max(0, rows - 1))
    for one in requests[first : first + rows]:
        line = _request(one, room)
        if _same(one, chosen):
            line.stylize("reverse")
        lines.append(line)
    return lines


def _request(one: RecordSummary, room: Room) -> Text:
    glyphs = room.glyphs
    style = OUTCOME_STYLES.get(one.outcome, "red")
    if one.status is not None and one.status >= 400:
        style = "red"
    at = time.strftime("%H:%M:%S", time.localtime(one.received_unix_seconds))
    endpoint = "-" if one.endpoint is None else one.endpoint.removeprefix("default/")
    columns = [
        cell(endpoint, 12, glyphs),
        cell(seconds(one.queue_seconds), 8, glyphs, right=True),
        cell(seconds(one.ttft_seconds), 6, glyphs, right=True),
        cell(seconds(one.seconds), 6, glyphs, right=True),
    ]
    parts = [
        (cell(at, 8, glyphs) + " ", ""),
        (cell(_outcome(one), 22, glyphs) + " ", style),
        (" ".join(columns) + " ", ""),
    ]
    left = room.width - sum(len(text) for text, _ in parts)
    if room.width < _WIDTH_FOR_IDS:
        return _fitting([*parts, (cell(one.fairness_id, left, glyphs), "")], room)
    flow = cell(one.fairness_id, left - _ID_WIDTH - 1, glyphs) + " "
    return _fitting([*parts, (flow + cell(one.request_id, _ID_WIDTH, glyphs), "")], room)


def _outcome(one: RecordSummary) -> str:
    if one.status in (None, 200):
        return words(one.reason or one.outcome)
    if one.reason is None and one.outcome == "completed":
        return f"{'server' if one.status >= 500 else 'client'} error {one.status}"
    return f"{words(one.reason or one.outcome)} {one.status}"


# Room


def _fitting(parts: list[tuple[str, str]], room: Room) -> Text:
    line = styled(parts)
    line.truncate(room.width)
    return line


def _cut(rows: list[T], limit: int) -> tuple[list[T], int]:
    if len(rows) <= limit:
        return rows, 0
    shown = rows[: max(0, limit - 1)]  # the last line counts the rest
    return shown, len(rows) - len(shown)


def _more(number: int, what: str, room: Room) -> list[Text]:
    if not number:
        return []
    text = f"{room.glyphs.more} {number} more {what}"
    return [styled([(cell(text, room.width, room.glyphs), "dim")])]
