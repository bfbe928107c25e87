"""Why an endpoint was chosen, in sentences."""

from collections.abc import Iterator

from picker.decisions.views import CandidateView, ProfileView, RecordView

_WAITING, _EVICTED = "waiting", "evicted"
_GOES_BY_TOTALS = ("max-score-picker", "")  # "": an unnamed picker


def reasons(record: RecordView) -> Iterator[str]:
    if record.refusal is not None:
        yield _refused(record)
        return
    if record.summary.outcome == _WAITING:
        yield "It is not decided yet."
        return
    primary = next((one for one in record.profiles if one.is_primary), None)
    if primary is None:
        yield from _without_profile(record)
    else:
        yield from _chosen(primary)
    for stage, why in record.stages.items():
        yield f"No endpoint of its own for {stage}: {why}."
    yield from _went_elsewhere(record)
    if record.summary.outcome == _EVICTED:
        yield "Flow control stopped it in favour of others while it was under way."


def _refused(record: RecordView) -> str:
    refusal = record.refusal
    if refusal is None:
        return ""
    reason = f", {refusal.reason}" if refusal.reason else ""
    text = f"The picker refused it: {refusal.status} {refusal.code}{reason}: {refusal.message}."
    if refusal.retry_after_seconds is not None:
        text += f" It asked the client to retry after {refusal.retry_after_seconds} s."
    emptied = [
        view.filter
        for one in record.profiles
        for view in one.filters
        if view.before > view.after == 0
    ]
    if emptied:
        text += f" The filter {emptied[0]} left no endpoint."
    return text


def _without_profile(record: RecordView) -> Iterator[str]:
    if record.destination is None:
        yield "It ended before an endpoint was chosen."
    elif record.size_bytes == 0:
        yield f"It has no body, so any endpoint will do: chance chose {record.summary.endpoint}."


def _chosen(profile: ProfileView) -> Iterator[str]:
    if not profile.picked or not profile.candidates:
        yield f"The profile {profile.name} found no endpoint."
        return
    name = profile.picked[0]
    picked = next((one for one in profile.candidates if one.endpoint == name), None)
    if picked is None:
        return
    if profile.num_scored == 1:
        left = "" if profile.num_candidates == 1 else " that the filters left"
        yield f"{name} was the only candidate{left}."
        return
    yield _contest(profile, picked)
    yield from _unknown_loads(profile)


def _contest(profile: ProfileView, picked: CandidateView) -> str:
    best = profile.candidates[0]
    others = [one for one in profile.candidates if one.endpoint != picked.endpoint]
    if not picked.scores:
        return f"No scorer is configured: chance chose {picked.endpoint}."
    if best.total == 0.0 and profile.num_tied == profile.num_scored:
        return (
            f"All {profile.num_scored} totals are 0, because no scorer favoured any "
            f"endpoint: chance chose {picked.endpoint}."
        )
    if picked.total < best.total:
        return (
            f"{profile.picker} leaves it to chance: it chose {picked.endpoint}, although "
            f"{best.endpoint} had {_amount(best.total - picked.total)} more."
        )
    if profile.num_tied > 1:
        tied = [one.endpoint for one in others if one.total == picked.total]
        return (
            f"{picked.endpoint} tied with {_some(tied, profile.num_tied - 1)} at "
            f"{_amount(picked.total)}: chance chose among them."
        )
    how = "" if profile.picker in _GOES_BY_TOTALS else f"; {profile.picker} drew it"
    return f"{_won(picked, others[0])}{how}."


def _won(picked: CandidateView, second: CandidateView) -> str:
    margin = _amount(picked.total - second.total)
    gains = [
        (mine.weighted - theirs.weighted, mine.scorer)
        for mine, theirs in zip(picked.scores, second.scores, strict=True)
    ]
    ahead = sorted((one for one in gains if one[0] > 0.0), reverse=True)
    behind = sorted(one for one in gains if one[0] < 0.0)
    parts = [f"{scorer} gave it {_amount(gain)} more" for gain, scorer in ahead]
    parts += [f"{scorer} {_amount(-gain)} less" for gain, scorer in behind]
    return f"{picked.endpoint} won by {margin} over {second.endpoint}: {', '.join(parts)}"


def _unknown_loads(profile: ProfileView) -> Iterator[str]:
    unknown = [one.endpoint for one in profile.candidates if one.waiting_requests is None]
    if unknown:
        yield f"The load of {_some(unknown, len(unknown))} was unknown or stale."


def _went_elsewhere(record: RecordView) -> Iterator[str]:
    destinations = (record.destination or "").split(",")
    if record.served_by is None or record.served_by == destinations[0]:
        return
    why = "the next in line" if record.served_by in destinations else "not a requested endpoint"
    yield f"The proxy says that {record.served_by} served it, {why}."


def _some(names: list[str], count: int) -> str:
    shown = names[:3]
    left = count - len(shown)
    if left > 0:
        return f"{', '.join(shown)} and {left} more"
    *most, last = shown
    return f"{', '.join(most)} and {last}" if most else last


def _amount(value: float) -> str:
    """Format briefly, but never as 0 unless it is."""
    text = f"{value:.3f}"
    return text if float(text) or not value else f"{value:.1e}"
