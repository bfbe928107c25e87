"""The load of all replicas of a picker: the totals that each of them reports to the others.

Every replica reports its totals once a second, in the exchange of loads under way, by its own name:
its sums need no agreement on when an interval begins. The growth since the last look counts, from
the first report that arrives, so a replica that was silent adds nothing at its return.
All replicas plan, and the first by name writes. Names begin with the time of the start: a new
replica, which has seen few intervals, is not the first.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Final

from picker.framework.attributes import EndpointLoad
from picker.planner.load_window import LoadWindow
from picker.planner.planner import Sums

_HERE: Final = "here"  # so that a replica without requests is known
_LEADS: Final = "leads"  # no standby
_WAITING: Final = "waiting"
_ARRIVALS: Final = "arrivals"
_SUMS: Final = tuple(one.name for one in fields(LoadWindow) if one.name != _ARRIVALS)
_PARTS: Final = tuple(one.name for one in fields(Sums))
_UNITS: Final = {"gaps": 1_000_000}  # in a second; other sums are whole numbers
_WORD: Final = 2**40  # the most that a field of a load may hold
_Totals = dict[str, int]


class SharedLoad:
    """Owns the totals of this replica, and those that the other ones reported last."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._own = LoadWindow()
        self._reported: Mapping[str, EndpointLoad] = {}
        self._elsewhere: Mapping[str, EndpointLoad] = {}
        self._others: dict[str, _Totals] = {}  # at the last look
        self.waiting_elsewhere = 0

    @property
    def is_first(self) -> bool:
        """Return whether this replica has the first name of those that lead."""
        return all(self._name < name for name, one in self._others.items() if one.get(_LEADS))

    @property
    def num_others(self) -> int:
        return len(self._others)

    @property
    def own_loads(self) -> Mapping[str, EndpointLoad]:
        return self._reported

    def set_loads_elsewhere(self, loads: Mapping[str, EndpointLoad]) -> None:
        self._elsewhere = loads

    def exchange(self, own: LoadWindow, waiting: int, leads: bool) -> LoadWindow:
        """Report `own`, the requests since the last call; return those of all replicas."""
        self._own = self._own.plus(own)
        totals = _totals(self._own) | {_HERE: 1, _LEADS: int(leads), _WAITING: waiting}
        self._reported = {f"{self._name}/{key}": _load(one) for key, one in totals.items() if one}
        others = self._read()
        self.waiting_elsewhere = sum(one.get(_WAITING, 0) for one in others.values())
        for name, now in others.items():
            before = self._others.get(name)
            if before is not None:
                own = own.plus(_growth(before, now))
        self._others = others
        return own

    def _read(self) -> dict[str, _Totals]:
        found: dict[str, _Totals] = {}
        for key, load in self._elsewhere.items():
            name, _, what = key.partition("/")
            found.setdefault(name, {})[what] = load.requests + load.tokens * _WORD
        return {name: totals for name, totals in found.items() if totals.get(_HERE)}


def _load(number: int) -> EndpointLoad:
    return EndpointLoad(number % _WORD, number // _WORD)


def _totals(window: LoadWindow) -> _Totals:
    totals = {_ARRIVALS: window.arrivals}
    for name in _SUMS:
        sums, unit = getattr(window, name), _UNITS.get(name, 1)
        numbers = (sums.count, sums.total * unit, sums.squares * unit**2)
        totals |= {f"{name} {part}": int(one) for part, one in zip(_PARTS, numbers, strict=True)}
    return totals


def _growth(before: _Totals, now: _Totals) -> LoadWindow:
    def grown(key: str) -> int:
        return max(0, now.get(key, 0) - before.get(key, 0))

    def sums(name: str) -> Sums:
        unit = _UNITS.get(name, 1)
        count, total, squares = (grown(f"{name} {part}") for part in _PARTS)
        return Sums(count, total / unit, squares / unit**2)

    return LoadWindow(grown(_ARRIVALS), *map(sums, _SUMS))
