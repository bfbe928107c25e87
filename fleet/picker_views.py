"""The reports of a running picker's HTTP port, as values."""

from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import quote

import msgspec

from fleet.errors import FleetError
from fleet.http_client import HTTP_ERRORS, Fetch, HttpAnswer, get, why
from fleet.several_pools import refuse_several
from picker.admin.views import ConfigView, EndpointsView
from picker.decisions.views import RecordSummary, RecordView
from picker.flowcontrol.views import QueuesView

TIMEOUT_SECONDS = 2.0
T = TypeVar("T")


class NoPickerError(FleetError):
    """No server answers, or it is not a picker."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A picker at the last sample of its history; `decisions` are the latest, newest first."""

    pool: EndpointsView
    queues: QueuesView
    decisions: tuple[RecordSummary, ...]


class _Decisions(msgspec.Struct, frozen=True):
    decisions: tuple[RecordSummary, ...]


def _fetch(url: str) -> HttpAnswer:
    return get(url, TIMEOUT_SECONDS)


class PickerViews:
    """Reads the picker at `url`, each time on a connection of its own."""

    def __init__(self, url: str, fetch: Fetch = _fetch) -> None:
        self._url, self._fetch = url, fetch

    def look(self, samples: int, decisions: int) -> Seen:
        """Read all views. Raises `NoPickerError` and `SeveralPoolsError`."""
        pool = self._ask(f"/endpoints?history={samples}", EndpointsView)
        history = pool.history
        queues = None if history is None or not history.last else history.queues
        return Seen(
            pool=pool,
            queues=queues or self._ask("/queues", QueuesView),
            decisions=self._ask(f"/decisions?limit={decisions}", _Decisions).decisions,
        )

    def config(self) -> ConfigView:
        return self._ask("/config", ConfigView)

    def decision(self, request_id: str) -> RecordView:
        """Return a decision. Raises `FleetError`, also when the request is no longer stored."""
        return self._ask(f"/decisions/{part_of_path(request_id)}", RecordView)

    def _ask(self, path: str, kind: type[T]) -> T:
        answer = self._get(self._url + path)
        # A picker of several pools has these pages below the name of each pool alone.
        if answer.status == 404:
            refuse_several(self._url, self._content)
        if answer.status != 200:
            raise NoPickerError(f"{self._url}{path} answers {answer.status}")
        try:
            return msgspec.json.decode(answer.content, type=kind)
        except msgspec.MsgspecError as error:
            raise NoPickerError(f"what answers at {self._url} is not this picker") from error

    def _content(self, address: str) -> bytes | None:
        answer = self._get(address)
        return answer.content if answer.status == 200 else None

    def _get(self, address: str) -> HttpAnswer:
        try:
            return self._fetch(address)
        except HTTP_ERRORS as error:
            raise NoPickerError(f"no picker answers at {self._url}: {why(error)}") from error


def part_of_path(request_id: str) -> str:
    """Escape an id as one part of a path. Clients choose ids: dots are escaped, as `..` would name
    another page, and bytes that are not text come as lone surrogates. Raises `FleetError`.
    """
    if not request_id:
        raise FleetError("a request's id is not empty; --last shows the one that came last")
    content = request_id.encode(errors="surrogateescape")
    return quote(content, safe="").replace(".", "%2E")
