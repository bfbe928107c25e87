"""The address of the API server and the credentials for it: kubeconfig files or a service account.

The official `kubernetes` package (extra `k8s`) reads the files, runs exec plugins and calls token
issuers. Tokens and certificates are read again every minute, in a thread, and after a refusal.
"""

import asyncio
import importlib
import logging
import os
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import yaml

from picker.errors import ConfigError

logger = logging.getLogger(__name__)

REREAD_SECONDS: Final = 60.0
RENEW_SECONDS: Final = 10.0
READ_TIMEOUT_SECONDS: Final = 30.0
SERVICE_ACCOUNT_FOLDER: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TOKEN: Final = "BearerToken"  # the package's name for the header's value, of whatever scheme


@dataclass(frozen=True, slots=True)
class Access:
    """An API server and the credentials for it; without `tls` the defaults apply."""

    url: str
    authorization: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = None
    tls_server_name: str | None = None
    proxy: str | None = field(default=None, repr=False)  # may hold a password


class AccessSource(Protocol):
    """A source of credentials; it may block on files, processes and token issuers."""

    def load(self, *, anew: bool) -> Access:
        """Return the credentials; the same object if unchanged. Raises `ConfigError`."""


class Credentials:
    """Owns the last access from `source`; requests wait up to `timeout_seconds` for a newer one."""

    def __init__(
        self,
        source: AccessSource,
        clock: Callable[[], float],
        timeout_seconds: float = READ_TIMEOUT_SECONDS,
    ) -> None:
        self._source, self._clock = source, clock
        self._timeout_seconds = timeout_seconds
        self._access = source.load(anew=False)
        self._read_at = clock()
        self._renewed_at: float | None = None
        self._reading: asyncio.Future[Access] | None = None

    async def access(self) -> Access:
        """Return the access to use now: the last one if a new one cannot be read."""
        if self._clock() - self._read_at >= REREAD_SECONDS:
            await self._read(anew=False)
        return self._access

    async def renewed(self, refused: Access) -> Access:
        """Return the access to use after a 401 to `refused`; the same if there is no other."""
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
        """Ask the source once for all waiting requests, with a time-out: a plugin may hang."""
        if self._reading is None:
            work = asyncio.to_thread(self._source.load, anew=anew)
            self._reading = asyncio.ensure_future(work)
        reading = self._reading
        await asyncio.wait({reading}, timeout=self._timeout_seconds)
        # Also after a failure, or each request would wait for a source that hangs.
        self._read_at = self._clock()
        if not reading.done():
            logger.warning("credentials are not read again in time, the old ones stay in use")
            return
        # Another waiting request has taken the result.
        if self._reading is not reading:
            return
        self._reading = None
        try:
            self._access = reading.result()
        except ConfigError as error:
            logger.warning("credentials are not read again, the old ones stay in use: %s", error)


@dataclass(frozen=True, slots=True)
class Places:
    environ: Mapping[str, str]
    home: Path
    service_account: Path = SERVICE_ACCOUNT_FOLDER


def find_credentials(
    kubeconfig: str = "",
    context: str | None = None,
    *,
    clock: Callable[[], float],
    places: Places | None = None,
) -> Credentials:
    """Search `kubeconfig`, `KUBECONFIG`, the Pod's service account and `~/.kube/config` in turn.

    Blocks while files are read and plugins run. Raises `ConfigError`.
    """
    return Credentials(
        _source(kubeconfig, context, places or Places(os.environ, Path.home())), clock
    )


def _source(kubeconfig: str, context: str | None, places: Places) -> AccessSource:
    listed = places.environ.get("KUBECONFIG", "")
    if kubeconfig:
        return KubeconfigFiles((Path(kubeconfig).expanduser(),), context, "--kubeconfig")
    if listed:
        paths = tuple(Path(one).expanduser() for one in listed.split(os.pathsep) if one)
        return KubeconfigFiles(paths, context, "KUBECONFIG")
    if places.environ.get("KUBERNETES_SERVICE_HOST"):
        return ServiceAccount(places.service_account, places.environ)
    own = places.home / ".kube" / "config"
    if own.is_file():
        return KubeconfigFiles((own,), context, str(own))
    raise ConfigError(
        "no way to a Kubernetes API server is configured: give --kubeconfig PATH, set KUBECONFIG, "
        "or run in a Pod with a service account"
    )


