"""`pointsman up`: Envoy, a picker and workers on this machine, until Ctrl-C.

Envoy starts last, when the picker serves, and stops last, so that clients that remain after the
drain get an answer. No process outlives this one, however it ends (see `reaper`).
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fleet.envoy import admin, probe
from fleet.envoy.binary import envoy_version, find_envoy, require_supported
from fleet.envoy.clusters import PICKER, POOL
from fleet.envoy.settings import Mechanism
from fleet.errors import FleetError
from fleet.proxy.relay import Relay
from fleet.run import models
from fleet.run.control import Control, Order
from fleet.run.devices import Gpu, described
from fleet.run.layout import PORTS_OF_A_PICKER, FleetOptions, FleetPlan, PickerPlan, Site
from fleet.run.members import Members, Rotation, Say, write_bootstrap
from fleet.run.ports import free_ports
from fleet.run.preflight import check_programs
from fleet.run.proc import cores
from fleet.run.process import Child, Reaper
from fleet.run.rolling import RollingRestart, Scene
from fleet.run.running_picker import RunningFleet, shown

_STOP_SECONDS = 5.0
_REPORT_SECONDS = 2.0  # between two lines about a stop that waits
_QUIET_SECONDS = 10.0  # between two lines about a start that waits
_SHARED_MEMORY = Path("/dev/shm")
_HOT_RESTART_BITS = 27  # ten times the value has to fit in 31 bits


def up(
    options: FleetOptions, gpus: Sequence[Gpu], say: Say, progress: models.Progress | None = None
) -> int:
    """Run a fleet until SIGINT or SIGTERM. Raises `FleetError`; no process remains then."""
    is_torch = options.engine == "torch"
    model = None
    if is_torch or options.model is not None:
        named = options.model or os.environ.get("POINTSMAN_MODEL")
        model = models.resolve_model(named, progress)
    if is_torch:
        found = models.with_found_draft_model(
            options.worker_args, lambda name: models.resolve_model(name, progress)
        )
        options = dataclasses.replace(options, worker_args=tuple(found))
    with _folder(say) as folder:
        layout = FleetPlan(options, _site(options, folder, gpus), model)
        check_programs(layout)
        url, control = layout.dashboard.url, str(layout.control_path)
        fleet = RunningFleet(os.getpid(), url, options.port, control, layout.ingress.url)
        try:
            with shown(fleet, os.environ):
                asyncio.run(_Fleet(layout, say).run())
        except BaseExceptionGroup as group:
            raise _first_reason(group) from group
    return 0


@contextlib.contextmanager
def _folder(say: Say) -> Iterator[Path]:
    """Yield a private folder for sockets, settings and logs; it survives unexpected failures."""
    folder = Path(tempfile.mkdtemp(prefix="pointsman-"))
    stays = True
    try:
        yield folder
        stays = False
    # The message of a failed start quotes the log, so the folder is not needed.
    except (FleetError, SystemExit, KeyboardInterrupt):
        stays = False
        raise
    finally:
        if stays:
            say(f"logs are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _site(options: FleetOptions, folder: Path, gpus: Sequence[Gpu]) -> Site:
    dashboard, *ports = free_ports("127.0.0.1", options.num_ports, options.port + 1)
    first_decoder = PORTS_OF_A_PICKER + options.workers
    last = None if not options.front else ports.pop()
    # Without it Envoy does not start, unless a flag switches hot restart off.
    has_memory = os.access(_SHARED_MEMORY, os.W_OK)
    return Site(
        folder=folder,
        dashboard_port=dashboard,
        picker_ports=(ports[0], ports[1], ports[2]),
        worker_ports=tuple(ports[PORTS_OF_A_PICKER:first_decoder]),
        cores=cores(),
        envoy=find_envoy(),
        hot_restart_id=secrets.randbits(_HOT_RESTART_BITS) if has_memory else None,
        gpus=tuple(gpus),
        decoder_ports=tuple(ports[first_decoder:]),
        kv_key=secrets.token_hex(16),
        gateway_port=last,
    )


def _first_reason(group: BaseExceptionGroup[BaseException]) -> BaseException:
    ours = group.subgroup(FleetError)
    inner: BaseException = ours if ours is not None else group
    while isinstance(inner, BaseExceptionGroup):
        inner = inner.exceptions[0]
    return inner


class _Fleet:
    def __init__(self, layout: FleetPlan, say: Say) -> None:
        self._plan = layout
        self._options = layout.options
        self._say = say
        self._stop, self._hurry = asyncio.Event(), asyncio.Event()
        self._guard = Reaper()
        self._guard.remove(layout.site.folder)
        self._members = Members(layout, self._guard, say)
        self._rotation = Rotation(layout)
        self._relay = Relay(layout.dashboard, self._members.picker.plan.http)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._signalled)
        workers = self._members.workers
        self._rotation.config()
        self._rotation.endpoints({one.plan.program.name: one.plan.address for one in workers})
        if self._plan.hot_restart_memory is not None:
            self._guard.remove(self._plan.hot_restart_memory)
        try:
            async with asyncio.TaskGroup() as group:
                children = [one.child for one in (*workers, *self._members.sidecars)]
                if self._members.front is not None:
                    children.append(self._members.front.child)
                relaying = group.create_task(self._relay.run(), name="relay")
                for child in (*children, self._members.picker.child):
                    group.create_task(child.run(), name=child.program.name)
                await asyncio.sleep(0)  # first, because they take longest
                self._rotation.pool(one.plan.address for one in workers)
                self._rotation.pickers([self._members.picker.plan])
                write_bootstrap(self._members.envoy.plan)
                group.create_task(self._run_envoy(), name="envoy")
                group.create_task(self._check_envoy(), name="envoy-version")
                await self._start()
                if self._stop.is_set():  # no client can have connected: there is nothing to drain
                    self._say("stopping …")
                    self._members.kill()
                else:
                    await self._serve(group)
                    await self._end()
                relaying.cancel()
        finally:
            self._guard.close()

    def _signalled(self) -> None:
        if self._stop.is_set():
            self._hurry.set()
            self._members.kill()
        self._stop.set()

    async def _run_envoy(self) -> None:
        """Open Envoy's port once a picker answers: earlier requests would bypass the picker."""
        picker = self._members.picker.child
        await picker.settled.wait()
        if picker.ready.is_set() and not self._stop.is_set():
            await self._members.envoy.child.run()

    async def _check_envoy(self) -> None:
        require_supported(await asyncio.to_thread(envoy_version, self._plan.site.envoy))

    async def _start(self) -> None:
        options = self._options
        workers = _counted(options.workers, "worker")
        if options.prefill:
            workers += f", {options.prefill} of them for prefills"
        parts = f"{workers} ({options.engine}), a picker and Envoy ({options.routing.value})"
        self._say(f"starting {parts} …")
        for line in described(self._plan.placements):
            self._say(f"  {line}")
        await _unless(self._stop, self._wait_in_time())

    async def _wait_in_time(self) -> None:
        limit = self._options.startup_seconds
        try:
            async with asyncio.timeout(limit):
                await self._wait_for_all()
        except TimeoutError as error:
            late = [child for child in self._members.children if not child.ready.is_set()]
            names = ", ".join(child.program.name for child in late) or "the way through Envoy"
            words = (late[0] if late else self._members.envoy.child).last_words()
            raise FleetError(f"{names} not ready after {limit:g} s{words}") from error

    async def _wait_for_all(self) -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        members, plan = self._members, self._plan
        ports = ", ".join(str(one.plan.address.port) for one in members.workers)

        def done(what: str, place: str) -> None:
            self._say(f"{_row(what, place):<54} {loop.time() - begun:5.1f} s")

        async def phase(what: str, place: str, *children: Child) -> None:
            for child in children:
                await child.ready.wait()
            done(what, place)

        async def reassure() -> None:
            while True:
                await asyncio.sleep(_QUIET_SECONDS)
                late = [one.program.name for one in members.children if not one.ready.is_set()]
                if late:
                    where = "`pointsman logs` shows more"
                    self._say(_row("waiting", f"for {', '.join(late)}; {where}"))

        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(reassure(), name="reassure")
            async with asyncio.TaskGroup() as phases:
                if members.front is not None:
                    phases.create_task(phase("front", plan.ingress.url, members.front.child))
                phases.create_task(phase("envoy", plan.gateway.url, members.envoy.child))
                picker = members.picker
                phases.create_task(phase("picker", picker.plan.place, picker.child))
                all_workers = [one.child for one in members.workers]
                phases.create_task(phase("workers", f"127.0.0.1:{ports}", *all_workers))
            waiting.cancel()
        await self._until_envoy_sees_all()
        # With tenants Envoy answers nothing without a key.
        has_tenants = self._options.tenants is not None
        asked = plan.workers[0].address if has_tenants else plan.ingress
        reply = await probe.until(asked, "/v1/models")
        model = str(json.loads(reply.body)["data"][0]["id"])
        done("ready", model)
        self._invite(model)

    def _invite(self, model: str) -> None:
        plan, better = self._plan, models.better_than(self._plan.model)
        if better is not None:
            size = f"{better.size_bytes / 1e6:.0f} MB"
            text = f"a small one, often wrong; better: --model {better.name} ({size})"
            self._say(_row("model", text))
        has_tenants = self._options.tenants is not None
        self._say(f"\n{_first_call(plan.ingress.url, model, needs_key=has_tenants)}\n")
        for what, text in (
            ("dashboard", plan.dashboard.url),
            ("metrics", f"{plan.dashboard.url}/metrics"),
            ("talk", "pointsman chat"),
            ("watch", "pointsman top"),
            ("explain", "pointsman explain"),
            ("stop", "Ctrl-C"),
        ):
            self._say(_row(what, text))

    async def _until_envoy_sees_all(self) -> None:
        """Wait for Envoy's health checks, without which requests do not reach all workers."""
        wanted = {PICKER: 1}
        if self._options.routing is Mechanism.OVERRIDE_HOST:
            wanted[POOL] = len(self._members.workers)

        async def sees_all() -> bool:
            for cluster, count in wanted.items():
                found = await admin.hosts(self._members.envoy.plan.admin, cluster)
                if sum(host.is_healthy for host in found.values()) != count:
                    return False
            return True

        await probe.until_true(sees_all)

    async def _serve(self, group: asyncio.TaskGroup) -> None:
        """Accept orders until a signal, which also ends a restart in progress."""

        def moved(picker: PickerPlan) -> None:
            self._relay.target = picker.http

        scene = Scene(self._plan, self._members, self._rotation, group, moved)
        restart = RollingRestart(scene)

        async def obey(order: Order, say: Say) -> int:
            def say_here_too(line: str) -> None:
                self._say(line)
                say(line)

            try:
                return await restart.obey(order, say_here_too)
            except FleetError as error:
                self._say(f"not restarted: {error}")
                raise

        control = Control(str(self._plan.control_path), obey)
        taking_orders = group.create_task(control.run(), name="control")
        await self._stop.wait()
        taking_orders.cancel()
        await asyncio.wait([taking_orders])  # until its clients are notified

    async def _end(self) -> None:
        """Let requests end, then end waiting and streaming ones with an error, then stop."""
        members, has_envoy = self._members, self._members.envoy.child.ready.is_set()
        if has_envoy:
            await _unless(self._hurry, self._drain())
        else:
            self._say("stopping …")
        inner = (members.picker.child, *(one.child for one in members.workers))
        # At the second signal the picker refuses what waits, and workers end answers with errors.
        await _stop_all(inner)
        if has_envoy:
            await _unless(self._hurry, self._until_idle(_STOP_SECONDS))
        await _stop_all(members.children)
        self._say("stopped")

    async def _drain(self) -> None:
        """Accept no new connection, and wait, up to a limit, until the last request is answered."""
        limit = self._options.drain_seconds
        front = self._members.front
        if front is not None:
            front.child.ask_to_end()
        with contextlib.suppress(probe.NoReplyError):
            await admin.drain(self._members.envoy.plan.admin)
        active = await self._active()
        waits = (
            f"waiting for {_counted(active, 'request')}, {limit:g} s at most; " if active else ""
        )
        self._say(f"stopping ({waits}Ctrl-C again to stop at once) …")
        await self._until_idle(limit, reports=True)

    async def _until_idle(self, limit_seconds: float, *, reports: bool = False) -> None:
        loop = asyncio.get_running_loop()
        begun = reported = loop.time()

        async def is_idle() -> bool:
            nonlocal reported
            active = await self._active()
            if reports and active and loop.time() - reported >= _REPORT_SECONDS:
                reported = loop.time()
                left = max(0.0, limit_seconds - (reported - begun))
                self._say(f"  {_counted(active, 'request')} left, {left:.0f} s")
            return not active

        try:
            async with asyncio.timeout(limit_seconds):
                await probe.until_true(is_idle)
        except TimeoutError:
            if reports:
                late = _counted(await self._active(), "request")
                self._say(f"  time is up: {late} will end with an error")

    async def _active(self) -> int:
        try:
            found = await admin.stats(self._members.envoy.plan.admin, [admin.ACTIVE])
        except probe.NoReplyError:
            return 0
        return found.get(admin.ACTIVE, 0)


async def _stop_all(children: Iterable[Child]) -> None:
    async with asyncio.TaskGroup() as group:
        for child in children:
            name = f"stop-{child.program.name}"
            group.create_task(child.stop(0.0, _STOP_SECONDS), name=name)


async def _unless(event: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    async with asyncio.TaskGroup() as group:
        working = group.create_task(work, name="work")
        waiting = group.create_task(event.wait(), name="interrupt")
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        working.cancel()
        waiting.cancel()


def _counted(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _row(what: str, text: str) -> str:
    return f"  {what:<10}{text}"


def _first_call(url: str, model: str, *, needs_key: bool) -> str:
    """Return a curl command; the default model answers its prompt correctly (docs/models.md)."""
    body = {
        "model": model,
        "stream": True,
        "max_tokens": 200,
        "messages": [{"role": "user", "content": "What is the capital of Japan?"}],
    }
    key = ' \\\n  -H "authorization: Bearer $KEY"' if needs_key else ""
    return (
        f"curl -N {url}/v1/chat/completions -H 'content-type: application/json'{key} \\\n"
        f"  -d '{json.dumps(body)}'"
    )
