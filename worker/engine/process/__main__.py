"""The engine process: `python -m worker.engine.process SOCKET BEATS`, spawned by `engine.child`.

Standard input carries the `EngineConfig` (msgpack after a 4-byte little-endian length) and stays
open: when it ends, the parent is gone and this process exits at once. SIGINT and SIGTERM may reach
a whole process group, so they are left to the parent, which drains and then says `Shutdown`.
"""

import gc
import importlib
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec

from worker.config import EngineConfig
from worker.engine.core import EngineCore
from worker.engine.messages import EngineFailed
from worker.engine.process.build import build_core
from worker.engine.process.heartbeat import HeartbeatThread, Pulse, StepBudget
from worker.engine.process.kv_events import KvEventPublisher, publishes
from worker.engine.process.server import EngineSocket, Server
from worker.engine.process.speculation_log import SpeculationLog
from worker.errors import ConfigError, ModelError, WorkerError
from worker.executor.lifeline import die_with_parent

logger = logging.getLogger(__name__)

WARM_UP_SECONDS = 60.0
FAILURE_SECONDS = 2.0
# Steps make little garbage in cycles. By default, most steps of large batches would look for it.
_GARBAGE = 10_000


def run(config: EngineConfig, channel: EngineSocket, budget: StepBudget, pulse: Pulse) -> int:
    started = time.monotonic()
    core: EngineCore | None = None
    publisher: KvEventPublisher | None = None
    try:
        core, ready = build_core(config)
        if config.engine == "torch":
            budget.compiles_kernels = importlib.import_module("torch").cuda.is_available()
        if publishes(config.kv_events):
            publisher = KvEventPublisher(
                config.kv_events, config.block_size, core.announce, time.time
            )
        gc.collect()
        gc.freeze()  # objects of the start-up stay; later collections skip them
        gc.set_threshold(_GARBAGE)
        # The kernel ends a process that is stuck or stopped, which no thread of its own can.
        die_with_parent()
        elapsed = time.monotonic() - started
        channel.send(msgspec.structs.replace(ready, startup_seconds=elapsed))
        Server(core, channel, pulse, publisher, SpeculationLog()).serve()
    except (ConfigError, ModelError) as error:  # the user can mend it; a traceback is no help
        logger.error("the engine failed: %s", error)
        _report_failure(channel, str(error))
        return 1
    except Exception as error:
        logger.exception("the engine failed")
        known = isinstance(error, WorkerError)
        _report_failure(channel, str(error) if known else f"{type(error).__name__}: {error}")
        return 1
    finally:
        if publisher is not None:
            publisher.close()
        if core is not None:
            core.shutdown()
        channel.close()
    return 0


def _report_failure(channel: EngineSocket, reason: str) -> None:
    channel.send(EngineFailed(reason))
    channel.wait(FAILURE_SECONDS)  # the parent answers with `Shutdown` once it has read it


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s [engine] %(name)s: %(message)s"
    )
    size = int.from_bytes(sys.stdin.buffer.read(4), "little")
    encoded = sys.stdin.buffer.read(size)
    if not encoded or len(encoded) < size:  # the parent is gone already
        _exit_with_parent(*sys.argv[1:3])
    config = msgspec.msgpack.decode(encoded, type=EngineConfig)
    threading.Thread(
        target=_exit_with_parent, args=sys.argv[1:3], name="parent-watch", daemon=True
    ).start()
    warm_up = WARM_UP_SECONDS if config.engine == "torch" else 0.0
    budget = StepBudget(config.step_budget_seconds, config.step_budget_factor, warm_up)
    pulse = Pulse(budget)
    heartbeat = HeartbeatThread(sys.argv[2], pulse)
    heartbeat.start()
    try:
        return run(config, EngineSocket(sys.argv[1]), budget, pulse)
    finally:
        heartbeat.stop()


def _exit_with_parent(*addresses: str) -> None:
    """Block until standard input ends, then exit at once: no client is left to serve, nor to remove
    the directory of the sockets, so that is done here.
    """
    while os.read(0, 1024):
        pass
    try:
        sockets = [Path(address.removeprefix("ipc://")) for address in addresses]
        for path in sockets:
            path.unlink(missing_ok=True)
        sockets[0].parent.rmdir()
    finally:  # the parent may be removing them, too
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
