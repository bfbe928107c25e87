"""token-limits: reject requests of a tenant that has used its tokens (429 with `Retry-After`).

Theory of operation. The gateway authenticates clients and names the limits of a request's tenant in
a header; the tenant is the fairness id:

    x-pointsman-token-limit: 100000, llama=20000

allows 100,000 tokens a minute for all models, of which 20,000 for the model `llama`. A request
without the header has the limit `tokensPerMinute`, if any. Each limit is a leaky bucket that runs
out at the limit's rate. A request is admitted while every bucket that it counts in is below its
limit; at its end its usage is added, however much that is. So a tenant may use its limit at once,
never more than the limit per minute in the long run, and a burst in flight is paid for afterwards.
The wait until a bucket is below its limit is known exactly: it becomes the `Retry-After`.

    level += prompt and completion tokens                                 at the end of a request
    level -= limit / 60 · seconds · level / (level + levels elsewhere)    all the time

Replicas exchange their levels as loads. Each drains its share, so that all together drain at the
limit's rate, and admits by the sum: a limit holds for all replicas, but for what is used in the
moment that a report takes.

A stream reports its usage only if the client asks for it, so the picker asks in its place
(`stream_options.include_usage`) for chat and completions; such a client sees one more event. An
answer without usage, as when its client leaves early, costs a token for each 4 bytes of the request
and of a JSON answer, and for each 200 bytes of an event stream.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from msgspec.structs import replace

from picker.errors import Code, RefusedError
from picker.framework.attributes import Attributes, EndpointLoad
from picker.framework.interfaces import Flight
from picker.framework.registry import Parameters, PluginType, PositiveInt
from picker.types import Api, Candidates, FinishCause, InferenceRequest, ResponseProgress, Usage

LIMIT_HEADER = "x-pointsman-token-limit"
MAX_BUCKETS = 65_536  # loads that replicas exchange
MAX_TENANT = 512  # characters
_FAIRNESS_HEADERS = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
_STREAMS_WITHOUT_USAGE = (Api.CHAT_COMPLETIONS, Api.COMPLETIONS)
_PAID = (FinishCause.COMPLETED, FinishCause.CLIENT_GONE, FinishCause.EVICTED)
_TEXT_BYTES, _EVENT_BYTES = 4, 200  # of a token
_MINUTE = 60.0
_EMPTY = 0.5  # tokens, below which a bucket is dropped
_NOTHING = EndpointLoad()


class TokenLimitsParameters(Parameters, frozen=True):
    tokens_per_minute: PositiveInt | None = None


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit on one model of the tenant, or on all of them together (None)."""

    tokens_per_minute: int
    model: str | None = None


@dataclass(slots=True)
class _Bucket:
    level: float
    at_seconds: float
    tokens_per_minute: int


@lru_cache(1024)
def parse_limits(text: str) -> tuple[Limit, ...]:
    """Read the header. Raises `ValueError`."""
    limits = []
    for part in text.split(","):
        model, equals, number = part.strip().rpartition("=")
        number = number.strip()
        is_number = number.isascii() and number.isdecimal() and len(number) < 16 and int(number)
        if not is_number or (equals and not model):
            raise ValueError(f"{part.strip()!r} is neither TOKENS nor MODEL=TOKENS")
        limits.append(Limit(int(number), model if equals else None))
    return tuple(limits)


