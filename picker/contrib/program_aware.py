"""program-aware-fairness: the least served program goes first, and long waits count.

A program is a fairness id, whatever the priorities of its requests. With the `strategy` las (least
attained service)

    score  = lasWeightService · (1 − norm(service)) + lasWeightHeadWait · norm(head's wait)
    norm   = (v − least) / (greatest − least) among the waiting flows of the band; 0.5 when these
             are equal
    service += prompt tokens + 2 · completion tokens, when a response reports them; it halves every
             lasHalfLifeSeconds

and with turn-priority, where a program is a session whose prompt grows with every turn,

    score  = turn + turnPriorityTimeWeight · seconds that the head has waited
    turn   = requests of the program that were dispatched, and the head; 1 when no request of the
             program was in flight for turnPriorityInactivitySeconds (0: no limit) before the head
             arrived, and always 1 without a fairness id

so that deep sessions go first, whose prompts are probably cached. The greatest score goes first,
among equal ones the least id. Sweeps, `evictionSweepSeconds` apart, forget programs that have had
no request for `evictionTtlSeconds` or, with las, whose service has faded to less than a token;
beyond 50,000 programs, the least recent one is forgotten at once.

Scores are relative, so a selection compares all waiting flows: O(n), once after each change. With
thousands of flows another policy is faster.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from picker.framework.flow import ProgramShare, QueuedRequest, Rank
from picker.framework.registry import NonNegativeFloat, Parameters, PluginType, PositiveFloat
from picker.types import DEFAULT_FAIRNESS_ID, Usage

COMPLETION_WEIGHT = 2
MIN_SERVICE_TOKENS = 1.0
EVEN = 0.5
MAX_PROGRAMS = 50_000  # clients can invent them faster than they are swept
_MAX_HALVINGS = 60.0  # beyond it all services are rescaled


class ProgramAwareFairnessParameters(Parameters, frozen=True):
    strategy: Literal["las", "turn-priority"] = "las"
    eviction_ttl_seconds: PositiveFloat = 3600.0
    eviction_sweep_seconds: PositiveFloat = 300.0
    las_weight_service: NonNegativeFloat = 0.8
    las_weight_head_wait: NonNegativeFloat = 0.2
    las_half_life_seconds: PositiveFloat = 60.0
    turn_priority_time_weight: NonNegativeFloat = 0.05
    turn_priority_inactivity_seconds: NonNegativeFloat = 120.0

    @property
    def counts_turns(self) -> bool:
        return self.strategy == "turn-priority"

    @property
    def without_effect(self) -> Mapping[str, str]:
        other = "las" if self.counts_turns else "turnPriority"
        names = (name for name in self.__struct_encode_fields__ if name.startswith(other))
        return dict.fromkeys(names, f"strategy is {self.strategy}")


@dataclass(slots=True)
class _Program:
    """The account of a program; its `service` is scaled as `ProgramLedger` says."""

    seen_at_seconds: float
    service: float = 0.0
    dispatched: int = 0
    in_flight: int = 0
    ended_at_seconds: float | None = None
    waited_seconds: float = 0.0


class ProgramLedger:
    """Accounts of programs, over all bands.

    Every program's service has halved equally often since the ledger's beginning, so later service
    is scaled up instead.
    """

    def __init__(self, parameters: ProgramAwareFairnessParameters) -> None:
        self._parameters = parameters
        self._programs: OrderedDict[str, _Program] = OrderedDict()  # least recently seen first
        self._begun_at_seconds: float | None = None
        self._last_halvings = 0.0
        self._swept_at_seconds = -math.inf
        self.changes = 0  # of services, so that bands know when to compare again

    def service(self, program: str) -> float:
        known = self._programs.get(program)
        return 0.0 if known is None else known.service

    def turn(self, program: str, arrived_at_seconds: float) -> int:
        """Return the turn of a waiting request that arrived at `arrived_at_seconds`."""
        known = self._programs.get(program)
        if known is None or program == DEFAULT_FAIRNESS_ID:
            return 1
        limit, ended = self._parameters.turn_priority_inactivity_seconds, known.ended_at_seconds
        if (
            limit
            and not known.in_flight
            and ended is not None
            and arrived_at_seconds - ended > limit
        ):
            return 1
        return known.dispatched + 1

    def shares(self) -> Mapping[str, ProgramShare]:
        scale = 0.5**self._last_halvings
        return {
            name: ProgramShare(one.service * scale, one.waited_seconds / max(1, one.dispatched))
            for name, one in self._programs.items()
        }

    def dispatched(self, item: QueuedRequest, now_seconds: float) -> None:
        program = self._seen(item.flow, now_seconds)
        program.dispatched += 1
        program.in_flight += 1
        self.changes += self._parameters.counts_turns
        program.waited_seconds += max(0.0, now_seconds - item.enqueued_at_seconds)
        self._sweep(now_seconds)

    def completed(self, item: QueuedRequest, usage: Usage | None, now_seconds: float) -> None:
        known = self._programs.get(item.flow)
        if known is not None:
            known.in_flight = max(0, known.in_flight - 1)
            known.ended_at_seconds = now_seconds
            self.changes += self._parameters.counts_turns
        if usage is None:
            return
        program = self._seen(item.flow, now_seconds)
        tokens = usage.prompt_tokens + COMPLETION_WEIGHT * usage.completion_tokens
        program.service += tokens * 2.0 ** self._halvings(now_seconds)
        self.changes += 1
        self._sweep(now_seconds)

    def _seen(self, name: str, now_seconds: float) -> _Program:
        program = self._programs.setdefault(name, _Program(now_seconds))
        program.seen_at_seconds = now_seconds
        self._programs.move_to_end(name)
        if len(self._programs) > MAX_PROGRAMS:
            self._programs.popitem(last=False)
        return program

    def _halvings(self, now_seconds: float) -> float:
        """Return the number of halvings since the ledger's beginning, which may be reset here."""
        if self._begun_at_seconds is None:
            self._begun_at_seconds = now_seconds
        halvings = (now_seconds - self._begun_at_seconds) / self._parameters.las_half_life_seconds
        if halvings <= _MAX_HALVINGS:
            self._last_halvings = halvings
            return halvings
        for program in self._programs.values():
            program.service *= 2.0 ** -min(halvings, 1000.0)
        self._begun_at_seconds, self._last_halvings = now_seconds, 0.0
        self.changes += 1
        return 0.0

    def _sweep(self, now_seconds: float) -> None:
        chosen = self._parameters
        if now_seconds - self._swept_at_seconds < chosen.eviction_sweep_seconds:
            return
        self._swept_at_seconds = now_seconds
        least = MIN_SERVICE_TOKENS * 2.0 ** self._halvings(now_seconds)
        since = now_seconds - chosen.eviction_ttl_seconds
        just_now = now_seconds - chosen.las_half_life_seconds
        self._programs = OrderedDict(
            (name, one)
            for name, one in self._programs.items()
            if one.seen_at_seconds > since
            and (chosen.counts_turns or one.service >= least or one.seen_at_seconds > just_now)
        )


