"""An authority for tests, and certificates that it vouches for, as PEM files and in folders."""

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True, slots=True)
class Pair:
    """Files of a certificate and its key."""

    certificate: Path
    key: Path


class Authority:
    """Signs; its own certificate is `path`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("authority")
        self._made = 0
        builder = _builder(self._name, self._name, self._key.public_key())
        basic = x509.BasicConstraints(ca=True, path_length=None)
        signed = builder.add_extension(basic, critical=True).sign(self._key, hashes.SHA256())
        self.path = folder / "authority.pem"
        self.path.write_bytes(signed.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *dns_names: str, address: str | None = None) -> Pair:
        """A certificate for `name`, valid for these names and this address."""
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [x509.DNSName(one) for one in dns_names]
        if address is not None:
            names.append(x509.IPAddress(ipaddress.ip_address(address)))
        builder = _builder(_name(name), self._name, key.public_key())
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        signed = builder.sign(self._key, hashes.SHA256())
        self._made += 1
        pair = Pair(self._folder / f"{self._made}.pem", self._folder / f"{self._made}-key.pem")
        pair.certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        pair.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return pair


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
    )


def certificates(folder: Path, host: str = "replicas.test", shown: Path | None = None) -> Path:
    """A folder with `tls.crt`, `tls.key` and `ca.crt` of an authority of its own; the latter is
    another one where it is `shown`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    authority = Authority(folder)
    issued = authority.issue(host, host)
    issued.certificate.rename(folder / "tls.crt")
    issued.key.rename(folder / "tls.key")
    (folder / "ca.crt").write_bytes((shown or authority.path).read_bytes())
    return folder
