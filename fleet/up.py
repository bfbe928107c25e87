"""`pointsman up`: Envoy, a picker and workers on this machine, until Ctrl-C.

Order of life: look for what could be in the way, start everything at once, wait until each part
answers and a request gets through Envoy, supervise, drain, stop: Envoy first, then the picker and
the workers. No process outlives this one, however it ends (see `reaper`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ipaddress
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from fleet import models, probe
from fleet.draft_model import with_found_draft_model
from fleet.envoy.binary import envoy_version, find_envoy, require_supported
from fleet.envoy.bootstrap import build, to_yaml
from fleet.envoy.settings import Address, Mechanism, SocketAddress
from fleet.errors import FleetError
from fleet.plan import PORTS_BESIDE_WORKERS, Options, Plan, Site, plan
from fleet.ports import free_ports, require_free
from fleet.process import Child, Program, Reaper
from fleet.running_picker import shown_as_running

Say = Callable[[str], None]
_FREE_BYTES_NEEDED = 50_000_000  # logs
_STOP_SECONDS = 5.0


def up(options: Options, say: Say, progress: models.Progress | None = None) -> int:
    """Run a fleet until SIGINT or SIGTERM; returns the exit status 0.

    `say` gets every line for the user, `progress` the state of a download. Raises `FleetError` when
    the fleet cannot start; nothing is left running then.
    """
    _preflight(options)
    model = None
    if options.engine == "torch" or options.model is not None:
        named = options.model or os.environ.get("POINTSMAN_MODEL")
        model = models.resolve_model(named, progress)
    if options.engine == "torch":
        found = with_found_draft_model(
            options.worker_args, lambda name: models.resolve_model(name, progress)
        )
        options = dataclasses.replace(options, worker_args=tuple(found))
    with _folder(say) as folder:
        layout = plan(options, _site(options, folder), model)
        try:
            with shown_as_running(f"http://{_host(layout.picker_http)}", os.environ):
                asyncio.run(_Fleet(layout, options, say).run())
        except BaseExceptionGroup as group:
            raise _first_reason(group) from group
    return 0


def _preflight(options: Options) -> None:
    if options.workers < 1:
        raise FleetError("a fleet needs at least one worker")
    try:
        address = ipaddress.ip_address(options.host)
    except ValueError as error:
        raise FleetError(f"--host takes an IP address, not {options.host}") from error
    if not address.is_loopback and not options.insecure:
        raise FleetError(
            f"{options.host} can be reached from other machines and there is no authentication; "
            "add --insecure to do it all the same"
        )
    if options.config is not None and not options.config.is_file():
        raise FleetError(f"no configuration file at {options.config}")
    require_free(options.host, options.port)
    temporary = tempfile.gettempdir()
    if shutil.disk_usage(temporary).free < _FREE_BYTES_NEEDED:
        raise FleetError(f"{temporary} is full: {_FREE_BYTES_NEEDED / 1e6:.0f} MB are needed there")


@contextlib.contextmanager
def _folder(say: Say) -> Iterator[Path]:
    """A private folder for sockets, settings and logs; kept when something went wrong."""
    folder = Path(tempfile.mkdtemp(prefix="pointsman-"))
    try:
        yield folder
    except BaseException:
        say(f"logs are kept in {folder}")
        raise
    shutil.rmtree(folder, ignore_errors=True)


def _site(options: Options, folder: Path) -> Site:
    ports = free_ports("127.0.0.1", PORTS_BESIDE_WORKERS + options.workers, options.port + 1)
    return Site(
        folder=folder,
        picker_ports=(ports[0], ports[1], ports[2]),
        worker_ports=tuple(ports[PORTS_BESIDE_WORKERS:]),
        cores=len(os.sched_getaffinity(0)),
        envoy=find_envoy(),
    )


def _first_reason(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The `FleetError` somewhere in `group`, else its first leaf."""
    told = group.subgroup(FleetError)
    inner: BaseException = told if told is not None else group
    while isinstance(inner, BaseExceptionGroup):
        inner = inner.exceptions[0]
    return inner


