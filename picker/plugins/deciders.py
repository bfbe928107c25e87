"""Deciders: whether a stage of a disaggregated request is worth its profile (`Decider`).

always-disagg-pd-decider: every request gets a prefill endpoint.

always-disagg-multimodal-decider: requests with images, video or audio get encode endpoints.

prefix-based-pd-decider: prefill elsewhere what the decode endpoint has not cached.

    run ⇔ input − hit ≥ nonCachedTokens,   hit = cached blocks at the decode endpoint · block size

`input` is the number of tokens of the request's prompts. The stage never runs with nonCachedTokens
0 (which turns disaggregation off), with input < nonCachedTokens or < promptTokens, without a decode
endpoint, or without a finding of approx-prefix-cache-producer, whose findings alone count.

latency-based-pd-decider: that rule, unless it is faster to compute the KV than to take it.

    run ⇔ prefix-based-pd-decider would, and T(n) − C(n) ≤ C(n),   n = input − hit

C(n) is the time to the first token where the decode endpoint computes n tokens, T(n) where another
one does: what T takes longer is the time to take the KV. Both are lines, a fixed time and one for
each token, fitted to the last twenty or so streamed answers of the endpoint, or of all while it
has few; prompts that prefix-based-pd-decider would not send elsewhere do not count. The first token
is seen where the proxy shows or reports responses. Until ten prompts have run elsewhere,
prefix-based-pd-decider decides alone; then every other prompt is computed until ten are. Later one
prompt of 47 goes the other way, so that changes are noticed.
"""

from typing import Any

import msgspec

from picker.framework.attributes import Attributes, DataKey
from picker.framework.disaggregation import DISAGGREGATION_DECISION_KEY, DisaggregationDecision
from picker.framework.interfaces import Flight
from picker.framework.registry import NonNegativeInt, Parameters, PluginType
from picker.plugins.producers.token_producer import TOKENIZED_PROMPT
from picker.prefix.match import match_info_key
from picker.types import Candidate, InferenceRequest, ResponseProgress


class AlwaysDecider:
    def should_run(
        self, request: InferenceRequest, picked: Candidate | None, attributes: Attributes
    ) -> bool:
        return True


class MultiModalDecider:
    consumes = (TOKENIZED_PROMPT,)  # media are found where prompts are

    def should_run(
        self, request: InferenceRequest, picked: Candidate | None, attributes: Attributes
    ) -> bool:
        return any(request.features or request.body.features)

    def why_not(
        self, request: InferenceRequest, picked: Candidate | None, attributes: Attributes
    ) -> str:
        return "the request has no image, video or audio"


_MATCH_KEY = match_info_key("approx-prefix-cache-producer")


class PrefixBasedPdDecider(Parameters, frozen=True):
    non_cached_tokens: NonNegativeInt = 0
    prompt_tokens: NonNegativeInt = 0

    @property
    def consumes(self) -> tuple[DataKey[Any], ...]:
        return (_MATCH_KEY,) if self.non_cached_tokens else ()

    def should_run(
        self, request: InferenceRequest, picked: Candidate | None, attributes: Attributes
    ) -> bool:
        if request.num_tokens < max(self.non_cached_tokens, self.prompt_tokens):
            return False
        uncached = self.uncached(request, picked, attributes)
        return uncached is not None and uncached >= self.non_cached_tokens

    def uncached(
        self, request: InferenceRequest, picked: Candidate | None, attributes: Attributes
    ) -> int | None:
        """Return the tokens that are not cached at `picked`; None: unknown, or turned off."""
        info = attributes.get(_MATCH_KEY)
        if not self.non_cached_tokens or picked is None or info is None:
            return None
        hit = info.match_blocks.get(picked.key, 0) * info.block_size_tokens
        return max(0, request.num_tokens - hit)

    def why_not(
        self, request: InferenceRequest, picked: Candidate | None, attributes: Attributes
    ) -> str:
        tokens, least = request.num_tokens, max(self.non_cached_tokens, self.prompt_tokens)
        if not self.non_cached_tokens:
            return "nonCachedTokens is 0, which turns it off"
        if picked is None:
            return "there is no decode endpoint"
        if tokens < least:
            return f"the prompt has {tokens} tokens, fewer than {least}"
        info = attributes.get(_MATCH_KEY)
        if info is None:
            return "nothing is known of cached prefixes"
        hit = info.match_blocks.get(picked.key, 0) * info.block_size_tokens
        return (
            f"of {tokens} tokens {hit} are cached at {picked.endpoint.name}, which leaves fewer "
            f"than {self.non_cached_tokens}"
        )


_DECAY = 0.95
_FEWEST_ANSWERS = 10
_PROMPTS_TO_A_TRIAL = 47  # a prime, so that it hits all phases of what repeats


