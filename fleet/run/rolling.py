"""Restarts of a fleet's parts that cost no request.

A new process serves, and every sender of requests has found it healthy, before the old one is taken
out. All senders have stopped using the old one, and it has finished its requests, before it ends.

- Picker: a new one starts beside the old one. Envoy gets the addresses of both, and once it finds
  the new one healthy, only that of the new one.
- Worker, one after the other: the picker stops picking it; it becomes idle, or its time runs out;
  Envoy removes it, so that requests without a pick do not reach it either. It starts again at its
  port, and returns: first to Envoy, then to the picker, which has to read its metrics. With a
  single worker, the replacement starts first.
- Envoy: the next one takes the listening socket over from the old one (Envoy's hot restart), so
  that no incoming connection is lost. The old one ends its connections with their next answer.
"""

import asyncio
import re
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fleet.envoy import admin, probe
from fleet.envoy.clusters import PICKER, POOL
from fleet.envoy.settings import Address, Mechanism, SocketAddress
from fleet.errors import FleetError
from fleet.run.control import FleetPart, Order
from fleet.run.layout import PORTS_OF_A_PICKER, FleetPlan, PickerPlan
from fleet.run.members import Envoy, Members, Picker, Rotation, Say, Worker, arrive, write_bootstrap
from fleet.run.ports import free_ports, is_free
from fleet.run.proc import connections
from picker.admin.views import EndpointsView

MARGIN_SECONDS = 5.0  # for a process to end after its last request
_HOST = "127.0.0.1"
_IDLE_LOOKS = 2  # a request that was picked just now may not have arrived yet
# On a worker's metrics page.
_UNFINISHED = re.compile(rb"^vllm:num_requests_(?:running|waiting)\{[^}]*\} (\S+)$", re.MULTILINE)
_COUNTED = (admin.COMPLETED, admin.FAILED, admin.WITHOUT_PICKER)


@dataclass(frozen=True, slots=True)
class Scene:
    """A restart's setting. New processes run in `group`; `moved` gets a picker that takes over."""

    plan: FleetPlan
    members: Members
    rotation: Rotation
    group: asyncio.TaskGroup
    moved: Callable[[PickerPlan], None]

    @property
    def limit_seconds(self) -> float:
        return self.plan.options.startup_seconds

    async def until(self, condition: Callable[[], Awaitable[bool]], complaint: str) -> None:
        """Wait for a condition; `NoReplyError` counts as false. Raises `FleetError` on timeout."""
        try:
            async with asyncio.timeout(self.limit_seconds):
                await probe.until_true(condition)
        except TimeoutError as error:
            raise FleetError(f"{complaint} within {self.limit_seconds:g} s") from error

    async def envoy_uses(self, cluster: str, address: Address) -> bool:
        found = await admin.hosts(self.members.envoy.plan.admin, cluster)
        return address in found and found[address].is_healthy

    async def envoy_forgot(self, cluster: str, address: Address) -> bool:
        return address not in await admin.hosts(self.members.envoy.plan.admin, cluster)

    async def active(self, cluster: str, address: SocketAddress) -> int:
        found = await admin.hosts(self.members.envoy.plan.admin, cluster)
        return found[address].active if address in found else 0

    async def picker_forgot(self, address: SocketAddress) -> bool:
        return _shown(address) not in await _known(self.members.picker)

    async def picker_uses(self, address: SocketAddress) -> bool:
        return (await _known(self.members.picker)).get(_shown(address), False)

    async def knows_as_much(self, new: Picker, old: Picker) -> bool:
        """Check if the new picker has the old one's pool, and metrics of the same endpoints."""
        found = await _known(new)
        try:
            wanted = await _known(old)
        except probe.NoReplyError:  # it has just died: the knowledge of the new one has to suffice
            return bool(found)
        return found.keys() == wanted.keys() and all(
            found[address] for address, is_read in wanted.items() if is_read
        )


async def _known(picker: Picker) -> dict[str, bool]:
    """Map each endpoint of the picker's pool to whether its metrics have been read."""
    reply = await probe.request(picker.plan.http, "/endpoints")
    try:
        found = msgspec.json.decode(reply.body, type=EndpointsView)
    except msgspec.MsgspecError as error:
        raise probe.NoReplyError(str(error)) from error
    return {one.address: one.metrics is not None for one in found.endpoints}


