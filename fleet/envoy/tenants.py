"""The file of `--tenants`: who may call the gateway, under which keys, and how much.

tenants:
- {name: acme, keys: [{env: ACME_KEY}], objective: chat, tokensPerMinute: 100000}
- {name: research, claim: team-research, models: [{name: llama, tokensPerMinute: 20000}]}
jwt: {issuer: "https://login.example", claim: team, jwks: {url: "https://login.example/keys"}}
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import msgspec

from fleet.errors import UsageError
from picker.config.decode import decode
from picker.config.documents import as_plain, unusable, yaml_loader
from picker.config.findings import Findings, InvalidConfigError, Source, dotted
from picker.config.findings import Path as Place

MAX_BYTES = 1024 * 1024
MAX_TENANTS = 2_000  # Envoy's configuration grows with each
MAX_KEY_BYTES = 4096
MIN_KEY_CHARACTERS = 16  # a shorter one can be guessed
SYSTEM_CA = "/etc/ssl/certs/ca-certificates.crt"
_Count = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
_Tokens = Annotated[int, msgspec.Meta(ge=1, lt=10**15)]
_Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,127}$")]
_Objective = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?$")]
# In a header: printable ASCII. The picker reads a list, separated by commas.
_Model = Annotated[str, msgspec.Meta(pattern=r"^[!-+\--~]([ -+\--~]{0,254}[!-+\--~])?$")]
_Printable = Annotated[str, msgspec.Meta(pattern=r"^[ -~]{1,256}$")]
_KEY = re.compile(r"[!-~]+")
# Envoy distinguishes tokens from keys by it.
JWT_SHAPE = r"eyJ[\w-]*\.[\w-]+\.[\w-]*"


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    pass


class _KeySection(_Section, frozen=True):
    env: str | None = None
    file: str | None = None
    value: str | None = None


class _ModelSection(_Section, frozen=True):
    name: _Model
    tokens_per_minute: _Tokens


class _TenantSection(_Section, frozen=True):
    name: _Name
    keys: tuple[_KeySection, ...] = ()
    claim: _Printable | None = None
    objective: _Objective | None = None
    requests_per_minute: _Count | None = None
    tokens_per_minute: _Tokens | None = None
    models: tuple[_ModelSection, ...] = ()


class _JwksSection(_Section, frozen=True):
    file: str | None = None
    url: str | None = None
    ca: str = SYSTEM_CA


class _JwtSection(_Section, frozen=True):
    issuer: _Printable
    jwks: _JwksSection
    claim: _Printable = "sub"
    audiences: tuple[_Printable, ...] = ()


class _TenantsSection(_Section, frozen=True):
    tenants: tuple[_TenantSection, ...]
    jwt: _JwtSection | None = None


@dataclass(frozen=True, slots=True)
class AllowedTenant:
    """One tenant; `token_limit` is the picker's header, "" without a limit. `claim` is the value of
    the claim in its tokens.
    """

    name: str
    keys: tuple[str, ...] = ()
    claim: str = ""
    objective: str = ""
    requests_per_minute: int | None = None
    token_limit: str = ""


@dataclass(frozen=True, slots=True)
class RemoteKeys:
    """The address of a JWKS document, and for https the file of the authorities to trust."""

    url: str
    host: str
    port: int
    ca: str | None


@dataclass(frozen=True, slots=True)
class Tokens:
    """JSON web tokens to accept: `claim` names the tenant, `keys` verify the signature."""

    issuer: str
    audiences: tuple[str, ...]
    claim: str
    keys: str | RemoteKeys


@dataclass(frozen=True, slots=True)
class Tenants:
    tenants: tuple[AllowedTenant, ...]
    tokens: Tokens | None = None

    @property
    def limits_tokens(self) -> bool:
        return any(one.token_limit for one in self.tenants)


def read_tenants(path: Path, environment: Mapping[str, str]) -> Tenants:
    """Read the file, and the keys that it names. Raises `UsageError`, without any key in its text.

    Paths in the file are relative to its folder.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"--tenants: cannot read {path}: {error.strerror or error}") from error
    try:
        return _Reading(path, content, environment).tenants()
    except InvalidConfigError as error:
        raise UsageError(f"--tenants: {error}") from error


