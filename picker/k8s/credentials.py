"""How to reach the API server and show who asks: kubeconfig files, or the Pod's service account.

The official `kubernetes` package (extra `k8s`) reads the files, runs exec plugins and asks token
issuers; here is only what becomes of that. Tokens and certificates change while the picker runs:
they are read again every minute, in a thread, and at once when the server does not take them.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from picker.errors import ConfigError
from picker.k8s.kubeconfig import KubeconfigFiles, ServiceAccount
from picker.k8s.tls import Access

__all__ = ["Access", "AccessSource", "Credentials", "find_credentials"]

logger = logging.getLogger(__name__)

REREAD_SECONDS: Final = 60.0
RENEW_SECONDS: Final = 10.0
PATIENCE_SECONDS: Final = 30.0
SERVICE_ACCOUNT_FOLDER: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class AccessSource(Protocol):
    """Where credentials come from. It may block: files, processes, token issuers."""

    def load(self, *, anew: bool) -> Access:
        """The credentials now, the same object when nothing changed; `anew`: whatever was known is
        no longer taken. Raises `ConfigError`.
        """
        ...


class Credentials:
    """Hands out what `source` says, and asks it again in time; owns what it said last.

    `clock` is monotonic, in seconds. A source that takes longer than `patience_seconds` keeps
    nobody waiting for longer.
    """

    def __init__(
        self,
        source: AccessSource,
        clock: Callable[[], float],
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self._source = source
        self._patience_seconds = patience_seconds
        self._clock = clock
        self._access = source.load(anew=False)
        self._read_at = clock()
        self._renewed_at: float | None = None
        self._reading: asyncio.Future[Access] | None = None

    @property
    def namespace(self) -> str:
        """Where the context, or the Pod, is at home."""
        return self._access.namespace

    async def access(self) -> Access:
        """What to ask with now; what was known stays in use when it cannot be read again."""
        if self._clock() - self._read_at >= REREAD_SECONDS:
            await self._read(anew=False)
        return self._access

    async def renewed(self, refused: Access) -> Access:
        """What to ask with after a 401 to `refused`; the same when there is nothing else."""
        if self._access is not refused:
            return self._access
        now = self._clock()
        due = self._renewed_at is None or now - self._renewed_at >= RENEW_SECONDS
        if due:
            self._renewed_at = now
        if due or self._reading is not None:
            await self._read(anew=True)
        return self._access

    async def _read(self, *, anew: bool) -> None:
        """Ask the source, once for all who wait; not for long, for a plugin may hang."""
        if self._reading is None:
            work = asyncio.to_thread(self._source.load, anew=anew)
            self._reading = asyncio.ensure_future(work)
        reading = self._reading
        await asyncio.wait({reading}, timeout=self._patience_seconds)
        self._read_at = self._clock()
        if not reading.done():
            logger.warning("credentials are not read again in time, the old ones stay in use")
            return
        if self._reading is not reading:
            return
        self._reading = None
        try:
            self._access = reading.result()
        except ConfigError as error:
            logger.warning("credentials are not read again, the old ones stay in use: %s", error)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where credentials are looked for: the environment, the home, the service account."""

    environ: Mapping[str, str]
    home: Path
    service_account: Path = SERVICE_ACCOUNT_FOLDER


def find_credentials(
    kubeconfig: str = "",
    context: str | None = None,
    *,
    clock: Callable[[], float],
    surroundings: Surroundings | None = None,
) -> Credentials:
    """The first of: `kubeconfig` (a path), the files that `KUBECONFIG` lists, the service account
    of the Pod, `~/.kube/config`. `context` None: the current one.

    Blocks while files are read and plugins run. Raises `ConfigError`.
    """
    around = surroundings or Surroundings(os.environ, Path.home())
    return Credentials(_source(kubeconfig, context, around), clock)


def _source(kubeconfig: str, context: str | None, around: Surroundings) -> AccessSource:
    listed = around.environ.get("KUBECONFIG", "")
    if kubeconfig:
        return KubeconfigFiles((Path(kubeconfig).expanduser(),), context, "--kubeconfig")
    if listed:
        paths = tuple(Path(one).expanduser() for one in listed.split(os.pathsep) if one)
        return KubeconfigFiles(paths, context, "KUBECONFIG")
    if around.environ.get("KUBERNETES_SERVICE_HOST"):
        return ServiceAccount(around.service_account, around.environ)
    own = around.home / ".kube" / "config"
    if own.is_file():
        return KubeconfigFiles((own,), context, str(own))
    raise ConfigError(
        "no way to a Kubernetes API server is configured: give --kubeconfig PATH, set KUBECONFIG, "
        "or run in a Pod with a service account"
    )