def _shown(address: SocketAddress) -> str:
    return f"{address.host}:{address.port}"


class PickerRestart:
    """Replaces the picker. Owns the ports of the last picker but one, which are free again."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._spare: tuple[int, int, int] | None = None

    async def run(self, say: Say) -> None:
        """Replace the picker; the old one stays if no new one starts. Raises `FleetError`."""
        scene, old = self._scene, self._scene.members.picker
        plan = scene.plan.picker(self._ports(), self._record(old))
        new = scene.members.new_picker(plan)
        say("picker: starting a new one beside the old one")
        await arrive(new.child, scene.group, scene.limit_seconds)
        await self._introduce(new, old)
        old.child.retire()
        scene.members.picker = new
        scene.rotation.pickers([plan])
        scene.moved(plan)
        say("picker: the new one decides; the old one finishes what it has")
        await scene.until(
            lambda: scene.envoy_forgot(PICKER, old.plan.ext_proc), "Envoy still asks the old picker"
        )
        await old.child.stop(scene.plan.options.drain_seconds + MARGIN_SECONDS, MARGIN_SECONDS)
        self._spare = old.plan.ports
        recorded = "" if plan.record is None else f"; decisions are recorded in {plan.record}"
        say(f"picker: restarted at {plan.place}{recorded}")

    async def _introduce(self, new: Picker, old: Picker) -> None:
        scene = self._scene
        try:
            await scene.until(
                lambda: scene.knows_as_much(new, old), "the new picker did not learn the pool"
            )
            scene.rotation.pickers([new.plan, old.plan])
            await scene.until(
                lambda: scene.envoy_uses(PICKER, new.plan.ext_proc),
                "Envoy did not find the new picker healthy",
            )
        except FleetError:
            scene.rotation.pickers([old.plan])
            new.child.kill()
            raise

    def _ports(self) -> tuple[int, int, int]:
        """Return the ports of the last picker but one, or others if those are taken."""
        spare = self._spare
        if spare is not None and all(is_free(_HOST, port) for port in spare):
            return spare
        found = free_ports(_HOST, PORTS_OF_A_PICKER, self._scene.plan.options.port + 1)
        return found[0], found[1], found[2]

    def _record(self, old: Picker) -> Path | None:
        """Choose another file to record into while the old picker writes to the first."""
        first = self._scene.plan.options.record
        if first is None or old.plan.record != first:
            return first
        return first.with_stem(f"{first.stem}-2")


class WorkerRestart:
    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._envoy_has_pool = scene.plan.options.routing is Mechanism.OVERRIDE_HOST

    async def run(self, say: Say) -> None:
        """Restart the workers until one does not come back; raise `FleetError` for that one."""
        count = len(self._scene.members.workers)
        if count == 1:
            await self._replace_the_only_one(say)
            return
        for index in range(count):
            await self._restart(self._scene.members.workers[index], say)

    async def _restart(self, worker: Worker, say: Say) -> None:
        scene, name, address = self._scene, worker.plan.program.name, worker.plan.address
        all_workers = scene.members.workers
        others = [one for one in all_workers if one is not worker]
        try:
            self._set_pickers_pool(others)
            await scene.until(
                lambda: scene.picker_forgot(address), "the picker still picks a worker"
            )
            left_seconds = await self._until_idle(address, name, say)
            await self._set_envoys_pool(others, absent=address)
            await worker.child.renew(left_seconds, MARGIN_SECONDS)
            await self._until_serving(worker)
            await self._set_envoys_pool(all_workers, present=address)
        finally:
            # Also when it failed to return: then it is restarted like any worker that died.
            scene.rotation.pool(one.plan.address for one in all_workers)
            self._set_pickers_pool(all_workers)
        await scene.until(lambda: scene.picker_uses(address), f"the picker did not see {name} back")
        say(f"{name}: restarted at {address.host}:{address.port}")

    async def _replace_the_only_one(self, say: Say) -> None:
        scene, old = self._scene, self._scene.members.workers[0]
        (port,) = free_ports(_HOST, 1, scene.plan.options.port + 1)
        new = scene.members.new_worker(scene.plan.worker(0, port, beside=old.plan))
        name, address = new.plan.program.name, new.plan.address
        say(f"{name}: it is the only one; starting a new one beside it")
        await arrive(new.child, scene.group, scene.limit_seconds)
        try:
            await self._set_envoys_pool([old, new], present=address)
        except FleetError:
            scene.rotation.pool([old.plan.address])
            new.child.kill()
            raise
        old.child.retire()
        scene.members.workers[:] = [new]
        self._set_pickers_pool([new])
        await scene.until(
            lambda: scene.picker_uses(address), f"the picker did not see the new {name}"
        )
        left_seconds = await self._until_idle(old.plan.address, name, say)
        await self._set_envoys_pool([new], absent=old.plan.address)
        await old.child.stop(left_seconds, MARGIN_SECONDS)
        say(f"{name}: restarted, now at {address.host}:{address.port}")

    def _set_pickers_pool(self, workers: list[Worker]) -> None:
        self._scene.rotation.endpoints({one.plan.program.name: one.plan.address for one in workers})

    async def _set_envoys_pool(
        self,
        workers: list[Worker],
        *,
        present: SocketAddress | None = None,
        absent: SocketAddress | None = None,
    ) -> None:
        """Wait until Envoy uses the worker that is `present`, or has removed the `absent` one."""
        scene = self._scene
        scene.rotation.pool(one.plan.address for one in workers)
        if not self._envoy_has_pool:
            return
        if present is not None:
            await scene.until(
                lambda: scene.envoy_uses(POOL, present), "Envoy did not find a worker healthy"
            )
        if absent is not None:
            await scene.until(lambda: scene.envoy_forgot(POOL, absent), "Envoy still uses a worker")

    async def _until_idle(self, address: SocketAddress, name: str, say: Say) -> float:
        """Wait, up to a limit, until a worker has no requests in flight; return the seconds left.
        With a front, do not wait: a worker that ends hands its streams over to the front. (If Envoy
        has the pool, it retries elsewhere a request for which the worker was just picked.)
        """
        if self._scene.plan.front is not None and self._envoy_has_pool:
            return self._scene.plan.options.drain_seconds
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._scene.plan.options.drain_seconds
        looks, is_reported = 0, False
        while looks < _IDLE_LOOKS and loop.time() < deadline:
            try:
                active = await self._scene.active(POOL, address)
            except probe.NoReplyError:
                active = 1  # it may be busy
            looks = 0 if active else looks + 1
            if active and not is_reported:
                is_reported = True
                say(f"{name}: {active} requests are under way there")
            await asyncio.sleep(probe.POLL_SECONDS)
        return max(0.0, deadline - loop.time())

    async def _until_serving(self, worker: Worker) -> None:
        child, limit = worker.child, self._scene.limit_seconds
        try:
            async with asyncio.timeout(limit):
                await child.serving.wait()
        except TimeoutError as error:
            name = child.program.name
            text = f"{name} did not come back within {limit:g} s{child.last_words()}"
            raise FleetError(text) from error


class EnvoyRestart:
    """Replaces Envoy. Owns the address of the last one, and counts the `cut` requests."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self.cut = 0
        self._address_of_the_gone: socket.socket | None = None

    async def run(self, say: Say) -> None:
        """Replace Envoy; the old one stays if the new one fails to start. Raises `FleetError`."""
        scene, old = self._scene, self._scene.members.envoy
        if scene.plan.site.hot_restart_id is None:
            raise FleetError("Envoy hands over through shared memory, and /dev/shm is not writable")
        plan = scene.plan.envoy(old.plan.number + 1, _epoch(old) + 1)
        new = scene.members.new_envoy(plan)
        write_bootstrap(plan)
        say("envoy: starting a new one, which takes over the port")
        try:
            await arrive(new.child, scene.group, scene.limit_seconds)
        except FleetError:
            await self._ensure_a_listener(old)
            raise
        old.child.retire()
        scene.members.envoy = new
        cut = await self._unfinished() if await self._until_deserted(old, say) else 0
        self.cut += cut
        await old.child.stop(MARGIN_SECONDS)
        self._answer_for(old)
        lost = f", with {cut} request{'' if cut == 1 else 's'} cut" if cut else ""
        say(f"envoy: restarted{lost}; settings in {plan.bootstrap_path}")

    async def _until_deserted(self, old: Envoy, say: Say) -> int:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._scene.plan.options.drain_seconds
        port, is_reported = self._scene.plan.ingress.port, False
        while True:
            # Its admin port is closed, and its successor must not ask it (see `FleetPlan`).
            left = 0 if old.child.pid is None else connections(old.child.pid, port)
            if left == 0 or loop.time() >= deadline:
                return left
            if not is_reported:
                is_reported = True
                say(f"envoy: the new one serves; the old one still has {left} connections")
            await asyncio.sleep(probe.POLL_SECONDS)

    async def _unfinished(self) -> int:
        """Estimate the old Envoy's unfinished requests, as it cannot be asked: those of all
        workers, except the new Envoy's. Idle connections have none.
        """
        scene = self._scene
        addresses = [one.plan.address for one in scene.members.workers]
        try:
            before = [await scene.active(POOL, one) for one in addresses]
            pages = [await probe.request(one, "/metrics") for one in addresses]
            after = [await scene.active(POOL, one) for one in addresses]
        except probe.NoReplyError:
            return 0
        at_workers = sum(float(one) for page in pages for one in _UNFINISHED.findall(page.body))
        # The larger one: requests that arrive between the looks are not the old Envoy's.
        return max(0, int(at_workers) - max(sum(before), sum(after)))

    def _answer_for(self, gone: Envoy) -> None:
        """Receive the messages for an Envoy that has ended. Its successor sends it one order to
        end, waits ten seconds for a socket, and aborts if none receives it (measured).
        """
        path = self._scene.plan.hot_restart_socket(_epoch(gone))
        if self._address_of_the_gone is not None:
            self._address_of_the_gone.close()  # of an earlier Envoy
        if path is not None:
            path.unlink(missing_ok=True)
            self._address_of_the_gone = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._address_of_the_gone.bind(str(path))

    async def _ensure_a_listener(self, old: Envoy) -> None:
        """Restore the listener of the port if its Envoy died just after it took over."""
        try:
            await probe.request(self._scene.plan.ingress, "/v1/models")
        except probe.NoReplyError:
            await old.child.renew(0.0, MARGIN_SECONDS)