class ProgramAwareBand:
    def __init__(self, parameters: ProgramAwareFairnessParameters, ledger: ProgramLedger) -> None:
        self._parameters = parameters
        self._ledger = ledger
        self._since: dict[str, float] = {}
        self._chosen: str | None = None
        self._chosen_at: int | None = None  # changes of the ledger; None: choose again

    def head_changed(self, flow: str, head: QueuedRequest | None, rank: Rank) -> None:
        self._chosen_at = None
        if head is None:
            self._since.pop(flow, None)
        else:
            self._since[flow] = head.enqueued_at_seconds

    def select(self, now_seconds: float) -> str | None:
        """Return the flow with the greatest score. All waits grow alike, so time alone does not
        change the order.
        """
        if self._chosen_at != self._ledger.changes:
            self._chosen, self._chosen_at = self._best(), self._ledger.changes
        return self._chosen

    def dispatched(self, item: QueuedRequest, now_seconds: float) -> None:
        self._ledger.dispatched(item, now_seconds)

    def completed(self, item: QueuedRequest, usage: Usage | None, now_seconds: float) -> None:
        self._ledger.completed(item, usage, now_seconds)

    def weight(self, flow: str) -> float:
        return 1.0

    def forget(self, flow: str) -> None: ...

    def _best(self) -> str | None:
        if not self._since:
            return None
        if self._parameters.counts_turns:
            return min(self._since, key=self._depth)
        service = self._ledger.service
        served = [service(flow) for flow in self._since]
        scores = map(self._score, _norms(served), _norms(list(self._since.values())))
        best, chosen = -math.inf, None
        for flow, score in zip(self._since, scores, strict=True):
            if score > best or (score == best and chosen is not None and flow < chosen):
                best, chosen = score, flow
        return chosen

    def _depth(self, flow: str) -> tuple[float, float, str]:
        since = self._since[flow]
        turn = self._ledger.turn(flow, since)
        return (self._parameters.turn_priority_time_weight * since - turn, since, flow)

    def _score(self, served: float, late: float) -> float:
        """Return a score; `late` is the norm of the head's arrival: later heads waited less."""
        weights = self._parameters
        return weights.las_weight_service * (1.0 - served) + weights.las_weight_head_wait * (
            1.0 - late
        )


def _norms(values: Sequence[float]) -> Sequence[float]:
    """Return the position of each value between the least and the greatest."""
    least = min(values)
    span = max(values) - least
    return [(one - least) / span for one in values] if span else [EVEN] * len(values)


class ProgramAwareFairness:
    def __init__(self, parameters: ProgramAwareFairnessParameters) -> None:
        self._parameters = parameters
        self._ledger = ProgramLedger(parameters)

    def for_band(self, priority: int) -> ProgramAwareBand:
        return ProgramAwareBand(self._parameters, self._ledger)

    def program_shares(self) -> Mapping[str, ProgramShare]:
        return self._ledger.shares()


PLUGINS = (PluginType("program-aware-fairness", ProgramAwareFairness),)
