"""How speculation goes, as a line for the log now and then. Pure: the time is an argument."""

from __future__ import annotations

from worker.engine.messages import EngineStats

INTERVAL_SECONDS = 10.0


class SpeculationLog:
    """Owns what was last told, and when. One line for `interval_seconds` in which anything was
    drafted; none otherwise. The words and numbers are those of vLLM's line.
    """

    def __init__(self, interval_seconds: float = INTERVAL_SECONDS) -> None:
        self._interval_seconds = interval_seconds
        self._told = EngineStats()
        self._told_seconds: float | None = None

    def line(self, stats: EngineStats, now_seconds: float) -> str | None:
        """What to log after a step, whose counters since the engine's start are given; mostly
        None. Rates are over the time since the last line, without a pause before the first draft.
        """
        num_drafts = stats.num_drafts - self._told.num_drafts
        since = self._told_seconds
        elapsed = 0.0 if since is None else now_seconds - since
        if since is None or (not num_drafts and elapsed >= self._interval_seconds):
            self._told_seconds = now_seconds
            return None
        if elapsed < self._interval_seconds:
            return None
        text = _line(self._told, stats, elapsed)
        self._told, self._told_seconds = stats, now_seconds
        return text


def _line(before: EngineStats, after: EngineStats, seconds: float) -> str:
    num_drafts = after.num_drafts - before.num_drafts
    drafted = after.num_draft_tokens - before.num_draft_tokens
    accepted = after.num_accepted_tokens - before.num_accepted_tokens
    earlier = before.num_accepted_by_position or (0,) * len(after.num_accepted_by_position)
    by_position = ", ".join(
        f"{(new - old) / num_drafts:.3f}"
        for old, new in zip(earlier, after.num_accepted_by_position, strict=True)
    )
    return (
        f"SpecDecoding metrics: Mean acceptance length: {1 + accepted / num_drafts:.2f},"
        f" Accepted throughput: {accepted / seconds:.2f} tokens/s,"
        f" Drafted throughput: {drafted / seconds:.2f} tokens/s,"
        f" Accepted: {accepted} tokens, Drafted: {drafted} tokens,"
        f" Per-position acceptance rate: {by_position},"
        f" Avg Draft acceptance rate: {accepted / max(1, drafted):.1%}"
    )
