"""The waiting requests: priority bands, the flows in them, and the caps on all of these.

Theory of operation. A band is an integer priority, the higher the sooner. In it every tenant
(fairness id) has a flow, a heap of its requests ordered by what the band's ordering policy said of
each on arrival, then by arrival. The band's fairness policy is notified of every change of a flow's
first request and names the flow whose first request goes next; which band may go at all is not
decided here.

A request's band is the one of its priority, else the nearest lower one: asking for an unknown
priority promotes no request. Where none is lower, one is made. So bands are those that are
configured, 0, those that objectives name, and those that were made; the latter two go when no
objective names them and their flows have been idle for as long as a flow is remembered.

A request takes its capacity when it is pushed and gives it back when it is taken or removed, at
once and whatever its place in a heap does: the counters count what waits, exactly. A flow in which
nothing waits costs a dictionary entry and what the fairness policy keeps of it, for five minutes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence

from picker.flowcontrol.band import Band
from picker.flowcontrol.capacity import Cap, displaced_by
from picker.flowcontrol.settings import BandSettings, FlowControlSettings
from picker.framework.flow import QueuedRequest
from picker.types import Usage

FLOW_MEMORY_SECONDS = 300.0
MAX_IDLE_FLOWS = 10_000  # of a band; clients can invent fairness ids
MAX_DYNAMIC_BANDS = 128


class FlowQueue:
    """Owns what waits, the bands, and what fairness policies remember. `forgotten` is called with
    the band and the name of each flow that is not remembered any more.
    """

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
        self._band_of: dict[int, Band] = {}  # by sequence number of what waits
        self._ascending: list[int] = []
        self.priorities: tuple[int, ...] = ()  # highest first; replaced when bands change
        self.num_requests = 0
        self.num_bytes = 0
        self.held_bytes = 0  # memory
        self._adjust_bands()

    def __iter__(self) -> Iterator[Band]:
        """The bands, highest first."""
        return map(self._bands.__getitem__, self.priorities)

    def use(self, settings: FlowControlSettings, now_seconds: float) -> None:
        """Go on by other settings. All that waits keeps its place among its like, also where there
        is more of it than the new caps allow; a fairness policy that is the same object as before
        keeps what it remembers.
        """
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
        """These have a band of their own from now on; others that have none configured only while
        something of them is remembered.
        """
        self._wanted = frozenset(priorities)
        self._adjust_bands(self._in_use())

    def band_for(self, priority: int) -> Band:
        """Where a request of `priority` waits."""
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

    def cap_exceeded(self, item: QueuedRequest, band: Band) -> Cap | None:
        """The first cap that leaves no room for `item`."""
        return next(iter(self._excess(item, band)), None)

    def never_fits(self, item: QueuedRequest, priority: int) -> tuple[int, int] | None:
        """The bytes that `item` takes and the most that one in the band of `priority` may, where
        these are less; None: it fits when nothing else waits.
        """
        every, own = self._settings, self.band_for(priority).settings
        for size, most in (
            (item.size_bytes, own.max_bytes),
            (item.size_bytes, every.max_bytes),
            (item.held_bytes, every.max_memory_bytes),
        ):
            if most is not None and size > most:
                return size, most
        return None

    def displaced_by(self, item: QueuedRequest, band: Band) -> Sequence[QueuedRequest]:
        """The requests to evict so that `item`, for which there is no room, may wait in `band`;
        empty when it must be rejected.
        """
        return displaced_by(item, band, self, self._excess(item, band))

    def push(self, item: QueuedRequest, band: Band) -> None:
        """`item` waits from now on. Caps are not looked at."""
        self._band_of[item.sequence] = band
        self.num_requests += 1
        self.num_bytes += item.size_bytes
        self.held_bytes += item.held_bytes
        band.insert(item)

    def remove(self, item: QueuedRequest, now_seconds: float) -> None:
        """`item` waits no more, and was not let in."""
        band = self._band_of.pop(item.sequence)
        self.num_requests -= 1
        self.num_bytes -= item.size_bytes
        self.held_bytes -= item.held_bytes
        band.delete(item, now_seconds)
        self._bound(band)

    def take(self, item: QueuedRequest, now_seconds: float) -> None:
        """`item` is let in."""
        self._band_of[item.sequence].fairness.dispatched(item, now_seconds)
        self.remove(item, now_seconds)

    def pass_by(self, item: QueuedRequest, band: Band, now_seconds: float) -> None:
        """`item` is let in without having waited; nothing of its flow waits."""
        band.pass_by(item, now_seconds)
        self._bound(band)

    def completed(
        self, item: QueuedRequest, priority: int, usage: Usage | None, now_seconds: float
    ) -> None:
        """`item`, let in from the band `priority`, is over."""
        band = self._bands.get(priority)
        if band is not None:
            band.fairness.completed(item, usage, now_seconds)

    def ahead_of(self, priority: int) -> int:
        """How many wait in the band `priority` and above."""
        return sum(band.num_requests for p, band in self._bands.items() if p >= priority)

    def forget_idle(self, now_seconds: float) -> None:
        """Forget flows of which nothing was seen for long, and bands without use."""
        before = now_seconds - FLOW_MEMORY_SECONDS
        for band in self._bands.values():
            while band.idle and next(iter(band.idle.values())) <= before:
                self._forget_oldest(band)
        self._adjust_bands(self._in_use())

    @property
    def next_idle_seconds(self) -> float | None:
        """When `forget_idle` has something to do."""
        oldest = [next(iter(band.idle.values())) for band in self._bands.values() if band.idle]
        return min(oldest) + FLOW_MEMORY_SECONDS if oldest else None

    def check_integrity(self) -> None:
        """Raise `AssertionError` when the books do not agree."""
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

    def _excess(self, item: QueuedRequest, band: Band) -> dict[Cap, int]:
        """How much there would be too much of with `item`, where it is anything."""
        every, own, size = self._settings, band.settings, item.size_bytes
        found = {}
        if every.max_bytes is not None and self.num_bytes + size > every.max_bytes:
            found[Cap.BYTES] = self.num_bytes + size - every.max_bytes
        if every.max_requests is not None and self.num_requests + 1 > every.max_requests:
            found[Cap.REQUESTS] = self.num_requests + 1 - every.max_requests
        held, most = self.held_bytes + item.held_bytes, every.max_memory_bytes
        if most is not None and held > most:
            found[Cap.MEMORY] = held - most
        if band.num_bytes + size > own.max_bytes:
            found[Cap.BAND_BYTES] = band.num_bytes + size - own.max_bytes
        if band.num_requests + 1 > own.max_requests:
            found[Cap.BAND_REQUESTS] = band.num_requests + 1 - own.max_requests
        return found

    def _adjust_bands(self, keep: Iterable[int] = ()) -> None:
        """Have the bands that are needed, and no others."""
        configured = self._settings.bands
        extra = sorted((self._wanted | {0, *keep}) - configured.keys(), key=abs)
        staying = {0, *keep} - configured.keys()
        room = MAX_DYNAMIC_BANDS + 1 - len(staying)
        added = [priority for priority in extra if priority not in staying][: max(0, room)]
        needed = {*configured, *staying, *added}
        for priority in self._bands.keys() - needed:
            self._drop(self._bands.pop(priority))
        for priority in needed - self._bands.keys():
            self._bands[priority] = Band(priority, self._band_settings(priority))
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

    def _drop(self, band: Band) -> None:
        for name in band.idle:
            self._forgotten(band.priority, name)

    def _bound(self, band: Band) -> None:
        if len(band.idle) > MAX_IDLE_FLOWS:
            self._forget_oldest(band)

    def _forget_oldest(self, band: Band) -> None:
        name = next(iter(band.idle))
        del band.idle[name]
        band.fairness.forget(name)
        self._forgotten(band.priority, name)