class _Fleet:
    """Owns the child processes of one fleet."""

    def __init__(self, layout: Plan, options: Options, say: Say) -> None:
        self._plan = layout
        self._options = options
        self._say = say
        self._stop, self._hurry = asyncio.Event(), asyncio.Event()
        self._guard = Reaper()
        self._workers = [
            self._child(program, address, "/health")
            for program, address in zip(layout.workers, layout.worker_addresses, strict=True)
        ]
        self._picker = self._child(layout.picker, layout.picker_http, "/readyz")
        self._envoy = self._child(layout.envoy, layout.admin, "/ready")

    def _child(self, program: Program, address: Address, path: str) -> Child:
        return Child(program, self._guard, lambda: probe.until(address, path), self._say)

    @property
    def _children(self) -> list[Child]:
        return [*self._workers, self._picker, self._envoy]

    async def run(self) -> None:
        """From nothing to nothing."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._signalled)
        self._plan.endpoints_path.write_text(self._plan.endpoints, encoding="utf-8")
        try:
            async with asyncio.TaskGroup() as group:
                for child in (*self._workers, self._picker):
                    group.create_task(child.run(), name=child.program.name)
                await asyncio.sleep(0)  # the slowest are on their way before anything else is done
                document = to_yaml(build(self._plan.bootstrap))
                self._plan.bootstrap_path.write_text(document, encoding="utf-8")
                group.create_task(self._envoy.run(), name="envoy")
                group.create_task(self._check_envoy(), name="envoy-version")
                await self._start()
                await self._stop.wait()
                await self._end()
        finally:
            self._guard.close()

    def _signalled(self) -> None:
        if self._stop.is_set():
            self._hurry.set()
            for child in self._children:
                child.kill()
        self._stop.set()

    async def _check_envoy(self) -> None:
        binary = Path(self._plan.envoy.argv[0])
        require_supported(await asyncio.to_thread(envoy_version, binary))

    async def _start(self) -> None:
        """Wait for every part, and say so; returns early when told to stop."""
        options = self._options
        self._say(
            f"starting {options.workers} workers ({options.engine}), a picker and Envoy "
            f"({options.routing.value}) …"
        )
        await _unless(self._stop, self._wait_in_time())

    async def _wait_in_time(self) -> None:
        limit = self._options.startup_seconds
        try:
            async with asyncio.timeout(limit):
                await self._wait_for_all()
        except TimeoutError as error:
            late = [child for child in self._children if not child.ready.is_set()]
            names = ", ".join(child.program.name for child in late) or "the way through Envoy"
            words = late[0].last_words() if late else self._envoy.last_words()
            raise FleetError(f"{names} not ready after {limit:g} s{words}") from error

    async def _wait_for_all(self) -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        shown = f"http://{_host(self._plan.ingress)}"
        picker, http = self._plan.bootstrap.picker, self._plan.picker_http
        ports = ", ".join(str(address.port) for address in self._plan.worker_addresses)

        async def phase(line: str, *children: Child) -> None:
            for child in children:
                await child.ready.wait()
            self._say(f"  {line:<52} {loop.time() - begun:5.1f} s")

        async with asyncio.TaskGroup() as group:
            group.create_task(phase(f"envoy    {shown}", self._envoy))
            place = f"picker   127.0.0.1:{picker.port}, metrics {http.port}"
            group.create_task(phase(place, self._picker))
            group.create_task(phase(f"workers  127.0.0.1:{ports}", *self._workers))
        await self._until_envoy_sees_all()
        reply = await probe.until(self._plan.ingress, "/v1/models")
        model = str(json.loads(reply.body)["data"][0]["id"])
        self._say(f"  {'ready    ' + model:<52} {loop.time() - begun:5.1f} s")
        self._say("  why a request went where it went: pointsman explain --last")
        self._say(_invitation(shown, model))

    async def _until_envoy_sees_all(self) -> None:
        """Health checks have to pass before requests are picked, and spread over all workers."""
        wanted = {"cluster.picker.membership_healthy": 1}
        if self._options.routing is Mechanism.OVERRIDE_HOST:
            wanted["cluster.pool.membership_healthy"] = len(self._workers)
        path = r"/stats?format=json&filter=membership_healthy$"
        await probe.until(
            self._plan.admin, path, lambda reply: wanted.items() <= _stats(reply).items()
        )

    async def _end(self) -> None:
        """Drain Envoy, then stop everything."""
        self._say("stopping (Ctrl-C again to stop at once) …")
        if self._envoy.ready.is_set():
            await _unless(self._hurry, self._drain())
        await self._envoy.stop(_STOP_SECONDS)
        async with asyncio.TaskGroup() as group:
            for child in (self._picker, *self._workers):
                group.create_task(child.stop(_STOP_SECONDS), name=f"stop-{child.program.name}")

    async def _drain(self) -> None:
        """Take no new connection, and wait (not for ever) until the last request is answered."""
        active = "http.ingress.downstream_rq_active"
        page = f"/stats?format=json&filter=^{active}$"
        with contextlib.suppress(TimeoutError, probe.NoReplyError):
            async with asyncio.timeout(self._options.drain_seconds):
                await probe.request(self._plan.admin, "/healthcheck/fail", "POST")
                await probe.request(self._plan.admin, "/drain_listeners", "POST")
                await probe.until(
                    self._plan.admin, page, lambda reply: _stats(reply).get(active) == 0
                )


async def _unless(event: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Do `work` until it is done or `event` comes, whichever is first."""
    async with asyncio.TaskGroup() as group:
        working = group.create_task(work, name="work")
        waiting = group.create_task(event.wait(), name="interrupt")
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        working.cancel()
        waiting.cancel()


def _stats(reply: probe.Reply) -> dict[str, int]:
    """Name → value of an Envoy statistics page."""
    if reply.status != 200:
        return {}
    entries = json.loads(reply.body)["stats"]
    return {entry["name"]: entry["value"] for entry in entries if "value" in entry}


def _host(address: SocketAddress) -> str:
    return (
        f"[{address.host}]:{address.port}"
        if ":" in address.host
        else (f"{address.host}:{address.port}")
    )


def _invitation(url: str, model: str) -> str:
    """A command to paste."""
    body = {
        "model": model,
        "stream": True,
        "messages": [{"role": "user", "content": "Why is the sky blue?"}],
    }
    return (
        f"curl -N {url}/v1/chat/completions -H 'content-type: application/json' \\\n"
        f"  -d '{json.dumps(body)}'"
    )
