# Apart: read for help and completion, without what the sidecar imports.
"""The flags of `pointsman sidecar`."""

from __future__ import annotations

import argparse
import ipaddress

from fleet.command_line import Parser, port, seconds, url

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def build_parser() -> Parser:
    """All of them."""
    parser = Parser(
        prog="pointsman sidecar",
        description="Stand in front of a decode worker: have the prompt of a request run by the"
        " prefill worker that its header x-prefiller-host-port names, then pass it on.",
        epilog="example: pointsman sidecar --port 8000 --decoder http://127.0.0.1:8200",
    )
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=port, default=8000, help="port to listen on (default: %(default)s)")
    text = "the decode worker (default: %(default)s)"
    add("--decoder", type=url, default="http://127.0.0.1:8200", metavar="URL", help=text)
    text = (
        "networks whose prefill workers may be asked, such as 10.8.0.0/16,fd00::/8 (default: all"
        " private ones but link-local addresses)"
    )
    add("--prefiller-networks", type=_networks, metavar="LIST", help=text)
    text = "how long a prefill may take; then the decode worker computes (default: %(default)g s)"
    add("--prefill-timeout", type=seconds, default=120.0, metavar="SECONDS", help=text)
    text = "how long running requests get to finish after SIGTERM (default: %(default)g s)"
    add("--drain-timeout", type=seconds, default=30.0, metavar="SECONDS", help=text)
    return parser


def _networks(text: str) -> tuple[Network, ...]:
    try:
        return tuple(ipaddress.ip_network(one.strip()) for one in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
