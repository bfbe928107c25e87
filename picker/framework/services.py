"""What a plugin may ask of the outside world, as contracts; `app` hands in what fulfils them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from picker.errors import PickerError


class HttpError(PickerError):
    """A server could not be asked, or answered with something other than 200."""


class HttpClient(Protocol):
    """Asks other servers; connections are kept."""

    async def post_json(
        self,
        url: str,
        body: Any,
        *,
        timeout_seconds: float,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """The decoded JSON of the answer, of 16 MiB at most. Raises `HttpError`."""
        ...


class NoHttp:
    """An `HttpClient` for configurations that ask nobody."""

    async def post_json(
        self,
        url: str,
        body: Any,
        *,
        timeout_seconds: float,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """Refuse."""
        raise HttpError(f"nothing may be asked of {url} here")


@dataclass(frozen=True, slots=True)
class Services:
    """Everything a plugin is given when it is made."""

    http: HttpClient


NO_SERVICES = Services(NoHttp())
