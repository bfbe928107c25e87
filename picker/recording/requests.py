"""Converts requests to lines of a recording and back: as plain text, or only as a digest.

Decisions mostly just compare the values of headers (same session?), so a digest suffices. Its key
is random for each run and not stored: a digest cannot be reversed by guessing. Headers that
decisions read by value are plain text, as are values that the pool or the configuration itself has.
Credentials and cookies never are.
"""

import base64
import hashlib
import secrets
from collections.abc import Iterable, Mapping, Sequence

from picker.recording.lines import RequestLine
from picker.requestcontrol.headers import PICKER_OWNED, REQUEST_ID
from picker.types import Api, Endpoint, InferenceRequest, MultiModalFeature, ParsedBody

MAX_PROMPT_BYTES = 2**28  # that of a line
DIGEST_BYTES = 12
MAX_REMEMBERED = 4096  # digests of recurring values
MAX_REMEMBERED_LENGTH = 1024  # clients may send salts of megabytes, each a different one
DIGEST_MARK = "digest:"

_PATH = ":path"
_PLAIN = frozenset((*PICKER_OWNED, REQUEST_ID, "content-type", "prefer", ":method", _PATH))
_SECRET = frozenset(
    ("authorization", "proxy-authorization", "cookie", "set-cookie", "x-api-key", "api-key")
)


class Digests:
    def __init__(self, key: bytes | None = None) -> None:
        self._key = secrets.token_bytes(32) if key is None else key
        self._made: dict[str, str] = {}

    def of(self, text: str) -> str:
        if not text.strip():
            return text
        known = self._made.get(text)
        if known is None:
            # JSON of clients may contain lone surrogates, which have no UTF-8.
            data = text.encode(errors="surrogatepass")
            made = hashlib.blake2b(data, digest_size=DIGEST_BYTES, key=self._key)
            known = DIGEST_MARK + made.hexdigest()
            if len(text) <= MAX_REMEMBERED_LENGTH:
                if len(self._made) >= MAX_REMEMBERED:
                    self._made.clear()
                self._made[text] = known
        return known


class HeaderPrivacy:
    """Makes headers safe to record. Owns the values that are public."""

    def __init__(self, digests: Digests) -> None:
        self._digests = digests
        self._names: frozenset[str] = frozenset()
        self._of_endpoints: dict[str, frozenset[str]] = {}
        self._public: frozenset[str] = frozenset()

    def know_names(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._renew()

    def know_endpoints(self, joined: Iterable[Endpoint], left: Iterable[Endpoint] = ()) -> None:
        for endpoint in left:
            self._of_endpoints.pop(endpoint.key, None)
        for endpoint in joined:
            token = base64.b64encode(endpoint.key.encode(errors="surrogatepass")).decode()
            addresses = (endpoint.key, endpoint.address, endpoint.host_port)
            words = frozenset((*addresses, token, *endpoint.labels.values()))
            self._of_endpoints[endpoint.key] = words
        self._renew()

    def of(self, headers: Mapping[str, str]) -> dict[str, str]:
        return {readable(name): self._value(name, value) for name, value in headers.items()}

    def _value(self, name: str, value: str) -> str:
        if name in _PLAIN:
            # A query may contain keys of clients.
            return readable(value.partition("?")[0] if name == _PATH else value)
        if name not in _SECRET and self._is_public(value):
            return readable(value)
        return self._digests.of(value)

    def _is_public(self, value: str) -> bool:
        if "," not in value:
            return value.strip() in self._public
        return all(part.strip() in self._public for part in value.split(","))

    def _renew(self) -> None:
        # One set, since every header of every request is looked up in it.
        self._public = self._names.union(*self._of_endpoints.values())


class RequestLines:
    def __init__(self, headers: HeaderPrivacy, digests: Digests, *, keeps_prompts: bool) -> None:
        self._headers = headers
        self._digests = digests
        self._keeps_prompts = keeps_prompts

    def of(self, request: InferenceRequest) -> RequestLine:
        body, limit, keeps = request.body, request.body.max_output_tokens, self._keeps_prompts
        features = private_features(request.features, self._digests)
        # Usually equal, and then recorded once.
        own_features = None
        if body.features != request.features:
            own_features = private_features(body.features, self._digests)
        return RequestLine(
            id=readable(request.request_id),
            api=body.api.value,
            headers=self._headers.of(request.headers),
            received_at=request.received_at_seconds,
            incoming_model=readable(request.incoming_model),
            target_model=readable(request.target_model),
            size_bytes=request.size_bytes,
            stream=body.stream,
            max_output_tokens=None if limit is None else bounded(limit),
            cache_salt=self._digests.of(body.cache_salt),
            objective=readable(request.objective),
            priority=bounded(request.priority),
            fairness_id=readable(request.fairness_id),
            prompts=request.prompts if keeps else None,
            prompt_bytes=None if keeps else tuple(map(len, request.prompts)),
            features=features,
            body_features=own_features,
        )


def request_of(line: RequestLine) -> InferenceRequest:
    """Restore the request, with zeros for prompts that were left out. Raises `ValueError`."""
    prompts = line.prompts
    if prompts is None:
        lengths = line.prompt_bytes or ()
        # A recording is a file that anyone may have written.
        if any(length < 0 for length in lengths) or sum(lengths) > MAX_PROMPT_BYTES:
            raise ValueError("prompts of an impossible length")
        prompts = tuple([bytes(length) for length in lengths])
    body = ParsedBody(
        api=Api(line.api),
        model=line.incoming_model,
        stream=line.stream,
        max_output_tokens=line.max_output_tokens,
        cache_salt=line.cache_salt,
        features=line.features if line.body_features is None else line.body_features,
    )
    return InferenceRequest(
        request_id=line.id,
        headers=line.headers,
        body=body,
        incoming_model=line.incoming_model,
        target_model=line.target_model,
        size_bytes=line.size_bytes,
        prompts=prompts,
        features=line.features,
        objective=line.objective,
        priority=line.priority,
        fairness_id=line.fairness_id,
        received_at_seconds=line.received_at,
    )


def private_features(
    features: Sequence[Sequence[MultiModalFeature]], digests: Digests
) -> tuple[tuple[MultiModalFeature, ...], ...]:
    return tuple(
        tuple(
            MultiModalFeature(
                readable(one.modality),
                digests.of(one.content_hash),
                bounded(one.offset),
                bounded(one.length),
            )
            for one in prompt
        )
        for prompt in features
    )


def readable(text: str) -> str:
    """Replace lone surrogates, which JSON strings of clients may contain and files may not."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def bounded(value: int) -> int:
    """Limit `value` to the range of JSON readers; anything beyond exceeds every limit anyway."""
    return max(-(2**62), min(value, 2**62))
