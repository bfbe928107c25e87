"""`python -m worker`: serve one model."""

import asyncio
import logging
import os
import sys
from collections.abc import Sequence

import uvloop

from worker import app
from worker.cli.flags import build_parser, read_config
from worker.errors import WorkerError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a worker until a signal stops it; return the exit status.

    A failed start writes one sentence to standard error and returns 1; a wrong flag exits with 2.
    """
    options = build_parser().parse_args(argv)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s [worker] %(name)s: %(message)s"
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        config, checkpoint = read_config(options, os.environ)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(app.run(config, checkpoint))
    except WorkerError as error:
        sys.stderr.write(f"pointsman worker: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
