"""The flags of `pointsman sidecar`."""

from __future__ import annotations

import os

from fleet.command_line import Parser, port, seconds, url
from worker.flag_types import networks, positive


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
    text = "how the workers hand over KV: as vLLM's NIXL connector (nixlv2), or SGLang"
    add("--kv-connector", choices=("nixlv2", "sglang"), default="nixlv2", help=text)
    text = (
        "port where SGLang's prefill workers serve rooms: with Pointsman's, their kv_port (default:"
        " SGLANG_BOOTSTRAP_PORT, else 8998)"
    )
    given = os.environ.get("SGLANG_BOOTSTRAP_PORT", "8998")
    add("--bootstrap-port", type=port, default=given, metavar="PORT", help=text)
    text = (
        "networks whose prefill workers may be asked, such as 10.8.0.0/16,fd00::/8 (default: all"
        " private ones but link-local addresses)"
    )
    add("--prefiller-networks", type=networks, metavar="LIST", help=text)
    text = "how long a prefill may take; then the decode worker computes (default: %(default)g s)"
    add("--prefill-timeout", type=positive, default=120.0, metavar="SECONDS", help=text)
    text = "how long running requests get to finish after SIGTERM (default: %(default)g s)"
    add("--drain-timeout", type=seconds, default=30.0, metavar="SECONDS", help=text)
    return parser
