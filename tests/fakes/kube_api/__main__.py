"""Run the API server as a process: `python -m tests.fakes.kube_api --kubeconfig FILE [--crds DIR]`.

It writes a kubeconfig and prints `ready URL` once it listens. SIGUSR1 makes it unreachable,
SIGUSR2 brings it back without its history of changes, and SIGTERM ends it.
"""

import argparse
import asyncio
import signal
import sys
from pathlib import Path

from tests.fakes.kube_api.server import KubeApi, running_kube_api


async def serve(kubeconfig: Path, definitions: list[Path]) -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with running_kube_api(None, *definitions) as api, asyncio.TaskGroup() as tasks:
        _follow_signals(api, loop, tasks, ended)
        api.write_kubeconfig(kubeconfig)
        sys.stdout.write(f"ready {api.url}\n")
        sys.stdout.flush()
        await ended.wait()


def _follow_signals(
    api: KubeApi, loop: asyncio.AbstractEventLoop, tasks: asyncio.TaskGroup, ended: asyncio.Event
) -> None:
    def go() -> None:
        tasks.create_task(api.go_away(), name="go away")

    def come() -> None:
        tasks.create_task(api.come_back(forget_changes=True), name="come back")

    loop.add_signal_handler(signal.SIGUSR1, go)
    loop.add_signal_handler(signal.SIGUSR2, come)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fakes.kube_api", description=__doc__)
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--crds", type=Path)
    arguments = parser.parse_args()
    definitions = [] if arguments.crds is None else sorted(arguments.crds.glob("*.yaml"))
    asyncio.run(serve(arguments.kubeconfig, definitions))
    return 0


if __name__ == "__main__":
    sys.exit(main())
