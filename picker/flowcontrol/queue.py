"""The waiting requests: priority bands, their flows, and the caps on both.

Each tenant (fairness id) has a flow in a band, a heap of its requests by the rank that the ordering
policy gave each on arrival; the fairness policy names the flow whose first request goes next. A
request waits in the band of its priority, else in the nearest lower one, so an unknown priority
promotes no request; if there is no lower band, one is created, and removed after some idle time.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator

from picker.flowcontrol.band import Band
from picker.flowcontrol.capacity import Cap
from picker.flowcontrol.settings import BandSettings, FlowControlSettings
from picker.framework.flow import QueuedRequest
from picker.types import Usage

FLOW_MEMORY_SECONDS = 300.0
MAX_IDLE_FLOWS = 10_000  # per band; clients can invent fairness ids
MAX_DYNAMIC_BANDS = 128  # objectives can have any priority


class FlowQueue:
    """Owns the waiting requests and bands; `forgotten` receives a lost flow's band and name."""

    def __init__(
        self,
        settings: FlowControlSettings,
        forgotten: Callable[[int, str], None],
        wanted: Iterable[int] = (),
    ) -> None:
        self._settings = settings
        self._forgotten = forgotten
        self._wanted = frozenset(wanted)
        self._bands: dict[int, Band] = {}
        self._band_of: dict[int, Band] = {}  # by sequence number of a waiting request
        self._ascending: list[int] = []
        self.priorities: tuple[int, ...] = ()  # highest first; replaced when bands change
        self.num_requests = 0
        self.num_bytes = 0
        self.held_bytes = 0  # memory
        self._adjust_bands()

    def __iter__(self) -> Iterator[Band]:
        return map(self._bands.__getitem__, self.priorities)

    def use(self, settings: FlowControlSettings, now_seconds: float) -> None:
        """Switch to other settings. Requests keep their order, even above the new caps."""
        before, band_of, self._settings = self._bands, self._band_of, settings
        waiting = [item for band in before.values() for item in band]
        keep = self._in_use()
        self._bands, self._band_of = {}, {}
        for priority, band in before.items():
            adapted = band.adapted(self._band_settings(priority))
            if adapted is not None:
                self._bands[priority] = adapted
        self._adjust_bands(keep)
        for item in sorted(waiting, key=lambda one: one.sequence):
            old, new = band_of[item.sequence], self.band_for(item.request.priority)
            self._band_of[item.sequence] = new
            if old is new:
                continue
            if self._bands.get(old.priority) is old:
                old.delete(item, now_seconds)
            new.insert(item)
        for priority, band in before.items():
            new = self._bands.get(priority, band)
            if new is not band:
                new.remember(band, now_seconds)

    def want(self, priorities: Iterable[int]) -> None:
        self._wanted = frozenset(priorities)
        self._adjust_bands(self._in_use())

    def band_for(self, priority: int) -> Band:
        band = self._bands.get(priority)
        if band is not None:
            return band
        ascending = self._ascending
        place = bisect_left(ascending, priority)
        if place:
            return self._bands[ascending[place - 1]]
        if len(ascending) - len(self._settings.bands) > MAX_DYNAMIC_BANDS:
            return self._bands[ascending[0]]
        self._adjust_bands((*ascending, priority))
        return self._bands[priority]

    def excess(self, item: QueuedRequest, band: Band) -> dict[Cap, int]:
        """Return the amount by which `item` would exceed each cap that it exceeds."""
        every, own = self._settings, band.settings
        sizes = (
            (Cap.BYTES, self.num_bytes + item.size_bytes, every.max_bytes),
            (Cap.REQUESTS, self.num_requests + 1, every.max_requests),
            (Cap.MEMORY, self.held_bytes + item.held_bytes, every.max_memory_bytes),
            (Cap.BAND_BYTES, band.num_bytes + item.size_bytes, own.max_bytes),
            (Cap.BAND_REQUESTS, band.num_requests + 1, own.max_requests),
        )
        return {cap: size - most for cap, size, most in sizes if most is not None and size > most}

    def never_fits(self, item: QueuedRequest, priority: int) -> tuple[int, int] | None:
        """Return the size of `item` and the limit that it exceeds even alone; None: it fits."""
        every, own = self._settings, self.band_for(priority).settings
        for size, limit in (
            (item.size_bytes, own.max_bytes),
            (item.size_bytes, every.max_bytes),
            (item.held_bytes, every.max_memory_bytes),
        ):
            if limit is not None and size > limit:
                return size, limit
        return None

    def push(self, item: QueuedRequest, band: Band) -> None:
        """Add a waiting request, without a check of the caps."""
        self._band_of[item.sequence] = band
        self.num_requests += 1
        self.num_bytes += item.size_bytes
        self.held_bytes += item.held_bytes
        band.insert(item)

    def remove(self, item: QueuedRequest, now_seconds: float, is_dispatched: bool = False) -> None:
        band = self._band_of.pop(item.sequence)
        if is_dispatched:
            # Before `delete`: by contract the policy learns of the dispatch before the next head.
            band.fairness.dispatched(item, now_seconds)
        self.num_requests -= 1
        self.num_bytes -= item.size_bytes
        self.held_bytes -= item.held_bytes
        band.delete(item, now_seconds)
        self._bound(band)

    def pass_by(self, item: QueuedRequest, band: Band, now_seconds: float) -> None:
        band.pass_by(item, now_seconds)
        self._bound(band)

    def completed(
        self, item: QueuedRequest, priority: int, usage: Usage | None, now_seconds: float
    ) -> None:
        band = self._bands.get(priority)
        if band is not None:
            band.fairness.completed(item, usage, now_seconds)

    def forget_idle(self, now_seconds: float) -> None:
        before = now_seconds - FLOW_MEMORY_SECONDS
        for band in self._bands.values():
            while band.idle and next(iter(band.idle.values())) <= before:
                self._forget_oldest(band)
        self._adjust_bands(self._in_use())

    @property
    def next_idle_seconds(self) -> float | None:
        oldest = [next(iter(band.idle.values())) for band in self._bands.values() if band.idle]
        return min(oldest) + FLOW_MEMORY_SECONDS if oldest else None

    def check_integrity(self) -> None:
        for band in self._bands.values():
            items = list(band)
            held = (len(items), sum(item.size_bytes for item in items))
            if held != (band.num_requests, band.num_bytes):
                raise AssertionError(f"band {band.priority} holds {held} and counts otherwise")
            if any(self._band_of.get(item.sequence) is not band for item in items):
                raise AssertionError(f"band {band.priority} holds what is not its own")
            for flow in band.flows.values():
                if not len(flow.heap) or flow.name in band.idle:
                    raise AssertionError(f"the flow {flow.name!r} is listed although it is idle")
                if flow.num_bytes != sum(item.size_bytes for item in flow.heap):
                    raise AssertionError(f"the flow {flow.name!r} counts wrong bytes")
            band.backlogs.check_integrity(items)
        counted = [(band.num_requests, band.num_bytes) for band in self._bands.values()]
        sums = (sum(one for one, _ in counted), sum(one for _, one in counted))
        if sums != (self.num_requests, self.num_bytes) or sums[0] != len(self._band_of):
            raise AssertionError(f"all bands hold {sums}, the queue counts otherwise")
        if self.held_bytes != sum(item.held_bytes for band in self for item in band):
            raise AssertionError(f"{self.held_bytes} bytes of memory are counted, not what is held")
        if sorted(self._bands) != self._ascending or 0 not in self._bands:
            raise AssertionError(f"bands {sorted(self._bands)} are shown as {self._ascending}")

    def _adjust_bands(self, keep: Iterable[int] = ()) -> None:
        configured = self._settings.bands
        extra = sorted((self._wanted | {0, *keep}) - configured.keys(), key=abs)
        staying = {0, *keep} - configured.keys()
        room = MAX_DYNAMIC_BANDS + 1 - len(staying)
        added = [priority for priority in extra if priority not in staying][: max(0, room)]
        needed = {*configured, *staying, *added}
        for priority in self._bands.keys() - needed:
            for name in self._bands.pop(priority).idle:
                self._forgotten(priority, name)
        for priority in needed - self._bands.keys():
            chosen = self._band_settings(priority)
            fairness = chosen.fairness.for_band(priority)
            self._bands[priority] = Band(priority, chosen, fairness)
        if sorted(needed) != self._ascending:
            self._ascending = sorted(needed)
            self.priorities = tuple(reversed(self._ascending))

    def _in_use(self) -> list[int]:
        return [priority for priority, band in self._bands.items() if band.idle or band.flows]

    def _band_settings(self, priority: int) -> BandSettings:
        settings = self._settings
        below = priority < 0
        default = settings.default_negative_band if below else settings.default_band
        return settings.bands.get(priority, default)

    def _bound(self, band: Band) -> None:
        if len(band.idle) > MAX_IDLE_FLOWS:
            self._forget_oldest(band)

    def _forget_oldest(self, band: Band) -> None:
        name = next(iter(band.idle))
        del band.idle[name]
        band.fairness.forget(name)
        self._forgotten(band.priority, name)
