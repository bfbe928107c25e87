"""The command line of the picker; see `picker.cli.flags`."""

import logging
import os
import sys
from collections.abc import Sequence

import uvloop

from picker.app.logs import set_up_logging
from picker.app.memory import keep_freed_pages
from picker.app.picker import serve
from picker.cli.flags import build_parser, options_of
from picker.cli.options import Options, Ports
from picker.errors import ConfigError, PickerError

log = logging.getLogger("picker")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the picker; return 0 after a drain, 1 when it cannot start or fails."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    try:
        options = options_of(arguments)
    except ConfigError as error:
        parser.error(str(error))
    set_up_logging(options.logs.verbosity, as_json=options.logs.as_json)
    keep_freed_pages(os.environ)
    try:
        uvloop.run(serve(options, lambda ports: _announce(options, ports)))
    except PickerError as error:
        for line in str(error).splitlines():
            log.error("%s", line)
        return 1
    return 0


def _announce(options: Options, ports: Ports) -> None:
    where = f"{options.bind_address}:{ports.grpc}" if ports.grpc else options.bind_address
    health = options.bind_address if ports.grpc else "127.0.0.1"
    log.info(
        "picker ready: ext_proc %s%s, health %s:%d, http %s:%d%s",
        where,
        " (TLS)" if options.tls is not None else "",
        health,
        ports.health,
        options.metrics_bind_address,
        ports.metrics,
        f", endpoint discovery {options.xds.bind_address}:{ports.xds}" if options.xds else "",
    )
    for key, port in ports.pools.items():
        log.info("pool %s alone: ext_proc %s:%d", key, options.bind_address, port)


if __name__ == "__main__":
    sys.exit(main())
