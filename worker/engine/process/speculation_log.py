"""The log line about speculation, in the words of vLLM."""

from worker.types import SpeculationStats

INTERVAL_SECONDS = 10.0


class SpeculationLog:
    """Writes one line for each `INTERVAL_SECONDS` of work in which anything was drafted. Owns the
    figures last logged, and how long the engine has worked since.
    """

    def __init__(self) -> None:
        self._logged = SpeculationStats()
        self._seen_seconds: float | None = None
        self._worked_seconds = 0.0  # since the last line

    def resume(self, now_seconds: float) -> None:
        """Note that the engine was idle until now: the time since the last step does not count."""
        self._seen_seconds = now_seconds

    def line(self, stats: SpeculationStats, now_seconds: float) -> str | None:
        """Return the line to log after a step, usually None; rates are over the time worked."""
        if self._seen_seconds is not None:
            self._worked_seconds += now_seconds - self._seen_seconds
        self._seen_seconds = now_seconds
        if self._worked_seconds < INTERVAL_SECONDS:
            return None
        seconds, self._worked_seconds = self._worked_seconds, 0.0
        if stats.num_drafts == self._logged.num_drafts:
            return None
        text = _line(self._logged, stats, seconds)
        self._logged = stats
        return text


def _line(before: SpeculationStats, after: SpeculationStats, seconds: float) -> str:
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
