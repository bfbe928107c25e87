"""Access to KV: the key, and the networks that KV is fetched from."""

import hashlib
import ipaddress
from collections.abc import Mapping, Sequence
from pathlib import Path

from worker.config import KvTransferConfig
from worker.errors import ConfigError

KEY_VARIABLE = "POINTSMAN_KV_TRANSFER_KEY"
NO_KEY = hashlib.sha256().digest()


def read_key(config: KvTransferConfig, environment: Mapping[str, str]) -> bytes:
    """Read the key that engines share, from a file or the environment. Without a key, only
    processes of this machine may take KV. Raises `ConfigError`.
    """
    text = environment.get(KEY_VARIABLE, "")
    if config.key_file is not None:
        try:
            text = Path(config.key_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--kv-transfer-config: key_file: {error}") from error
        if not text.strip():
            raise ConfigError(f"--kv-transfer-config: key_file {config.key_file} is empty")
    if not text.strip() and not is_loopback(config.kv_ip):
        raise ConfigError(
            f"--kv-transfer-config: kv_ip {config.kv_ip} can be reached from other machines: give"
            f" the workers a common key, in {KEY_VARIABLE} or in the file key_file"
        )
    return hashlib.sha256(text.strip().encode()).digest()


def is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback


def may_ask(host: str, networks: Sequence[str] | None) -> bool:
    """True if an address that a request names may be connected to: it is in one of `networks`;
    without them, private but not link-local. Raises `ValueError` for what is not an address.
    """
    address = ipaddress.ip_address(host)
    # The system connects ::ffff:a.b.c.d to a.b.c.d, so that address counts.
    address = getattr(address, "ipv4_mapped", None) or address
    if networks is None:
        return address.is_private and not (address.is_link_local or address.is_unspecified)
    return any(address in ipaddress.ip_network(network) for network in networks)
