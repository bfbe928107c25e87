"""A rank from 1 to N-1: `python -m worker.executor.follower PARENT RANK`, which `ranks` starts."""

import dataclasses
import logging
import os
import signal
import sys
import threading
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

# First: it sets variables that torch reads when it is loaded.
from worker.executor.start import build_shard

# isort: split
import msgspec

from worker.executor.interface import Ticket
from worker.executor.lifeline import die_with_parent
from worker.executor.ranks import (
    AdaptRanks,
    JoinRanks,
    ReadRanks,
    SleepRanks,
    StepRanks,
    ToRank,
    WakeRanks,
    find_ranks,
    gather_kv,
    join,
    read_messages,
)
from worker.ops.parallel import Shard

logger = logging.getLogger(__name__)


def run(messages: SimpleQueue[bytearray]) -> None:
    """Build the shard of the first message, then carry out all later messages.

    Every failure raises: rank 0 fails for the same reason, or notices that this process ended.
    """
    decoder = msgspec.msgpack.Decoder(ToRank)
    first = decoder.decode(messages.get())
    if not isinstance(first, JoinRanks):
        raise TypeError(f"the first message is {type(first).__name__}")
    shard = Shard(first.rank, first.config.tensor_parallel_size)
    runner, _ = build_shard(
        first.config, shard, lambda device: join(shard, find_ranks(first), device)
    )
    last: Ticket | None = None
    reads: dict[int, Future[Any]] = {}
    while True:
        match decoder.decode(messages.get()):
            case StepRanks(step=step):
                puts = tuple(
                    (slot, n if n is None else reads[n].result()) for slot, n in step.adapters
                )
                # As on rank 0, a step is collected before the next but one is submitted, and before
                # the next if it has or makes drafts.
                submitted = runner.submit(dataclasses.replace(step, adapters=puts))
                if last is not None:
                    last.collect()
                last = submitted
                if any(s.num_drafts or s.num_to_draft or s.limit for s in step.sequences):
                    last.collect()
                    last = None
            case AdaptRanks(adapter=adapter, held=held):
                reads = {number: reads[number] for number in held}
                reads[adapter.number] = runner.read_adapter(adapter)
            case ReadRanks() as message:
                gather_kv(runner, message)
            case SleepRanks(level=level):
                runner.sleep(level)
            case WakeRanks(tags=tags):
                runner.wake(tags)


def main() -> int:
    """Tie this process's life to rank 0's, then follow rank 0."""
    # Ctrl-C goes to the whole process group; rank 0 decides when the ranks end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent()
    if os.getppid() != int(sys.argv[1]):  # rank 0 ended before
        return 1
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s %(levelname)s [rank {sys.argv[2]}] %(name)s: %(message)s",
    )
    messages: SimpleQueue[bytearray] = SimpleQueue()
    # Beside the steps: the end of the input must end this process inside a step, too.
    threading.Thread(target=_read, args=[messages], name="input", daemon=True).start()
    try:
        run(messages)
    except Exception:
        logger.exception("the rank failed")
    return 1


def _read(messages: SimpleQueue[bytearray]) -> None:
    try:
        read_messages(sys.stdin.buffer, messages.put)
    finally:  # rank 0 closed the input, or ended
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
