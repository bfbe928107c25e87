"""What the picker sent where lately: requests a second, and how much of them was cached there.

Nobody tells the picker how many tokens an engine really found in its cache, unless responses pass
through it. So prefix hits are what the configuration's prefix index *expected* at the endpoint that
was picked: right as long as the index is, and there before the engine has begun.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from picker.decisions.decision import Decision
from picker.prefix.match import MATCH_INFO

WINDOW_SAMPLES = 10


class Recent(msgspec.Struct, frozen=True):
    """What was sent to an endpoint over the last ten samples, or since it was first seen.

    Of the prompts that were looked up in a prefix index: their tokens, and how many of these were
    expected in its cache.
    """

    requests_per_second: float = 0.0
    prompt_tokens: int = 0
    matched_tokens: int = 0

    @property
    def prefix_hit_share(self) -> float | None:
        """In [0, 1]; None when no prompt was looked up."""
        return self.matched_tokens / self.prompt_tokens if self.prompt_tokens else None


class _Counts:
    """Owns what was sent to one endpoint: totals, and what they were at the last samples."""

    __slots__ = ("before", "matched", "prompt", "requests")

    def __init__(self) -> None:
        self.requests = 0
        self.prompt = 0
        self.matched = 0
        self.before: deque[tuple[int, int, int]] = deque([(0, 0, 0)], maxlen=WINDOW_SAMPLES + 1)

    def sample(self, interval_seconds: float) -> Recent:
        self.before.append((self.requests, self.prompt, self.matched))
        requests, prompt, matched = self.before[0]
        seconds = (len(self.before) - 1) * interval_seconds
        return Recent(
            requests_per_second=(self.requests - requests) / seconds,
            prompt_tokens=self.prompt - prompt,
            matched_tokens=self.matched - matched,
        )


class EndpointTraffic:
    """Watches decisions and counts, and is looked at once a second by `sample`."""

    def __init__(self) -> None:
        self._counts: dict[str, _Counts] = {}

    def decided(self, decision: Decision) -> None:
        """Count a request for the endpoint that it is meant for."""
        if decision.result is None:
            return  # any endpoint will do
        key = decision.result.endpoints[0].key
        counts = self._counts.get(key)
        if counts is None:
            counts = self._counts[key] = _Counts()
        counts.requests += 1
        prompt, matched = expected_hits(decision, key)
        counts.prompt += prompt
        counts.matched += matched

    def sample(self, keys: Iterable[str], interval_seconds: float) -> dict[str, Recent]:
        """What was sent to each of `keys` lately; the other endpoints are forgotten.

        `interval_seconds` is what lies between two calls.
        """
        before, self._counts = self._counts, {}
        for key in keys:
            self._counts[key] = before.get(key) or _Counts()
        return {key: counts.sample(interval_seconds) for key, counts in self._counts.items()}


def expected_hits(decision: Decision, key: str) -> tuple[int, int]:
    """The tokens of a decision's prompt, and how many of them were expected at endpoint `key`.

    Both are 0 when no prefix index was asked. Of several indexes the one counts that expects most.
    """
    if decision.attributes is None or decision.request is None:
        return 0, 0
    matched = whole = 0
    is_known = False
    for data_key, found in decision.attributes.items():
        if data_key.data_type == MATCH_INFO:
            is_known = True
            matched = max(matched, found.match_blocks.get(key, 0) * found.block_size_tokens)
            whole = max(whole, found.total_blocks * found.block_size_tokens)
    if not is_known:
        return 0, 0
    prompt = decision.request.num_tokens or whole
    return prompt, min(matched, prompt)
