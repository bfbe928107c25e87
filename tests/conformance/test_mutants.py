"""Every direct case passes with a picker that is right, and fails with one that is wrong there."""

from collections.abc import Set

import pytest

from conformance.case import Provision, Violation
from conformance.echo.pool import EchoPool
from conformance.epp.cases import DIRECT
from conformance.epp.cases.health import with_any_certificate
from conformance.epp.scene import Scene
from conformance.epp.suite import play
from conformance.report import Outcome, Result, broken
from tests.support.picker.mutant_epp import Fault, running_mutant

PATIENCE_SECONDS = 60.0
FAIL_SECONDS = 0.5  # that a case which has to fail waits in vain
# Played with every fault: those that are not about it leave it alone.
CONTROL = {"request-body-chunkings", "request-without-body"}
ENDPOINTS = ("127.0.0.11:81", "127.0.0.12:81", "127.0.0.13:81", "127.0.0.13:82")


def words(text: str) -> set[str]:
    return set(text.split())


REFUSALS_OF_SUBSETS = {"subset-empty", "subset-of-strangers", "subset-empty-without-body"}
REFUSALS_OF_POOLS = {"refusal-empty-pool", "refusal-empty-pool-without-body"}
RESPONSES = words(
    "response-body-intact response-events-intact response-without-body response-trailers"
)
SELECTIONS = words(
    "selection-of-endpoint selection-of-address selection-of-several selection-without-body "
    "selection-with-strangers selection-of-strangers"
)
HEALTH = words(
    "health-liveness health-readiness health-ext-proc health-inference-extension health-of-server"
)
# What each fault breaks, and nothing else.
EXPECTED: dict[Fault, set[str]] = {
    Fault.NO_HEADER: {"destination-in-header"},
    Fault.NO_METADATA: {"destination-in-metadata"},
    Fault.SAYS_IT_DIFFERENTLY: {"destination-said-alike"},
    Fault.PICKS_STRANGERS: words(
        "destination-in-pool destination-unsteered destination-of-ipv6 subset-absent"
    ),
    Fault.IS_STEERED: {"destination-unsteered"},
    Fault.NAMES_ONE_TWICE: {"destination-list-of-different"},
    Fault.NO_BRACKETS: {"destination-of-ipv6"},
    Fault.NAMES_HOSTS_ONLY: {"destination-form", "destination-in-pool", "destination-unsteered"},
    Fault.KEEPS_ROUTE: {"destination-route-anew"},
    Fault.IGNORES_SUBSET: words(
        "subset-of-one subset-of-some subset-of-ports subset-without-body subset-with-strangers "
        "refusal-only"
    )
    | REFUSALS_OF_SUBSETS,
    Fault.IGNORES_SUBSET_PORTS: {"subset-of-ports"},
    Fault.IGNORES_SUBSET_WITHOUT_BODY: {"subset-without-body", "subset-empty-without-body"},
    Fault.OBEYS_OTHER_NAMESPACES: {"subset-absent"},
    Fault.IGNORES_SELECTION: SELECTIONS,
    Fault.IGNORES_SELECTION_WITHOUT_BODY: {"selection-without-body"},
    Fault.TAKES_ALL_FOR_STRANGERS: {"selection-of-strangers"},
    Fault.REFUSES_BODILESS: words(
        "request-without-body response-of-bodiless-request destination-in-header "
        "destination-in-metadata destination-form destination-in-pool destination-unsteered "
        "destination-of-ipv6 destination-route-anew selection-absent served-taken "
        "served-told-without-body refusal-empty-pool-without-body"
    ),
    Fault.REFUSES_WITH_500: REFUSALS_OF_SUBSETS | REFUSALS_OF_POOLS,
    Fault.FAILS_STREAMS: words(
        "selection-of-strangers refusal-dropped refusal-only refusal-of-nonsense "
        "refusal-then-served"
    )
    | REFUSALS_OF_SUBSETS
    | REFUSALS_OF_POOLS,
    Fault.ROUTES_AND_REFUSES: {"refusal-only", *REFUSALS_OF_SUBSETS},
    Fault.SULKS: words("refusal-dropped refusal-of-nonsense refusal-then-served")
    | REFUSALS_OF_POOLS,
    Fault.SHEDS_WITH_503: {"refusal-dropped"},
    Fault.CHOKES_ON_NONSENSE: {"refusal-of-nonsense"},
    Fault.BIG_PIECES: {"request-pieces-fit"},
    Fault.LOSES_PIECES: {"request-body-intact"},
    Fault.EMPTY_PIECE_ENDS: {"request-body-chunkings"},
    Fault.ENDS_TWICE: words(
        "request-body-intact request-body-chunkings request-repeated-end "
        "streams-end-with-the-request served-taken"
    )
    | RESPONSES,
    Fault.BODY_FIRST: {"request-order"},
    Fault.IGNORES_TRAILERS: {"request-trailers"},
    Fault.TAKES_SECOND_END: {"request-repeated-end"},
    Fault.ENDS_AFTER_REQUEST: words(
        "request-repeated-end response-of-bodiless-request streams-reset served-taken served-told "
        "served-told-without-body served-missing"
    )
    | RESPONSES,
    Fault.CHANGES_RESPONSES: words(
        "response-body-intact response-events-intact response-of-bodiless-request response-trailers"
    ),
    Fault.MANGLES_EVENTS: {"response-events-intact"},
    Fault.IGNORES_RESPONSE_TRAILERS: {"response-trailers"},
    Fault.NEEDS_A_REQUEST: {"response-without-request"},
    Fault.ONE_BUFFER_FOR_ALL: {"streams-apart", "streams-reset"},
    Fault.FALLS_WITH_A_STREAM: {"streams-reset"},
    Fault.DIES_OF_NONSENSE: {"streams-out-of-order"},
    Fault.ENDS_WITH_AN_ERROR: {"streams-end-with-the-request"},
    Fault.OMITS_SERVED: {"served-told", "served-told-without-body", "served-missing"},
    Fault.REPORTS_ITS_PICK: {"served-told", "served-told-without-body", "served-missing"},
    Fault.REPORTS_ONLY_WITH_BODY: {"served-told-without-body"},
    Fault.NOT_HEALTHY: HEALTH,
    Fault.LEAVES_WITH_SERVED: {"served-taken"},
}


