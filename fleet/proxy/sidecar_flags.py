"""The command line of `pointsman sidecar`."""

import os

from base.flags import Dialect, Parser, add_flags

_FLAGS = """
--host TEXT = 127.0.0.1       address to listen on
--port PORT = 8000            port to listen on
--decoder URL = http://127.0.0.1:8200
                              the decode worker
--kv-connector nixlv2|sglang = nixlv2
                              protocol of KV between workers: vLLM's NIXL connector (nixlv2), or
                              SGLang's
--bootstrap-port PORT         port where SGLang's prefill workers serve rooms: with Pointsman's,
                              their kv_port (default: SGLANG_BOOTSTRAP_PORT, else 8998)
--prefiller-networks CIDR     networks of permitted prefill workers, such as 10.8.0.0/16,fd00::/8
                              (default: all private ones but link-local addresses)
--prefill-timeout SECONDS(0..] = 120
                              longest time of a prefill; then the decode worker computes the prompt
--drain-timeout SECONDS[0..] = 30
                              time that running requests have to finish after SIGTERM
"""


def build_parser() -> Parser:
    parser = Parser(
        prog="pointsman sidecar",
        description="Stand in front of a decode worker: have the prompt of a request run by the"
        " prefill worker that its header x-prefiller-host-port names, then pass it on.",
        epilog="example: pointsman sidecar --port 8000 --decoder http://127.0.0.1:8200",
    )
    given = os.environ.get("SGLANG_BOOTSTRAP_PORT", "8998")
    add_flags(parser, _FLAGS, Dialect(defaults={"bootstrap_port": given}))
    return parser
