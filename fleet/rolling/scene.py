"""What a restart works with, and what it waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from fleet import probe
from fleet.envoy import admin
from fleet.envoy.settings import SocketAddress
from fleet.errors import FleetError
from fleet.members import Members, Picker
from fleet.plan import PickerPlan, Plan
from fleet.rotation import Rotation
from picker.admin.views import EndpointsView

MARGIN_SECONDS = 5.0  # for a process to end in, beyond what it had under way


@dataclass(frozen=True, slots=True)
class Scene:
    """A running fleet. New processes run in `group`; `moved` hears of a picker that takes over."""

    plan: Plan
    members: Members
    rotation: Rotation
    group: asyncio.TaskGroup
    moved: Callable[[PickerPlan], None]

    @property
    def limit_seconds(self) -> float:
        """How long anything may take to come."""
        return self.plan.options.startup_seconds

    async def until(self, condition: Callable[[], Awaitable[bool]], complaint: str) -> None:
        """Wait for a condition, which may raise `NoReplyError` for "not yet".

        Raises `FleetError` with the complaint when it does not come.
        """
        try:
            async with asyncio.timeout(self.limit_seconds):
                await probe.until_true(condition)
        except TimeoutError as error:
            raise FleetError(f"{complaint} within {self.limit_seconds:g} s") from error

    async def envoy_uses(self, cluster: str, address: SocketAddress) -> bool:
        """Envoy has found an endpoint healthy."""
        found = await admin.hosts(self.members.envoy.plan.admin, cluster)
        return address in found and found[address].is_healthy

    async def envoy_forgot(self, cluster: str, address: SocketAddress) -> bool:
        """Envoy sends an endpoint nothing new."""
        return address not in await admin.hosts(self.members.envoy.plan.admin, cluster)

    async def active(self, cluster: str, address: SocketAddress) -> int:
        """Requests that Envoy has under way at an endpoint."""
        found = await admin.hosts(self.members.envoy.plan.admin, cluster)
        return found[address].active if address in found else 0

    async def picker_forgot(self, address: SocketAddress) -> bool:
        """The picker picks a worker no more."""
        return _shown(address) not in await _known(self.members.picker)

    async def picker_uses(self, address: SocketAddress) -> bool:
        """The picker has read a worker's metrics."""
        return (await _known(self.members.picker)).get(_shown(address), False)

    async def knows_as_much(self, new: Picker, old: Picker) -> bool:
        """The new picker has the pool of the old one, and metrics wherever that has them."""
        found = await _known(new)
        try:
            wanted = await _known(old)
        except probe.NoReplyError:  # it has just died: then what the new one knows has to do
            return bool(found)
        return found.keys() == wanted.keys() and all(
            found[address] for address, is_read in wanted.items() if is_read
        )


async def _known(picker: Picker) -> dict[str, bool]:
    """Of each endpoint of the picker's pool, whether its metrics have been read."""
    reply = await probe.request(picker.plan.http, "/endpoints")
    try:
        found = msgspec.json.decode(reply.body, type=EndpointsView)
    except msgspec.MsgspecError as error:
        raise probe.NoReplyError(str(error)) from error
    return {one.address: one.metrics is not None for one in found.endpoints}


def _shown(address: SocketAddress) -> str:
    return f"{address.host}:{address.port}"
