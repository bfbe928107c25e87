"""deficit-round-robin-fairness-policy: equal or weighted shares of tokens.

Theory of operation. A turn of a flow is worth `quantumTokens` × its weight. The request that uses a
turn up may use more, and the excess is a debt that the flow repays by missing turns. (Deficit round
robin, Shreedhar and Varghese 1995, in the form that does not need a request's cost in advance:
surplus round robin.) Missed turns are not enumerated. Each flow has a position, counted in turns,
which its tokens move:

    position += tokens / (quantumTokens · weight)

and the flow has its next turn in the round ⌊position⌋. The next flow is one of the waiting flows
with the least round; a round in which no flow has a turn is skipped. So some request is dispatched
whenever one waits, and a flow that is alone is never held back by its debt.

    at dispatch     position moves by the estimate, times the cost of an estimated token of the
                    flow's last requests (1/8 to 8); this corrects most of the constant error of
                    estimates in advance
    at completion   position moves by the difference from the usage that the response reports:
                    prompt + completionTokenWeight · completion, where a cached token of the prompt
                    counts cachedTokenWeight; without a report the estimate remains
    on coming back  position = max(position, the current round): having no request earns no
                    credit, and refunds for earlier requests no longer count
    always          position − the current round is at most maxDebtTokens / (quantumTokens ·
                    weight), and at least the negative of that

A known flow goes to the front of its round, at most once per round, so that a flow with occasional
requests waits for one request, not for every turn. A new flow starts in the next round, so that ids
which clients invent during a round deprive no flow of its turn.

The last places in the pool, from `minHeadroom` to `maxHeadroom` of the band's ceiling, are for
flows that were charged no more than their share of the last seconds' tokens (`RecentUse`); these go
out of turn if necessary, so that a flow with few requests need not wait for the end of a request of
a busy flow. The number of places follows the bursts of such flows (`CalmLoad`).

A selection takes amortised O(log n) for n waiting flows.
"""

import math
from dataclasses import dataclass
from itertools import count
from typing import Annotated, TypeAlias

import msgspec

from picker.framework.flow import QueuedRequest, Rank
from picker.framework.flow_heap import FlowHeap
from picker.framework.registry import Parameters, PluginType
from picker.plugins.fairness_policies._burst_headroom import CalmLoad
from picker.plugins.fairness_policies._recent_use import RecentUse
from picker.types import Usage

MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0
REMEMBERED = 0.875  # of the costs so far, with each completed request
MAX_FACTOR = 8.0  # a larger error of estimates is corrected only at the end of the request
_FRONT, _BACK = 0, 1

Tokens: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=10**12)]
Factor: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=MAX_WEIGHT)]


class DeficitRoundRobinFairnessPolicyParameters(Parameters, frozen=True):
    quantum_tokens: Tokens = 512
    default_weight: float = 1.0
    weights: dict[str, float] = msgspec.field(default_factory=dict)
    completion_token_weight: Factor = 1.0
    cached_token_weight: Factor = 1.0
    max_debt_tokens: Tokens = 1_000_000
    min_headroom: float = 0.0
    max_headroom: float = 0.5


@dataclass(slots=True)
class _Account:
    """A flow's account. `estimated` and `used` cover its last requests; `pace` is tokens a turn."""

    pace: float
    position: float
    returns: int = 0  # to a round later than its own
    estimated: float = 0.0
    used: float = 0.0

    @property
    def round(self) -> int:
        return math.floor(self.position)

    @property
    def cost_per_token(self) -> float:
        if not self.estimated:
            return 1.0
        return min(max(1 / MAX_FACTOR, self.used / self.estimated), MAX_FACTOR)


@dataclass(frozen=True, slots=True)
class _Charge:
    tokens: float
    returns: int


