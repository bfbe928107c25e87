"""A generated key and certificate. Imported only on demand, because the import is slow."""

import ipaddress
import socket
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from picker.rpc.options import TlsMaterial

LIFETIME_DAYS = 3650
_CLOCK_SKEW = timedelta(hours=1)


def self_signed(names: Sequence[str] = ()) -> TlsMaterial:
    """Generate a pair for this machine and `names`, for gateways that do not verify them."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "pointsman picker")])
    known = dict.fromkeys(("localhost", "127.0.0.1", "::1", socket.gethostname(), *names))
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + timedelta(days=LIFETIME_DAYS))
        .add_extension(x509.SubjectAlternativeName([_alternative(name) for name in known]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    return TlsMaterial(
        private_key=key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
        certificate_chain=certificate.public_bytes(serialization.Encoding.PEM),
    )


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
