"""`pointsman explain`: why a request went where it went, or why it did not go at all."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

import httpx
import msgspec
from rich.console import Console

from fleet.errors import FleetError
from fleet.explain_text import SHOWN_CANDIDATES, Page, explained
from fleet.top_text import ASCII, Glyphs
from picker.requestcontrol.record_views import RecordView

TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Options:
    """Which request, at which picker; `request_id` None: the one that came last."""

    url: str
    request_id: str | None = None
    as_json: bool = False
    shows_all: bool = False


def explain(
    options: Options, console: Console, transport: httpx.BaseTransport | None = None
) -> int:
    """Print the record; returns the exit status 0.

    `transport` is how to get to the picker, by TCP when None. Raises `FleetError` when nobody
    answers, or nothing is known of the request.
    """
    content = _fetch(options, transport)
    if options.as_json:
        console.file.write(msgspec.json.format(content, indent=2).decode() + "\n")
        return 0
    try:
        record = msgspec.json.decode(content, type=RecordView)
    except msgspec.MsgspecError as error:
        raise FleetError(f"what answers at {options.url} is not this picker: {error}") from error
    glyphs = Glyphs() if console.encoding.lower().startswith("utf") else ASCII
    limit = None if options.shows_all else SHOWN_CANDIDATES
    for part in explained(record, Page(glyphs, limit=limit)):
        console.print(part, highlight=False, markup=False)
    return 0


def _fetch(options: Options, transport: httpx.BaseTransport | None) -> bytes:
    wanted = "last" if options.request_id is None else quote(options.request_id, safe="")
    url = f"{options.url}/decisions/{wanted}"
    try:
        with httpx.Client(transport=transport, timeout=TIMEOUT_SECONDS, trust_env=False) as client:
            answer = client.get(url)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        hint = "name it with --picker URL, or start a fleet with `pointsman up`"
        raise FleetError(f"no picker answers at {options.url}: {error}; {hint}") from error
    if answer.status_code == 404:
        raise FleetError(_said(answer, "nothing is known of this request, or not any more"))
    if answer.status_code != 200:
        raise FleetError(_said(answer, f"{url} answers {answer.status_code}"))
    return answer.content


def _said(answer: httpx.Response, otherwise: str) -> str:
    """The picker's own words, where it said any."""
    try:
        body = answer.json()
    except ValueError:
        return otherwise
    return str(body["error"]) if isinstance(body, dict) and "error" in body else otherwise