class TokenLimits:
    """Owns the buckets, by tenant and model; the least recently charged one comes first."""

    flush_interval_seconds = 1.0  # how often buckets drain without requests

    def __init__(self, parameters: TokenLimitsParameters) -> None:
        default = parameters.tokens_per_minute
        self._default: tuple[Limit, ...] = () if default is None else (Limit(default),)
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self._elsewhere: Mapping[str, EndpointLoad] = {}
        self._unreported: dict[int, int] = {}  # bytes of answers without usage, by their flight

    # Before and after flow control

    def process(self, request: InferenceRequest) -> InferenceRequest:
        now = request.received_at_seconds
        for key, limit in self._limits(request):
            bucket = self._buckets.get(key)
            if bucket is not None:
                self._drain(key, bucket, now)
            level = (0.0 if bucket is None else bucket.level) + self._level_elsewhere(key)
            if level >= limit.tokens_per_minute:
                raise _refusal(_tenant(request), limit, level)
        return request

    def produce(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> InferenceRequest:
        """Let a stream report its usage. Done after a wait, for which no body is held."""
        body, payload = request.body, request.body.payload
        if not body.stream or body.api not in _STREAMS_WITHOUT_USAGE or payload is None:
            return request
        options = payload.get("stream_options") or {}
        is_asked = not isinstance(options, Mapping) or options.get("include_usage") is True
        if is_asked or not any(self._limits(request)):
            return request
        payload = {**payload, "stream_options": {**options, "include_usage": True}}
        return replace(request, body=replace(body, payload=payload))

    # At the end

    def response_progress(self, flight: Flight, progress: ResponseProgress) -> None:
        if progress.is_last and progress.usage is None and any(self._limits(flight.request)):
            self._unreported[id(flight)] = progress.num_bytes

    def request_ended(
        self, flight: Flight, cause: FinishCause, usage: Usage | None, now_seconds: float
    ) -> None:
        request, num_bytes = flight.request, self._unreported.pop(id(flight), 0)
        if usage is not None:
            tokens = max(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens)
        elif cause in _PAID:
            answer = _EVENT_BYTES if request.body.stream else _TEXT_BYTES
            tokens = request.size_bytes // _TEXT_BYTES + num_bytes // answer
        else:
            return
        for key, limit in self._limits(request):
            self._charge(key, limit, tokens, now_seconds)

    async def flush(self, now_seconds: float, unix_seconds: float) -> None:
        del unix_seconds
        for key, bucket in self._buckets.items():
            self._drain(key, bucket, now_seconds)
        empty = [key for key, bucket in self._buckets.items() if bucket.level < _EMPTY]
        for key in empty:
            del self._buckets[key]

    # Other replicas

    @property
    def own_loads(self) -> Mapping[str, EndpointLoad]:
        levels = ((key, math.ceil(bucket.level)) for key, bucket in self._buckets.items())
        return {key: EndpointLoad(tokens=level) for key, level in levels if level}

    def set_loads_elsewhere(self, loads: Mapping[str, EndpointLoad]) -> None:
        self._elsewhere = loads

    # Buckets

    def _limits(self, request: InferenceRequest) -> Iterator[tuple[str, Limit]]:
        """Yield the limits that the request counts in, with the keys of their buckets."""
        text, limits = request.headers.get(LIMIT_HEADER), self._default
        if text:
            try:
                limits = parse_limits(text)
            except ValueError as error:
                text = f"the gateway's {LIMIT_HEADER} cannot be read: {error}"
                raise RefusedError(Code.INTERNAL, text) from error
        if not limits:
            return
        tenant = _tenant(request)
        models = (None, request.incoming_model, request.target_model)
        for limit in limits:
            if limit.model in models:
                # A line feed is in no header, so no tenant can take the bucket of another.
                yield tenant if limit.model is None else f"{tenant}\n{limit.model}", limit

    def _charge(self, key: str, limit: Limit, tokens: int, now: float) -> None:
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _Bucket(0.0, now, limit.tokens_per_minute)
            if len(self._buckets) > MAX_BUCKETS:
                self._buckets.popitem(last=False)
        self._drain(key, bucket, now)
        bucket.level += tokens
        bucket.tokens_per_minute = limit.tokens_per_minute
        self._buckets.move_to_end(key)

    def _drain(self, key: str, bucket: _Bucket, now: float) -> None:
        passed = now - bucket.at_seconds
        if passed <= 0:
            return
        bucket.at_seconds = now
        if bucket.level > 0:
            share = bucket.level / (bucket.level + self._level_elsewhere(key))
            drained = bucket.tokens_per_minute / _MINUTE * passed * share
            bucket.level = max(0.0, bucket.level - drained)

    def _level_elsewhere(self, key: str) -> int:
        return self._elsewhere.get(key, _NOTHING).tokens

    def check_integrity(self) -> None:
        levels: Sequence[float] = [bucket.level for bucket in self._buckets.values()]
        if len(levels) > MAX_BUCKETS or any(level < 0 for level in levels):
            raise AssertionError("too many buckets, or one below zero")


def _tenant(request: InferenceRequest) -> str:
    named = next(filter(None, map(request.headers.get, _FAIRNESS_HEADERS)), request.fairness_id)
    return named[:MAX_TENANT]


def _refusal(tenant: str, limit: Limit, level: float) -> RefusedError:
    of_model = "" if limit.model is None else f" of model '{limit.model}'"
    rate = limit.tokens_per_minute / _MINUTE
    return RefusedError(
        Code.RESOURCE_EXHAUSTED,
        f"'{tenant}' has used its {limit.tokens_per_minute} tokens a minute{of_model}",
        retry_after_seconds=math.floor((level - limit.tokens_per_minute) / rate) + 1,
    )


PLUGINS = (PluginType("token-limits", TokenLimits),)
