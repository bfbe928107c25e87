"""All cases of the Endpoint Picker Protocol, in the order in which they run."""

from conformance.case import Case
from conformance.epp.cases import (
    destination,
    faults,
    health,
    lifetimes,
    refusals,
    routing,
    selection,
    served,
    stream,
    subset,
)
from conformance.epp.scene import Scene

DIRECT: tuple[Case[Scene], ...] = (
    *stream.CASES,
    *lifetimes.CASES,
    *destination.CASES,
    *subset.CASES,
    *selection.CASES,
    *served.CASES,
    *refusals.CASES,
    *health.CASES,
)
THROUGH_ENVOY: tuple[Case[Scene], ...] = (*routing.CASES, *faults.CASES)
ALL: tuple[Case[Scene], ...] = (*DIRECT, *THROUGH_ENVOY)
