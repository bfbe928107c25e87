"""The flags of `pointsman front`."""

from __future__ import annotations

from fleet.command_line import Parser, count, port, seconds, url
from worker.flag_types import positive


def build_parser() -> Parser:
    """All of them."""
    parser = Parser(
        prog="pointsman front",
        description="Stand in front of a gateway: when the worker of a stream dies, ask the gateway"
        " for another one and have it go on, so that the client sees one stream.",
        epilog="example: pointsman front --port 8080 --gateway http://127.0.0.1:8081",
    )
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=port, default=8080, help="port to listen on (default: %(default)s)")
    text = "the gateway whose picker chooses workers (default: %(default)s)"
    add("--gateway", type=url, default="http://127.0.0.1:8081", metavar="URL", help=text)
    text = (
        "how many workers in a row may fail with a request that gets no token further"
        " (default: %(default)s)"
    )
    add("--attempts", type=count, default=3, metavar="N", help=text)
    text = "how long a request waits while no worker answers (default: %(default)g s)"
    add("--patience", type=seconds, default=60.0, metavar="SECONDS", help=text)
    text = (
        "how long a stream that has begun may be silent; then its worker counts as dead"
        " (default: %(default)g s)"
    )
    add("--stall-timeout", type=positive, default=60.0, metavar="SECONDS", help=text)
    text = "how long running requests get to finish after SIGTERM (default: %(default)g s)"
    add("--drain-timeout", type=seconds, default=30.0, metavar="SECONDS", help=text)
    return parser
