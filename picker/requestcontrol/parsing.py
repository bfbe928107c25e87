"""Which parser understands a request, by its path."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from picker.errors import bad_request
from picker.framework.interfaces import Parser

DEFAULT_PATH = "/v1/completions"
_PATH_HEADERS = (":path", "x-original-path", "x-forwarded-path")
log = logging.getLogger(__name__)


def request_path(headers: Mapping[str, str]) -> str:
    """The path of a request without its query; what the proxy rewrote is found in `x-…-path`."""
    for name in _PATH_HEADERS:
        if value := headers.get(name):
            return value.partition("?")[0]
    return DEFAULT_PATH


class ParserTable:
    """Parsers by the path suffixes they claim.

    A claim matches a path that ends with it, from a `/` on, or from a `.`, as a gRPC service's
    package ends. The longest matching claim wins; between equal claims the parser configured first.
    A parser without claims takes what nobody else does, and parsers configured after it are unused,
    which is logged.
    """

    def __init__(self, parsers: Sequence[Parser]) -> None:
        used = _until_fallback(parsers)
        for parser in parsers[len(used) :]:
            log.warning(
                "the parser %s is unused: one before it takes every path", type(parser).__name__
            )
        claims = [(claim.strip("/"), parser) for parser in used for claim in parser.claims]
        claims.sort(key=lambda pair: -len(pair[0]))
        self._claims = tuple(((f"/{claim}", f".{claim}"), parser) for claim, parser in claims)
        self._fallback = next((parser for parser in used if not parser.claims), None)

    def select(self, path: str) -> Parser:
        """The parser of `path`. Raises `RefusedError` (400) when nobody takes it."""
        trimmed = path.rstrip("/")
        if not trimmed.startswith("/"):
            trimmed = f"/{trimmed}"
        for endings, parser in self._claims:
            if trimmed.endswith(endings):
                return parser
        if self._fallback is None:
            raise bad_request(f"no parser is configured for the path '{path}'")
        return self._fallback


def _until_fallback(parsers: Sequence[Parser]) -> Sequence[Parser]:
    """Parsers up to the first one without claims."""
    for index, parser in enumerate(parsers):
        if not parser.claims:
            return parsers[: index + 1]
    return parsers