class _Line(msgspec.Struct):
    """A line through points (tokens, seconds) by least squares: decaying sums, of which `answers`
    is that of ones.
    """

    num_seen: int = 0
    answers: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self.num_seen += 1
        self.answers = self.answers * _DECAY + 1.0
        self.tokens = self.tokens * _DECAY + tokens
        self.seconds = self.seconds * _DECAY + seconds
        self.squares = self.squares * _DECAY + tokens * tokens
        self.products = self.products * _DECAY + tokens * seconds

    def at(self, tokens: int) -> float | None:
        """Return the seconds for `tokens`; None while too few points are known."""
        if self.num_seen < _FEWEST_ANSWERS:
            return None
        mean, seconds = self.tokens / self.answers, self.seconds / self.answers
        variance = self.squares / self.answers - mean * mean
        if variance > 1e-4 * mean * mean:
            slope = (self.products / self.answers - mean * seconds) / variance
        else:  # all prompts are alike: nothing shows a fixed time
            slope = seconds / mean if mean else 0.0
        return max(0.0, seconds + max(0.0, slope) * (tokens - mean))


class _Paths(msgspec.Struct):
    """The times to the first token at one decode endpoint."""

    computed: _Line = msgspec.field(default_factory=_Line)
    taken: _Line = msgspec.field(default_factory=_Line)


class _Asked(msgspec.Struct, frozen=True):
    """A request's decode endpoint and its tokens that are not cached there, and the reason against
    a prefill endpoint ("": none but those of `PrefixBasedPdDecider`).
    """

    key: str
    uncached: int
    reason: str


class LatencyBasedPdDecider:
    """Owns what was learned from first tokens, for each decode endpoint and for all of them."""

    def __init__(self, name: str, parameters: PrefixBasedPdDecider) -> None:
        self._rule = parameters
        self.consumes = parameters.consumes
        self._asked_key: DataKey[_Asked] = DataKey("Asked", name)
        self.produces = (self._asked_key,)
        self._paths: dict[str, _Paths] = {}
        self._all = _Paths()
        self._num_asked = 0

    def should_run(
        self, request: InferenceRequest, picked: Candidate | None, attributes: Attributes
    ) -> bool:
        uncached = self._rule.uncached(request, picked, attributes)
        if picked is None or uncached is None:
            return False
        if not self._rule.should_run(request, picked, attributes):
            return False
        reason = self._reason_against(picked.key, uncached)
        attributes[self._asked_key] = _Asked(picked.key, uncached, reason)
        return not reason

    def why_not(
        self, request: InferenceRequest, picked: Candidate | None, attributes: Attributes
    ) -> str:
        asked = attributes.get(self._asked_key)
        if asked is not None and asked.reason:
            return asked.reason
        return self._rule.why_not(request, picked, attributes)

    def response_progress(self, flight: Flight, progress: ResponseProgress) -> None:
        """Learn from the first token of a streamed answer."""
        asked = flight.attributes.get(self._asked_key)
        if asked is None or not progress.is_first or not flight.request.body.stream:
            return
        seconds = max(0.0, progress.now_seconds - flight.request.received_at_seconds)
        decision = flight.attributes.get(DISAGGREGATION_DECISION_KEY)
        for paths in (self._all, self._paths.setdefault(asked.key, _Paths())):
            if decision is DisaggregationDecision.PREFILL_DECODE:
                paths.taken.add(asked.uncached, seconds)
            elif decision is DisaggregationDecision.DECODE_ONLY:
                paths.computed.add(asked.uncached, seconds)

    def endpoint_removed(self, key: str) -> None:
        self._paths.pop(key, None)

    def _reason_against(self, key: str, uncached: int) -> str:
        own = self._paths.get(key, self._all)
        computed, taken = own.computed.at(uncached), own.taken.at(uncached)
        computed = self._all.computed.at(uncached) if computed is None else computed
        taken = self._all.taken.at(uncached) if taken is None else taken
        if taken is None:
            return ""
        self._num_asked += 1
        is_trial = self._num_asked % (_PROMPTS_TO_A_TRIAL if computed is not None else 2) == 0
        if computed is None or taken - computed <= computed:
            return "it is computed to measure how long that takes" if is_trial else ""
        if is_trial:
            return ""
        return (
            f"to take the KV of {uncached} tokens lasts {taken - computed:.3f} s, to compute it "
            f"{computed:.3f} s"
        )


PLUGINS = (
    PluginType("always-disagg-pd-decider", AlwaysDecider),
    PluginType("always-disagg-multimodal-decider", MultiModalDecider),
    PluginType("prefix-based-pd-decider", PrefixBasedPdDecider),
    PluginType("latency-based-pd-decider", LatencyBasedPdDecider),
)
