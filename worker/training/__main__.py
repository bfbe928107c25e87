"""`python -m worker.training`: train a draft head. Everything else is in `pipeline`."""

import importlib
import os
import sys
import time
from collections.abc import Sequence

from worker.errors import WorkerError
from worker.training.flags import resolve
from worker.training.progress import ProgressLine


def main(argv: Sequence[str] | None = None) -> int:
    """Train until done; return the exit status. An error is one sentence on standard error and
    status 1; a wrong flag ends with status 2, Ctrl-C with 130.
    """
    # Before torch is loaded: threads that wait by spinning stall each other on shared cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    progress = ProgressLine(sys.stderr, time.monotonic)
    try:
        settings = resolve(argv)
        pipeline = importlib.import_module("worker.training.pipeline")
        acceptance = pipeline.TrainingRun(settings, progress).run()
    except WorkerError as error:
        sys.stderr.write(f"pointsman train-draft: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nstopped; start it again with the same flags to resume\n")
        return 130
    shares = ", ".join(f"{share:.0%}" for share in acceptance.conditional)
    sys.stdout.write(f"greedy drafts held, position by position: {shares}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