class _AccessMaker:
    """Makes an `Access`: the same one while nothing changes, so that connections stay open."""

    def __init__(self) -> None:
        self._access: Access | None = None
        self._tls: tuple[tuple[object, ...], ssl.SSLContext] | None = None

    def make(self, configuration: Any) -> Access:
        """Convert a configuration. Raises `ConfigError`, and `OSError` for unreadable files."""
        url = str(configuration.host).rstrip("/")
        scheme = url.partition("://")[0]
        if scheme not in ("https", "http"):
            shown = _without_password(url)
            raise ConfigError(
                f"the server {shown!r} is not an address: begin it with https:// or http://"
            )
        header = configuration.api_key.get(_TOKEN)
        access = Access(
            url,
            _header(header) if header else None,
            self._context(configuration) if scheme == "https" else None,
            configuration.tls_server_name or None,
            _proxy(configuration, url),
        )
        if self._access != access:
            self._access = access
        return self._access or access

    def _context(self, configuration: Any) -> ssl.SSLContext:
        """Return a new context only if the bytes of a file have changed: many files rotate."""
        paths = (configuration.ssl_ca_cert, configuration.cert_file, configuration.key_file)
        files = (Path(path).read_bytes() if path else None for path in paths)
        material = (bool(configuration.verify_ssl), *paths, *files)
        if self._tls is None or self._tls[0] != material:
            self._tls = material, _context(bool(configuration.verify_ssl), *paths)
        return self._tls[1]


def _context(
    verify: bool, authorities: str | None, certificate: str | None, key: str | None
) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=authorities or None)
    except OSError as error:
        raise ConfigError(
            f"{authorities}: no certificates of authorities in it ({error}); "
            f"give PEM in certificate-authority"
        ) from error
    # The authorities of cluster installers often lack extensions that newer Pythons require.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if certificate:
        try:
            # A password, so that an encrypted key is refused instead of a prompt on the terminal.
            context.load_cert_chain(certificate, key or None, password="")
        except OSError as error:
            raise ConfigError(
                f"{certificate}: not a client certificate with its key ({error}); "
                f"give PEM, unencrypted, in client-certificate and client-key"
            ) from error
    return context


def _header(text: str) -> str:
    """Return the value of `Authorization`; token files often end with a line break."""
    scheme, _, secret = text.strip().partition(" ")
    if not secret.strip() or any(ord(one) < ord(" ") for one in secret.strip()):
        raise ConfigError("the token is empty or has line breaks; give exactly one token")
    return f"{'Bearer' if scheme.lower() == 'bearer' else scheme} {secret.strip()}"


def _proxy(configuration: Any, url: str) -> str | None:
    proxy = configuration.proxy
    if not proxy:
        return None
    rest = importlib.import_module("kubernetes.client.rest")
    if rest.should_bypass_proxies(url, no_proxy=configuration.no_proxy or ""):
        return None
    if not str(proxy).startswith(("http://", "https://")):
        shown = _without_password(str(proxy))
        raise ConfigError(f"the proxy {shown!r} cannot be used: only http:// and https:// can")
    return str(proxy)


def _without_password(url: str) -> str:
    before, _, rest = url.rpartition("@")
    scheme, separator, _ = before.partition("://")
    return f"{scheme}{separator}{rest}" if separator else rest


