"""inflight-load-producer: count this picker's requests and tokens in flight.

When a request leaves (`pre_request`), the first endpoint of each profile that picked one gets

    requests + 1
    tokens   + uncached + output

    uncached = input − match · B, at least 0: the prompt's tokens less those in blocks cached there
    output   = min(round(input · outputRatio), the client's limit, maxEstimatedOutputTokens)
               with `addEstimatedOutputTokens`, else 0

With the first piece of the response, or with its headers where the proxy shows no bodies, the other
profiles' endpoints (prefill, encode) have done their part and return everything; the primary one
has read the prompt, and without `addEstimatedOutputTokens` returns its tokens. The rest is returned
when the request ends.

What a request holds is stored in its `Attributes`, not under its id, because ids repeat. Each part
is returned once, in whatever order the hooks are called. A request that vanishes without an end
returns everything when nothing refers to it any longer. When an endpoint leaves or restarts, its
account is closed: later returns go to the closed account and change nothing.

With `syncCrossReplicaState` the load is that of all replicas of the picker
(`picker.framework.replicas`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec

from picker.framework.attributes import (
    INFLIGHT_LOAD,
    Attributes,
    DataKey,
    EndpointFlow,
    EndpointLoad,
    InFlightLoad,
    inflight_load_key,
)
from picker.framework.interfaces import Flight
from picker.framework.registry import NonNegativeFloat, NonNegativeInt, Parameters, PluginType
from picker.plugins.producers.token_producer import TOKENIZED_PROMPT
from picker.prefix.match import match_info_key
from picker.types import (
    DEFAULT_FAIRNESS_ID,
    Candidates,
    FinishCause,
    InferenceRequest,
    ResponseHead,
    ResponseProgress,
    SchedulingResult,
    Usage,
)

_NO_OWNER = (DEFAULT_FAIRNESS_ID, 0)
_NOTHING = EndpointLoad()
_MAX_OUTPUT = 1e15  # a greater or infinite estimate is not a number of tokens


class InflightLoadParameters(Parameters, frozen=True):
    add_estimated_output_tokens: bool = False
    output_ratio: NonNegativeFloat = 1.5
    max_estimated_output_tokens: NonNegativeInt | None = None
    prefix_match_info_producer_name: str = "approx-prefix-cache-producer"
    sync_cross_replica_state: bool = True


class _Account(msgspec.Struct, eq=False):
    """The load of one endpoint, from its first use until it leaves."""

    key: str
    parts: set[_Part] = set()
    requests: int = 0
    tokens: int = 0


class Ledger:
    """The accounts of endpoints; `own_loads` are this replica's, `loads` those of all replicas."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._loads: dict[str, EndpointLoad] = {}
        self._elsewhere: Mapping[str, EndpointLoad] = {}
        self._sums: dict[str, EndpointLoad] = {}
        self._abandoned: list[_Part] = []
        self.own_loads: Mapping[str, EndpointLoad] = MappingProxyType(self._loads)
        self.loads: Mapping[str, EndpointLoad] = MappingProxyType(self._sums)

    def set_elsewhere(self, loads: Mapping[str, EndpointLoad]) -> None:
        keys = self._elsewhere.keys() | loads.keys()
        self._elsewhere = dict(loads)
        for key in keys:
            self._sum(key)

    def take(self, key: str, tokens: int, owner: tuple[str, int] = _NO_OWNER) -> _Part:
        """Add a request at endpoint `key`; `owner` is its fairness id and priority."""
        account = self._accounts.get(key)
        if account is None:
            account = self._accounts[key] = _Account(key)
        part = _Part(account, tokens, owner)
        account.parts.add(part)
        self._add(account, 1, tokens)
        return part

    def return_tokens(self, part: _Part) -> None:
        """Return the tokens of `part`, whose request continues; a second call does nothing."""
        tokens, part.tokens = part.tokens, 0
        self._add(part.account, 0, -tokens)

    def return_part(self, part: _Part) -> None:
        """Return all of `part`, whose request ended; a second call does nothing."""
        part.account.parts.discard(part)
        requests, part.requests = part.requests, 0
        tokens, part.tokens = part.tokens, 0
        self._add(part.account, -requests, -tokens)

    def by_flow(self) -> dict[EndpointFlow, EndpointLoad]:
        flows: dict[EndpointFlow, EndpointLoad] = {}
        for key, account in self._accounts.items():
            for part in account.parts:
                flow = EndpointFlow(key, *part.owner)
                load = flows.get(flow, _NOTHING)
                flows[flow] = EndpointLoad(load.requests + part.requests, load.tokens + part.tokens)
        return flows

    def close(self, key: str) -> None:
        """Close the account of endpoint `key`; later returns to it change nothing."""
        self._accounts.pop(key, None)
        self._loads.pop(key, None)
        self._sum(key)

    def abandon(self, part: _Part) -> None:
        """Return `part` at the next `sweep`. Safe to call at any moment, even from a finalizer."""
        self._abandoned.append(part)

    def sweep(self) -> None:
        while self._abandoned:
            self.return_part(self._abandoned.pop())

    def check_integrity(self) -> None:
        """Raise `AssertionError` when the accounts contradict each other."""
        expected = {
            key: EndpointLoad(account.requests, account.tokens)
            for key, account in self._accounts.items()
        }
        if expected != self._loads:
            raise AssertionError(f"accounts {expected} are reported as {self._loads}")
        for key, account in self._accounts.items():
            parts = account.parts
            held = (sum(one.requests for one in parts), sum(one.tokens for one in parts))
            if held != (account.requests, account.tokens):
                raise AssertionError(f"the parts of {key} do not add up to its account")
        for key, load in self._loads.items():
            if load.requests < 0 or load.tokens < 0 or load == EndpointLoad():
                raise AssertionError(f"{key} has {load}")
        keys = self._loads.keys() | self._elsewhere.keys()
        if self._sums != {key: self._whole(key) for key in keys}:
            raise AssertionError(f"{self._sums} is not the sum of own loads and those elsewhere")

    def _add(self, account: _Account, requests: int, tokens: int) -> None:
        if not requests and not tokens:
            return
        account.requests += requests
        account.tokens += tokens
        # The endpoint left meanwhile; its closed account is no longer reported.
        if self._accounts.get(account.key) is not account:
            return
        if account.requests or account.tokens:
            load = self._loads[account.key] = EndpointLoad(account.requests, account.tokens)
            if self._elsewhere:
                self._sum(account.key)
            else:
                self._sums[account.key] = load
        else:
            self.close(account.key)

    def _whole(self, key: str) -> EndpointLoad:
        own, others = self._loads.get(key, _NOTHING), self._elsewhere.get(key, _NOTHING)
        return EndpointLoad(own.requests + others.requests, own.tokens + others.tokens)

    def _sum(self, key: str) -> None:
        own, others = self._loads.get(key), self._elsewhere.get(key)
        if own is not None and others is not None:
            self._sums[key] = self._whole(key)
        elif own is not None or others is not None:
            self._sums[key] = own or others or _NOTHING
        else:
            self._sums.pop(key, None)


