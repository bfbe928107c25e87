"""mTLS between replicas: both ends present a certificate of one CA, from one folder.

The files are those of a cert-manager Secret: `tls.crt`, `tls.key`, `ca.crt`. They are read again
for every connection, so a renewed certificate takes effect without a restart.
"""

from pathlib import Path

import grpc

from picker.errors import ConfigError
from picker.rpc.options import TlsMaterial, TlsOptions

CERTIFICATE_FILE, KEY_FILE, CA_FILE = "tls.crt", "tls.key", "ca.crt"
_PEM = b"-----BEGIN "


class PeerCredentials:
    """Reads the folder. Owns its last readable contents, the fallback while files are replaced."""

    def __init__(self, folder: Path) -> None:
        """Raises `ConfigError` for a file that is missing or not PEM."""
        self._folder = folder
        self._last = self._read()

    def of_server(self) -> TlsOptions:
        certificate, key, authority = self._current()
        material = TlsMaterial(private_key=key, certificate_chain=certificate)
        return TlsOptions(material, client_authority=authority, renewed=self.of_server)

    def of_client(self) -> grpc.ChannelCredentials:
        certificate, key, authority = self._current()
        return grpc.ssl_channel_credentials(authority, key, certificate)

    def _current(self) -> tuple[bytes, bytes, bytes]:
        try:
            self._last = self._read()
        except ConfigError:
            return self._last  # the files are being replaced
        return self._last

    def _read(self) -> tuple[bytes, bytes, bytes]:
        return (self._pem(CERTIFICATE_FILE), self._pem(KEY_FILE), self._pem(CA_FILE))

    def _pem(self, name: str) -> bytes:
        path = self._folder / name
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"--peer-cert-path: cannot read {path}: {error.strerror or error}"
            ) from error
        if _PEM not in content:
            raise ConfigError(f"--peer-cert-path: {path} is not PEM")
        return content
