"""context-length-aware: endpoints for short and for long prompts, by a label.

The label (`llm-d.ai/context-length-range`) is `min-max`, in tokens, both included. With the
prompt's length n (0 while its tokens are unknown):

    score = 0.3 + 0.7 · (0.7 · w + 0.3 · p)     for min ≤ n ≤ max, with
                w = 1 / (1 + (max − min) / 10000)    narrow ranges are specialists
                p = (max − n) / (max − min)          room to grow
            1.0                                 for min = n = max
            0.3 / (1 + distance / 1000)         out of range
            0.5                                 without the label
            0.0                                 for an invalid label

As a filter, with `enableFiltering`, it passes the endpoints without the label and those whose range
includes n, which may be none.
"""

from collections.abc import Sequence
from functools import lru_cache
from random import Random

from picker.framework.attributes import Attributes
from picker.framework.registry import Parameters, PluginType
from picker.plugins.producers.token_producer import TOKENIZED_PROMPT
from picker.types import Candidate, Candidates, InferenceRequest

DEFAULT_LABEL = "llm-d.ai/context-length-range"
UNLABELLED = 0.5
IN_RANGE = 0.3
MAX_DIGITS = 18


class ContextLengthAwareParameters(Parameters, frozen=True):
    label: str = DEFAULT_LABEL
    enable_filtering: bool = False


class ContextLengthAware:
    consumes = (TOKENIZED_PROMPT,)

    def __init__(self, parameters: ContextLengthAwareParameters) -> None:
        if not parameters.label:
            raise ValueError("label must not be empty")
        self._label = parameters.label
        self._filters = parameters.enable_filtering

    def filter(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes, rng: Random
    ) -> Candidates:
        if not self._filters:
            return candidates
        length = request.num_tokens
        return [candidate for candidate in candidates if self._takes(candidate, length)]

    def score(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> Sequence[float]:
        length = request.num_tokens
        return [self._rate(candidate, length) for candidate in candidates]

    def _takes(self, candidate: Candidate, length: int) -> bool:
        text = candidate.endpoint.labels.get(self._label)
        if text is None:
            return True
        ends = parse_range(text)
        return ends is not None and ends[0] <= length <= ends[1]

    def _rate(self, candidate: Candidate, length: int) -> float:
        text = candidate.endpoint.labels.get(self._label)
        if text is None:
            return UNLABELLED
        ends = parse_range(text)
        return 0.0 if ends is None else _rate_range(length, *ends)


@lru_cache(maxsize=1024)
def parse_range(text: str) -> tuple[int, int] | None:
    """Parse `min-max`; None for other text."""
    first, dash, last = text.partition("-")
    for end in (first, last):
        if not (end.isascii() and end.isdecimal() and len(end) <= MAX_DIGITS):
            return None
    shortest, longest = int(first), int(last)
    return (shortest, longest) if dash and shortest <= longest else None


def _rate_range(length: int, shortest: int, longest: int) -> float:
    if not shortest <= length <= longest:
        distance = shortest - length if length < shortest else length - longest
        return IN_RANGE / (1.0 + distance / 1000)
    width = longest - shortest
    if width == 0:
        return 1.0
    narrow = 1.0 / (1.0 + width / 10000)
    room = (longest - length) / width
    return IN_RANGE + (1.0 - IN_RANGE) * (0.7 * narrow + 0.3 * room)


PLUGINS = (PluginType("context-length-aware", ContextLengthAware),)