def _epoch(envoy: Envoy) -> int:
    return 0 if envoy.child.deaths else envoy.plan.epoch


class RollingRestart:
    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._envoy = EnvoyRestart(scene)
        self._runs = {
            FleetPart.PICKER: PickerRestart(scene).run,
            FleetPart.ENVOY: self._envoy.run,
            FleetPart.WORKERS: WorkerRestart(scene).run,
        }
        self._busy: str | None = None

    async def obey(self, order: Order, say: Say) -> int:
        """Execute an order; return how many requests it cut. Raises `FleetError` for the first part
        that fails to return, and while another restart is in progress.
        """
        if self._busy is not None:
            raise FleetError(f"a restart of {self._busy} is under way; wait until it is done")
        self._busy = ", ".join(part.value for part in order.restart)
        begun, counts = asyncio.get_running_loop().time(), Counter[str]()
        cut_before = self._envoy.cut
        try:
            for part in order.restart:
                # The counters of a new Envoy start at 0.
                before = {} if part is FleetPart.ENVOY else await self._counts()
                await self._runs[part](say)
                counts.update(Counter(await self._counts()) - Counter(before))
            cut = self._envoy.cut - cut_before
            seconds = asyncio.get_running_loop().time() - begun
            requests, failed, unpicked = (counts[name] for name in _COUNTED)
            say(
                f"done in {seconds:.1f} s: {requests} requests, {failed} with a status of 5xx, "
                f"{unpicked} without the picker, {cut} cut"
            )
            return cut
        finally:
            self._busy = None

    async def _counts(self) -> Mapping[str, int]:
        try:
            return await admin.stats(self._scene.members.envoy.plan.admin, _COUNTED)
        except probe.NoReplyError:
            return {}
