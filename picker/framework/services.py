"""What a plugin may ask of the outside world, as contracts; `app` hands in what fulfils them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from picker.errors import PickerError

_NO_ENVIRONMENT: Mapping[str, str] = MappingProxyType({})


class HttpError(PickerError):
    """A server could not be asked, or answered with a status outside 200..299."""


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
        """The decoded JSON of the answer, of 16 MiB at most; None for an answer without a body.

        Raises `HttpError`.
        """


class NoHttp:
    """An `HttpClient` for configurations that ask no server."""

    async def post_json(self, url: str, body: Any, **_: Any) -> Any:
        """Refuse."""
        raise HttpError(f"nothing may be asked of {url} here")


class Clock(Protocol):
    """Lets time pass, for plugins that wait on purpose."""

    def now(self) -> float:
        """Seconds that never go back."""

    async def sleep(self, seconds: float) -> None:
        """Return once so much has passed. May be cancelled."""


class NoClock:
    """A `Clock` on which no time passes and nothing waits."""

    def now(self) -> float:
        """The beginning."""
        return 0.0

    async def sleep(self, seconds: float) -> None:
        """Return at once."""


@dataclass(frozen=True, slots=True)
class Services:
    """Everything a plugin is given when it is made.

    `environment` holds the process's environment variables, for settings that have always been
    there. `hash_seed` is a secret number of this process, for hashes that clients must not be able
    to make collide.
    """

    http: HttpClient
    environment: Mapping[str, str] = field(default_factory=lambda: _NO_ENVIRONMENT)
    hash_seed: int = 0
    clock: Clock = field(default_factory=NoClock)


NO_SERVICES = Services(NoHttp())