class DeficitRoundRobinBand:
    """Owns the accounts of one band's flows, and the charges of its requests in flight."""

    def __init__(self, parameters: DeficitRoundRobinFairnessPolicyParameters) -> None:
        self._parameters = parameters
        self._accounts: dict[str, _Account] = {}
        self._charges: dict[int, _Charge] = {}
        self._turns: FlowHeap[tuple[int, int, int]] = FlowHeap()
        self._calm = CalmLoad()
        self._use = RecentUse(self._calm.forget)
        self._places = count()
        self._round = 0

    def head_changed(self, flow: str, head: QueuedRequest | None, rank: Rank) -> None:
        if head is None:
            self._turns.remove(flow)
            self._use.stops_waiting(flow)
        elif flow not in self._turns:
            self._use.waits(flow, self.weight(flow), head.enqueued_at_seconds)
            is_known = flow in self._accounts
            account = self._account(flow)
            # Absence earns no credit: the flow joins the current round.
            if account.position < self._round:
                account.position = self._round
                account.returns += 1
            self._queue(flow, account, _FRONT if is_known else _BACK)

    def headroom(self, place: float, now_seconds: float) -> float:
        places = 0.0
        if len(self._use) > 1:
            places = self._calm.places(now_seconds, 1.0 / place if place > 0.0 else math.inf)
        if not places:
            return 0.0
        chosen = self._parameters
        reserved = min(max(chosen.min_headroom, places * place), chosen.max_headroom)
        self._use.reserved = reserved
        return reserved

    def select(self, now_seconds: float) -> str | None:
        return self._turns.first()

    def select_within_share(self, now_seconds: float) -> str | None:
        first = self._turns.first()
        return None if first is None else self._use.within_share(first, now_seconds)

    def dispatched(self, item: QueuedRequest, now_seconds: float) -> None:
        account = self._account(item.flow)
        self._round = max(self._round, account.round)
        tokens = self._estimate(item) * account.cost_per_token
        self._charges[item.sequence] = _Charge(tokens, account.returns)
        is_calm = self._use.is_within_share(item.flow)
        # Without other waiting flows, a wait says nothing about reserved places.
        are_others_held_back = len(self._turns) > (item.flow in self._turns)
        if is_calm and are_others_held_back and self._use.seldom_waits(item.flow):
            self._calm.learn(now_seconds - item.enqueued_at_seconds)
        self._calm.began(item.flow, is_calm, now_seconds)
        self._use.began(item.flow, self.weight(item.flow), tokens, now_seconds)
        self._move(item.flow, account, tokens)

    def completed(self, item: QueuedRequest, usage: Usage | None, now_seconds: float) -> None:
        charge = self._charges.pop(item.sequence, None)
        account = self._accounts.get(item.flow)
        used = 0.0 if usage is None else self._cost(usage)
        if charge is None:
            return
        self._use.ended(item.flow, used - charge.tokens if used else 0.0, now_seconds)
        self._calm.ended(item.flow, self._use.is_within_share(item.flow), now_seconds)
        if account is None or not used:
            return
        account.estimated = account.estimated * REMEMBERED + self._estimate(item)
        account.used = account.used * REMEMBERED + used
        # A refund for a request before an absence would be credit for it; a debt is always due.
        if used > charge.tokens or charge.returns == account.returns:
            self._move(item.flow, account, used - charge.tokens)

    def weight(self, flow: str) -> float:
        return self._parameters.weights.get(flow, self._parameters.default_weight)

    def forget(self, flow: str) -> None:
        if flow not in self._turns:
            self._accounts.pop(flow, None)
            self._use.forget(flow)

    def _account(self, flow: str) -> _Account:
        account = self._accounts.get(flow)
        if account is None:
            pace = self._parameters.quantum_tokens * self.weight(flow)
            account = _Account(pace, self._round + 1)
            self._accounts[flow] = account
        return account

    def _move(self, flow: str, account: _Account, tokens: float) -> None:
        limit = self._parameters.max_debt_tokens / account.pace
        before, moved = account.round, account.position + tokens / account.pace
        account.position = min(max(moved, self._round - limit), self._round + limit)
        if flow in self._turns and account.round != before:
            self._queue(flow, account, _BACK)

    def _queue(self, flow: str, account: _Account, lane: int) -> None:
        self._turns.put(flow, (account.round, lane, next(self._places)))

    def _estimate(self, item: QueuedRequest) -> int:
        """Return the estimate, at most the greatest debt because clients may write any number."""
        return min(max(1, item.tokens), self._parameters.max_debt_tokens)

    def _cost(self, usage: Usage) -> float:
        """Return the cost of a response; 0 when it reports no usage."""
        chosen, prompt = self._parameters, usage.prompt_tokens
        if not prompt and not usage.completion_tokens:
            return usage.total_tokens
        cached = min(usage.cached_tokens or 0, prompt)
        completion = chosen.completion_token_weight * usage.completion_tokens
        return prompt - cached + chosen.cached_token_weight * cached + completion


class DeficitRoundRobinFairnessPolicy:
    def __init__(self, parameters: DeficitRoundRobinFairnessPolicyParameters) -> None:
        least, most = parameters.min_headroom, parameters.max_headroom
        if not 0 <= least <= most < 1:
            span = "0 <= minHeadroom <= maxHeadroom < 1"
            raise ValueError(f"headroom must be {span}, got {least} and {most}")
        weights = {f"weights of '{flow}'": one for flow, one in parameters.weights.items()}
        for name, weight in {"defaultWeight": parameters.default_weight, **weights}.items():
            if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
                span = f"{MIN_WEIGHT:g} to {MAX_WEIGHT:g}"
                raise ValueError(f"{name} must be a number from {span}, got {weight}")
        self._parameters = parameters

    def for_band(self, priority: int) -> DeficitRoundRobinBand:
        return DeficitRoundRobinBand(self._parameters)


PLUGIN = PluginType("deficit-round-robin-fairness-policy", DeficitRoundRobinFairnessPolicy)
