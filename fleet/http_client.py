"""HTTP/1.1 for commands that send a few requests, with the standard library alone: a client library
takes longer to import than these commands run.
"""

import contextlib
import json
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from urllib.parse import unquote, urlsplit

from fleet.errors import FleetError

CONNECT_SECONDS = 5.0
SILENCE_SECONDS = 300.0  # while a prompt is read; a missing server is known at once
# Raised by `get`, by `opened` and while its response is read.
HTTP_ERRORS = (OSError, HTTPException, ValueError)


class ConnectError(OSError):
    """The server cannot be reached, or its certificate is not trusted."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    status: int
    content: bytes


Fetch = Callable[[str], HttpAnswer]
"""Gets what is at a URL. Raises `HTTP_ERRORS`."""


def get(url: str, timeout_seconds: float) -> HttpAnswer:
    """Send GET and return the complete answer. Raises as `opened` does."""
    with opened(url, timeout_seconds) as response:
        return HttpAnswer(response.status, response.read())


@contextlib.contextmanager
def opened(
    url: str,
    timeout_seconds: float,
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
) -> Iterator[HTTPResponse]:
    """Send GET, or POST if there is a `body`; open the response. No byte may take longer than the
    timeout. Raises `ConnectError`, and other `HTTP_ERRORS` once there is a connection.
    """
    parts = urlsplit(url)
    is_tls = parts.scheme == "https"
    host, port = parts.hostname or "", parts.port or (443 if is_tls else 80)
    seconds = min(CONNECT_SECONDS, timeout_seconds)
    connection = (HTTPSConnection if is_tls else HTTPConnection)(host, port, timeout=seconds)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    sent = dict(headers or {})
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        sent["authorization"] = f"Basic {b64encode(pair.encode()).decode()}"
    with contextlib.closing(connection):
        try:
            connection.connect()
        except OSError as error:
            raise ConnectError(why(error)) from error
        # A missing server is known at once; an answer may take long.
        connection.sock.settimeout(timeout_seconds)
        connection.request("GET" if body is None else "POST", path, body, sent)
        with connection.getresponse() as response:
            yield response


def why(error: Exception) -> str:
    return str(error) or type(error).__name__


def reason_in(body: bytes) -> str:
    """Return the message of an error object, or the beginning of any other body, on one line."""
    try:
        error = json.loads(body)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError, RecursionError):
        text = body.decode(errors="replace")
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line[:200] or "(no reason)"


def first_model(
    url: str, headers: Mapping[str, str] | None = None, timeout_seconds: float = SILENCE_SECONDS
) -> str:
    """Return the id of the first model that is served. Raises `FleetError`."""
    url = url.rstrip("/")
    with explained(url), opened(f"{url}/v1/models", timeout_seconds, headers) as response:
        status, content = response.status, response.read()
    if status != 200:
        raise FleetError(f"{url}/v1/models: {refusal(status, content)}")
    try:
        return str(json.loads(content)["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise FleetError(f"{url}/v1/models lists no model: name one with --model") from error


@contextlib.contextmanager
def explained(url: str) -> Iterator[None]:
    """Turn errors of an exchange into a `FleetError` of one sentence."""
    try:
        yield
    except ConnectError as error:
        if "CERTIFICATE" in str(error):
            raise FleetError(
                f"{url} has no certificate that is trusted: {error}; name its issuer's in "
                "SSL_CERT_FILE"
            ) from error
        raise FleetError(
            f"nothing answers at {url} ({error}): start a fleet with `pointsman up`, or give --url"
        ) from error
    except (HTTPException, ConnectionError) as error:
        raise FleetError("the answer broke off: the connection was lost") from error
    except (*HTTP_ERRORS, LookupError) as error:
        raise FleetError(f"no useful answer from {url}: {why(error)}") from error


def refusal(status: int, content: bytes) -> str:
    return f"the server refuses ({status}): {reason_in(content)}"
