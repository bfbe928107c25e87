"""A request's record, as text for a terminal or a file."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo

from rich import box
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fleet.commands.top_text import ASCII, Glyphs, clean
from picker.decisions.views import CandidateView, FilterView, ProfileView, RecordView, ScoreView

SHOWN_CANDIDATES = 10
_HEADER_WIDTH = 13
_ALL_GLYPHS = Glyphs()
_DIM, _STRONG = "dim", "bold"
_IN_ASCII = str.maketrans({"×": "x", "→": "->", "µ": "u", "…": "~"})


@dataclass(frozen=True, slots=True)
class Layout:
    """The form of the text: `zone` None means the local one, `limit` None shows all candidates."""

    glyphs: Glyphs = _ALL_GLYPHS
    zone: tzinfo | None = None
    limit: int | None = SHOWN_CANDIDATES

    def text(self, text: str, style: str = "") -> Text:
        """Escape text that clients have chosen, so that a terminal only shows it."""
        if self.glyphs is ASCII:
            text = text.translate(_IN_ASCII)
        return Text(clean(text, self.glyphs), style)

    def line(self, name: str, text: str) -> Text:
        return Text.assemble((f"  {name:<9}", _DIM), self.text(text))


def explained(record: RecordView, page: Layout) -> Iterator[RenderableType]:
    yield from _summary(record, page)
    yield Text("")
    for sentence in record.reasons:
        yield page.text(sentence, _STRONG)
    for profile in record.profiles:
        yield Text("")
        yield from _profile(profile, page)


def _summary(record: RecordView, page: Layout) -> Iterator[Text]:
    summary = record.summary
    status = "" if summary.status is None else f", {summary.status}"
    yield page.text(f"request {summary.request_id or '(without an id)'}: {summary.outcome}{status}")
    yield page.line("model", _model(record))
    arrived = datetime.fromtimestamp(summary.received_unix_seconds, UTC).astimezone(page.zone)
    yield page.line("arrived", arrived.isoformat(" ", "milliseconds"))
    yield page.line("from", _origin(record))
    if summary.endpoint is not None:
        yield page.line("endpoint", f"{summary.endpoint} ({record.destination})")
    yield page.line("times", _times(record))
    tokens = ", ".join(_tokens(record))
    if tokens:
        yield page.line("tokens", tokens)


def _model(record: RecordView) -> str:
    named = record.incoming_model or "(none)"
    if record.target_model == record.incoming_model:
        return named
    by = f" by {record.rewritten_by}" if record.rewritten_by else ""
    return f"{named}, rewritten{by} to {record.target_model}"


def _origin(record: RecordView) -> str:
    summary = record.summary
    objective = f" ({record.objective})" if record.objective else ""
    parts = [summary.fairness_id] if summary.fairness_id else []
    parts += [f"priority {summary.priority}{objective}", f"{record.size_bytes:,} bytes"]
    return ", ".join(parts)


def _times(record: RecordView) -> str:
    summary = record.summary
    parts = [f"queue {_duration(summary.queue_seconds)}"]
    if record.destination is not None:
        alone = max(0.0, summary.decision_seconds - summary.queue_seconds)
        parts.append(f"decision {_duration(alone)}")
    if summary.ttft_seconds is not None:
        parts.append(f"first token {_duration(summary.ttft_seconds)}")
    if summary.seconds is not None:
        parts.append(f"total {_duration(summary.seconds)}")
    return ", ".join(parts)


def _tokens(record: RecordView) -> Iterator[str]:
    for name, count in (
        ("prompt", record.prompt_tokens),
        ("expected in cache", record.matched_prefix_tokens),
        ("found there", record.cached_tokens),
        ("completion", record.completion_tokens),
    ):
        if count is not None:
            yield f"{name} {count:,}"


def _profile(profile: ProfileView, page: Layout) -> Iterator[RenderableType]:
    role = ", the primary one" if profile.is_primary else ""
    picked = ", ".join(profile.picked) or "nothing"
    by = f" by {profile.picker}" if profile.picker else ""
    yield page.text(f"profile {profile.name}{role}: {picked} picked{by}", _STRONG)
    yield page.text(f"  {profile.num_candidates} candidates, {profile.num_scored} scored")
    for one in profile.filters:
        yield page.text(_filter(one))
    if not profile.candidates:
        return
    shown = profile.candidates[: page.limit]
    yield Text("")
    yield Padding(_scores(profile, shown, page), (0, 0, 0, 2), expand=False)
    yield Text("")
    yield Padding(_loads(shown, page), (0, 0, 0, 2), expand=False)
    left = len(profile.candidates) - len(shown)
    if left:
        yield page.text(f"  and {left} more, which --all shows", _DIM)
    dropped = profile.num_scored - len(profile.candidates)
    if dropped:
        yield page.text(f"  and {dropped} with lower totals, which are not stored", _DIM)


def _filter(view: FilterView) -> str:
    removed = view.before - view.after
    names = ", ".join(view.removed)
    more = "" if removed <= len(view.removed) else f" and {removed - len(view.removed)} more"
    what = f"removed {names}{more}" if removed else "removed nothing"
    return f"  filter {view.filter}: {view.before} → {view.after}, {what}"


def _scores(profile: ProfileView, shown: tuple[CandidateView, ...], page: Layout) -> Table:
    table = _table("", "endpoint")
    table.add_column("total", justify="right", no_wrap=True)
    for score in shown[0].scores:
        names = [page.text(line) for line in _broken(score.scorer)]
        table.add_column(Text("\n").join(names), justify="right", overflow="fold")
    for one in shown:
        mark, style = _marked(profile, one)
        cells = [mark, one.endpoint, f"{one.total:.3f}", *map(_score, one.scores)]
        table.add_row(*map(page.text, cells), style=style)
    return table


def _loads(shown: tuple[CandidateView, ...], page: Layout) -> Table:
    table = _table("endpoint", "address")
    for name in ("in flight", "waiting", "running", "KV cache", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in shown:
        usage = None if one.kv_cache_usage is None else f"{one.kv_cache_usage:.0%}"
        age = one.metrics_age_seconds
        numbers = (one.inflight_requests, one.waiting_requests, one.running_requests, usage)
        cells = (one.endpoint, one.address, *map(_known, numbers))
        table.add_row(*map(page.text, (*cells, "-" if age is None else _duration(age))))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


def _marked(profile: ProfileView, candidate: CandidateView) -> tuple[str, str]:
    if candidate.endpoint in profile.picked:
        return ">", _STRONG
    is_tied = profile.num_tied > 1 and candidate.total == profile.candidates[0].total
    return ("=", "") if is_tied else ("", "")


def _broken(name: str) -> list[str]:
    lines = [""]
    for part in name.replace("-", "-\n").split("\n"):
        if lines[-1] and len(lines[-1]) + len(part) > _HEADER_WIDTH:
            lines.append("")
        lines[-1] += part
    return lines


def _score(score: ScoreView) -> str:
    raw = "?" if score.raw is None else f"{score.raw:.3f}"  # not a number; it counts 0
    return f"{raw}×{score.weight:g}={score.weighted:.3f}"


def _known(value: int | str | None) -> str:
    return "-" if value is None else str(value)


def _duration(seconds: float) -> str:
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.2f} s"