class ServiceAccount:
    """The service account that Kubernetes mounts into every Pod; its token rotates on disk."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self._folder, self._environ = folder, environ
        self._maker = _AccessMaker()

    def load(self, *, anew: bool) -> Access:
        configuration = _package().client.Configuration()
        with _explained(f"the service account in {self._folder}"):
            importlib.import_module("kubernetes.config.incluster_config").InClusterConfigLoader(
                str(self._folder / "token"), str(self._folder / "ca.crt"), environ=self._environ
            ).load_and_set(configuration)
            return self._maker.make(configuration)


class KubeconfigFiles:
    """Kubeconfig files; the first definition of a name counts, and errors name `source`."""

    def __init__(self, paths: tuple[Path, ...], context: str | None, source: str) -> None:
        self._paths, self._wanted, self._source = paths, context, source
        self._maker = _AccessMaker()
        self._configuration: Any = None

    def load(self, *, anew: bool) -> Access:
        """Run plugins again only if a token expires: they are slow, and some are interactive."""
        with _explained(self._source):
            name, user = self._context()
            plugin = _plugin(user)
            if anew or self._configuration is None or plugin is None:
                self._configuration = self._read(name)
            self._configuration.get_api_key_with_prefix(_TOKEN)  # refreshes it when it expires
            access = self._maker.make(self._configuration)
            if access.authorization is None:
                self._check_user(name, user, plugin)
            return access

    def _read(self, context: str) -> Any:
        package = _package()
        configuration = package.client.Configuration()
        package.config.load_kube_config(
            config_file=os.pathsep.join(map(str, self._paths)),
            context=context,
            client_configuration=configuration,
            # The package would write renewed tokens into the operator's files.
            persist_config=False,
        )
        return configuration

    def _check_user(self, name: str, user: dict[str, Any], plugin: str | None) -> None:
        if plugin is not None and self._configuration.cert_file is None:
            raise ConfigError(
                f"{self._source}: the plugin {plugin!r} of context {name!r} gave no credentials; "
                f"run it by hand to see why"
            )
        if token_file := user.get("tokenFile"):
            raise ConfigError(
                f"{self._source}: the token file {str(token_file)!r} of context {name!r} is empty; "
                f"write a token into it"
            )

    def _context(self) -> tuple[str, dict[str, Any]]:
        """Return the wanted context, else the first current one; the package uses the last."""
        documents = [_document(path) for path in self._paths if path.exists()]
        if not documents:
            listed = ", ".join(map(str, self._paths)) or "(no path)"
            raise ConfigError(f"{self._source}: there is no such file: {listed}")
        current = (one.get("current-context") for one in documents)
        name = self._wanted or next((one for one in current if one), None)
        contexts = _named(documents, "contexts", "context")
        found = contexts.get(name) if isinstance(name, str) else None
        if found is None:
            known = ", ".join(sorted(contexts)) or "none"
            what = f"no context {name!r}" if name else "no current-context"
            raise ConfigError(f"{self._source}: {what}; the files have: {known}")
        user = _named(documents, "users", "user").get(str(found.get("user")), {})
        return str(name), user


def _document(path: Path) -> dict[str, Any]:
    try:
        document = yaml.safe_load(path.read_text())
    except yaml.MarkedYAMLError as error:
        # Without the text of the line, which may contain a token.
        mark = error.problem_mark or error.context_mark
        where = "" if mark is None else f" in line {mark.line + 1}, column {mark.column + 1}"
        what = error.problem or error.context or "broken YAML"
        raise ConfigError(f"{path}: not a kubeconfig file: {what}{where}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: not a kubeconfig file: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: not a kubeconfig file: it is not a mapping")
    return document


def _named(documents: list[dict[str, Any]], section: str, key: str) -> dict[str, dict[str, Any]]:
    """Return the entries of a section by name; the first of each name wins."""
    found: dict[str, dict[str, Any]] = {}
    for document in documents:
        listed = document.get(section)
        for one in listed if isinstance(listed, list) else []:
            if isinstance(one, dict) and isinstance(one.get(key), dict):
                found.setdefault(str(one.get("name")), one[key])
    return found


def _plugin(user: dict[str, Any]) -> str | None:
    """Return the command or issuer of a user's credentials; None if the user only has files."""
    command, provider = user.get("exec"), user.get("auth-provider")
    if isinstance(command, dict):
        return str(command.get("command"))
    return str(provider.get("name")) if isinstance(provider, dict) else None


def _package() -> Any:
    """Import the official package, which only pickers in Kubernetes need."""
    try:
        importlib.import_module("kubernetes.config")
        return importlib.import_module("kubernetes")
    except ImportError as error:
        raise ConfigError(
            "to follow Kubernetes the picker needs the package 'kubernetes': "
            "in a clone, pip install '.[k8s]'"
        ) from error


@contextmanager
def _explained(source: str) -> Iterator[None]:
    """Translate all errors of the package, its plugins and the libraries of token issuers.

    They have no common base class, and a broken file may raise even `AttributeError`.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{source}: not usable: {str(error) or repr(error)}") from error
