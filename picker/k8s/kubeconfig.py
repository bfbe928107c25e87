"""Credentials as the official package reads them: from kubeconfig files, or a service account."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from picker.errors import ConfigError
from picker.k8s.tls import Access, TlsContexts, TlsMaterial

_TOKEN: Final = "BearerToken"  # the package's name for the header's value, of whatever scheme


@dataclass(frozen=True, slots=True)
class _Context:
    """What is to be known of a context beyond what the package hands out."""

    name: str
    namespace: str
    plugin: str | None  # what gives credentials that are dear: they are kept while they last
    token_file: str | None


class KubeconfigFiles:
    """Kubeconfig files, the first of which to say something wins; owns what they said last.

    `told_by` names for errors where the paths come from.
    """

    def __init__(self, paths: tuple[Path, ...], context: str | None, told_by: str) -> None:
        self._paths = paths
        self._wanted = context
        self._told_by = told_by
        self._contexts = TlsContexts()
        self._configuration: Any = None
        self._access: Access | None = None

    def load(self, *, anew: bool) -> Access:
        """See `AccessSource`. Plugins run again only when what they gave is about to expire."""
        with _explained(self._told_by):
            context = self._context()
            if anew or self._configuration is None or context.plugin is None:
                self._configuration = self._read(context)
            self._configuration.get_api_key_with_prefix(_TOKEN)  # refreshes it when it expires
            access = _access(self._configuration, context.namespace, self._contexts)
            if access.authorization is None:
                self._check_told(context)
        return self._kept(access)

    def _kept(self, access: Access) -> Access:
        if self._access != access:
            self._access = access
        return self._access or access

    def _read(self, context: _Context) -> Any:
        package = _package()
        configuration = package.client.Configuration()
        package.config.load_kube_config(
            config_file=os.pathsep.join(map(str, self._paths)),
            context=context.name,
            client_configuration=configuration,
            persist_config=False,
        )
        return configuration

    def _check_told(self, context: _Context) -> None:
        """No token came of the files: nobody is to ask without the one that they name."""
        if context.plugin is not None and self._configuration.cert_file is None:
            raise ConfigError(
                f"{self._told_by}: the plugin {context.plugin!r} of context {context.name!r} gave "
                f"no credentials; run it by hand to see why"
            )
        if context.token_file is not None:
            raise ConfigError(
                f"{self._told_by}: the token file {context.token_file!r} of context "
                f"{context.name!r} is empty; write a token into it"
            )

    def _context(self) -> _Context:
        """The context to use: the one asked for, else the first that a file calls current."""
        documents = [self._document(path) for path in self._paths if path.exists()]
        if not documents:
            listed = ", ".join(map(str, self._paths)) or "(no path)"
            raise ConfigError(f"{self._told_by}: there is no such file: {listed}")
        current = (one.get("current-context") for one in documents)
        name = self._wanted or next((one for one in current if one), None)
        contexts = _named(documents, "contexts", "context")
        found = contexts.get(name) if isinstance(name, str) else None
        if found is None:
            known = ", ".join(sorted(contexts)) or "none"
            what = f"no context {name!r}" if name else "no current-context"
            raise ConfigError(f"{self._told_by}: {what}; the files have: {known}")
        user = _named(documents, "users", "user").get(str(found.get("user")), {})
        namespace, token_file = found.get("namespace") or "default", user.get("tokenFile")
        return _Context(
            str(name), str(namespace), _plugin(user), str(token_file) if token_file else None
        )

    def _document(self, path: Path) -> dict[str, Any]:
        try:
            document = yaml.safe_load(path.read_text())
        except yaml.MarkedYAMLError as error:
            # Said without the line itself, which may hold a token.
            raise ConfigError(f"{path}: not a kubeconfig file: {_place(error)}") from None
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"{path}: not a kubeconfig file: {error}") from error
        if not isinstance(document, dict):
            raise ConfigError(f"{path}: not a kubeconfig file: it is no mapping")
        return document


class ServiceAccount:
    """The service account that Kubernetes puts into every Pod; its token changes on disk."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self._folder = folder
        self._environ = environ
        self._contexts = TlsContexts()
        self._access: Access | None = None

    def load(self, *, anew: bool) -> Access:
        """See `AccessSource`. Reading is cheap, so it is always done anew."""
        package = _package()
        configuration = package.client.Configuration()
        told_by = f"the service account in {self._folder}"
        with _explained(told_by):
            importlib.import_module("kubernetes.config.incluster_config").InClusterConfigLoader(
                str(self._folder / "token"),
                str(self._folder / "ca.crt"),
                environ=self._environ,
            ).load_and_set(configuration)
            home = self._folder / "namespace"
            namespace = home.read_text().strip() if home.is_file() else "default"
            access = _access(configuration, namespace, self._contexts)
        if self._access != access:
            self._access = access
        return self._access or access


def _access(configuration: Any, namespace: str, contexts: TlsContexts) -> Access:
    url = str(configuration.host).rstrip("/")
    scheme = url.partition("://")[0]
    if scheme not in ("https", "http"):
        shown = _without_password(url)
        raise ConfigError(f"the server {shown!r} is no address: begin it with https:// or http://")
    header = configuration.api_key.get(_TOKEN)
    tls = None
    if scheme == "https":
        material = TlsMaterial.read(
            bool(configuration.verify_ssl),
            configuration.ssl_ca_cert,
            configuration.cert_file,
            configuration.key_file,
        )
        tls = contexts.of(material)
    return Access(
        url,
        _header(header) if header else None,
        tls,
        configuration.tls_server_name or None,
        _proxy(configuration, url),
        namespace,
    )


def _header(text: str) -> str:
    """The value of `Authorization`; files of tokens often end with a line break."""
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
    """An address for people, without what stands before "@"."""
    before, _, rest = url.rpartition("@")
    scheme, separator, _ = before.partition("://")
    return f"{scheme}{separator}{rest}" if separator else rest


def _place(error: yaml.MarkedYAMLError) -> str:
    """What is wrong with YAML, and where."""
    mark = error.problem_mark or error.context_mark
    where = "" if mark is None else f" in line {mark.line + 1}, column {mark.column + 1}"
    return f"{error.problem or error.context or 'broken YAML'}{where}"


def _named(documents: list[dict[str, Any]], section: str, key: str) -> dict[str, dict[str, Any]]:
    """The entries of a section by name, of all files; the first of a name wins."""
    found: dict[str, dict[str, Any]] = {}
    for document in documents:
        listed = document.get(section)
        for one in listed if isinstance(listed, list) else []:
            if isinstance(one, dict) and isinstance(one.get(key), dict):
                found.setdefault(str(one.get("name")), one[key])
    return found


def _plugin(user: dict[str, Any]) -> str | None:
    """The command or issuer behind a user's credentials; None for what stands in files."""
    command, provider = user.get("exec"), user.get("auth-provider")
    if isinstance(command, dict):
        return str(command.get("command"))
    return str(provider.get("name")) if isinstance(provider, dict) else None


def _package() -> Any:
    """The official package, which is only needed, and only installed, where there is Kubernetes."""
    try:
        importlib.import_module("kubernetes.config")
        return importlib.import_module("kubernetes")
    except ImportError as error:
        raise ConfigError(
            "to follow Kubernetes the picker needs the package 'kubernetes': "
            "pip install 'pointsman[k8s]'"
        ) from error


@contextmanager
def _explained(told_by: str) -> Iterator[None]:
    """What the package, its plugins and the libraries of token issuers raise, as one error: they
    have no common root, and a broken file is an `AttributeError` as well as anything else.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{told_by}: not usable: {str(error) or repr(error)}") from error
