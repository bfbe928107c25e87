"""deficit-round-robin-fairness-policy: equal shares of tokens, or shares by weight, however many
requests they come in.

Theory of operation. A turn of a flow is worth `quantumTokens` × its weight. It goes on while
anything of that is left; the request that uses it up may use more, and what it uses more is a debt
that the flow repays with turns that it misses. (Deficit round robin, Shreedhar and Varghese 1995,
in the form that needs not know beforehand what a request costs: surplus round robin.)

Missed turns are not gone through one by one. Each flow has a position, counted in turns, which
its tokens move on:

    position += tokens / (quantumTokens · weight)

and the flow has its next turn in the round ⌊position⌋. The next of the flows that wait is one of
the least round; where no flow has a turn in a round, the round is skipped. So something always goes
when something waits, and a flow that is alone is never held back by its debt.

    at dispatch     position moves by the estimate, times what an estimated token of the flow's
                    last requests came to (1/8 to 8); most of what is always wrong with estimates
                    is so put right beforehand
    at completion   position moves by the difference to what the response says it used:
                    prompt + completionTokenWeight · completion, where a cached token of the prompt
                    counts cachedTokenWeight; a response that says nothing leaves the estimate
    on coming back  position = max(position, the round under way): nothing is saved up by waiting
                    for nothing, and what is handed back for requests of before counts no more
    always          position − the round under way is at most maxDebtTokens / (quantumTokens ·
                    weight), and at least the negative of that

A flow that was there before goes to the front of its round, so that one that asks now and then
waits for one request, not for every turn; but once a round at most. One that is new starts in
the next round, so that ids which are made up as the round goes on keep no flow from its turn.

The last places in the pool are for flows that were charged no more than their share of the last
seconds' tokens (`RecentUse`); these go out of turn if need be. So a flow that asks for little
finds a place, and need not wait for the end of a request of one that asks for much. How many
places follows the bursts of such flows (`CalmLoad`), from `minHeadroom` to `maxHeadroom` of the
band's ceiling and no more than such flows leave, and none while none of them is there. A tenant
that is alone is never held back; of tenants who all want more than they get, the one that had less
fills the pool.

A selection takes amortised O(log n) of the flows that wait.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import count
from typing import Annotated, TypeAlias

import msgspec

from picker.framework.flow import QueuedRequest, Rank
from picker.framework.flow_heap import FlowHeap
from picker.framework.registry import Parameters, PluginType, configured
from picker.plugins.fairness_policies._burst_headroom import CalmLoad
from picker.plugins.fairness_policies._recent_use import RecentUse
from picker.types import Usage

LEAST_WEIGHT, GREATEST_WEIGHT = 0.001, 1000.0
REMEMBERED = 0.875  # of what requests have cost so far, with each one that completes
MOST_OFF = 8.0  # further off than that an estimate is corrected only when its request is over
_FRONT, _BACK = 0, 1

Tokens: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=10**12)]
Factor: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=GREATEST_WEIGHT)]


class DeficitRoundRobinFairnessPolicyParameters(Parameters, frozen=True):
    """`parameters` of a deficit-round-robin-fairness-policy; `weights` are by fairness id."""

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
    """One flow. `pace` is tokens a turn; `estimated` and `used` are of its last requests.

    `returns` counts how often it came back to a round later than its own.
    """

    pace: float
    position: float
    returns: int = 0
    estimated: float = 0.0
    used: float = 0.0

    @property
    def round(self) -> int:
        """In which it has its next turn."""
        return math.floor(self.position)

    @property
    def cost_per_token(self) -> float:
        """What an estimated token came to lately."""
        if not self.estimated:
            return 1.0
        return min(max(1 / MOST_OFF, self.used / self.estimated), MOST_OFF)


@dataclass(frozen=True, slots=True)
class _Charge:
    """What a request that is under way was taken to cost."""

    tokens: float
    returns: int


class DeficitRoundRobinBand:
    """Owns the accounts of one band's flows, and what its requests under way were charged."""

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
        """Give the flow a turn if it has none."""
        if head is None:
            self._turns.remove(flow)
            self._use.waits_no_more(flow)
        elif flow not in self._turns:
            self._use.waits(flow, self.weight(flow), head.enqueued_at_seconds)
            is_known = flow in self._accounts
            account = self._account(flow)
            if account.position < self._round:
                account.position = self._round
                account.returns += 1
            self._queue(flow, account, _FRONT if is_known else _BACK)

    def headroom(self, place: float, now_seconds: float) -> float:
        """As much as bursts need, within the limits."""
        places = 0.0
        if len(self._use) > 1:
            places = self._calm.places(now_seconds, 1.0 / place if place > 0.0 else math.inf)
        if not places:
            return 0.0
        chosen = self._parameters
        kept = min(max(chosen.min_headroom, places * place), chosen.max_headroom)
        self._use.kept_free = kept
        return kept

    def select(self, now_seconds: float) -> str | None:
        """A flow of the least round."""
        return self._turns.first()

    def select_within_share(self, now_seconds: float) -> str | None:
        """That flow, or one that has used less lately."""
        first = self._turns.first()
        return None if first is None else self._use.within_share(first, now_seconds)

    def dispatched(self, item: QueuedRequest, now_seconds: float) -> None:
        """Charge the estimate."""
        account = self._account(item.flow)
        self._round = max(self._round, account.round)
        tokens = self._estimate(item) * account.cost_per_token
        self._charges[item.sequence] = _Charge(tokens, account.returns)
        is_calm = self._use.is_within_share(item.flow)
        are_others_held_back = len(self._turns) > (item.flow in self._turns)
        if is_calm and are_others_held_back and self._use.seldom_waits(item.flow):
            self._calm.learn(now_seconds - item.enqueued_at_seconds)
        self._calm.began(item.flow, is_calm, now_seconds)
        self._use.began(item.flow, self.weight(item.flow), tokens, now_seconds)
        self._move(item.flow, account, tokens)

    def completed(self, item: QueuedRequest, usage: Usage | None, now_seconds: float) -> None:
        """Charge, or hand back, the difference to what was really used."""
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
        if used > charge.tokens or charge.returns == account.returns:
            self._move(item.flow, account, used - charge.tokens)

    def weight(self, flow: str) -> float:
        """As configured: shares of a full queue are as those of what is served."""
        return self._parameters.weights.get(flow, self._parameters.default_weight)

    def forget(self, flow: str) -> None:
        """Close the account."""
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
        """No more than a debt can be: clients may write any number into a request."""
        return min(max(1, item.tokens), self._parameters.max_debt_tokens)

    def _cost(self, usage: Usage) -> float:
        """What a response used; 0 when it does not say."""
        chosen, prompt = self._parameters, usage.prompt_tokens
        if not prompt and not usage.completion_tokens:
            return usage.total_tokens
        cached = min(usage.cached_tokens or 0, prompt)
        completion = chosen.completion_token_weight * usage.completion_tokens
        return prompt - cached + chosen.cached_token_weight * cached + completion