class _Part(msgspec.Struct, eq=False):
    """The load that one request holds at one endpoint."""

    account: _Account
    tokens: int
    owner: tuple[str, int]
    requests: int = 1


class _Hold:
    """All parts of one request; they are returned when it is garbage collected at the latest."""

    __slots__ = ("_ledger", "others", "primary")

    def __init__(self, ledger: Ledger, primary: Sequence[_Part], others: Sequence[_Part]) -> None:
        self._ledger = ledger
        self.primary = tuple(primary)
        self.others = tuple(others)

    def __del__(self) -> None:
        for part in self.primary + self.others:
            if part.requests:
                # Not returned here: a finalizer may run in the middle of a change of the books.
                self._ledger.abandon(part)


class InflightLoadProducer:
    consumes = (TOKENIZED_PROMPT,)

    def __init__(self, name: str, parameters: InflightLoadParameters) -> None:
        self._parameters = parameters
        self._ledger = Ledger()
        self._key = inflight_load_key(name)
        self._match_key = match_info_key(parameters.prefix_match_info_producer_name)
        self._hold_key: DataKey[_Hold] = DataKey("InFlightHold", name)
        self.produces = (self._key,)
        self.may_consume = (self._match_key,)

    @property
    def loads(self) -> Mapping[str, EndpointLoad]:
        self._ledger.sweep()
        return self._ledger.loads

    @property
    def own_loads(self) -> Mapping[str, EndpointLoad] | None:
        self._ledger.sweep()
        return self._ledger.own_loads if self._parameters.sync_cross_replica_state else None

    def set_loads_elsewhere(self, loads: Mapping[str, EndpointLoad]) -> None:
        if self._parameters.sync_cross_replica_state:
            self._ledger.set_elsewhere(loads)

    def flow_loads(self) -> Mapping[EndpointFlow, EndpointLoad]:
        self._ledger.sweep()
        return self._ledger.by_flow()

    def produce(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes
    ) -> InferenceRequest:
        tokens = request.num_tokens
        uncached: Mapping[str, int] = {}
        match = attributes.get(self._match_key)
        if match is not None:
            size = match.block_size_tokens
            uncached = {
                key: max(0, tokens - blocks * size) for key, blocks in match.match_blocks.items()
            }
        attributes[self._key] = InFlightLoad(self.loads, uncached, tokens)
        return request

    def pre_request(
        self, request: InferenceRequest, result: SchedulingResult, attributes: Attributes
    ) -> None:
        """Count the request at the first endpoint of every profile."""
        # A second departure of a request replaces the first.
        if attributes.get(self._hold_key) is not None:
            self._return_all(attributes)
        load = attributes.get(self._key)
        adds_output = self._parameters.add_estimated_output_tokens
        output = self._output_tokens(request) if adds_output else 0
        owner = (request.fairness_id, request.priority)
        primary: list[_Part] = []
        others: list[_Part] = []
        for name, profile in result.profiles.items():
            if not profile.picked:
                continue
            key = profile.picked[0].candidate.endpoint.key
            tokens = request.num_tokens if load is None else load.uncached(key)
            part = self._ledger.take(key, tokens + output, owner)
            (primary if name == result.primary_profile else others).append(part)
        attributes[self._hold_key] = _Hold(self._ledger, primary, others)

    def response_head(self, flight: Flight, head: ResponseHead) -> None:
        if not head.shows_first_piece:  # many engines send the headers with the first token
            self._answer_began(flight.attributes)

    def response_progress(self, flight: Flight, progress: ResponseProgress) -> None:
        if progress.is_first:
            self._answer_began(flight.attributes)

    def _answer_began(self, attributes: Attributes) -> None:
        """Return the load of the stages that are done."""
        hold = attributes.get(self._hold_key)
        if hold is None:
            return
        for part in hold.others:
            self._ledger.return_part(part)
        if not self._parameters.add_estimated_output_tokens:
            for part in hold.primary:
                self._ledger.return_tokens(part)

    def request_ended(
        self, flight: Flight, cause: FinishCause, usage: Usage | None, now_seconds: float
    ) -> None:
        self._return_all(flight.attributes)

    def endpoint_removed(self, key: str) -> None:
        self._ledger.close(key)

    def check_integrity(self) -> None:
        self._ledger.check_integrity()

    def _return_all(self, attributes: Attributes) -> None:
        hold = attributes.get(self._hold_key)
        if hold is not None:
            for part in hold.primary + hold.others:
                self._ledger.return_part(part)

    def _output_tokens(self, request: InferenceRequest) -> int:
        # A huge ratio gives infinity, of which `floor` would raise.
        estimate = request.num_tokens * self._parameters.output_ratio + 0.5
        limits = (request.body.max_output_tokens, self._parameters.max_estimated_output_tokens)
        least = min(
            [math.floor(min(estimate, _MAX_OUTPUT)), *(one for one in limits if one is not None)]
        )
        return max(0, least)


PLUGIN = PluginType("inflight-load-producer", InflightLoadProducer, default_for=(INFLIGHT_LOAD,))