class _Reading:
    def __init__(self, path: Path, content: bytes, environment: Mapping[str, str]) -> None:
        self._folder, self._environment = path.parent, environment
        with yaml_loader(content, str(path), "the list of tenants", MAX_BYTES) as loader:
            root = loader.get_single_node()
            if root is None:
                raise unusable(str(path), "the file is empty: list tenants")
            self._findings = Findings(Source(str(path), root))
            document = as_plain(loader, root, str(path), self._findings)
        self._section = decode(document, _TenantsSection, (), self._findings)

    def tenants(self) -> Tenants:
        """Return the tenants. Raises `InvalidConfigError` with everything that is wrong."""
        section, findings = self._section, self._findings
        if section is None:
            raise InvalidConfigError(findings)
        listed = section.tenants
        if not listed:
            findings.error(("tenants",), "list at least one tenant")
        if len(listed) > MAX_TENANTS:
            text = f"{len(listed)} tenants; at most {MAX_TENANTS} fit into Envoy's configuration"
            findings.error(("tenants",), text)
            raise InvalidConfigError(findings)
        found = tuple(self._tenant(index, one) for index, one in enumerate(listed))
        self._refuse_repeated("name", ((("tenants", i), one.name) for i, one in enumerate(found)))
        if section.jwt is not None:
            claims = ((("tenants", i), one.claim) for i, one in enumerate(found) if one.claim)
            self._refuse_repeated("claim", claims)
        keys = (
            (("tenants", i, "keys", j), key)
            for i, one in enumerate(found)
            for j, key in enumerate(one.keys)
            if key
        )
        self._refuse_repeated("key", keys)
        tokens = None if section.jwt is None else self._tokens(section.jwt)
        findings.refuse_errors()
        return Tenants(found, tokens)

    def _tenant(self, index: int, section: _TenantSection) -> AllowedTenant:
        at: Place = ("tenants", index)
        has_jwt = self._section is not None and self._section.jwt is not None
        if not section.keys and not has_jwt:
            self._findings.error(at, "give it keys, or the file a section jwt")
        if section.claim is not None and not has_jwt:
            self._findings.error((*at, "claim"), "needs the section jwt")
        models = (((*at, "models", i), one.name) for i, one in enumerate(section.models))
        self._refuse_repeated("model", models)
        every = [] if section.tokens_per_minute is None else [f"{section.tokens_per_minute}"]
        limits = [*every, *(f"{one.name}={one.tokens_per_minute}" for one in section.models)]
        keys = (self._key((*at, "keys", i), one) for i, one in enumerate(section.keys))
        return AllowedTenant(
            section.name,
            tuple(keys),
            (section.claim or section.name) if has_jwt else "",
            section.objective or "",
            section.requests_per_minute,
            ", ".join(limits),
        )

    def _key(self, at: Place, section: _KeySection) -> str:
        given: dict[str, str] = {
            name: value
            for name in ("env", "file", "value")
            if (value := getattr(section, name)) is not None
        }
        if len(given) != 1:
            self._findings.error(at, "give one of env, file and value")
            return ""
        ((way, text),) = given.items()
        if way == "env":
            text = self._environment.get(text, "")
        elif way == "file":
            text = self._text(at, text, MAX_KEY_BYTES).strip()
        problem = _problem_of_key(text, self._section is not None and self._section.jwt is not None)
        if problem:
            self._findings.error((*at, way), problem)
        return text

    def _text(self, at: Place, name: str, limit: int) -> str:
        try:
            with (self._folder / name).open("rb") as file:
                content = file.read(limit + 1)
            if len(content) <= limit:
                return content.decode()
            problem = f"{name} is larger than {limit} bytes"
        except (OSError, ValueError) as error:
            problem = f"cannot read {name}: {getattr(error, 'strerror', None) or 'not UTF-8'}"
        self._findings.error(at, problem)
        return ""

    def _tokens(self, section: _JwtSection) -> Tokens:
        at: Place = ("jwt", "jwks")
        keys: str | RemoteKeys = ""
        if (section.jwks.file is None) is (section.jwks.url is None):
            self._findings.error(at, "give file or url")
        elif section.jwks.file is not None:
            keys = self._text((*at, "file"), section.jwks.file, MAX_BYTES)
            if keys and not _is_key_set(keys):
                self._findings.error((*at, "file"), 'is no JWKS: {"keys": [...]}')
        else:
            keys = self._remote((*at, "url"), section.jwks.url or "", section.jwks.ca)
        return Tokens(section.issuer, section.audiences, section.claim, keys)

    def _remote(self, at: Place, url: str, ca: str) -> RemoteKeys:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        is_tls = parts.scheme == "https"
        if parts.scheme not in ("http", "https") or not parts.hostname:
            self._findings.error(at, f"{url!r} is no URL of http or https")
        default = 443 if is_tls else 80
        return RemoteKeys(url, parts.hostname or "", port or default, ca if is_tls else None)

    def _refuse_repeated(self, what: str, found: Iterable[tuple[Place, str]]) -> None:
        seen: dict[str, Place] = {}
        for at, value in found:
            if value in seen:
                self._findings.error(at, f"has the same {what} as {dotted(seen[value])}")
            seen.setdefault(value, at)


def _problem_of_key(key: str, has_jwt: bool) -> str:
    if not key:
        return "names no key: it is unset or empty"
    if not _KEY.fullmatch(key) or len(key) > MAX_KEY_BYTES:
        return "a key has printable ASCII characters without spaces"
    if len(key) < MIN_KEY_CHARACTERS:
        return f"a key has at least {MIN_KEY_CHARACTERS} characters"
    if has_jwt and re.match(JWT_SHAPE, key):
        return "looks like a JSON web token, which Envoy would take it for"
    return ""


def _is_key_set(text: str) -> bool:
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return isinstance(found, dict) and isinstance(found.get("keys"), list) and bool(found["keys"])
