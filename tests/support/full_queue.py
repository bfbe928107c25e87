"""What a full queue does with a newcomer, worked out from a plain list of all who wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from picker.flowcontrol.settings import BandSettings, FlowControlSettings
from picker.framework.flow import SharesCapacity

MOST = 64
CAPS = (
    "bytes in all",
    "requests in all",
    "memory in all",
    "bytes of its priority",
    "requests of its priority",
)


@dataclass(frozen=True)
class Place:
    """Somebody who waits, or wants to; the greater `number` came later."""

    number: int
    band: int
    flow: str
    size_bytes: int
    held_bytes: int = 0

    def takes(self, cap: str) -> int:
        """Of what the cap is about."""
        of = {"bytes": self.size_bytes, "memory": self.held_bytes, "requests": 1}
        return of[cap.split()[0]]


def settings_of(chosen: FlowControlSettings, band: int) -> BandSettings:
    """Of a band that may not exist yet."""
    default = chosen.default_negative_band if band < 0 else chosen.default_band
    return chosen.bands.get(band, default)


def exceeded(
    chosen: FlowControlSettings, waiting: Sequence[Place], newcomer: Place
) -> Sequence[str]:
    """The caps that would be, in the order in which they are told."""
    own = [one for one in waiting if one.band == newcomer.band]
    band = settings_of(chosen, newcomer.band)
    found = (
        (waiting, chosen.max_bytes),
        (waiting, chosen.max_requests),
        (waiting, chosen.max_memory_bytes),
        (own, band.max_bytes),
        (own, band.max_requests),
    )
    return [
        cap
        for cap, (others, most) in zip(CAPS, found, strict=True)
        if most is not None and sum(one.takes(cap) for one in (*others, newcomer)) > most
    ]


def displaced(
    chosen: FlowControlSettings, waiting: Sequence[Place], newcomer: Place
) -> Sequence[Place] | None:
    """Who goes so that the newcomer may wait; None when it is refused."""
    left, gone = list(waiting), list[Place]()
    while caps := exceeded(chosen, left, newcomer):
        last = _last(chosen, left, newcomer, caps[-1]) if len(gone) < MOST else None
        if last is None:
            return None
        left.remove(last)
        gone.append(last)
    return gone


def _last(
    chosen: FlowControlSettings, waiting: Sequence[Place], newcomer: Place, cap: str
) -> Place | None:
    lower = [one.band for one in waiting if one.band < newcomer.band]
    losing = min(lower) if lower and cap.endswith("all") else newcomer.band
    members = [one for one in waiting if one.band == losing]
    fairness: object = settings_of(chosen, losing).fairness.for_band(losing)
    if not isinstance(fairness, SharesCapacity):
        return None if losing == newcomer.band else max(members, key=lambda one: one.number)
    held: Mapping[str, float] = {
        flow: sum(one.takes(cap) for one in members if one.flow == flow) / fairness.weight(flow)
        for flow in {one.flow for one in members}
    }
    if not held:
        return None
    greatest = min(held, key=lambda flow: (-held[flow], flow))
    if losing == newcomer.band:
        more = newcomer.takes(cap) / fairness.weight(newcomer.flow)
        if held.get(newcomer.flow, 0.0) + more >= held[greatest]:
            return None
    return max((one for one in members if one.flow == greatest), key=lambda one: one.number)
