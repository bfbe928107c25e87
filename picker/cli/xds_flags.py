"""The flags of endpoint discovery."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

DEFAULT_ADDRESS = "127.0.0.1"
MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class XdsFlags:
    """Where endpoint discovery is served, and under which name; `port` 0 takes a free one."""

    port: int
    bind_address: str = DEFAULT_ADDRESS
    cluster_name: str = "default"


def add_xds_flags(group: argparse._ArgumentGroup) -> None:
    """Flags about endpoint discovery."""
    text = "tell proxies the pool's endpoints (xDS, EDS) at this port; 0: a free one"
    group.add_argument(
        "--xds-port", metavar="PORT", type=_port, default=None, help=f"{text} (default: nobody)"
    )
    text = "where that listens; whoever reaches it learns the endpoints' addresses"
    group.add_argument("--xds-bind-address", metavar="ADDRESS", default=DEFAULT_ADDRESS, help=text)
    text = "what proxies call the pool (default: as --pool-name says)"
    group.add_argument("--xds-cluster-name", metavar="NAME", default=None, help=text)


def xds_flags_of(arguments: argparse.Namespace) -> XdsFlags | None:
    """What the parsed flags ask for, None for no endpoint discovery."""
    if arguments.xds_port is None:
        return None
    return XdsFlags(
        port=arguments.xds_port,
        bind_address=arguments.xds_bind_address,
        cluster_name=arguments.xds_cluster_name or arguments.pool_name,
    )


def _port(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) > MAX_PORT:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to {MAX_PORT}")
    return int(text)
