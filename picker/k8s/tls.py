"""A way to an API server, and the TLS context for it, which is made anew only when files change."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from picker.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Access:
    """Where an API server is and how to show it who asks.

    `url` has no slash at its end. `authorization` is the whole header. `tls` is None for the
    defaults (and for plain HTTP). `namespace` is the default one.
    """

    url: str
    authorization: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = None
    tls_server_name: str | None = None
    proxy: str | None = field(default=None, repr=False)  # may hold a password
    namespace: str = "default"


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """What a context is made of, as bytes, so that a change on disk is seen; None is not given."""

    verify: bool
    ca_path: Path | None = None
    ca: bytes | None = None
    certificate_path: Path | None = None
    certificate: bytes | None = None
    key_path: Path | None = None
    key: bytes | None = field(default=None, repr=False)

    @classmethod
    def read(
        cls, verify: bool, ca: str | None, certificate: str | None, key: str | None
    ) -> TlsMaterial:
        """What is in the files now. Raises `OSError`."""
        ca_path, certificate_path, key_path = (
            Path(one) if one else None for one in (ca, certificate, key)
        )
        return cls(
            verify,
            ca_path,
            ca_path.read_bytes() if ca_path else None,
            certificate_path,
            certificate_path.read_bytes() if certificate_path else None,
            key_path,
            key_path.read_bytes() if key_path else None,
        )


class TlsContexts:
    """Owns the context made last, so that connections live on while nothing changes."""

    def __init__(self) -> None:
        self._made: tuple[TlsMaterial, ssl.SSLContext] | None = None

    def of(self, material: TlsMaterial) -> ssl.SSLContext:
        """The context of some material. Raises `ConfigError` for what is no certificate or key."""
        if self._made is None or self._made[0] != material:
            self._made = material, _context(material)
        return self._made[1]


def _context(material: TlsMaterial) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=material.ca_path)
    except OSError as error:
        raise ConfigError(
            f"{material.ca_path}: no certificates of authorities in it ({error}); "
            f"give PEM in certificate-authority"
        ) from error
    # Authorities made by cluster installers often lack extensions that newer Pythons insist on.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if not material.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if material.certificate_path is not None:
        try:
            # A password, so that an encrypted key is refused instead of asked for on the terminal.
            context.load_cert_chain(material.certificate_path, material.key_path, password="")
        except OSError as error:
            raise ConfigError(
                f"{material.certificate_path}: not a client certificate with its key ({error}); "
                f"give PEM, unencrypted, in client-certificate and client-key"
            ) from error
    return context
