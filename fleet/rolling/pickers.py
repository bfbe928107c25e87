"""The restart of the picker."""

from __future__ import annotations

from pathlib import Path

from fleet.envoy.clusters import PICKER
from fleet.errors import FleetError
from fleet.members import Picker, Say, arrive
from fleet.plan import PORTS_OF_A_PICKER
from fleet.ports import free_ports, is_free
from fleet.rolling.scene import MARGIN_SECONDS, Scene

_HOST = "127.0.0.1"


class PickerRestart:
    """Replaces the picker by one beside it. Owns the ports that the last but one has left."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._spare: tuple[int, int, int] | None = None

    async def run(self, say: Say) -> None:
        """Raises `FleetError` when the new one does not come; then the old one goes on."""
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
            lambda: scene.envoy_forgot(PICKER, old.plan.ext_proc), "Envoy kept the old picker"
        )
        await old.child.stop(scene.plan.options.drain_seconds + MARGIN_SECONDS, MARGIN_SECONDS)
        self._spare = old.plan.ports
        say(f"picker: restarted{_whereabouts(new)}")

    async def _introduce(self, new: Picker, old: Picker) -> None:
        """Have Envoy find the new one healthy beside the old one."""
        scene = self._scene
        try:
            await scene.until(
                lambda: scene.knows_as_much(new, old), "the new picker did not get to know the pool"
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
        """Those of the last but one, so that ports alternate; others where they are taken."""
        spare = self._spare
        if spare is not None and all(is_free(_HOST, port) for port in spare):
            return spare
        found = free_ports(_HOST, PORTS_OF_A_PICKER, self._scene.plan.options.port + 1)
        return found[0], found[1], found[2]

    def _record(self, old: Picker) -> Path | None:
        """A file of its own, as long as the old one writes to the other."""
        first = self._scene.plan.options.record
        if first is None or old.plan.record != first:
            return first
        return first.with_stem(f"{first.stem}-2")


def _whereabouts(picker: Picker) -> str:
    plan = picker.plan
    recorded = "" if plan.record is None else f"; decisions are recorded in {plan.record}"
    return f" at {_HOST}:{plan.ext_proc.port}, metrics {plan.http.port}{recorded}"
