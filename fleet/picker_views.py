"""What a running picker says of itself at its HTTP port, as values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import quote

import httpx
import msgspec

from fleet.errors import FleetError
from fleet.several_pools import refuse_several
from picker.admin.views import ConfigView, EndpointsView
from picker.decisions.views import RecordSummary, RecordView
from picker.flowcontrol.views import QueuesView

TIMEOUT_SECONDS = 2.0
T = TypeVar("T")


class NoPickerError(FleetError):
    """Nothing answers, or what answers is no picker."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A picker at one moment; `decisions` are the last ones, the newest first."""

    pool: EndpointsView
    queues: QueuesView
    decisions: tuple[RecordSummary, ...]


class _Decisions(msgspec.Struct, frozen=True):
    decisions: tuple[RecordSummary, ...]


class PickerViews:
    """Asks the picker at `url`. A context manager that keeps its connection."""

    def __init__(self, url: str, transport: httpx.BaseTransport | None = None) -> None:
        """`transport` is how to get there, by TCP when None."""
        self._url = url
        self._http = httpx.Client(transport=transport, timeout=TIMEOUT_SECONDS, trust_env=False)

    def __enter__(self) -> PickerViews:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def look(self, samples: int, decisions: int) -> Seen:
        """Everything there is, with the last `samples` of the pool's history and so many decisions.

        Raises `NoPickerError`, and `SeveralPoolsError` where a pool has to be named.
        """
        return Seen(
            pool=self._ask(f"/endpoints?history={samples}", _decoder(EndpointsView)),
            queues=self._ask("/queues", _decoder(QueuesView)),
            decisions=self._ask(f"/decisions?limit={decisions}", _decoder(_Decisions)).decisions,
        )

    def config(self) -> ConfigView:
        """The configuration in use. Raises as `look` does."""
        return self._ask("/config", _decoder(ConfigView))

    def decision(self, request_id: str) -> RecordView:
        """The record of one request. Raises `FleetError`, also when it is not known any more."""
        return self._ask(f"/decisions/{part_of_path(request_id)}", _decoder(RecordView))

    def _ask(self, path: str, decode: Callable[[bytes], T]) -> T:
        answer = self._get(self._url + path)
        if answer.status_code == 404:
            refuse_several(self._url, self._content)
        if answer.status_code != 200:
            raise NoPickerError(f"{self._url}{path} answers {answer.status_code}")
        try:
            return decode(answer.content)
        except msgspec.MsgspecError as error:
            raise NoPickerError(f"what answers at {self._url} is not this picker") from error

    def _content(self, address: str) -> bytes | None:
        answer = self._get(address)
        return answer.content if answer.status_code == 200 else None

    def _get(self, address: str) -> httpx.Response:
        try:
            return self._http.get(address)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise NoPickerError(f"no picker answers at {self._url}: {error}") from error


def part_of_path(request_id: str) -> str:
    """An id, which clients choose, as one part of a path; with its dots escaped too, as `..` would
    be another page. Bytes that are no text come from the command line as lone surrogates.

    Raises `FleetError`.
    """
    if not request_id:
        raise FleetError("a request's id is not empty; --last shows the one that came last")
    content = request_id.encode(errors="surrogateescape")
    return quote(content, safe="").replace(".", "%2E")


def _decoder(kind: type[T]) -> Callable[[bytes], T]:
    return msgspec.json.Decoder(kind).decode
