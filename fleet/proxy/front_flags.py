"""The command line of `pointsman front`."""

from base.flags import Parser, add_flags

_FLAGS = """
--host TEXT = 127.0.0.1       address to listen on
--port PORT = 8080            port to listen on
--gateway URL = http://127.0.0.1:8081
                              the gateway whose picker chooses workers
--attempts N[1..] = 3         most consecutive workers that may fail with a request without a new
                              token
--patience SECONDS[0..] = 60  time that a request waits while no worker answers
--stall-timeout SECONDS(0..] = 60
                              longest silence of a stream that has begun; then its worker counts as
                              dead
--drain-timeout SECONDS[0..] = 30
                              time that running requests have to finish after SIGTERM
"""


def build_parser() -> Parser:
    parser = Parser(
        prog="pointsman front",
        description="Proxy in front of a gateway: when the worker of a stream dies, ask the gateway"
        " for another one, which continues the stream, so that the client sees only one.",
        epilog="example: pointsman front --port 8080 --gateway http://127.0.0.1:8081",
    )
    add_flags(parser, _FLAGS)
    return parser
