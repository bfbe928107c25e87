"""TLS for a gRPC port: versions, cipher suites, and a certificate that may be renewed."""

import logging
import os
import ssl
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import msgspec

from picker.errors import ConfigError
from picker.file_changes import moments_to_look
from picker.rpc.options import TlsMaterial, TlsOptions

log = logging.getLogger(__name__)

CERTIFICATE_FILE, KEY_FILE = "tls.crt", "tls.key"
DEBOUNCE_MS = 200  # the two files of a pair are rarely replaced at the same time

MIN_VERSIONS: Mapping[str, ssl.TLSVersion] = MappingProxyType(
    {"VersionTLS12": ssl.TLSVersion.TLSv1_2, "VersionTLS13": ssl.TLSVersion.TLSv1_3}
)
# The suites of TLS 1.2 that HTTP/2 may use (RFC 9113, appendix A lists those that it may not).
CIPHER_SUITES: Mapping[str, str] = MappingProxyType(
    {
        "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
        "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
        "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
        "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
        "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
        "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
    }
)


def min_version(name: str) -> ssl.TLSVersion:
    """Parse `--tls-min-version`. Raises `ConfigError`."""
    if name in MIN_VERSIONS:
        return MIN_VERSIONS[name]
    raise ConfigError(f"'{name}' is no TLS version that is offered: {', '.join(MIN_VERSIONS)}")


def cipher_suites(names: Sequence[str]) -> tuple[str, ...]:
    """Parse `--tls-cipher-suites` into OpenSSL's names. Raises `ConfigError`."""
    unknown = [name for name in names if name not in CIPHER_SUITES]
    if unknown:
        allowed = ", ".join(CIPHER_SUITES)
        raise ConfigError(f"'{unknown[0]}' is no cipher suite for HTTP/2 over TLS 1.2: {allowed}")
    return tuple(CIPHER_SUITES[name] for name in names)


def server_context(options: TlsOptions) -> ssl.SSLContext:
    """Create a context that offers only HTTP/2. Raises `OSError` for an unusable pair."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = options.min_version
    if options.cipher_suites:
        context.set_ciphers(":".join(options.cipher_suites))
    context.set_alpn_protocols(["h2"])
    if options.client_authority is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=options.client_authority.decode("ascii", "replace"))
    _load(context, options.material)
    if options.renewed is not None:
        context.sni_callback = _Renewal(options, context)
    return context


class _Renewal(msgspec.Struct, eq=False):
    """Called in each handshake, with or without a server name. Owns the context in use."""

    _options: TlsOptions
    _context: ssl.SSLContext

    def __call__(
        self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, _: ssl.SSLContext
    ) -> None:
        renewed = self._options.renewed() if self._options.renewed is not None else self._options
        if renewed != self._options:
            try:
                self._context = server_context(replace(renewed, renewed=None))
                self._options = renewed
            except OSError as error:
                log.error("%s; keeping the certificate of before", error)
        connection.context = self._context


def replace_certificate(context: ssl.SSLContext, material: TlsMaterial) -> None:
    """Use `material` for new connections. If this raises `ssl.SSLError`, nothing has changed."""
    _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), material)  # half a pair would break `context`
    _load(context, material)


def _load(context: ssl.SSLContext, material: TlsMaterial) -> None:
    with _as_file(material.private_key + b"\n" + material.certificate_chain) as path:
        context.load_cert_chain(path)


@contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """Yield a path to `content`, in memory where possible, because `ssl` reads only files."""
    if hasattr(os, "memfd_create"):
        with os.fdopen(os.memfd_create("tls"), "wb") as memory:
            memory.write(content)
            memory.flush()
            yield f"/proc/self/fd/{memory.fileno()}"
    else:
        with tempfile.NamedTemporaryFile() as file:  # readable by its owner only
            file.write(content)
            file.flush()
            yield file.name


class CertificateFolder(msgspec.Struct, eq=False):
    """A folder with `tls.crt` and `tls.key`; `expires` receives the unix time of the expiry."""

    path: Path
    flag: str = "--cert-path"
    expires: Callable[[float], None] | None = None
    _last: TlsMaterial | None = None

    def load(self) -> TlsMaterial:
        """Read and return the pair. Raises `ConfigError` if it cannot be read or used."""
        material = TlsMaterial(self._read(KEY_FILE), self._read(CERTIFICATE_FILE))
        if material == self._last:
            return material
        try:
            _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), material)
        except OSError as error:  # ssl.SSLError is one
            raise ConfigError(
                f"{self.flag}: {CERTIFICATE_FILE} and {KEY_FILE} in {self.path} cannot be used: "
                f"{error}"
            ) from error
        self._last = material
        if self.expires is not None:
            # Loaded on demand: it costs memory that starts without certificates do not need.
            from cryptography import x509  # noqa: PLC0415

            leaf = x509.load_pem_x509_certificates(material.certificate_chain)[0]
            self.expires(leaf.not_valid_after_utc.timestamp())
        return material

    async def watch(self, apply: Callable[[TlsMaterial], None]) -> None:
        """Pass each new pair to `apply`, until cancelled; an unusable one is logged once."""
        complaint = ""
        files = (CERTIFICATE_FILE, KEY_FILE)
        looking = moments_to_look(self.path.absolute(), *files, debounce_ms=DEBOUNCE_MS)
        async with aclosing(looking) as moments:
            async for _ in moments:
                last = complaint
                complaint = self._reload(apply)
                if complaint and complaint != last:
                    log.error("%s; keeping the certificate of before", complaint)

    def _reload(self, apply: Callable[[TlsMaterial], None]) -> str:
        """Apply the pair if it is new; return its error, or ""."""
        before = self._last
        try:
            material = self.load()
            if material != before:
                apply(material)
                log.info("new connections are shown the new certificate in %s", self.path)
        except (ConfigError, OSError) as error:
            self._last = before
            return str(error)
        return ""

    def _read(self, name: str) -> bytes:
        path = self.path / name
        try:
            return path.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"{self.flag}: cannot read {path}: {error.strerror or error}"
            ) from error