class DeficitRoundRobinFairnessPolicy:
    """Turns by tokens. Keeps no state of its own."""

    def __init__(self, parameters: DeficitRoundRobinFairnessPolicyParameters) -> None:
        """Raises `ValueError` for values out of range."""
        least, most = parameters.min_headroom, parameters.max_headroom
        if not 0 <= least <= most < 1:
            span = "0 <= minHeadroom <= maxHeadroom < 1"
            raise ValueError(f"headroom must be {span}, got {least} and {most}")
        weights = {f"weights of '{flow}'": one for flow, one in parameters.weights.items()}
        for name, weight in {"defaultWeight": parameters.default_weight, **weights}.items():
            if not LEAST_WEIGHT <= weight <= GREATEST_WEIGHT:
                span = f"{LEAST_WEIGHT:g} to {GREATEST_WEIGHT:g}"
                raise ValueError(f"{name} must be a number from {span}, got {weight}")
        self._parameters = parameters

    def for_band(self, priority: int) -> DeficitRoundRobinBand:
        """A band in which no flow had a turn."""
        return DeficitRoundRobinBand(self._parameters)


PLUGIN = PluginType(
    "deficit-round-robin-fairness-policy",
    DeficitRoundRobinFairnessPolicyParameters,
    configured(DeficitRoundRobinFairnessPolicy),
)
