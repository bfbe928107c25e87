"""Client sessions and headers of programs that forward HTTP requests."""

import re
from collections.abc import Iterable
from typing import Final

import aiohttp

Headers = list[tuple[str, str]]

CONNECT_SECONDS: Final = 5.0
# Headers of one connection, and those that the client library sets anew.
_OF_A_CONNECTION: Final = re.compile(
    "connection|keep-alive|proxy-authenticate|proxy-authorization|te|trailer|transfer-encoding"
    "|upgrade|host|content-length|expect",
    re.IGNORECASE,
)
_OF_A_BODY: Final = ("content-type", "content-encoding", "accept-encoding")


def new_session() -> aiohttp.ClientSession:
    """Create a client without limits on its connections or on the time of an answer."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        auto_decompress=False,  # bodies pass as they are
        # aiohttp would add these where the client has sent none.
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        cookie_jar=aiohttp.DummyCookieJar(),  # clients share a session, but no cookies
    )


def forwarded_headers(headers: Iterable[tuple[str, str]], *removed: str) -> Headers:
    """Select a message's end-to-end headers, except those in `removed` (in lower case)."""
    return [
        (name, value)
        for name, value in headers
        if not _OF_A_CONNECTION.fullmatch(name) and name.lower() not in removed
    ]


def json_headers(headers: Headers) -> Headers:
    """Adapt headers to an uncompressed JSON body; the answer may not be compressed either."""
    others = [(name, value) for name, value in headers if name.lower() not in _OF_A_BODY]
    return [*others, ("Content-Type", "application/json")]
