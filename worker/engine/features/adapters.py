"""LoRA adapters: read from files into the host's memory, and from there into slots of the device.

An adapter keeps its slot while a sequence runs with it, then until it is the least recently used
and another wants the slot. Only as many adapters are read as could have a slot, so that no two
evict each other again and again.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from enum import Enum, auto
from operator import itemgetter
from typing import Any

from worker.engine.features.interface import EngineState, Feature
from worker.engine.sequences.planning import StepInFlight
from worker.engine.sequences.sequence import Sequence
from worker.errors import IntegrityError
from worker.types import Adapter, AdapterStats


class Access(Enum):
    READY = auto()  # in a slot, or there is one for it
    READING = auto()
    NO_SLOT = auto()
    BROKEN = auto()  # its files cannot be used: see `AdapterSlots.error`


class AdapterSlots:
    """Sole owner of what is in the slots and in the host's memory; pure except for `read`, which
    begins to read an adapter. `users` are the numbers of adapters that sequences run with.
    """

    def __init__(
        self, num_slots: int, num_held: int, read: Callable[[Adapter], Future[Any]]
    ) -> None:
        self._free = list(reversed(range(num_slots)))
        self._num_held = num_held
        self._read = read
        self._slots: OrderedDict[int, tuple[int, Adapter]] = OrderedDict()  # the last used last
        self._held: OrderedDict[int, Future[Any]] = OrderedDict()  # likewise
        self._puts: dict[int, Any] = {}
        self._given_up: set[int] = set()

    @property
    def loaded(self) -> tuple[str, ...]:
        return tuple(adapter.name for _, adapter in sorted(self._slots.values(), key=itemgetter(0)))

    def is_missing(self, adapter: Adapter) -> bool:
        held = self._held.get(adapter.number)
        return adapter.number not in self._slots and (held is None or not held.done())

    def find(self, digest: str) -> Adapter | None:
        loaded = (adapter for _, adapter in self._slots.values() if digest)
        return next((adapter for adapter in loaded if adapter.digest == digest), None)

    def load(self, adapter: Adapter) -> Future[Any]:
        """Read an adapter into the host's memory, whether or not a sequence wants it."""
        held = self._held.get(adapter.number)
        if held is None:
            self._make_room()
            held = self._held[adapter.number] = self._read(adapter)
        self._held.move_to_end(adapter.number)
        return held

    def place(self, adapter: Adapter, users: Collection[int]) -> Access:
        """Return whether an adapter could run next; begin to read it if only that is missing."""
        number = adapter.number
        if number in self._slots:
            return Access.READY
        num_reading = sum(not held.done() for held in self._held.values())
        num_spare = len(self._free) + sum(other not in users for other in self._slots)
        held = self._held.get(number)
        if num_spare == 0 or (held is None and num_spare <= num_reading):
            return Access.NO_SLOT
        held = self.load(adapter)
        if not held.done():
            return Access.READING
        return Access.READY if held.exception() is None else Access.BROKEN

    def error(self, adapter: Adapter) -> str:
        """Return why the adapter's files are unusable. They are read again when next wanted."""
        return str(self._held.pop(adapter.number).exception())

    def take(self, adapter: Adapter, users: Collection[int]) -> int:
        """Return the slot of a ready adapter. The adapter keeps the slot while it is one of
        `users`.
        """
        number = adapter.number
        if number not in self._slots:
            slot = self._free.pop() if self._free else self._evict(users)
            self._puts[slot] = self._held[number].result()
            self._slots[number] = (slot, adapter)
        self._slots.move_to_end(number)
        return self._slots[number][0]

    def take_puts(self) -> tuple[tuple[int, Any], ...]:
        """Return the adapters to put into slots before the next step, each once."""
        puts, self._puts = tuple(self._puts.items()), {}
        return puts

    def give_up(self, adapter: Adapter) -> None:
        """Accept no more requests for an adapter; `prune` frees its memory."""
        self._given_up.add(adapter.number)

    @property
    def has_given_up(self) -> bool:
        return bool(self._given_up)

    def prune(self, wanted: Collection[int]) -> None:
        """Free the adapters that were given up, except those that unfinished requests want."""
        for number in self._given_up - set(wanted):
            self._given_up.remove(number)
            self._held.pop(number, None)
            slot, _ = self._slots.pop(number, (None, None))
            if slot is not None:
                self._puts[slot] = None
                self._free.append(slot)

    def check_integrity(self, users: Collection[int]) -> None:
        taken = [slot for slot, _ in self._slots.values()]
        if len({*taken, *self._free}) != len(taken) + len(self._free):
            raise IntegrityError("a slot has two adapters, or is free and has one")
        if not set(users) <= set(self._slots):
            raise IntegrityError("a sequence runs with an adapter that has no slot")

    def _evict(self, users: Collection[int]) -> int:
        number = next(number for number in self._slots if number not in users)
        return self._slots.pop(number)[0]

    def _make_room(self) -> None:
        # Adapters that are being read stay, even if they are too many.
        done = [number for number, held in self._held.items() if held.done()]
        for number in done[: max(0, len(self._held) + 1 - self._num_held)]:
            del self._held[number]


