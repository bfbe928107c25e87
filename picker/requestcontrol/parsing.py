"""Which parser understands a request, by its path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from picker.errors import bad_request
from picker.framework.interfaces import Parser

DEFAULT_PATH = "/v1/completions"
_PATH_HEADERS = (":path", "x-original-path", "x-forwarded-path")


def request_path(headers: Mapping[str, str]) -> str:
    """The path of a request without its query; what the proxy rewrote is found in `x-…-path`."""
    for name in _PATH_HEADERS:
        if value := headers.get(name):
            return value.partition("?")[0]
    return DEFAULT_PATH


class ParserTable:
    """Parsers by the path suffixes they claim.

    The longest matching claim wins; between equal claims the parser configured first. A parser
    without claims takes what nobody else does, and there can be only one: later ones are unused.
    """

    def __init__(self, parsers: Sequence[Parser]) -> None:
        claims = [(claim.strip("/"), parser) for parser in parsers for claim in parser.claims]
        self._claims = sorted(claims, key=lambda pair: -len(pair[0]))
        self._fallback = next((parser for parser in parsers if not parser.claims), None)

    def select(self, path: str) -> Parser:
        """The parser of `path`. Raises `RefusedError` (400) when nobody takes it."""
        trimmed = path.rstrip("/")
        for claim, parser in self._claims:
            if trimmed.endswith(claim):
                return parser
        if self._fallback is None:
            raise bad_request(f"no parser is configured for the path '{path}'")
        return self._fallback
