"""A certificate authority for tests, and folders with certificates of it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

_BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


class Authority:
    """Signs certificates that are valid for years."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        builder = self._builder(self._name, self._key.public_key())
        self.certificate = builder.add_extension(constraints, True).sign(self._key, hashes.SHA256())

    @property
    def pem(self) -> bytes:
        """Its own certificate."""
        return self.certificate.public_bytes(Encoding.PEM)

    def pair(self, host: str) -> tuple[bytes, bytes]:
        """A certificate of `host`, and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
        names = x509.SubjectAlternativeName([x509.DNSName(host)])
        builder = self._builder(name, key.public_key()).add_extension(names, False)
        certificate = builder.sign(self._key, hashes.SHA256())
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return certificate.public_bytes(Encoding.PEM), private

    def _builder(self, name: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(_BEGIN)
            .not_valid_after(_BEGIN + timedelta(days=36500))
        )


def certificates(
    folder: Path, authority: Authority, host: str = "replicas.test", shown: Path | None = None
) -> Path:
    """A folder with `tls.crt`, `tls.key` and `ca.crt`, the latter another one where it is given."""
    folder.mkdir(parents=True, exist_ok=True)
    certificate, key = authority.pair(host)
    (folder / "tls.crt").write_bytes(certificate)
    (folder / "tls.key").write_bytes(key)
    (folder / "ca.crt").write_bytes(authority.pem if shown is None else shown.read_bytes())
    return folder