async def results(fault: Fault, cases: Set[str], seconds: float) -> list[Result]:
    pool, played = EchoPool(ENDPOINTS), [case for case in DIRECT if case.id in cases]
    async with running_mutant(pool) as mutant:
        mutant.use(fault)
        scene = Scene(mutant, pool, patience_seconds=seconds, ready_seconds=seconds)
        try:
            return await play(played, scene, mutant.provides, lambda _: mutant.use(fault))
        finally:
            await scene.disconnect()


async def test_a_right_picker_passes() -> None:
    found = await results(Fault.NONE, {case.id for case in DIRECT}, PATIENCE_SECONDS)
    assert {one.case: one.reason for one in found if one.outcome is not Outcome.PASSED} == {
        "tls-with-any-certificate": "not provided: tls"
    }


@pytest.mark.parametrize("fault", EXPECTED, ids=lambda fault: fault.name.lower())
async def test_a_fault_is_found_by_the_cases_that_are_about_it(fault: Fault) -> None:
    found = await results(fault, EXPECTED[fault], FAIL_SECONDS)
    found += await results(fault, CONTROL - EXPECTED[fault], PATIENCE_SECONDS)
    assert set(broken(found)) == EXPECTED[fault], [
        (one.case, one.reason) for one in found if one.reason
    ]


def test_every_direct_case_can_fail() -> None:
    covered = set().union(*EXPECTED.values())
    assert {case.id for case in DIRECT} - covered == {"tls-with-any-certificate"}
    assert set(EXPECTED) == set(Fault) - {Fault.NONE}


async def test_a_plain_port_is_no_tls() -> None:
    pool = EchoPool(ENDPOINTS)
    async with running_mutant(pool) as mutant:
        with pytest.raises(Violation, match="no TLS at"):
            await with_any_certificate.check(Scene(mutant, pool))
    assert with_any_certificate.needs == {Provision.TLS}
