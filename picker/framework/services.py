"""The contracts of outside services for plugins; `app` passes the implementations."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from picker.errors import PickerError

_NO_ENVIRONMENT: Mapping[str, str] = MappingProxyType({})


class HttpError(PickerError):
    """Raised when a server could not be reached, or answered with a status outside 200..299."""


class HttpClient(Protocol):
    """Sends requests to other servers over persistent connections."""

    async def post_json(
        self,
        url: str,
        body: Any,
        *,
        timeout_seconds: float,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """Return the decoded JSON of the answer, at most 16 MiB; None for an empty body. Raises
        `HttpError`.
        """


class NoHttp:
    """An `HttpClient` for configurations that ask no server."""

    async def post_json(self, url: str, body: Any, **_: Any) -> Any:
        raise HttpError(f"nothing may be asked of {url} here")


class Clock(Protocol):
    """A clock and timer for plugins that wait."""

    def now(self) -> float:
        """The monotonic time in seconds."""

    async def sleep(self, seconds: float) -> None:
        """Suspend for `seconds`. May be cancelled."""


class NoClock:
    """A `Clock` on which no time passes and nothing waits."""

    def now(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        """Return without a wait."""


@dataclass(frozen=True, slots=True)
class Services:
    """The services that a plugin's constructor may receive.

    `environment` holds the process's environment variables, for the settings that other tools
    define there. `hash_seed` is a secret of this process, so that clients cannot provoke collisions
    of hashes.
    """

    http: HttpClient
    environment: Mapping[str, str] = field(default_factory=lambda: _NO_ENVIRONMENT)
    hash_seed: int = 0
    clock: Clock = field(default_factory=NoClock)


NO_SERVICES = Services(NoHttp())
