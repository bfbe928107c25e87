"""Flags about replicas that serve one pool and tell each other what they do."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from picker.errors import ConfigError
from picker.peers.discovery import PeerName, peer_name
from picker.peers.seeds import seed_of_secret

DEFAULT_PORT = 9005
MIN_SECRET_BYTES = 16
_EVERYWHERE, _LOOPBACK = "0.0.0.0", "127.0.0.1"
_SERVICE = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_NEEDS_PEERS = ("peer_bind_address", "peer_cert_path", "peer_server_name", "peer_insecure")


@dataclass(frozen=True, slots=True)
class PeerFlags:
    """Who the other replicas are, and where they reach this one.

    Either `names` are resolved, or the EndpointSlices of the Service `slices` are followed.
    Without `cert_path` the exchange is plain text, and who reaches the port is believed. Peers'
    certificates are of `server_name`, "": of the name that they were found by. `namespace` is that
    of the Service, "": the pool's. `pool` is what replicas call the pool, "": by its name.
    """

    names: tuple[PeerName, ...]
    port: int = DEFAULT_PORT
    bind_address: str = _LOOPBACK
    cert_path: Path | None = None
    server_name: str = ""
    slices: PeerName | None = None
    namespace: str = ""
    pool: str = ""


def add_peer_flags(group: argparse._ArgumentGroup) -> None:
    """Add them."""
    text = "replicas to share knowledge with, this one may be among them"
    group.add_argument("--peers", metavar="HOST:PORT,…", default="", help=text)
    text = "name that stands for all replicas, e.g. of a headless Service; resolved again regularly"
    group.add_argument("--peer-service", metavar="NAME[:PORT]", default="", help=text)
    text = "Service of the pool's namespace whose EndpointSlices name all replicas; followed"
    group.add_argument("--peer-slices", metavar="SERVICE[:PORT]", default="", help=text)
    text = "where replicas reach this one; 0: a free port"
    group.add_argument("--peer-port", metavar="PORT", type=_port, default=DEFAULT_PORT, help=text)
    text = "where that listens (default: everywhere with --peer-cert-path or --peer-insecure, else "
    group.add_argument(
        "--peer-bind-address", metavar="ADDRESS", default="", help=f"{text}loopback only)"
    )
    text = "folder with tls.crt, tls.key and ca.crt, whose CA must have signed replicas' "
    group.add_argument(
        "--peer-cert-path", metavar="DIR", type=_path, default=None, help=f"{text}certificates"
    )
    text = "name in the certificates of replicas (default: the one they were found by)"
    group.add_argument("--peer-server-name", metavar="NAME", default="", help=text)
    text = "let replicas speak plain text in a network where everybody may be believed"
    group.add_argument(
        "--peer-insecure", action=argparse.BooleanOptionalAction, default=False, help=text
    )
    text = "secret that hashes of prompts are seeded with, the same for all replicas (default: "
    group.add_argument(
        "--hash-seed-file",
        metavar="FILE",
        type=_path,
        default=None,
        help=f"{text}drawn at the start; peers agree on one)",
    )


def peer_flags_of(arguments: argparse.Namespace) -> PeerFlags | None:
    """What the parsed flags ask for, None for a picker on its own.

    Raises `ConfigError` for flags that contradict each other.
    """
    names = _names(arguments.peers, arguments.peer_service, arguments.peer_port)
    slices = _slices(arguments.peer_slices, arguments.peer_port)
    if not names and slices is None:
        _refuse_what_needs_peers(arguments)
        return None
    if names and slices is not None:
        raise ConfigError("--peer-slices names all replicas; give it without other peers")
    if arguments.record is not None and arguments.hash_seed_file is None:
        raise ConfigError(
            "--record with peers needs --hash-seed-file: a recording names the seed of its hashes, "
            "which peers would change"
        )
    is_open = arguments.peer_cert_path is not None or arguments.peer_insecure
    address = arguments.peer_bind_address or (_EVERYWHERE if is_open else _LOOPBACK)
    if not is_open and not _is_loopback(address):
        raise ConfigError(
            f"--peer-bind-address {address}: who reaches this port is believed; give "
            "--peer-cert-path DIR, or --peer-insecure where the network can be trusted"
        )
    return PeerFlags(
        names,
        arguments.peer_port,
        address,
        arguments.peer_cert_path,
        arguments.peer_server_name,
        slices,
    )


def configured_hash_seed(path: Path | None) -> int | None:
    """The seed that a secret file stands for; None without a file. Raises `ConfigError`."""
    if path is None:
        return None
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        text = f"--hash-seed-file: cannot read {path}: {error.strerror or error}"
        raise ConfigError(text) from error
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"--hash-seed-file: {path} has {len(secret)} bytes; a secret has {MIN_SECRET_BYTES} "
            "and more"
        )
    return seed_of_secret(secret)


def _names(peers: str, service: str, port: int) -> tuple[PeerName, ...]:
    found: list[PeerName] = [peer_name(text.strip()) for text in peers.split(",") if text.strip()]
    if service:
        found.append(peer_name(service, port or None))
    return tuple(dict.fromkeys(found))


def _slices(service: str, port: int) -> PeerName | None:
    if not service:
        return None
    found = peer_name(service, port or None)
    if not _SERVICE.fullmatch(found.host):
        raise ConfigError(f"--peer-slices: '{found.host}' is no name of a Service")
    return found


def _refuse_what_needs_peers(arguments: argparse.Namespace) -> None:
    for name in _NEEDS_PEERS:
        if getattr(arguments, name):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{flag} has no effect without --peers, --peer-service or --peer-slices"
            )


def _is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return False


def _port(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"'{text}' is no port; write a number from 0 to 65535")
    return int(text)


def _path(text: str) -> Path | None:
    return Path(text) if text else None
