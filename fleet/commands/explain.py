"""`pointsman explain`: the reasons for a request's destination, or for its refusal."""

import json
from dataclasses import dataclass

import msgspec
from rich.console import Console

from fleet.commands.explain_text import SHOWN_CANDIDATES, Layout, explained
from fleet.commands.top_text import ASCII, Glyphs
from fleet.errors import FleetError
from fleet.http_client import HTTP_ERRORS, Fetch, HttpAnswer, get, why
from fleet.picker_views import part_of_path
from fleet.several_pools import PoolAddress, is_of_all, list_of, pools_of, which_to_name
from picker.decisions.views import RecordView

TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ExplainOptions:
    url: str
    request_id: str | None = None
    as_json: bool = False
    shows_all: bool = False


def _fetch(url: str) -> HttpAnswer:
    return get(url, TIMEOUT_SECONDS)


def explain(options: ExplainOptions, console: Console, fetch: Fetch = _fetch) -> int:
    """Print the record. Raises `FleetError` when nothing answers, or the request is not known."""
    content, pools = _Search(options, fetch).run()
    if options.as_json:
        console.file.write(msgspec.json.format(content, indent=2).decode() + "\n")
        return 0
    record = _decoded(options.url, content)
    glyphs = Glyphs() if console.encoding.lower().startswith("utf") else ASCII
    limit = None if options.shows_all else SHOWN_CANDIDATES
    page = Layout(glyphs, limit=limit)
    for number, one in enumerate(pools):
        said = "also known to pool" if number else "pool"
        console.print(page.text(f"{said} {one.name} ({one.url})"), soft_wrap=True)
    for part in explained(record, page):
        console.print(part, highlight=False, markup=False)
    return 0


class _Search:
    def __init__(self, options: ExplainOptions, fetch: Fetch) -> None:
        self._options, self._fetch = options, fetch
        wanted = "last" if options.request_id is None else part_of_path(options.request_id)
        self._path = f"/decisions/{wanted}"

    def run(self) -> tuple[bytes, tuple[PoolAddress, ...]]:
        """Return a record; if several pools know the request, also those, the record's first."""
        url = self._options.url
        answer = self._get(url + self._path)
        if answer.status != 404:
            return self._content(answer, url), ()
        listed = self._get(list_of(url))
        pools = pools_of(url, listed.content) if listed.status == 200 else ()
        if pools and is_of_all(url):
            return self._in_any(pools)
        ambiguity = which_to_name(url, pools)
        if ambiguity is not None:
            raise FleetError(f"{url}: {ambiguity}")
        raise FleetError(_said(answer, "nothing is known of this request, or not any more"))

    def _in_any(self, pools: tuple[PoolAddress, ...]) -> tuple[bytes, tuple[PoolAddress, ...]]:
        """Find the newest record; a pool's errors matter only if no other knows the request."""
        found, failed = [], []
        for pool in pools:
            answer = self._get(pool.url + self._path)
            if answer.status == 200:
                record = _decoded(pool.url, answer.content)
                found.append((record.summary.received_unix_seconds, answer.content, pool))
            elif answer.status != 404:
                failed.append((answer, pool.url))
        if not found and failed:
            self._content(*failed[0])
        if not found:
            names = ", ".join(pool.name for pool in pools)
            wanted = self._options.request_id
            raise FleetError(
                f"none of the pools {names} had a request yet"
                if wanted is None
                else f"none of the pools {names} knows of request '{wanted[:200]}', or not any more"
            )
        found.sort(key=lambda one: one[0], reverse=True)
        known = tuple(pool for _, _, pool in found)
        is_last = self._options.request_id is None
        return found[0][1], known[:1] if is_last else known

    def _content(self, answer: HttpAnswer, url: str) -> bytes:
        if answer.status != 200:
            raise FleetError(_said(answer, f"{url}{self._path} answers {answer.status}"))
        return answer.content

    def _get(self, address: str) -> HttpAnswer:
        try:
            return self._fetch(address)
        except HTTP_ERRORS as error:
            hint = "name it with --picker URL, or start a fleet with `pointsman up`"
            raise FleetError(
                f"no picker answers at {self._options.url}: {why(error)}; {hint}"
            ) from error


def _decoded(url: str, content: bytes) -> RecordView:
    try:
        return msgspec.json.decode(content, type=RecordView)
    except msgspec.MsgspecError as error:
        raise FleetError(f"what answers at {url} is not this picker: {error}") from error


def _said(answer: HttpAnswer, otherwise: str) -> str:
    try:
        body = json.loads(answer.content)
    except ValueError:
        return otherwise
    return str(body["error"]) if isinstance(body, dict) and "error" in body else otherwise
