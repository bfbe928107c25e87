"""What of a request a recording may hold as it stands, and what only as a digest.

A decision asks of most headers only whether two of them are alike (whose session is it?), so a
digest does as well. Its key is made for one run and is kept nowhere: nobody can try out what a
digest may stand for, and digests of two runs have nothing in common.

As they stand are headers whose values decisions read, and values that the pool or the configuration
itself has: a label, an address, the token of an endpoint, the name of a profile. Those of
credentials and cookies never are.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Iterable, Mapping, Sequence

from picker.requestcontrol.headers import PICKER_OWNED, REQUEST_ID
from picker.types import Endpoint, MultiModalFeature

DIGEST_BYTES = 12
MAX_REMEMBERED = 4096  # digests of values that come again and again
MAX_REMEMBERED_LENGTH = 1024  # clients may send salts of megabytes, each another one
DIGEST_MARK = "digest:"

_PATH = ":path"
_PLAIN = frozenset((*PICKER_OWNED, REQUEST_ID, "content-type", "prefer", ":method", _PATH))
_SECRET = frozenset(
    ("authorization", "proxy-authorization", "cookie", "set-cookie", "x-api-key", "api-key")
)


class Digests:
    """Makes texts unreadable, alike ones alike. Owns the key, and what it made lately."""

    def __init__(self, key: bytes | None = None) -> None:
        """`key` is random unless it is given."""
        self._key = secrets.token_bytes(32) if key is None else key
        self._made: dict[str, str] = {}

    def of(self, text: str) -> str:
        """The digest of `text`; "" and blanks stand for themselves."""
        if not text.strip():
            return text
        known = self._made.get(text)
        if known is None:
            data = text.encode(errors="surrogatepass")
            made = hashlib.blake2b(data, digest_size=DIGEST_BYTES, key=self._key)
            known = DIGEST_MARK + made.hexdigest()
            if len(text) <= MAX_REMEMBERED_LENGTH:
                if len(self._made) >= MAX_REMEMBERED:
                    self._made.clear()
                self._made[text] = known
        return known


class HeaderPrivacy:
    """Makes headers fit to be recorded. Owns the values that are no secret."""

    def __init__(self, digests: Digests) -> None:
        self._digests = digests
        self._names: frozenset[str] = frozenset()
        self._of_endpoints: dict[str, frozenset[str]] = {}
        self._public: frozenset[str] = frozenset()

    def know_names(self, names: Iterable[str]) -> None:
        """Names of the configuration, those of profiles, are no secret."""
        self._names = frozenset(names)
        self._renew()

    def know_endpoints(self, joined: Iterable[Endpoint], left: Iterable[Endpoint] = ()) -> None:
        """What the pool says of its endpoints is no secret."""
        for endpoint in left:
            self._of_endpoints.pop(endpoint.key, None)
        for endpoint in joined:
            token = base64.b64encode(endpoint.key.encode(errors="surrogatepass")).decode()
            addresses = (endpoint.key, endpoint.address, endpoint.host_port)
            words = frozenset((*addresses, token, *endpoint.labels.values()))
            self._of_endpoints[endpoint.key] = words
        self._renew()

    def of(self, headers: Mapping[str, str]) -> dict[str, str]:
        """The headers as a recording may hold them."""
        return {readable(name): self._value(name, value) for name, value in headers.items()}

    def _value(self, name: str, value: str) -> str:
        if name in _PLAIN:
            return readable(value.partition("?")[0] if name == _PATH else value)
        if name not in _SECRET and self._is_public(value):
            return readable(value)
        return self._digests.of(value)

    def _is_public(self, value: str) -> bool:
        """Whether it is known anyway, or a list of what is."""
        if "," not in value:
            return value.strip() in self._public
        return all(part.strip() in self._public for part in value.split(","))

    def _renew(self) -> None:
        self._public = self._names.union(*self._of_endpoints.values())


def private_features(
    features: Sequence[Sequence[MultiModalFeature]], digests: Digests
) -> tuple[tuple[MultiModalFeature, ...], ...]:
    """The items of prompts, their contents told apart but not told."""
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
    """`text` without halves of characters, which JSON strings of clients may hold."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def bounded(value: int) -> int:
    """`value` within what JSON readers take; what is beyond is beyond every limit anyway."""
    return max(-(2**62), min(value, 2**62))