class Adapters(Feature):
    name = "adapters"

    def __init__(self, slots: AdapterSlots) -> None:
        self.slots = slots
        self._without_slot: list[Sequence] = []  # in this walk along the line
        self._broken: list[tuple[Sequence, str]] = []

    def attach(self, state: EngineState) -> None:
        self._live = state.live
        self._max_bypasses = state.limits.max_bypasses

    def waits(self, sequence: Sequence) -> bool:
        adapter = sequence.request.adapter
        return adapter is not None and self.slots.is_missing(adapter)

    def begin_admission(self) -> None:
        self._without_slot = []
        if self.slots.has_given_up:
            self._prune()

    def may_join(self, sequence: Sequence) -> bool:
        """True if the adapter is in a slot or can get one. An adapter without a slot is overtaken
        `max_bypasses` times at most by sequences with other adapters.
        """
        adapter = sequence.request.adapter
        if adapter is None:
            return True
        if any(
            other.priority < sequence.priority or other.num_bypassed >= self._max_bypasses
            for other in self._without_slot
        ):
            return False
        place = self.slots.place(adapter, self._live.running_adapters())
        if place is Access.NO_SLOT:
            self._without_slot.append(sequence)
        elif place is Access.BROKEN:
            self._broken.append((sequence, self.slots.error(adapter)))
        return place is Access.READY

    def admitted(self, sequence: Sequence) -> None:
        adapter = sequence.request.adapter
        if adapter is not None:
            sequence.adapter_slot = self.slots.take(adapter, self._live.running_adapters())
            for other in self._without_slot:
                other.num_bypassed += 1

    def take_failed(self) -> Seq[tuple[Sequence, str]]:
        broken, self._broken = self._broken, []
        return broken

    def adapter_puts(self) -> tuple[tuple[int, Any], ...]:
        return self.slots.take_puts()

    def give_up(self, adapter: Adapter) -> None:
        """Free an adapter as soon as no request wants it."""
        self.slots.give_up(adapter)
        self._prune()

    def _prune(self) -> None:
        wanted = (s.request.adapter for s in self._live)
        self.slots.prune({adapter.number for adapter in wanted if adapter is not None})

    def stats(self) -> dict[str, Any]:
        loaded = self.slots.loaded
        wanted = (s.request.adapter for s in self._live.waiting)
        awaited = {a.name: None for a in wanted if a is not None and a.name not in loaded}
        return {"adapters": AdapterStats(loaded, tuple(awaited))}

    def check_integrity(self, in_flight: Iterable[StepInFlight]) -> None:
        self.slots.check_integrity(self._live.running_adapters())
