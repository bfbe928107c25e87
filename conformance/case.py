"""A case: one rule of the protocol, its requirements, and the check."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from inspect import cleandoc
from typing import Generic, TypeVar

S = TypeVar("S")
DEFAULT_LIMIT_SECONDS = 90.0


class Strength(StrEnum):
    """The force of a rule. A broken SHOULD is reported and fails no run."""

    MUST = "MUST"
    SHOULD = "SHOULD"


class Provision(StrEnum):
    """A requirement of a case on the picker under test or on this machine."""

    SELECTION = "selection-header"
    SERVED = "served-header"
    FALLBACK = "fallback-list"
    SHEDDING = "shedding"
    POOL_CHANGES = "pool-changes"
    RESTART = "restart"
    HEALTH = "health"
    TLS = "tls"
    GATEWAY = "gateway"
    API_OUTAGE = "api-outage"
    SEVERAL_POOLS = "several-pools"


PROVISIONS: dict[Provision, str] = {
    Provision.SELECTION: "the picker follows the request header test-epp-endpoint-selection",
    Provision.SERVED: "the picker sets the response header x-conformance-test-served-endpoint",
    Provision.FALLBACK: "the picker names more than one endpoint where it can",
    Provision.SHEDDING: "the picker knows the objective 'sheddable', of negative priority, and "
    "reads load from the endpoints' vLLM metrics",
    Provision.POOL_CHANGES: "the suite can change the picker's pool",
    Provision.RESTART: "the suite starts the picker, and may stop it",
    Provision.HEALTH: "the address of the picker's gRPC health service is known",
    Provision.TLS: "the picker's port speaks TLS",
    Provision.GATEWAY: "an Envoy binary, and a pool whose addresses this machine can serve",
    Provision.API_OUTAGE: "the suite may take the Kubernetes API server away",
    Provision.SEVERAL_POOLS: "the suite knows how to start one picker for several InferencePools",
}


class Violation(Exception):  # noqa: N818 - what a rule that is broken is called
    """The picker does not do what the case asks; the text says what it did instead."""


class NotApplicable(Exception):  # noqa: N818 - no error
    """The case cannot be judged here; the text says why. It counts as skipped."""


@dataclass(frozen=True, slots=True)
class Case(Generic[S]):
    """One rule. `check` gets the scene it needs, and raises `Violation` or `NotApplicable`."""

    id: str
    text: str
    source: str
    check: Callable[[S], Awaitable[None]]
    strength: Strength = Strength.MUST
    needs: frozenset[Provision] = frozenset()
    limit_seconds: float = DEFAULT_LIMIT_SECONDS


Check = Callable[[S], Awaitable[None]]


def case(
    case_id: str,
    source: str,
    *needs: Provision,
    strength: Strength = Strength.MUST,
    limit_seconds: float = DEFAULT_LIMIT_SECONDS,
) -> Callable[[Check[S]], Case[S]]:
    """Make a case of a check; the rule's text is the check's docstring."""

    def made(check: Check[S]) -> Case[S]:
        text = " ".join(cleandoc(check.__doc__ or "").split())
        return Case(case_id, text, source, check, strength, frozenset(needs), limit_seconds)

    return made


def expect(condition: object, what: str) -> None:
    """Raise `Violation` with `what` unless the condition holds."""
    if not condition:
        raise Violation(what)
